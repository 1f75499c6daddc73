"""All expected failures: one exception per cause, each with the exit code that tells AWS Batch what to do next.

A message has four parts: what was wrong, the value found, the rule it broke, and the remedy. They are the last lines of a
failing log and the content of `STAGE/failure.json`. All text passes through `shown`, because values come from data and from
command lines, and end in terminals. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, IntEnum
from typing import Any

LONGEST_SHOWN = 1500
"""Characters of one text in a message. Step Functions reads a failure into its state, which holds 256 KiB."""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters without line feeds and tabs, characters that change the writing direction, and lone surrogates."""

URI_REST = re.compile(r"(?P<web>\bhttps?)?://[^\s'\"]*")
"""A URI from the end of its scheme on. Every start matches, so that the time is linear in the text's length."""

AUTHORITY_END = re.compile("[/?#]")


def plain(text: str) -> str:
    """Return a text that is safe to print: control characters as escapes, no password or signature in a URI."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), URI_REST.sub(_without_secrets, text))


def shown(value: object) -> str:
    """Return a value for messages: `plain`, and cut to a readable length."""
    text = str(value)
    left_out = len(text) - LONGEST_SHOWN
    return plain(text if left_out <= 0 else f"{text[:LONGEST_SHOWN]} ... and {left_out} more characters")


def _without_secrets(found: re.Match[str]) -> str:
    uri = found[0]
    end = AUTHORITY_END.search(uri, uri.index("://") + 3)
    authority, rest = (uri[: end.start()], uri[end.start() :]) if end else (uri, "")
    if "@" in authority:
        authority = f"{authority.partition('://')[0]}://***@{authority.rpartition('@')[2]}"
    path, query, _ = rest.partition("?")
    return authority + (f"{path}?***" if found["web"] and query else rest)


class ExitCode(IntEnum):
    """Process exit codes. Batch ends a job at the 60s, and at 1, an uncaught exception; it retries all others."""

    DONE = 0
    BAD_CONFIG = 64
    BAD_DATA = 65
    MISSING_INPUT = 66
    GATE_REFUSED = 67
    SUPERSEDED = 68
    DEFECT = 69
    TRANSIENT = 75
    UNHEALTHY_HOST = 76
    NO_PROGRESS = 77

    @classmethod
    def of(cls, status: int) -> ExitCode:
        """Return the code that a process ended with; DEFECT where that is none of these."""
        return cls(status) if status in set(cls) else cls.DEFECT

    @property
    def retryable(self) -> bool:
        """Whether a new attempt may succeed without any change."""
        return 70 <= self < 80


class FailureKind(str, Enum):
    """Whose failure it is: this alone decides which of several failures explains the others, never the words of a message.

    OWN: the process that failed knows why. LOST_PEER: it knows only that another rank is gone, which has its own failure.
    TERMINATED: Batch, an operator or a reclaimed host ended the node. UNEXPECTED: an exception that trnpipe does not know, or an
    end without a word; a line of the log may explain it.
    """

    OWN = "own"
    LOST_PEER = "lost_peer"
    TERMINATED = "terminated"
    UNEXPECTED = "unexpected"


class TrnpipeError(Exception):
    """Base of all expected failures.

    Args:
        what: what was wrong, one sentence.
        value: the offending value, or several as a list.
        rule: the rule that the value broke.
        remedy: what a person can do about it.
        exit_code, kind: those of this failure, where they differ from the class's.
    """

    exit_code: ExitCode = ExitCode.DEFECT
    kind: FailureKind = FailureKind.OWN

    def __init__(
        self,
        what: str,
        *,
        value: Any = None,
        rule: str = "",
        remedy: str = "",
        exit_code: ExitCode | None = None,
        kind: FailureKind | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.value = value
        self.rule = rule
        self.remedy = remedy
        self.exit_code = exit_code or self.exit_code
        self.kind = kind or self.kind

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the message as `error:`, `value:`, `rule:`, `remedy:` lines, without empty parts."""
        lines = [_line("error: ", self.what)]
        if self.value is not None:
            values = self.value if isinstance(self.value, (list, tuple)) else [self.value]
            lines += [_line("value: ", value) for value in values[:20]]
            if len(values) > 20:
                lines.append(f"value:  ... and {len(values) - 20} more")
        return lines + [_line(name, text) for name, text in (("rule:  ", self.rule), ("remedy:", self.remedy)) if text]


def _line(name: str, text: object) -> str:
    # Further lines are indented: no value can look like a part of the message.
    return f"{name} {shown(text)}".replace("\n", "\n        ")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then the one that it was raised from or during, and so on."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """Return an exception in one line, for the log."""
    text = str(error) if isinstance(error, TrnpipeError) else f"{type(error).__name__}: {error}"
    return " | ".join(text.splitlines())


class BadConfig(TrnpipeError):
    """An impossible setting, or a checkpoint of another shape: exit 64, no retry."""

    exit_code = ExitCode.BAD_CONFIG


class BadData(TrnpipeError):
    """Input that was found but is not what it should be: exit 65, no retry."""

    exit_code = ExitCode.BAD_DATA


class MissingInput(TrnpipeError):
    """A bucket, object or file that is not there: exit 66, no retry."""

    exit_code = ExitCode.MISSING_INPUT


class StorageRefused(TrnpipeError):
    """Storage refused a request: exit 66, no retry.

    Not a MissingInput: denied access must not pass for the absence of an optional object.
    """

    exit_code = ExitCode.MISSING_INPUT


class ServiceRefused(TrnpipeError):
    """An AWS service refused an operator's request: exit 66."""

    exit_code = ExitCode.MISSING_INPUT


class GateRefused(TrnpipeError):
    """The new model is worse than the gate's baseline: exit 67 (of `trnpipe local` and `trnpipe start --watch`)."""

    exit_code = ExitCode.GATE_REFUSED


class Superseded(TrnpipeError):
    """Another run published first: exit 68, no retry."""

    exit_code = ExitCode.SUPERSEDED


class Defect(TrnpipeError):
    """Our own mistake: exit 69, no retry."""

    exit_code = ExitCode.DEFECT


class Transient(TrnpipeError):
    """A failure of storage, network or a peer that may pass: exit 75, retried."""

    exit_code = ExitCode.TRANSIENT


class UnhealthyHost(TrnpipeError):
    """A host whose devices fail a check: exit 76, retried on another host."""

    exit_code = ExitCode.UNHEALTHY_HOST


class NoProgress(TrnpipeError):
    """A rank that stopped making progress: exit 77, retried."""

    exit_code = ExitCode.NO_PROGRESS
