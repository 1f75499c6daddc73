"""Metrics of a container for CloudWatch: one line of standard output per record, in the embedded metric format.

Batch hands a container's output to CloudWatch Logs line by line, and CloudWatch takes the metrics out of every line that is such
a document; it needs no permission. The catalogue of metrics is pipeline.contract.METRICS. Outside of
AWS nothing is printed: the same numbers stand in the run folder.

Format: "Specification: Embedded metric format", Amazon CloudWatch User Guide.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.contract import (
    DEPLOYMENT_DIMENSION,
    DEPLOYMENT_VARIABLE,
    METRICS,
    METRICS_NAMESPACE,
    STAGE_DIMENSION,
    Metric,
    Stage,
)
from pipeline.run.world import NodeWorld

EXECUTION_VARIABLE = "AWS_EXECUTION_ENV"
"""ECS sets it in every container: AWS_ECS_EC2 or AWS_ECS_FARGATE (Amazon ECS Developer Guide, "Environment variables")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedMetrics:
    """Writes the metrics of one process.

    Attributes:
        deployment: its name; empty: nothing is written.
        run: a property of every record, by which Logs Insights finds them; as a dimension it would make new metrics every week.
    """

    deployment: str
    stage: Stage
    run: str
    node: NodeWorld

    @classmethod
    def from_environment(
        cls, stage: Stage, run: str, node: NodeWorld, environment: Mapping[str, str] = os.environ
    ) -> EmbeddedMetrics:
        """Return the metrics of this process: silent outside a deployment's containers."""
        in_container = environment.get(EXECUTION_VARIABLE, "").startswith("AWS_ECS")
        return cls(deployment=environment.get(DEPLOYMENT_VARIABLE, "") if in_container else "", stage=stage, run=run, node=node)

    @property
    def enabled(self) -> bool:
        return bool(self.deployment)

    def write(self, values: Mapping[Metric, float], **properties: int | str) -> None:
        """Print one record.

        Args:
            values: those that are not finite are left out.
            properties: further members, for people who search the logs.
        """
        finite = {metric: value for metric, value in values.items() if math.isfinite(value)}
        if not self.enabled or not finite:
            return
        # In one piece, and shorter than a pipe takes at once: other processes of the container write to the same one.
        sys.stdout.write(json.dumps(self._document(finite, properties), separators=(",", ":")) + "\n")
        sys.stdout.flush()

    def _document(self, values: Mapping[Metric, float], properties: Mapping[str, int | str]) -> dict[str, Any]:
        directives: dict[tuple[tuple[str, ...], ...], list[Metric]] = {}
        for metric in values:
            directives.setdefault(METRICS[metric].dimensions, []).append(metric)
        return {
            "_aws": {
                "Timestamp": time.time_ns() // 1_000_000,
                "CloudWatchMetrics": [
                    {
                        "Namespace": METRICS_NAMESPACE,
                        "Dimensions": [list(names) for names in dimensions],
                        "Metrics": [{"Name": metric.value, "Unit": METRICS[metric].unit} for metric in metrics],
                    }
                    for dimensions, metrics in directives.items()
                ],
            },
            DEPLOYMENT_DIMENSION: self.deployment,
            STAGE_DIMENSION: self.stage.value,
            "Run": self.run,
            "Job": self.node.job_id,
            "Attempt": self.node.attempt,
            "Node": self.node.index,
            "Host": self.node.host,
            **properties,
            **{metric.value: value for metric, value in values.items()},
        }


def is_record(line: str) -> bool:
    """Whether a line of output is one that `EmbeddedMetrics` wrote."""
    return line.startswith('{"_aws":')
