"""`trnpipe doctor`: is this account ready for what the settings would deploy; and after a deployment, is all well?

Only reads.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from infra.doctor import check_account, check_capacity, check_deployed, check_image, check_network, check_storage, printing
from infra.doctor.asking import Aws, Check, DoctorFinding, NotAuthenticated, Subject, Unavailable, examine, policy
from infra.doctor.blueprint import Blueprint, chosen_context, draw
from pipeline.errors import Transient

ALWAYS: tuple[Check, ...] = (
    check_account.bootstrap,
    check_account.service_roles,
    check_account.budgets,
    check_capacity.quotas,
    check_capacity.zones,
    check_capacity.reservation,
    check_image.ami,
    check_image.containers,
    check_network.vpc,
    check_network.subnets,
    check_network.endpoints,
    check_network.service_zones,
    check_network.default_group,
    check_storage.buckets,
    check_storage.encryption,
)
BEFORE: tuple[Check, ...] = (check_account.names, check_account.addressees, check_storage.initial_model)
AFTER: tuple[Check, ...] = (
    check_deployed.stacks,
    check_deployed.environments,
    check_deployed.queues,
    check_deployed.job_definitions,
    check_deployed.schedule,
    check_deployed.alarms,
    check_deployed.subscriptions,
)


def print_policy() -> None:
    """Print the permissions that doctor takes, as an IAM policy."""
    needed = policy((check_account.region, *ALWAYS, *BEFORE, *AFTER), check_account.CREDENTIAL_CALLS)
    sys.stdout.write(json.dumps(needed, indent=2) + "\n")


def run_doctor(context: Sequence[str] = (), environment: str | None = None, *, after: bool = False, as_json: bool = False) -> int:
    """Check the account, print the findings, and return the exit code.

    Args:
        context: `KEY=VALUE` items, as after `cdk deploy -c`.
        environment: name of an environment's settings.
        after: check what was deployed, too.
        as_json: print JSON.

    Raises:
        BadConfig: the settings are refused.
    """
    blueprint = draw(chosen_context(context, environment))
    try:
        findings = _findings(blueprint, after=after)
    except NotAuthenticated as error:
        findings = [dataclasses.replace(check_account.not_accepted(error), area=check_account.CREDENTIALS)]
    if as_json:
        sys.stdout.write(printing.as_json(findings) + "\n")
    else:
        printing.show(findings, Console())
    return int(printing.exit_code(findings))


def _findings(blueprint: Blueprint, *, after: bool) -> list[DoctorFinding]:
    aws = Aws(blueprint.settings.region)
    try:
        account_id, found = check_account.who(aws, blueprint)
    except Unavailable as error:
        raise Transient(
            "AWS cannot be reached", value=error, remedy="look at the network, proxies and AWS_ENDPOINT_URL"
        ) from error
    findings = [dataclasses.replace(found, area=check_account.CREDENTIALS)]
    subject = Subject(blueprint=blueprint, account=account_id, after=after, ask=aws)
    # Where these are wrong, every other answer would be about something else.
    findings += check_account.region(subject)
    return findings if printing.exit_code(findings) else findings + examine((*ALWAYS, *(AFTER if after else BEFORE)), subject)
