"""Where the AWS console is, and where it shows an execution. The links of messages (infra/console.py) begin with the same."""

from __future__ import annotations

DOMAINS = {"cn-": "console.amazonaws.cn", "us-gov-": "console.amazonaws-us-gov.com"}
"""Beginning of a region's name -> where its console is; all others have AWS_DOMAIN."""
AWS_DOMAIN = "console.aws.amazon.com"


def domain(region: str) -> str:
    """Host of the console that shows a region."""
    return next((host for beginning, host in DOMAINS.items() if region.startswith(beginning)), AWS_DOMAIN)


def home(region: str, service: str) -> str:
    """A service's first page, without anything after the #."""
    return f"https://{domain(region)}/{service}/home?region={region}"


def execution(region: str, arn: str) -> str:
    """An execution of a state machine."""
    return f"{home(region, 'states')}#/v2/executions/details/{arn}"
