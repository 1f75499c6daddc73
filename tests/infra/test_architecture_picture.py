"""The picture of the architecture: it is the templates', it can be read, and the one in the repository is up to date."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from infra import architecture
from infra.architecture import GROUPS, NOT_DRAWN, PASSED_THROUGH, PICTURE, Assembly, connections, draw, read_assembly
from infra.svg import PALETTE, Box, text_width, wrap
from pipeline.errors import ExitCode

SVG = "{http://www.w3.org/2000/svg}"
FIXTURES = ("deployment", "other_deployment")


def assembly_of(deployment: Any) -> Assembly:
    return read_assembly(Path(deployment.app.outdir))


@dataclass
class Drawn:
    """A drawing, read back from its text."""

    size: Box
    frames: list[Box]
    cards: dict[str, Box]
    texts: list[tuple[str, Box, Box]]
    """What it says, where, and the box that it has to stay in: its chip, its card, its frame, or the page."""
    arrows: list[tuple[str, list[tuple[float, float]]]]


def read(text: str) -> Drawn:
    root = ElementTree.fromstring(text)
    size = Box(x=0, y=0, width=float(root.get("width", "")), height=float(root.get("height", "")))
    drawn = Drawn(size, [], {}, [], [])
    for group in root.iter(f"{SVG}g"):
        boxes = [size]
        for rect in group.iter(f"{SVG}rect"):
            box = Box(**{key: float(rect.get(key, "")) for key in ("x", "y", "width", "height")})
            look = (rect.get("class") or "").split()[0]
            if look == "card":
                drawn.cards[f"{group.get('data-name')} {len(drawn.cards)}"] = box
            elif look == "frame":
                drawn.frames.append(box)
            boxes += [box] * (look in ("card", "frame", "chip"))
        for text in group.iter(f"{SVG}text"):
            # Where it is anchored, not how far it reaches.
            at = Box(x=float(text.get("x", "")), y=float(text.get("y", "")) - 3, width=0.1, height=0.1)
            inside = min((box for box in boxes if overlap(at, box)), key=lambda box: box.width * box.height)
            drawn.texts.append((text.text or "", placed(text), inside))
    for path in root.iter(f"{SVG}path"):
        if path.get("class") == "arrow":
            corners = re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d", ""))
            drawn.arrows.append((path[0].text or "", [(float(x), float(y)) for x, y in corners]))
    return drawn


def placed(text: ElementTree.Element) -> Box:
    """Where a text is: its capitals and what hangs below its line."""
    size = float(text.get("font-size", ""))
    width = text_width(text.text or "", size, bold=text.get("font-weight") == "bold")
    x, baseline = float(text.get("x", "")), float(text.get("y", ""))
    left = x - width if text.get("text-anchor") == "end" else x
    return Box(x=left, y=baseline - 0.74 * size, width=width, height=0.95 * size)


def overlap(a: Box, b: Box) -> bool:
    return a.x < b.right and b.x < a.right and a.y < b.bottom and b.y < a.bottom


@pytest.fixture(scope="module", params=FIXTURES)
def drawn(request: pytest.FixtureRequest) -> Drawn:
    return read(draw(assembly_of(request.getfixturevalue(request.param))))


def test_the_one_in_the_repository_is_what_the_templates_say(deployment: Any) -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(assembly_of(deployment)), "draw it again: python -m infra.architecture"


def test_it_is_readable_at_the_width_of_a_page(drawn: Drawn) -> None:
    assert drawn.size.width == 900
    assert len(drawn.texts) > 40


def test_no_text_leaves_its_box(drawn: Drawn) -> None:
    for text, place, inside in drawn.texts:
        assert inside.x <= place.x, text
        assert place.right <= inside.right - 4, text
        assert inside.y <= place.y, text
        assert place.bottom <= inside.bottom, text


def test_no_text_is_on_another(drawn: Drawn) -> None:
    for (text, place, _), (other, elsewhere, _) in combinations(drawn.texts, 2):
        assert not overlap(place, elsewhere), (text, other)


def test_no_card_is_on_another_and_all_are_on_the_page(drawn: Drawn) -> None:
    for (name, card), (other, elsewhere) in combinations(drawn.cards.items(), 2):
        assert not overlap(card, elsewhere), (name, other)
    for box in (*drawn.cards.values(), *drawn.frames):
        assert 0 <= box.x < box.right <= drawn.size.width
        assert 0 <= box.y < box.bottom <= drawn.size.height


def segments(corners: list[tuple[float, float]]) -> Iterator[Box]:
    """An arrow's lines as thin boxes, a little shorter than they are: they begin and end on the border of a card."""
    for (x1, y1), (x2, y2) in pairwise(corners):
        left, top = min(x1, x2), min(y1, y2)
        yield Box(x=left + 1, y=top + 1, width=max(abs(x1 - x2) - 2, 0.2), height=max(abs(y1 - y2) - 2, 0.2))


def test_arrows_go_around_cards_and_text(drawn: Drawn) -> None:
    assert len(drawn.arrows) > 10
    for name, corners in drawn.arrows:
        for line in segments(corners):
            for card, place in drawn.cards.items():
                assert not overlap(line, place), (name, card)
            for text, place, _ in drawn.texts:
                assert not overlap(line, place), (name, text)


def test_every_resource_and_every_connection_is_on_it_or_left_out_for_a_reason(deployment: Any) -> None:
    assembly = assembly_of(deployment)
    types = {resource["Type"] for resource in assembly.resources.values()} - {"AWS::StepFunctions::StateMachine"}
    assert types <= set(GROUPS) | PASSED_THROUGH, "say in infra/architecture.py which card a new kind of resource belongs to"
    arrows = {tuple(name.split(" to ")) for name, _ in read(draw(assembly)).arrows}
    assert connections(assembly) - set(NOT_DRAWN) == arrows, "a connection has no route in infra/architecture.py"


def changed(assembly: Assembly, kind: str, **properties: Any) -> Assembly:
    """The same deployment, with other properties on all resources of a type."""
    resources = copy.deepcopy(dict(assembly.resources))
    for resource in resources.values():
        if resource["Type"] == kind:
            resource["Properties"] = {**resource["Properties"], **properties}
    return replace(assembly, resources=resources)


def test_an_arrow_is_a_reference_of_the_template(deployment: Any) -> None:
    assembly = assembly_of(deployment)
    arrows = {name for name, _ in read(draw(assembly)).arrows}
    assert {"machine to lock", "machine to queues", "queues to hosts", "schedule to machine", "alarms to topic"} <= arrows
    silent = changed(assembly, "AWS::CloudWatch::Alarm", AlarmActions=[])
    assert "alarms to topic" not in {name for name, _ in read(draw(silent)).arrows}
    # What a role may reach counts as well: the name of the table is in the definition, and its ARN in the policy.
    idle = changed(assembly, "AWS::StepFunctions::StateMachine", DefinitionString=json.dumps({"States": {}}))
    assert "machine to lock" in {name for name, _ in read(draw(idle)).arrows}
    powerless = changed(idle, "AWS::IAM::Policy", PolicyDocument={})
    assert "machine to lock" not in {name for name, _ in read(draw(powerless)).arrows}


def test_figures_are_the_templates(deployment: Any) -> None:
    assembly = assembly_of(deployment)
    resources = copy.deepcopy(dict(assembly.resources))
    [train] = [
        resource["Properties"]["ComputeResources"]
        for resource in resources.values()
        if resource["Type"] == "AWS::Batch::ComputeEnvironment" and "PlacementGroup" in resource["Properties"]["ComputeResources"]
    ]
    train["MaxvCpus"] = 1024
    says = lambda drawing: [text for text, _, _ in read(drawing).texts]  # noqa: E731
    assert "0 to 512 vCPUs: 4 hosts" in says(draw(assembly))
    assert "8 EFA interfaces a host" in says(draw(assembly))
    assert "0 to 1024 vCPUs: 8 hosts" in says(draw(replace(assembly, resources=resources)))


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """WCAG 2.2's ratio of two colours."""
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: tuple[float, ...]) -> float:
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))


@pytest.mark.parametrize("ground", [0, 1], ids=["light", "dark"])
def test_text_stands_out_in_light_and_dark(ground: int) -> None:
    card = rgb(PALETTE["card"][ground])
    for tone in ("ink", "muted"):
        for below in ("page", "frame", "card"):
            assert contrast(rgb(PALETTE[tone][ground]), rgb(PALETTE[below][ground])) >= 4.5, (tone, below)
    for tone in ("train", "embed", "cpu"):
        colour = rgb(PALETTE[tone][ground])
        chip = tuple(0.15 * part + 0.85 * under for part, under in zip(colour, card, strict=True))
        assert contrast(colour, chip) >= 4, tone


def test_both_grounds_are_in_the_file() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    dark = text[text.index("@media (prefers-color-scheme: dark)") :]
    assert PALETTE["page"][0] in text
    assert PALETTE["page"][1] in dark


def test_lines_are_no_wider_than_they_may_be() -> None:
    lines = wrap("one averylongwordthatfitsnowhere two three", 60, 11.5)
    assert "".join(lines).replace(" ", "") == "oneaverylongwordthatfitsnowheretwothree"
    assert all(text_width(line, 11.5) <= 60 for line in lines)
    assert wrap("two three", 500, 11.5) == ["two three"]


def test_the_command_draws_an_assembly(deployment: Any, tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    assert architecture.main(["--assembly", deployment.app.outdir, "--output", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == draw(assembly_of(deployment))


def test_a_folder_that_is_no_assembly_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert architecture.main(["--assembly", str(tmp_path), "--output", str(tmp_path / "out.svg")]) == ExitCode.BAD_CONFIG
    assert "remedy" in capsys.readouterr().err
