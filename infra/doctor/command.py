"""`trnpipe doctor`: is this account ready for what the settings would deploy; and after a deployment, is all well?

Only reads, except for `--gang`, which asks first.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from rich.console import Console

from infra.doctor import account, capacity, deployed, image, network, output, storage
from infra.doctor.asking import (
    Ask,
    Aws,
    Check,
    Denied,
    Finding,
    NotAuthenticated,
    Refused,
    Subject,
    Unavailable,
    examine,
    ok,
    policy,
)
from infra.doctor.blueprint import Blueprint, chosen_context, draw
from infra.doctor.gang import FORMS, Form, Outcome, Pace, definition, node_command, verdict, walk
from infra.doctor.probe import CALLS, NODES, Probe
from pipeline.errors import BadConfig, ServiceRefused, Transient

ALWAYS: tuple[Check, ...] = (
    account.bootstrap,
    account.service_roles,
    account.budgets,
    capacity.quotas,
    capacity.zones,
    capacity.reservation,
    image.ami,
    image.containers,
    network.vpc,
    network.subnets,
    network.endpoints,
    network.default_group,
    storage.buckets,
)
BEFORE: tuple[Check, ...] = (account.names, account.addressees)
AFTER: tuple[Check, ...] = (
    deployed.stacks,
    deployed.environments,
    deployed.queues,
    deployed.job_definitions,
    deployed.schedule,
    deployed.alarms,
    deployed.subscriptions,
    deployed.locks,
)
GANG = "Gang"
PROBE_HOURS = 1.0
"""More than a probe takes: two gangs one after the other, the start of their hosts and their end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """The command line.

    Attributes:
        context: `KEY=VALUE`, as after `cdk deploy -c`.
        environment: name of an environment's settings.
        after: look at what was deployed, too.
        gang, cleanup: try gangs; only remove what an earlier try has left.
        image, instance_type, subnet, hold_seconds: of that try; None: the deployment's own image and subnet.
        yes: do not ask.
        as_json: print JSON.
        policy: only print the permissions that doctor takes.
    """

    context: tuple[str, ...] = ()
    environment: str | None = None
    after: bool = False
    gang: bool = False
    cleanup: bool = False
    image: str | None = None
    instance_type: str = "c6i.large"
    subnet: str | None = None
    hold_seconds: int = 180
    yes: bool = False
    as_json: bool = False
    policy: bool = False


def run_doctor(options: DoctorOptions) -> int:
    """Run the command; its exit code.

    Raises:
        BadConfig: the settings are refused, or there is nothing to try gangs with.
        ServiceRefused: something of a try could not be removed.
    """
    if options.policy:
        more = (*account.CREDENTIAL_CALLS, *(CALLS if options.gang else ()))
        sys.stdout.write(json.dumps(policy((account.region, *ALWAYS, *BEFORE, *AFTER), more), indent=2) + "\n")
        return 0
    blueprint = draw(chosen_context(options.context, options.environment))
    try:
        findings = _findings(options, blueprint)
    except NotAuthenticated as error:
        findings = [dataclasses.replace(account.not_accepted(error), area=account.CREDENTIALS)]
    if options.as_json:
        sys.stdout.write(output.as_json(findings) + "\n")
    else:
        output.show(findings, Console())
    return int(output.exit_code(findings))


def _findings(options: DoctorOptions, blueprint: Blueprint) -> list[Finding]:
    aws = Aws(blueprint.settings.region)
    try:
        account_id, found = account.who(aws, blueprint)
    except Unavailable as error:
        raise Transient(
            "AWS cannot be reached", value=error, remedy="look at the network, proxies and AWS_ENDPOINT_URL"
        ) from error
    findings = [dataclasses.replace(found, area=account.CREDENTIALS)]
    subject = Subject(blueprint=blueprint, account=account_id, after=options.after, ask=aws)
    # Where these are wrong, every other answer would be about something else.
    findings += account.region(subject)
    if output.exit_code(findings):
        return findings
    if options.gang:
        return findings + _try_gangs(options, subject, aws)
    return findings + examine((*ALWAYS, *(AFTER if options.after else BEFORE)), subject)


def _try_gangs(options: DoctorOptions, subject: Subject, aws: Aws) -> list[Finding]:
    say = Console(stderr=True).print
    settings = subject.settings
    probe = Probe(
        call=aws.call,
        name=settings.name,
        account=subject.account,
        region=settings.region,
        tell=lambda what: say(f"gang: {what}", style="dim", highlight=False),
    )
    if options.cleanup:
        _remove(probe)
        return [dataclasses.replace(ok("removed", f"everything named {probe.prefix}"), area=GANG)]
    subnet_id, container = _place(options, subject)
    price = hourly_price(aws, options.instance_type, settings.region)
    cost = "at a price that cannot be looked up" if price is None else f"${NODES * PROBE_HOURS * price:.2f} at most"
    say(
        f"This starts {NODES} x {options.instance_type} in {subnet_id} ({settings.region}, account {subject.account}), {cost} "
        f"for {PROBE_HOURS:g} h, runs {container} on them, and removes everything again."
    )
    if not options.yes and not typer.confirm("Go on?", err=True):
        raise typer.Exit(0)
    outcomes = try_forms(probe, subnet_id, options.instance_type, container, options.hold_seconds, Pace())
    return [dataclasses.replace(finding, area=GANG) for finding in verdict(outcomes, settings.gang_submit)]


def try_forms(
    probe: Probe, subnet_id: str, instance_type: str, container: str, hold_seconds: int, pace: Pace
) -> dict[Form, Outcome]:
    """Make everything, execute both forms, remove everything: also when that fails or is interrupted.

    Raises:
        BadConfig: an earlier probe is in the way, or AWS refuses one of the resources.
        ServiceRefused: something could not be removed, or a permission is missing.
        Transient: a service does not answer.
    """
    with _explained():
        if left := probe.leftovers():
            raise BadConfig(
                "an earlier probe has left something behind, or runs now",
                value=left,
                rule="one probe of a deployment at a time",
                remedy="trnpipe doctor --gang --cleanup",
            )
        try:
            made = probe.make(
                subnet_id=subnet_id, instance_type=instance_type, image=container, command=node_command(hold_seconds)
            )
            outcomes = {}
            for form in FORMS:
                machine_arn = probe.make_machine(
                    form, definition(form, made.queue_arn, probe.partition, probe.region), made.machine_role_arn
                )
                probe.tell(f"form {form}: a gang of {probe.nodes}, which waits for hosts first")
                outcomes[form] = walk(probe, form, machine_arn, made.definition_arn, made.queue_arn, pace)
        finally:
            _remove(probe)
    return outcomes


@contextmanager
def _explained() -> Iterator[None]:
    """What stands in the way of a probe, as this command's errors."""
    try:
        yield
    except Denied as denied:
        raise ServiceRefused(
            "the probe may not make what it needs",
            value=denied.action,
            remedy="trnpipe doctor --gang --policy prints the permissions; iam:PassRole on its two roles besides",
        ) from denied
    except Unavailable as error:
        raise Transient("AWS did not answer in the middle of the probe", value=error, remedy="try again") from error
    except Refused as refused:
        raise BadConfig(
            "AWS refuses a part of the probe", value=refused, remedy="another --subnet, --instance-type or --image"
        ) from refused


def _remove(probe: Probe) -> None:
    try:
        kept = probe.remove(FORMS)
    except KeyboardInterrupt:
        probe.tell("interrupted while removing: `trnpipe doctor --gang --cleanup` removes the rest")
        raise
    if kept:
        raise ServiceRefused(
            "something of the probe could not be removed",
            value=kept,
            rule="hosts that are left cost money",
            remedy="trnpipe doctor --gang --cleanup, until it finds nothing",
        )


def _place(options: DoctorOptions, subject: Subject) -> tuple[str, str]:
    """Subnet and image of the try."""
    blueprint = subject.blueprint
    named = [subnet for fleet in blueprint.fleets() for subnet in fleet.subnet_ids]
    try:
        subnet_id = options.subnet or next(iter(named or subject.physical(blueprint.pipeline_stack, "AWS::EC2::Subnet")), None)
    except (Denied, Refused, Unavailable):
        subnet_id = None
    if subnet_id is None:
        raise BadConfig(
            "there is no subnet to try a gang in",
            value=f"no stack {blueprint.pipeline_stack}, no existing VPC in the settings",
            rule="a private subnet with a way to ECR, ECS and the image",
            remedy="deploy first, or --subnet subnet-...",
        )
    if options.image is not None:
        return subnet_id, options.image
    [container] = [one for one in blueprint.containers if one.name == "cpu"]
    if container.repository is None or container.registry is not None:
        return subnet_id, container.uri
    return subnet_id, f"{subject.account}.dkr.ecr.{subject.settings.region}.amazonaws.com/{container.uri}"


def hourly_price(ask: Ask, instance_type: str, region: str) -> float | None:
    """US dollars per hour on demand, from the AWS price list; None where it cannot be asked or says nothing."""
    wanted = {
        "instanceType": instance_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "preInstalledSw": "NA",
        "marketoption": "OnDemand",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    try:
        listed = ask("pricing", "GetProducts", ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
    except (Denied, Refused, Unavailable):
        return None
    prices = [
        float(dimension["pricePerUnit"]["USD"])
        for product in map(json.loads, listed)
        for term in product["terms"].get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if dimension["unit"] == "Hrs"
    ]
    return max(prices, default=None)
