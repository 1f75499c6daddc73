"""docs/ as a site: a strict build, which finds broken links and forgotten pages, and the structure that GitHub shows."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {ROOT / "README.md": "index", ROOT / "CONTRIBUTING.md": "contributing", ROOT / "CHANGELOG.md": "changelog"} | {
    page: page.stem for page in (ROOT / "docs").glob("*.md")
}
"""Every page of the repository -> its name on the site."""


def built(root: Path, target: Path) -> Path:
    """Build the site of a repository strictly.

    Raises:
        Abort: the build warns.
    """
    build(load_config(str(root / "mkdocs.yml"), site_dir=str(target), strict=True))
    return target


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("site"))


class Structure(HTMLParser):
    """Counts of the tags that make up a page: a list or a block of code that Markdown dialects read differently changes one."""

    TAGS = ("h1", "h2", "h3", "h4", "ul", "ol", "li", "table", "tr", "pre", "code", "strong", "em", "img")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.TAGS:
            self.counts[tag] += 1


@pytest.mark.parametrize("source", SOURCES, ids=lambda page: page.stem)
def test_the_site_shows_what_github_shows(site: Path, source: Path) -> None:
    name = SOURCES[source]
    html = (site / ("index.html" if name == "index" else f"{name}/index.html")).read_text(encoding="utf-8")
    [article] = re.findall(r"<article.*?</article>", html, re.DOTALL)
    on_github = MarkdownIt("commonmark").enable("table").render(source.read_text(encoding="utf-8"))
    assert Structure(article).counts == Structure(on_github).counts


def test_the_site_has_diagrams_no_sources_and_asks_no_other_host_for_fonts(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    assert '<pre class="mermaid">' in front
    assert "fonts.g" not in front
    assert [path for path in site.rglob("*") if path.suffix in (".py", ".pyc")] == []


def append(page: str, text: str) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        path = root / page
        path.write_text((path.read_text(encoding="utf-8") if path.exists() else "") + text, encoding="utf-8")

    return change


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        pytest.param(append("README.md", "\n[gone](docs/gone.md)\n"), "gone.md", id="readme"),
        pytest.param(append("docs/glossary.md", "\n[gone](../GONE.md)\n"), "../GONE.md", id="outside"),
        pytest.param(append("CONTRIBUTING.md", "\n[gone](docs/glossary.md#gone)\n"), "#gone", id="anchor"),
        pytest.param(append("docs/new-page.md", "# Not in the navigation\n"), "new-page.md", id="navigation"),
        pytest.param(lambda root: (root / "docs/devices.md").unlink(), "devices.md", id="missing"),
    ],
)
def test_a_strict_build_finds(
    change: Callable[[Path], object], warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("docs", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy2(ROOT / name, tmp_path)
    change(tmp_path)
    with pytest.raises(Abort):
        built(tmp_path, tmp_path / "site")
    assert warning in caplog.text
