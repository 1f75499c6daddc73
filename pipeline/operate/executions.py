"""Find, list, follow and start the executions of a site's state machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline.contract import RUN_ID_PATTERN, check_run_id
from pipeline.errors import BadConfig, MissingInput
from pipeline.operate.deployment import Site
from pipeline.operate.run_files import IN_FOLDER, json_object

RUNNING = ("RUNNING", "PENDING_REDRIVE")
FIRST_PAGE = 1000
NEXT_PAGE = 100
"""Events of a history per request: all of them at first, then the new ones."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One execution as DescribeExecution describes it.

    Attributes:
        name: unique within its state machine.
        status: RUNNING, SUCCEEDED, FAILED, TIMED_OUT, ABORTED or PENDING_REDRIVE.
        stopped: None while it runs.
        error, cause: of one that failed or was stopped.
        given: its input, empty where that is no object.
    """

    arn: str
    name: str
    status: str
    started: datetime
    stopped: datetime | None
    error: str
    cause: str
    given: Mapping[str, Any]

    @property
    def running(self) -> bool:
        return self.status in RUNNING

    @property
    def run(self) -> str:
        """Id of the run that it carries out: the input names an earlier one, or the execution's name is the run's."""
        named = self.given.get("run")
        return named if isinstance(named, str) and RUN_ID_PATTERN.fullmatch(named) else self.name

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> Execution:
        return cls(
            arn=answer["executionArn"],
            name=answer["name"],
            status=answer["status"],
            started=answer["startDate"],
            stopped=answer.get("stopDate"),
            error=answer.get("error") or "",
            cause=answer.get("cause") or "",
            given=json_object(answer.get("input")),
        )


def describe(site: Site, arn: str) -> Execution:
    """
    Raises:
        MissingInput: there is no such execution.
    """
    if (found := _described(site, arn)) is None:
        raise _no_such_run(site, arn)
    return found


def find(site: Site, wanted: str | None) -> Execution:
    """Return the execution that the operator names.

    Args:
        wanted: an execution's name or ARN, or the id of a run: then the execution that carries it out now or did so last;
            None: the one that was started last among those that run.

    Raises:
        BadConfig: an invalid name; or two executions of this run are in progress, and the name does not say which.
        MissingInput: there is none.
    """
    if wanted is None:
        if running := newest(site, 1, running=True):
            return running[0]
        raise MissingInput(
            "nothing is running",
            value=site.option,
            rule="without an ID the newest running execution is meant",
            remedy="start one, or name an earlier one: `trnpipe runs` lists them",
        )
    if wanted.startswith("arn:"):
        if not wanted.startswith(site.execution_arn("")):
            raise BadConfig(
                "the execution belongs to another state machine",
                value=wanted,
                rule=f"it begins with {site.execution_arn('')}",
                remedy="set --stack to the one that it belongs to",
            )
        return describe(site, wanted)
    by_name = _described(site, site.execution_arn(check_run_id(wanted)))
    newest_arn = json_object(site.files(wanted).read(IN_FOLDER.input)).get("execution_arn")
    # Only the files know of a local run that is over.
    by_run = (
        _described(site, newest_arn) if isinstance(newest_arn, str) and (by_name is None or newest_arn != by_name.arn) else None
    )
    if by_name and by_run and by_name.running and by_run.running:
        raise BadConfig(
            "two executions of this run are in progress",
            value=[by_name.arn, by_run.arn],
            rule="one name, one execution",
            remedy="give the full ARN of one of them",
        )
    if found := [one for one in (by_run, by_name) if one is not None]:
        return max(found, key=lambda one: (one.running, one.started))
    raise _no_such_run(site, wanted)


def newest(site: Site, limit: int, *, running: bool = False) -> list[Execution]:
    """Return the executions that were started last, newest first.

    Args:
        limit: the most to return.
        running: only those that run.
    """
    asked = {"stateMachineArn": site.machine_arn, **({"statusFilter": "RUNNING"} if running else {})}
    size = {"MaxItems": limit, "PageSize": min(limit, FIRST_PAGE)}
    with site.asking("executions"):
        pages = site.client("stepfunctions").get_paginator("list_executions").paginate(**asked, PaginationConfig=size)
        return [describe(site, arn) for arn in pages.search("executions[].executionArn")]


def start(site: Site, name: str, execution_input: Mapping[str, Any]) -> Execution:
    """Start an execution.

    Raises:
        BadConfig: there is an execution of this name.
    """
    given = {"stateMachineArn": site.machine_arn, "name": name, "input": json.dumps(execution_input)}
    answer = site.ask(name, "stepfunctions", "start_execution", ("ExecutionAlreadyExists",), **given)
    if answer is None:
        raise BadConfig(
            "there is an execution of this name already",
            value=name,
            rule="names are unique for 90 days",
            remedy=f"choose another --name, or resume that run with --run {name}",
        )
    return describe(site, answer["executionArn"])


def read_history(site: Site, arn: str, events: list[Event]) -> None:
    """Add an execution's new events to those that were read before, newest first, so that a long history is read once and not at
    every look.

    Args:
        events: as GetExecutionHistory gives them, oldest first.
    """
    last = events[-1]["id"] if events else 0
    new: dict[int, Event] = {}
    with site.asking("the execution's history"):
        pages = site.client("stepfunctions").get_paginator("get_execution_history")
        for page in pages.paginate(
            executionArn=arn, reverseOrder=last > 0, PaginationConfig={"PageSize": NEXT_PAGE if last else FIRST_PAGE}
        ):
            new |= {event["id"]: event for event in page["events"] if event["id"] > last}
            if last and any(event["id"] <= last for event in page["events"]):
                break
    events += [new[number] for number in sorted(new)]


def _described(site: Site, arn: str) -> Execution | None:
    answer = site.ask(arn, "stepfunctions", "describe_execution", ("ExecutionDoesNotExist", "InvalidArn"), executionArn=arn)
    return None if answer is None else Execution.parse(answer)


def _no_such_run(site: Site, wanted: str) -> MissingInput:
    return MissingInput(
        "there is no such run",
        value=f"{wanted} ({site.option})",
        rule="an execution's name or ARN, or a run's id; AWS forgets executions after 90 days",
        remedy="`trnpipe runs` lists the newest ones",
    )
