"""The findings as people read them, and as programs do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from infra.doctor.asking import DoctorFinding, Level
from pipeline.errors import ExitCode, shown

STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def exit_code(findings: Sequence[DoctorFinding]) -> ExitCode:
    """64 where a setting or the account is wrong, 75 where something could only not be asked now, else 0."""
    if any(finding.level == "problem" for finding in findings):
        return ExitCode.BAD_CONFIG
    return ExitCode.TRANSIENT if any(finding.transient for finding in findings) else ExitCode.DONE


def as_json(findings: Sequence[DoctorFinding]) -> str:
    """One object: the findings, how many there are of each level, and the exit code."""
    return json.dumps(
        {
            "findings": [asdict(finding) for finding in findings],
            "count": {level: sum(finding.level == level for finding in findings) for level in STYLES},
            "exit_code": int(exit_code(findings)),
        },
        indent=2,
    )


def show(findings: Sequence[DoctorFinding], console: Console) -> None:
    """Print the findings as a table, area by area, and a last line that sums them up."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for area in dict.fromkeys(finding.area for finding in findings):
        table.add_row("", Text(f"\n{area}", style="bold"))
        for finding in findings:
            if finding.area == area:
                table.add_row(Text(finding.level, STYLES[finding.level]), _cell(finding))
    console.print(table)
    console.print(
        Text(
            "\n" + ", ".join(f"{sum(finding.level == level for finding in findings)} {level}" for level in reversed(STYLES)),
            style="bold",
        )
    )


def _cell(finding: DoctorFinding) -> Group | Text:
    if finding.level == "ok":
        return Text.assemble(shown(finding.what), (f"  {shown(finding.value)}" if finding.value else "", "dim"))
    parts = (("value", finding.value), ("rule", finding.rule), ("remedy", finding.remedy))
    lines = [Text.assemble((f"{name}: ", "dim"), shown(text)) for name, text in parts if text]
    return Group(Text(shown(finding.what), style="bold"), *lines)
