"""Advice for alarms and notices: their meaning, the first step, and the section of the guide."""

from __future__ import annotations

import re
from dataclasses import dataclass

GUIDE = "docs/runbook.md"


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice for an alarm or a notice.

    Attributes:
        meaning: the event, one sentence.
        first: the first step.
    """

    meaning: str
    first: str


ADVICE: dict[str, Advice] = {
    "Failed": Advice(
        "A run failed.",
        "Read its notification, which has the cause and the remedy; then start it again with its run id.",
    ),
    "Refused": Advice(
        "The gate refused a run's model: the published model stays.",
        "Open the run's report and compare both models; the new data is the likeliest cause.",
    ),
    "Aborted": Advice(
        "A run was stopped.",
        "If it was a mistake, CloudTrail shows who called StopExecution; started again with its run id, it resumes.",
    ),
    "TimedOut": Advice("A run's execution timed out.", "Open the execution, see which state it hung in, and start it again."),
    "Overdue": Advice(
        "A run takes, or took, longer than its time budget.",
        "Look at queue wait and throughput on the dashboard: it waits for hosts, trains slowly, or Batch retries its jobs.",
    ),
    "NotStarted": Advice(
        "A start could not be delivered.",
        "Read the message in the schedules' dead-letter queue, correct the error that it names, and start the run by hand.",
    ),
    "MissedWeek": Advice(
        "No run of a schedule has succeeded for its `every_days` and a time budget.",
        "The dashboard shows whether runs failed, were refused or never started; follow the advice for that.",
    ),
    "QueueBlocked": Advice(
        "A job at the head of a queue cannot be placed.",
        "The notice names the reason: no capacity in the zone, maxvCpus or a job too large for a host, or a role.",
    ),
    "DefaultGroup": Advice(
        "A rule of the VPC's default security group was removed: without its rules the nodes of a gang cannot connect.",
        "Restore the rules with the commands that the doctor prints, and exempt the group from rules that empty default groups.",
    ),
    "UnhealthyHost": Advice(
        "A host failed its tests or its hardware failed, and it left the cluster; Batch retries its job on another host.",
        "Nothing for a single host. If more hosts fail, terminate the instances that the log names, and check image and driver.",
    ),
    "MemoryErrors": Advice(
        "A device counted uncorrected memory errors.",
        "The run continues on another host. Terminate the instance that the log names and report it to AWS.",
    ),
    "NewGraphs": Advice(
        "Training compiled graphs that the compile stage had not compiled, and all hosts waited.",
        "Read the cause in train/graphs-00000.json of the run; compile.new_graphs = stop ends such runs at once.",
    ),
    "CheckpointStall": Advice(
        "Training stalled for a checkpoint for longer than copying it takes.",
        "Look for storage errors in the job's log; the copy waits while the previous upload is in progress.",
    ),
    "WatchFailed": Advice(
        "A watch failed: a stopped run's jobs may still run, or overdue runs and missed weeks are not reported.",
        "Open the failed execution of the watch, correct the error that it names, and terminate jobs of ended runs by hand.",
    ),
}
"""Name of an alarm or a notice -> advice."""


RUNBOOK: dict[str, str] = {name: f"{GUIDE}#alarm-{re.sub('(?<!^)(?=[A-Z])', '-', name).lower()}" for name in ADVICE}
"""Name of an alarm or a notice -> its heading in the guide."""


def advice(name: str) -> str:
    """Return meaning, first step and section of the guide as plain text."""
    return f"{ADVICE[name].meaning} First: {ADVICE[name].first} Guide: {RUNBOOK[name]}"


def remedy(name: str) -> str:
    """Return the same without the meaning, for a notice that describes the event itself."""
    return f"First: {ADVICE[name].first} Guide: {RUNBOOK[name]}"
