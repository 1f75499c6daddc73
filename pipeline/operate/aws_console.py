"""URLs of the AWS console, for the commands and for the links in messages (infra/console.py)."""

from __future__ import annotations

DOMAINS = {"cn-": "console.amazonaws.cn", "us-gov-": "console.amazonaws-us-gov.com"}
"""Prefix of a region's name -> its console's host; all other regions have AWS_DOMAIN."""
AWS_DOMAIN = "console.aws.amazon.com"


def domain(region: str) -> str:
    """Return the host of a region's console."""
    return next((host for beginning, host in DOMAINS.items() if region.startswith(beginning)), AWS_DOMAIN)


def home(region: str, service: str) -> str:
    """Return the URL of a service's first page, without a fragment."""
    return f"https://{domain(region)}/{service}/home?region={region}"


def execution(region: str, arn: str) -> str:
    """Return the URL that shows an execution of a state machine."""
    return f"{home(region, 'states')}#/v2/executions/details/{arn}"
