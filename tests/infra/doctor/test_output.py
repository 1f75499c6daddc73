"""The findings as people and programs read them."""

from __future__ import annotations

import dataclasses
import io
import json

import pytest
from rich.console import Console

from infra.doctor.asking import DoctorFinding, ok, problem, warning
from infra.doctor.printing import as_json, exit_code, show

GOOD = dataclasses.replace(ok("region", "us-west-2"), area="Account")
ODD = dataclasses.replace(warning("no budget", remedy="https://example.com/budgets"), area="Account")
WRONG = dataclasses.replace(
    problem("the quota is too low", value="0 vCPUs", rule="512", remedy="aws service-quotas " + "x" * 150), area="Capacity"
)
AGAIN = dataclasses.replace(warning("cannot look now"), area="Capacity", transient=True)


@pytest.mark.parametrize(
    ("findings", "code"),
    [([], 0), ([GOOD], 0), ([GOOD, ODD], 0), ([ODD, AGAIN], 75), ([AGAIN, WRONG], 64), ([WRONG], 64)],
)
def test_exit_code(findings: list[DoctorFinding], code: int) -> None:
    assert exit_code(findings) == code
    assert json.loads(as_json(findings))["exit_code"] == code


def text(findings: list[DoctorFinding], width: int = 100) -> str:
    stream = io.StringIO()
    show(findings, Console(file=stream, width=width))
    return stream.getvalue()


def test_table_is_grouped_by_area_and_says_what_to_do() -> None:
    lines = [line.strip() for line in text([GOOD, WRONG, ODD]).splitlines()]
    assert lines.index("Account") < lines.index("Capacity")
    assert [line for line in lines if line.startswith(("ok", "warning", "problem"))] == [
        "ok       region  us-west-2",
        "warning  no budget",
        "problem  the quota is too low",
    ]
    assert {"value: 0 vCPUs", "rule: 512", "remedy: https://example.com/budgets"} <= set(lines)
    assert lines[-1] == "1 problem, 1 warning, 1 ok"


def test_a_long_command_is_whole() -> None:
    assert "x" * 150 in "".join(line.strip() for line in text([WRONG], width=60).splitlines())


def test_json_holds_every_part() -> None:
    record = json.loads(as_json([WRONG, GOOD]))
    assert record["count"] == {"ok": 1, "warning": 0, "problem": 1}
    assert record["findings"][0] == {
        "level": "problem",
        "what": "the quota is too low",
        "value": "0 vCPUs",
        "rule": "512",
        "remedy": WRONG.remedy,
        "area": "Capacity",
        "transient": False,
    }


def test_what_an_account_says_does_not_reach_the_terminal_raw() -> None:
    hostile = dataclasses.replace(problem("an image", value="\x1b]0;owned\x07name"), area="Images")
    assert "\x1b]0;" not in text([hostile])
