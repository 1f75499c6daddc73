"""Draws the architecture from the synthesized templates: `python -m infra.architecture` writes infra/architecture.svg.

What is on the picture is what a deployment creates: cards are groups of resources, their figures are the templates', and an
arrow is there because one resource refers to another, by itself or by what its role may do. The layout alone is ours.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from infra.app import read_context, synthesize
from infra.settings import HARDWARE
from infra.svg import Box, Picture, Tone, text_width, wrap
from pipeline.contract import STAGES, Shape, Stage
from pipeline.errors import BadConfig, TrnpipeError

PICTURE = Path(__file__).parent / "architecture.svg"

Resource = Mapping[str, Any]

# What the templates say.


@dataclass(frozen=True)
class Assembly:
    """Both stacks as one set of resources: what one imports from the other is a reference like any other.

    Attributes:
        resources: logical id, with its stack's name before it -> resource.
        region: where it is deployed to.
        name: of the deployment.
    """

    resources: Mapping[str, Resource]
    exports: Mapping[str, str]
    region: str
    name: str

    def of(self, kind: str) -> dict[str, Mapping[str, Any]]:
        """Id -> properties of all resources of a type."""
        return {key: each.get("Properties", {}) for key, each in self.resources.items() if each["Type"] == kind}

    def references(self, value: Any, stack: str) -> Iterator[str]:
        """Ids that a part of a template refers to."""
        if isinstance(value, list):
            for each in value:
                yield from self.references(each, stack)
        if not isinstance(value, Mapping):
            return
        for key, inner in value.items():
            if key == "Ref":
                yield f"{stack}/{inner}"
            elif key == "Fn::GetAtt":
                yield f"{stack}/{inner[0]}"
            elif key == "Fn::ImportValue":
                yield self.exports[str(inner)]
            else:
                yield from self.references(inner, stack)

    def text(self, value: Any) -> str:
        """A string of a template; references in it become their text, unknown ones `?`."""
        if isinstance(value, Mapping):
            if "Fn::Join" in value:
                separator, parts = value["Fn::Join"]
                return str(separator).join(map(self.text, parts))
            return self.region if value.get("Ref") == "AWS::Region" else "?"
        return str(value)

    @cached_property
    def policies(self) -> dict[str, list[str]]:
        """Role -> the policies that name it."""
        found: dict[str, list[str]] = {}
        for key, properties in self.of("AWS::IAM::Policy").items():
            for role in self.references(properties["Roles"], _stack(key)):
                found.setdefault(role, []).append(key)
        return found

    def reached(self, start: str) -> set[str]:
        """Resources of a group that a resource refers to, through roles and the like."""
        found: set[str] = set()
        waiting, seen = [start], {start}
        while waiting:
            key = waiting.pop()
            resource = self.resources[key]
            following = list(self.references(resource.get("Properties", {}), _stack(key)))
            if resource["Type"] == "AWS::IAM::Policy":
                following = list(self.references(resource["Properties"]["PolicyDocument"], _stack(key)))
            following += self.policies.get(key, [])
            for each in following:
                if each in seen or each not in self.resources:
                    continue
                seen.add(each)
                if self.resources[each]["Type"] in PASSED_THROUGH:
                    waiting.append(each)
                else:
                    found.add(each)
        return found


def read_assembly(folder: Path) -> Assembly:
    """The templates of a cloud assembly.

    Raises:
        BadConfig: not the folder of one deployment.
    """
    paths = sorted(folder.glob("*.template.json"))
    data = [path for path in paths if path.name.endswith("-data.template.json")]
    if len(paths) != 2 or len(data) != 1:
        raise BadConfig("this is no cloud assembly of one deployment", value=folder, remedy="cdk synth, and name its folder")
    name = data[0].name.removesuffix("-data.template.json")
    resources: dict[str, Resource] = {}
    exports: dict[str, str] = {}
    region = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["artifacts"][name]["environment"].split("/")[-1]
    for path in paths:
        stack = path.name.removesuffix(".template.json")
        template = json.loads(path.read_text(encoding="utf-8"))
        resources |= {f"{stack}/{key}": each for key, each in template["Resources"].items()}
        for output in template.get("Outputs", {}).values():
            if "Export" not in output:
                continue
            value = output["Value"]
            exports[output["Export"]["Name"]] = f"{stack}/{value['Ref'] if 'Ref' in value else value['Fn::GetAtt'][0]}"
    return Assembly(resources=resources, exports=exports, region=region, name=name)


PASSED_THROUGH = {
    *("AWS::IAM::Role", "AWS::IAM::Policy", "AWS::IAM::ManagedPolicy", "AWS::IAM::InstanceProfile"),
    *("AWS::EC2::LaunchTemplate", "AWS::EC2::PlacementGroup"),
}
"""Resources whose references count as those of what refers to them."""

GROUPS: dict[str, str] = {
    "AWS::Scheduler::Schedule": "schedule",
    "AWS::SQS::Queue": "schedule",
    "AWS::SQS::QueuePolicy": "schedule",
    "AWS::Events::Rule": "watches",
    "AWS::SNS::Topic": "topic",
    "AWS::SNS::TopicPolicy": "topic",
    "AWS::SNS::Subscription": "topic",
    "AWS::KMS::Key": "topic",
    "AWS::CloudWatch::Alarm": "alarms",
    "AWS::CloudWatch::Dashboard": "alarms",
    "AWS::Logs::MetricFilter": "alarms",
    "AWS::Budgets::Budget": "alarms",
    "AWS::Batch::SchedulingPolicy": "queues",
    "AWS::Batch::JobQueue": "queues",
    "AWS::Batch::JobDefinition": "queues",
    "AWS::Batch::ComputeEnvironment": "hosts",
    "AWS::S3::Bucket": "bucket",
    "AWS::S3::BucketPolicy": "bucket",
    "AWS::DynamoDB::Table": "lock",
    "AWS::ECR::Repository": "images",
    "AWS::Logs::LogGroup": "logs",
    **{f"AWS::EC2::{kind}": "network" for kind in ("VPC", "Subnet", "RouteTable", "SubnetRouteTableAssociation", "FlowLog")},
    **{f"AWS::EC2::{kind}": "network" for kind in ("VPCEndpoint", "SecurityGroup")},
    **{f"AWS::EC2::SecurityGroup{way}": "network" for way in ("Ingress", "Egress")},
}
"""Resource type -> the card it belongs to; a state machine's depends on its name."""

NOT_DRAWN: dict[tuple[str, str], str] = {
    ("hosts", "network"): "hosts stand in one frame with their network",
    **{("alarms", group): "an alarm's name says what it watches" for group in ("machine", "schedule", "watches", "logs")},
    ("alarms", "bucket"): "the dashboard links to it",
    **{(group, "logs"): "everything writes logs; jobs write most" for group in ("machine", "watches", "network")},
    ("watches", "queues"): "they look at queues for the state machine, which has its arrow",
}
"""References between groups that would only be lines on lines, and why."""


def group_of(assembly: Assembly, key: str) -> str | None:
    """The card a resource belongs to; None: it is on none."""
    resource = assembly.resources[key]
    if resource["Type"] == "AWS::StepFunctions::StateMachine":
        return "machine" if resource["Properties"].get("StateMachineName") == assembly.name else "watches"
    return GROUPS.get(resource["Type"])


def connections(assembly: Assembly) -> set[tuple[str, str]]:
    """Pairs of groups of which the first refers to the second."""
    found = set()
    for key in assembly.resources:
        source = group_of(assembly, key)
        if source is None:
            continue
        for reached in assembly.reached(key):
            target = group_of(assembly, reached)
            if target not in (None, source):
                found.add((source, str(target)))
    return found


# Cards.

WIDTH = 900.0
MARGIN = 20.0
PAD = 14.0
CAPTION, TITLE, ROW, CHIP = 10.5, 13.5, 11.5, 11.5
LEADING, ROW_GAP = 15.0, 3.0
CHIP_HEIGHT, CHIP_GAP = 20.0, 7.0


Chip = tuple[str, Tone, "str | None"]
"""A stage's name, its tone, and what stands to its right. Without such words chips follow each other in a line."""


@dataclass(kw_only=True)
class Card:
    """A box: the service, a title, rows of text, and stages."""

    name: str
    service: str
    title: str
    tone: Tone
    rows: list[str] = field(default_factory=list)
    stages: list[Chip] = field(default_factory=list)

    def lines(self, width: float) -> list[list[str]]:
        """The lines of every row."""
        return [wrap(row, width - 2 * PAD, ROW) for row in self.rows]

    def chips(self, width: float) -> list[list[Chip]]:
        """Stages by line."""
        lines: list[list[Chip]] = []
        left = 0.0
        for stage in self.stages:
            needed = chip_width(stage[0]) + 2 * CHIP_GAP
            if stage[2] is not None or not lines or left < needed:
                lines.append([])
                left = width - 2 * PAD
            lines[-1].append(stage)
            left -= needed
        return lines

    def height(self, width: float) -> float:
        chips = len(self.chips(width))
        titles = len(wrap(self.title, width - 2 * PAD, TITLE, bold=True))
        text = sum(LEADING * len(lines) + ROW_GAP for lines in self.lines(width))
        return 24 + 17 * titles + text + (CHIP_HEIGHT + CHIP_GAP) * chips + (14 if chips else 10)

    def draw(self, picture: Picture, place: Box) -> None:
        picture.group(self.name)
        picture.box(place, "card")
        picture.bar(place, self.tone)
        x, y = place.x + PAD, place.y + 19
        picture.text(x, y, self.service, size=CAPTION, tone="muted")
        for line in wrap(self.title, place.width - 2 * PAD, TITLE, bold=True):
            y += 17
            picture.text(x, y, line, size=TITLE, bold=True)
        for lines in self.lines(place.width):
            y += ROW_GAP
            for line in lines:
                y += LEADING
                picture.text(x, y, line, size=ROW)
        y += 10
        for stages in self.chips(place.width):
            left = x
            for number, (stage, tone, words) in enumerate(stages):
                chip = Box(x=left, y=y, width=chip_width(stage), height=CHIP_HEIGHT)
                picture.box(chip, "chip", radius=CHIP_HEIGHT / 2, tone=tone)
                picture.text(left + 9, y + 14, stage, size=CHIP, tone=tone, bold=True)
                if words is not None:
                    picture.text(place.right - PAD, y + 14, words, size=CAPTION, tone="muted", anchor="end")
                elif number + 1 < len(stages):
                    picture.text(chip.right + 4, y + 14, ">", size=CAPTION, tone="plain")
                left = chip.right + 2 * CHIP_GAP
            y += CHIP_HEIGHT + CHIP_GAP
        picture.end_group()


def chip_width(text: str) -> float:
    return text_width(text, CHIP, bold=True) + 18


def cards(assembly: Assembly) -> dict[str, Card]:
    """Every card but those of queues and hosts."""
    found = [
        *_schedule_cards(assembly),
        _machine_card(assembly),
        *_watch_cards(assembly),
        *_data_cards(assembly),
        _network_card(assembly),
    ]
    return {card.name: card for card in found}


def _schedule_cards(assembly: Assembly) -> Iterator[Card]:
    for schedule in assembly.of("AWS::Scheduler::Schedule").values():
        window = schedule["FlexibleTimeWindow"].get("MaximumWindowInMinutes")
        given = json.loads(assembly.text(schedule["Target"].get("Input", "{}")))
        rows = [
            f"{schedule['ScheduleExpressionTimezone']}{f', within {window} min' if window else ''}",
            f"share {given['share']}, waits {_hours(60 * given['lock']['wait_minutes'])} for the lock",
        ]
        for queue in assembly.of("AWS::SQS::Queue").values():
            rows.append(f"undelivered starts are kept {queue['MessageRetentionPeriod'] // 86_400} days")
        title = schedule["ScheduleExpression"] if schedule["State"] == "ENABLED" else "Switched off"
        yield Card(name="schedule", service="EventBridge Scheduler", title=title, tone="start", rows=rows)


def _machine_card(assembly: Assembly) -> Card:
    [machine] = [key for key in assembly.of("AWS::StepFunctions::StateMachine") if group_of(assembly, key) == "machine"]
    states = json.loads(assembly.text(assembly.resources[machine]["Properties"]["DefinitionString"]))["States"]
    kinds = [state["Type"] for state in states.values()]
    retried = sum("Retry" in state for state in states.values())
    caught = sum("Catch" in state for state in states.values())
    rows = [f"{len(kinds)} states; {kinds.count('Task')} call a service: {retried} are tried again, {caught} catch what is left"]
    stages: list[Chip] = [(stage.value, _tone(spec.queue.value), None) for stage, spec in STAGES.items()]
    title = f"State machine {assembly.name}"
    return Card(name="machine", service="Step Functions", title=title, tone="start", rows=rows, stages=stages)


def _watch_cards(assembly: Assembly) -> Iterator[Card]:
    machines = {
        key: str(properties["StateMachineName"]).removeprefix(f"{assembly.name}-")
        for key, properties in assembly.of("AWS::StepFunctions::StateMachine").items()
        if group_of(assembly, key) == "watches"
    }
    rows = [f"state machine{'s' * (len(machines) > 1)} {', '.join(machines.values())}"]
    # A rule that starts one of them needs no words of its own.
    rules = assembly.of("AWS::Events::Rule").items()
    rows += [rule["Description"] for key, rule in rules if not machines.keys() & assembly.reached(key)]
    yield Card(name="watches", service="EventBridge", title="Watches", tone="notify", rows=rows)
    topics = assembly.of("AWS::SNS::Topic").values()
    addresses = len(assembly.of("AWS::SNS::Subscription"))
    rows = [f"{addresses} subscription{'s' * (addresses != 1)}" if addresses else "no e-mail address yet"]
    rows += ["encrypted with a key of its own"] * any("KmsMasterKeyId" in topic for topic in topics)
    yield Card(name="topic", service="SNS", title="Notices and alarms", tone="notify", rows=rows)
    alarms = [str(alarm["AlarmName"]) for alarm in assembly.of("AWS::CloudWatch::Alarm").values()]
    rows = [", ".join(name.removeprefix(f"{assembly.name}-") for name in alarms)]
    rows += ["and a dashboard"] * bool(assembly.of("AWS::CloudWatch::Dashboard"))
    rows += ["and a budget"] * bool(assembly.of("AWS::Budgets::Budget"))
    yield Card(name="alarms", service="CloudWatch", title=f"{len(alarms)} alarms", tone="notify", rows=rows)


def _data_cards(assembly: Assembly) -> Iterator[Card]:
    for table in assembly.of("AWS::DynamoDB::Table").values():
        recovery = table.get("PointInTimeRecoverySpecification", {}).get("PointInTimeRecoveryEnabled")
        rows = ["one run per registry name"] + ["point-in-time recovery"] * bool(recovery)
        yield Card(name="lock", service="DynamoDB", title="Lock", tone="store", rows=rows)
    [bucket] = [each for each in assembly.of("AWS::S3::Bucket").values() if "LoggingConfiguration" in each]
    granted = json.dumps([*assembly.of("AWS::IAM::Policy").values()])
    folders = sorted(set(re.findall(r'"/([a-z]+)/', granted)))
    rows = [" ".join(f"{folder}/" for folder in folders)]
    rows += ["versioned, encrypted"] * (bucket.get("VersioningConfiguration", {}).get("Status") == "Enabled")
    yield Card(name="bucket", service="S3", title="Bucket", tone="store", rows=rows)
    repositories = assembly.of("AWS::ECR::Repository").values()
    rows = [", ".join(each["RepositoryName"] for each in repositories)]
    rows += ["tags never move"] * all(each.get("ImageTagMutability") == "IMMUTABLE" for each in repositories)
    yield Card(name="images", service="ECR", title="Images", tone="store", rows=rows)
    named = [each for each in assembly.of("AWS::Logs::LogGroup").values() if "LogGroupName" in each]
    kept = sorted({each["RetentionInDays"] for each in named})
    rows = [f"jobs and executions, {' to '.join(map(str, kept))} days"]
    yield Card(name="logs", service="CloudWatch Logs", title=f"{len(named)} log groups", tone="store", rows=rows)


def _network_card(assembly: Assembly) -> Card:
    by_kind: dict[str, list[str]] = {}
    for endpoint in assembly.of("AWS::EC2::VPCEndpoint").values():
        service = assembly.text(endpoint["ServiceName"]).partition(f"{assembly.region}.")[2]
        by_kind.setdefault(str(endpoint["VpcEndpointType"]).lower(), []).append(service)
    rows = [f"{kind} endpoints: {', '.join(services)}" for kind, services in by_kind.items()]
    zones = sorted({str(each["AvailabilityZone"]) for each in assembly.of("AWS::EC2::Subnet").values()})
    ways_out = len(assembly.of("AWS::EC2::InternetGateway")) + len(assembly.of("AWS::EC2::NatGateway"))
    subnets = len(assembly.of("AWS::EC2::Subnet"))
    title = f"{subnets} private subnet{'s' * (subnets != 1)} in {', '.join(zones)}" if subnets else "Private subnets of your own"
    rows += ["no way to the internet"] * (subnets > 0 and not ways_out)
    ranges = [str(each["CidrBlock"]) for each in assembly.of("AWS::EC2::VPC").values()]
    service = f"VPC {', '.join(ranges)}" if ranges else "Existing VPC"
    return Card(name="network", service=service, title=title, tone="plain", rows=rows)


def queue_cards(assembly: Assembly) -> Iterator[tuple[Card, list[Card]]]:
    """Each queue with its stages, and the compute environments it sends them to."""
    for key, queue in assembly.of("AWS::Batch::JobQueue").items():
        name = str(queue["JobQueueName"])
        short = name.removeprefix(f"{assembly.name}-")
        own = [(stage, words) for stage, words in _job_rows(assembly) if STAGES[stage].queue.value == short]
        stages: list[Chip] = [(stage.value, _tone(short), words) for stage, words in own]
        gangs = sorted({nodes for stage, _ in own for nodes in _gangs(assembly, stage)})
        rows = [f"gangs of {', '.join(map(str, gangs))} nodes"] if gangs else ["single jobs"]
        if any(STAGES[stage].shape is Shape.ARRAY for stage, _ in own):
            rows = ["single jobs and arrays"]
        card = Card(name=f"queue {short}", service="Job queue", title=name, tone=_tone(short), rows=rows, stages=stages)
        environments = assembly.references(queue["ComputeEnvironmentOrder"], _stack(key))
        yield card, [_hosts_card(assembly, each, short) for each in environments]


def _job_rows(assembly: Assembly) -> Iterator[tuple[Stage, str]]:
    """Stage -> how often it is tried, and how long each time."""
    limits: dict[str, str] = {}
    for definition in assembly.of("AWS::Batch::JobDefinition").values():
        attempts, seconds = definition["RetryStrategy"]["Attempts"], definition["Timeout"]["AttemptDurationSeconds"]
        limits[_stage_of(definition)] = f"{attempts} x {_hours(seconds)}"
    yield from ((stage, limits[stage.value]) for stage in STAGES if stage.value in limits)


def _gangs(assembly: Assembly, stage: Stage) -> Iterator[int]:
    """The node counts that a stage has job definitions for."""
    for definition in assembly.of("AWS::Batch::JobDefinition").values():
        if _stage_of(definition) == stage.value and "NodeProperties" in definition:
            yield definition["NodeProperties"]["NumNodes"]


def _stage_of(definition: Mapping[str, Any]) -> str:
    return str(definition.get("Tags", {}).get("trnpipe:stage", ""))


def _hosts_card(assembly: Assembly, key: str, queue: str) -> Card:
    resources = assembly.resources[key]["Properties"]["ComputeResources"]
    most = resources["MaxvCpus"]
    if resources["Type"].startswith("FARGATE"):
        rows = [f"up to {most} vCPUs"]
        return Card(name=f"hosts {queue}", service="Compute environment", title="Fargate", tone=_tone(queue), rows=rows)
    [instance] = resources["InstanceTypes"]
    hosts = most // HARDWARE[instance].vcpus
    rows = [f"{resources['MinvCpus']} to {most} vCPUs: {hosts} host{'s' * (hosts != 1)}"]
    rows.append("Spot" if resources["Type"] == "SPOT" else "On-Demand")
    [template] = [
        assembly.resources[each]["Properties"]["LaunchTemplateData"]
        for each in assembly.references(resources["LaunchTemplate"]["LaunchTemplateId"], _stack(key))
    ]
    efa = sum(interface["InterfaceType"].startswith("efa") for interface in template.get("NetworkInterfaces", []))
    rows += [f"{efa} EFA interfaces a host"] * bool(efa)
    rows += ["cluster placement group"] * ("PlacementGroup" in resources)
    rows += [f"{device['Ebs']['VolumeSize']} GiB {device['Ebs']['VolumeType']}" for device in template["BlockDeviceMappings"]]
    kept = resources.get("ScalingPolicy", {}).get("MinScaleDownDelayMinutes")
    rows += [f"kept {_hours(60 * kept)} for the next job"] * bool(kept)
    return Card(name=f"hosts {queue}", service="Compute environment", title=instance, tone=_tone(queue), rows=rows)


def _tone(queue: str) -> Tone:
    return "train" if queue == "train" else "embed" if queue == "embed" else "cpu"


def _hours(seconds: int) -> str:
    return f"{seconds // 3600} h" if seconds % 3600 == 0 else f"{seconds // 60} min"


# The layout.

LEFT = 620.0
"""Width of what starts, keeps and queues; to its right, beyond a gutter for arrows, what tells people."""
GUTTER = 36.0
GAP = 16.0
BETWEEN = 30.0
"""Where an arrow passes between two cards."""
INSET = 12.0
"""Between a frame and its cards."""
SCHEDULE = 176.0

Placed = list[tuple[Card, Box]]
Corners = list[tuple[float, float]]


def draw(assembly: Assembly) -> str:
    """The picture, as an SVG file's text."""
    known, edges = cards(assembly), connections(assembly)
    words = f"drawn from the synthesized templates: {len(assembly.resources)} resources in two stacks, {assembly.region}"
    picture = Picture(width=WIDTH, title=f"Architecture of {assembly.name}", description=words)
    picture.group("header")
    picture.text(MARGIN, 38, f"What cdk deploy creates for {assembly.name}", size=18, bold=True)
    picture.text(MARGIN, 58, words, size=12, tone="muted")
    picture.end_group()

    top, right = 78.0, MARGIN + LEFT + GUTTER
    told = _under_each_other([known[name] for name in TELLING], x=right, y=top, width=WIDTH - MARGIN - right)
    machine_x = MARGIN + SCHEDULE + 40
    schedule = _beside_each_other([known["schedule"]], x=MARGIN, y=top, width=SCHEDULE)
    machine = _beside_each_other([known["machine"]], x=machine_x, y=top, width=MARGIN + LEFT - machine_x)
    first = _as_tall([*schedule, *machine])

    inside = MARGIN + INSET
    kept_top = first[0][1].bottom + BETWEEN
    kept = _as_tall(_beside_each_other([known[name] for name in STORES], x=inside, y=kept_top + 38, width=LEFT - 2 * INSET))
    stored = _around(kept, kept_top)

    columns = list(queue_cards(assembly))
    queue_top = stored.bottom + BETWEEN
    queues = _as_tall(_beside_each_other([card for card, _ in columns], x=inside, y=queue_top + 38, width=LEFT - 2 * INSET))
    batch = _around(queues, queue_top)

    hosts_top = max(batch.bottom + BETWEEN, told[-1][1].bottom + BETWEEN)
    stacks = [
        _under_each_other(environments, x=queue.x, y=hosts_top + INSET, width=queue.width, gap=GAP)
        for (_, environments), (_, queue) in zip(columns, queues, strict=True)
    ]
    stacks.append(_under_each_other([known["network"]], x=right, y=hosts_top + INSET, width=WIDTH - MARGIN - INSET - right))
    lowest = max(place.bottom for stack in stacks for _, place in stack)
    hosts = [placed for stack in stacks for placed in _down_to(lowest, stack)]
    vpc = replace(_around(hosts, hosts_top), width=WIDTH - 2 * MARGIN)

    _frame(picture, stored, f"Stack {assembly.name}-data", _kept(assembly))
    _frame(picture, batch, "AWS Batch", f"fair share by weight, less gets more: {_shares(assembly)}; attempts x time limit")
    _frame(picture, vpc)
    placed = [*told, *first, *kept, *queues, *hosts]
    for card, place in placed:
        card.draw(picture, place)
    places = {card.name: place for card, place in placed}
    pairs = [(queue, place) for _, queue in queues for _, place in hosts if place.x == queue.x and place.y == hosts_top + INSET]
    for edge, points in _routes(places, pairs, batch):
        if edge in edges:
            picture.arrow(points, f"{edge[0]} to {edge[1]}")
    return picture.render(vpc.bottom + MARGIN)


TELLING = ("topic", "watches", "alarms")
STORES = ("logs", "images", "bucket", "lock")
"""In this order: what jobs use on the left, what the state machine uses on the right, below it."""


def _under_each_other(found: Sequence[Card], *, x: float, y: float, width: float, gap: float = BETWEEN - 4) -> Placed:
    placed: Placed = []
    for card in found:
        placed.append((card, Box(x=x, y=y, width=width, height=card.height(width))))
        y = placed[-1][1].bottom + gap
    return placed


def _beside_each_other(found: Sequence[Card], *, x: float, y: float, width: float) -> Placed:
    each = (width - GAP * (len(found) - 1)) / len(found)
    return [
        (card, Box(x=x + number * (each + GAP), y=y, width=each, height=card.height(each))) for number, card in enumerate(found)
    ]


def _as_tall(placed: Placed) -> Placed:
    tallest = max(place.height for _, place in placed)
    return [(card, replace(place, height=tallest)) for card, place in placed]


def _down_to(bottom: float, placed: Placed) -> Placed:
    """The last one is stretched."""
    card, place = placed[-1]
    return [*placed[:-1], (card, replace(place, height=bottom - place.y))]


def _around(placed: Placed, top: float) -> Box:
    """A frame over the left part's width."""
    return Box(x=MARGIN, y=top, width=LEFT, height=max(place.bottom for _, place in placed) + INSET - top)


def _frame(picture: Picture, place: Box, title: str = "", words: str = "") -> None:
    picture.group(f"frame {title}")
    picture.box(place, "frame", radius=10)
    if title:
        picture.text(place.x + INSET, place.y + 25, title, size=13, bold=True)
        picture.text(place.x + 2 * INSET + text_width(title, 13, bold=True), place.y + 25, words, size=11, tone="muted")
    picture.end_group()


def _kept(assembly: Assembly) -> str:
    data = [each for key, each in assembly.resources.items() if _stack(key) == f"{assembly.name}-data"]
    kept = sum(str(each.get("DeletionPolicy", "")).startswith("Retain") for each in data)
    return f"{kept} resources stay when it goes"


def _shares(assembly: Assembly) -> str:
    return ", ".join(
        f"{share['ShareIdentifier']} {share['WeightFactor']:g}"
        for policy in assembly.of("AWS::Batch::SchedulingPolicy").values()
        for share in policy["FairsharePolicy"]["ShareDistribution"]
    )


def _routes(places: Mapping[str, Box], pairs: Sequence[tuple[Box, Box]], batch: Box) -> Iterator[tuple[tuple[str, str], Corners]]:
    """(from, to) and the corners of its arrow, for every connection that has a way of its own."""
    schedule, machine, topic, watches, alarms = (places[name] for name in ("schedule", "machine", "topic", "watches", "alarms"))
    yield ("schedule", "machine"), [(schedule.right, machine.middle), (machine.x, machine.middle)]
    yield ("machine", "topic"), [(machine.right, topic.y + 30), (topic.x, topic.y + 30)]
    # A rule refers to the machine whose changes it is told: the arrow shows how the news go.
    heard, far = machine.bottom - 46, machine.right + GUTTER * 0.66
    yield ("watches", "machine"), [(machine.right, heard), (far, heard), (far, watches.y + 30), (watches.x, watches.y + 30)]
    yield ("watches", "topic"), [(watches.center, watches.y), (watches.center, topic.bottom)]
    around = [(alarms.right + 9, alarms.middle), (topic.right + 9, topic.middle)]
    yield ("alarms", "topic"), [(alarms.right, alarms.middle), *around, (topic.right, topic.middle)]
    near, leave = machine.right + GUTTER * 0.33, machine.bottom - 22
    yield ("machine", "queues"), [(machine.right, leave), (near, leave), (near, batch.middle), (batch.right, batch.middle)]
    for name in ("bucket", "lock"):
        at = min(max(places[name].center, machine.x + 20), machine.right - 20)
        yield ("machine", name), [(at, machine.bottom), (at, places[name].y)]
    for name in ("logs", "images", "bucket"):
        yield ("queues", name), [(places[name].center, batch.y), (places[name].center, places[name].bottom)]
    for queue, place in pairs:
        yield ("queues", "hosts"), [(queue.center, queue.bottom), (queue.center, place.y)]


def _stack(key: str) -> str:
    return key.partition("/")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m infra.architecture", description="Draw what a deployment creates.")
    parser.add_argument("--assembly", type=Path, help="folder that cdk synth wrote (default: synthesize what cdk.json describes)")
    parser.add_argument("--output", type=Path, default=PICTURE, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            assembly = read_assembly(options.assembly or synthesize(read_context(), folder))
    except TrnpipeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    options.output.write_text(draw(assembly), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
