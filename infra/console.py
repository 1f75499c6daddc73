"""Links into the AWS console. Those for messages have `{}` where States.Format puts a run id or an execution's ARN."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

DOMAINS = {"cn-": "console.amazonaws.cn", "us-gov-": "console.amazonaws-us-gov.com"}
"""Beginning of a region's name -> where its console is; all others have AWS_DOMAIN."""
AWS_DOMAIN = "console.aws.amazon.com"


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
        return f"{self._home('states')}#/v2/executions/details/{{}}"

    @property
    def log(self) -> str:
        """What the jobs of a run logged: every line of the program's own names the run (pipeline/runtime/logs.py)."""
        # CloudWatch's console escapes what follows the # twice, with $ in the place of %.
        pattern = f"$3FfilterPattern$3D{_escaped(chr(34))}{{}}{_escaped(chr(34))}"
        return f"{self._home('cloudwatch')}#logsV2:log-groups/log-group/{_escaped(self.job_logs)}/log-events{pattern}"

    @property
    def report(self) -> str:
        """Of a run."""
        return f"https://{self._domain}/s3/object/{self.bucket}?region={self.region}&prefix=runs/{{}}/report/index.html"

    @property
    def overview(self) -> str:
        """The dashboard; has no `{}`."""
        return f"{self._home('cloudwatch')}#dashboards/dashboard/{self.dashboard}"

    @property
    def job_log_group(self) -> str:
        """The log group of all jobs."""
        return f"{self._home('cloudwatch')}#logsV2:log-groups/log-group/{_escaped(self.job_logs)}"

    @property
    def bucket_objects(self) -> str:
        """Runs, registry and graphs."""
        return f"https://{self._domain}/s3/buckets/{self.bucket}?region={self.region}"

    def machine(self, arn: str) -> str:
        """A state machine with its executions."""
        return f"{self._home('states')}#/statemachines/view/{arn}"

    @property
    def _domain(self) -> str:
        return next((domain for beginning, domain in DOMAINS.items() if self.region.startswith(beginning)), AWS_DOMAIN)

    def _home(self, service: str) -> str:
        return f"https://{self._domain}/{service}/home?region={self.region}"


def _escaped(text: str) -> str:
    return quote(quote(text, safe=""), safe="").replace("%", "$")
