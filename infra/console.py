"""Links into the AWS console. Those for messages have `{}` where States.Format puts a run id or an execution's ARN."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from pipeline.operate import aws_console


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """One deployment in the console.

    Attributes:
        bucket: name, or a reference to it.
        job_logs: name of the log group of all jobs; spelled out, because it is escaped in the link.
        dashboard: name.
    """

    region: str
    bucket: str
    job_logs: str
    dashboard: str

    @property
    def execution(self) -> str:
        """Link to the execution whose ARN replaces `{}`."""
        return aws_console.execution(self.region, "{}")

    @property
    def log(self) -> str:
        """Link to the log lines of a run's jobs: every line of the program names the run (pipeline/run/logs.py)."""
        # CloudWatch's console escapes the part after # twice, with $ instead of %.
        return f"{self.job_log_group}/log-events$3FfilterPattern$3D{_escaped(chr(34))}{{}}{_escaped(chr(34))}"

    @property
    def report(self) -> str:
        """Link to a run's report."""
        return f"https://{aws_console.domain(self.region)}/s3/object/{self.bucket}?region={self.region}&prefix=runs/{{}}/report/index.html"

    @property
    def overview(self) -> str:
        """Link to the dashboard; without `{}`."""
        return f"{aws_console.home(self.region, 'cloudwatch')}#dashboards/dashboard/{self.dashboard}"

    @property
    def job_log_group(self) -> str:
        """Link to the log group of all jobs."""
        return f"{aws_console.home(self.region, 'cloudwatch')}#logsV2:log-groups/log-group/{_escaped(self.job_logs)}"

    @property
    def bucket_objects(self) -> str:
        """Link to runs, registry and graphs."""
        return f"https://{aws_console.domain(self.region)}/s3/buckets/{self.bucket}?region={self.region}"

    def machine(self, arn: str) -> str:
        """Link to a state machine with its executions."""
        return f"{aws_console.home(self.region, 'states')}#/statemachines/view/{arn}"


def _escaped(text: str) -> str:
    return quote(quote(text, safe=""), safe="").replace("%", "$")
