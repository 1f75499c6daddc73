"""MkDocs hook: README.md as the site's front page and other files next to docs/, with links that lead there."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "examples/reviews/README.md": "reviews.md",
    "examples/esci/README.md": "esci.md",
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE",
}
"""File of the repository -> its place on the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that lie outside docs/."""
    for name, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Turn links between the repository's folders into links between pages of the site."""
    for name, place in OUTSIDE.items():
        markdown = markdown.replace(f"](../{name}", f"]({place}").replace(f"]({name}", f"]({place}")
    return markdown.replace("](../../docs/", "](").replace("](docs/", "](")
