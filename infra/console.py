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
        """Of the execution whose ARN takes the place of `{}`."""
        return aws_console.execution(self.region, "{}")

    @property
    def log(self) -> str:
        """What the jobs of a run logged: every line of the program's own names the run (pipeline/run/logs.py)."""
        # CloudWatch's console escapes what follows the # twice, with $ in the place of %.
        pattern = f"$3FfilterPattern$3D{_escaped(chr(34))}{{}}{_escaped(chr(34))}"
        return f"{self.job_log_group}/log-events{pattern}"

    @property
    def report(self) -> str:
        """Of a run."""
        return f"https://{aws_console.domain(self.region)}/s3/object/{self.bucket}?region={self.region}&prefix=runs/{{}}/report/index.html"

    @property
    def overview(self) -> str:
        """The dashboard; has no `{}`."""
        return f"{aws_console.home(self.region, 'cloudwatch')}#dashboards/dashboard/{self.dashboard}"

    @property
    def job_log_group(self) -> str:
        """The log group of all jobs."""
        return f"{aws_console.home(self.region, 'cloudwatch')}#logsV2:log-groups/log-group/{_escaped(self.job_logs)}"

    @property
    def bucket_objects(self) -> str:
        """Runs, registry and graphs."""
        return f"https://{aws_console.domain(self.region)}/s3/buckets/{self.bucket}?region={self.region}"

    def machine(self, arn: str) -> str:
        """A state machine with its executions."""
        return f"{aws_console.home(self.region, 'states')}#/statemachines/view/{arn}"


def _escaped(text: str) -> str:
    return quote(quote(text, safe=""), safe="").replace("%", "$")
