"""The deployment that the settings describe, read from the synthesized templates: the doctor compares an account with it.

Read there rather than computed again from the settings, so that doctor and deployment cannot differ.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.app import synthesize
from infra.cdk_context import ENVIRONMENT_KEY, parse_context, read_context, read_settings
from infra.settings import Settings
from infra.templates import Stacks

COMPUTE_ENVIRONMENT = "AWS::Batch::ComputeEnvironment"
GATEWAY_SERVICES = ("s3", "dynamodb")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerImage:
    """A container image that jobs run.

    Attributes:
        name: its kind: `cpu`, `cuda` or `neuron`.
        uri: as the settings give it, else repository and tag.
        repository: in ECR; None for an image that is elsewhere.
        version: tag or digest in that repository.
        registry, region: of the repository; None for our own.
    """

    name: str
    uri: str
    repository: str | None = None
    version: str = ""
    registry: str | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One compute environment.

    Attributes:
        name: of its resource in the template.
        market: EC2 (on demand), SPOT or FARGATE, as Batch calls them.
        instance_type: None on Fargate.
        max_vcpus: of all its hosts together.
        interfaces: network interfaces of the host itself, without that of a gang's container.
        subnet_ids: where an existing VPC's subnets are named.
        zones: where the subnets are our own.
    """

    name: str
    market: str
    instance_type: str | None
    max_vcpus: int
    interfaces: int
    subnet_ids: tuple[str, ...]
    zones: tuple[str, ...]

    @property
    def forms_gangs(self) -> bool:
        """Whether jobs of several nodes run on these hosts."""
        return "Train" in self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A synthesized deployment.

    Attributes:
        settings: what it was synthesized from.
        stacks: the templates.
        bootstrap_version: of the CDK bootstrap stack that a deployment takes.
        bootstrap_parameter: SSM parameter that holds an account's version.
        endpoint_services: interface endpoints that hosts without a way to the internet need, e.g. `ecr.api`.
        containers: the images that jobs run.
    """

    settings: Settings
    stacks: Stacks
    bootstrap_version: int
    bootstrap_parameter: str
    endpoint_services: tuple[str, ...]
    containers: tuple[ContainerImage, ...]

    @property
    def pipeline_stack(self) -> str:
        return self.settings.name

    @property
    def data_stack(self) -> str:
        return f"{self.settings.name}-data"

    def resources(self, kind: str) -> dict[str, Mapping[str, Any]]:
        """Logical id -> properties of every resource of a type, in both stacks."""
        return {logical_id: properties for _, logical_id, properties in self.stacks.unresolved(kind)}

    def fleets(self) -> list[Fleet]:
        return [self._fleet(logical_id, properties) for logical_id, properties in self.resources(COMPUTE_ENVIRONMENT).items()]

    def subnet_ids(self) -> list[str]:
        """The subnets of an existing VPC that hosts and tasks start in, sorted."""
        return sorted({subnet for fleet in self.fleets() for subnet in fleet.subnet_ids})

    def _fleet(self, logical_id: str, properties: Mapping[str, Any]) -> Fleet:
        compute = properties["ComputeResources"]
        subnets = self.resources("AWS::EC2::Subnet")
        launch = {}
        if "LaunchTemplate" in compute:
            launch = self.resources("AWS::EC2::LaunchTemplate")[compute["LaunchTemplate"]["LaunchTemplateId"]["Ref"]][
                "LaunchTemplateData"
            ]
        return Fleet(
            name=logical_id,
            market=compute["Type"],
            instance_type=next(iter(compute.get("InstanceTypes", ())), None),
            max_vcpus=int(compute["MaxvCpus"]),
            interfaces=len(launch.get("NetworkInterfaces", ())) or 1,
            subnet_ids=tuple(subnet for subnet in compute["Subnets"] if isinstance(subnet, str)),
            zones=tuple(
                subnets[subnet["Ref"]]["AvailabilityZone"] for subnet in compute["Subnets"] if not isinstance(subnet, str)
            ),
        )


def chosen_context(options: Sequence[str], environment: str | None) -> dict[str, Any]:
    """The CDK context of cdk.json with what the command line lays over it.

    Args:
        options: `KEY=VALUE`, as after `cdk deploy -c`.
        environment: the same as `env=ENVIRONMENT`.

    Raises:
        BadConfig: not KEY=VALUE.
    """
    return {**read_context(), **parse_context([*options, *([f"{ENVIRONMENT_KEY}={environment}"] if environment else [])])}


def draw(context: Mapping[str, Any]) -> Blueprint:
    """Synthesize what the context describes.

    Raises:
        BadConfig: the settings are refused.
    """
    with tempfile.TemporaryDirectory(prefix="trnpipe-doctor-") as folder:
        return read_blueprint(synthesize(context, folder), read_settings(context))


def read_blueprint(assembly: Path, settings: Settings) -> Blueprint:
    """Read a cloud assembly.

    Args:
        assembly: the folder that `cdk synth` wrote.
    """
    # CDK starts its Node.js process when it is imported, so not before `synthesize` has chosen one.
    from aws_cdk import aws_ec2 as ec2

    from infra.constructs.network import INTERFACE_ENDPOINTS

    manifest = json.loads((assembly / "manifest.json").read_text(encoding="utf-8"))
    stacks = [one["properties"] for one in manifest["artifacts"].values() if one["type"] == "aws:cloudformation:stack"]
    return Blueprint(
        settings=settings,
        stacks=Stacks.read(assembly),
        bootstrap_version=max(properties["requiresBootstrapStackVersion"] for properties in stacks),
        bootstrap_parameter=stacks[0]["bootstrapStackVersionSsmParameter"],
        endpoint_services=tuple(getattr(ec2.InterfaceVpcEndpointAwsService, name).short_name for name in INTERFACE_ENDPOINTS),
        containers=tuple(_container(settings, kind, getattr(settings.images, kind)) for kind in settings.image_kinds),
    )


def _container(settings: Settings, name: str, uri: str | None) -> ContainerImage:
    from infra.constructs.jobs import PRIVATE_IMAGE

    if uri is None:
        repository, tag = f"{settings.name}/{name}", settings.images.tag
        return ContainerImage(name=name, uri=f"{repository}:{tag}", repository=repository, version=tag)
    if (private := PRIVATE_IMAGE.match(uri)) is None:
        return ContainerImage(name=name, uri=uri)
    return ContainerImage(
        name=name,
        uri=uri,
        repository=private["name"],
        version=uri[private.end() + 1 :].rpartition("@")[2] or "latest",
        registry=private["account"],
        region=private["region"],
    )
