"""What alarms and notices mean, and what to do first. Each ends with the place in the guide that says more."""

from __future__ import annotations

import re
from dataclasses import dataclass

GUIDE = "docs/runbook.md"


@dataclass(frozen=True, slots=True)
class Advice:
    """
    Attributes:
        meaning: what has happened, one sentence.
        first: what to do first.
    """

    meaning: str
    first: str


ADVICE: dict[str, Advice] = {
    "Failed": Advice(
        "A run failed.",
        "Read its notification, which says what was wrong and the remedy; then start it again with its run id.",
    ),
    "Refused": Advice(
        "The gate refused a run's model: what is published stays.",
        "Open the run's report and compare both models; the new data is the likeliest cause.",
    ),
    "Aborted": Advice(
        "A run was stopped.",
        "If nobody meant it, look in CloudTrail for StopExecution; started again with its run id it goes on.",
    ),
    "TimedOut": Advice("A run's execution timed out.", "Open the execution, see which state it hung in, and start it again."),
    "Overdue": Advice(
        "A run takes, or took, longer than its time budget.",
        "Look at queue wait and throughput on the dashboard: it waits for hosts, trains slowly, or is retried.",
    ),
    "NotStarted": Advice(
        "The weekly start could not be delivered.",
        "Read the message in the schedule's dead-letter queue, mend what it names, and start the run by hand.",
    ),
    "MissedWeek": Advice(
        "No run has succeeded for a week, or for the `every_days` of the schedule, and a time budget.",
        "See on the dashboard whether runs failed, were refused or never began, and follow the advice for that.",
    ),
    "QueueBlocked": Advice(
        "A job at the head of a queue cannot be placed.",
        "The notice names the reason: no capacity in the zone, maxvCpus or a job too large for a host, or a role.",
    ),
    "DefaultGroup": Advice(
        "A rule of the VPC's default security group was removed: without its rules the nodes of a gang cannot meet.",
        "Restore the rules with the commands that the doctor prints, and exempt the group from rules that empty default groups.",
    ),
    "UnhealthyHost": Advice(
        "A host failed its tests or its hardware failed, and left the cluster; its job is tried again elsewhere.",
        "Nothing, if it is one. Terminate the instance that the log names; if hosts go on failing, look at image and driver.",
    ),
    "MemoryErrors": Advice(
        "A device counted uncorrected memory errors.",
        "The run goes on elsewhere by itself. Terminate the instance that the log names and report it to AWS.",
    ),
    "NewGraphs": Advice(
        "Training compiled graphs that the compile stage had not made: time is lost on all hosts.",
        "Read the cause in train/graphs-00000.json of the run; compile.new_graphs = stop ends such runs at once.",
    ),
    "CheckpointStall": Advice(
        "Training stood still for a checkpoint for longer than copying it takes.",
        "Look for storage errors in the job's log; the copy waits where the upload before it is not done.",
    ),
    "WatchFailed": Advice(
        "A watch failed: a stopped run's jobs may go on, or nobody looks whether a run is overdue or a week was missed.",
        "Open the failed execution of the watch, mend what it names, and terminate jobs of ended runs by hand.",
    ),
}
"""Name of an alarm or a notice -> advice."""


RUNBOOK: dict[str, str] = {name: f"{GUIDE}#alarm-{re.sub('(?<!^)(?=[A-Z])', '-', name).lower()}" for name in ADVICE}
"""Name of an alarm or a notice -> its heading in the guide."""


def advice(name: str) -> str:
    """Meaning, first step and where to read on, as plain text."""
    return f"{ADVICE[name].meaning} First: {ADVICE[name].first} Guide: {RUNBOOK[name]}"


def remedy(name: str) -> str:
    """The same for a notice that says itself what has happened."""
    return f"First: {ADVICE[name].first} Guide: {RUNBOOK[name]}"
