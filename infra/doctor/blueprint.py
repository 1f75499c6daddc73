"""What the settings would deploy, read from the synthesized templates: the measure that the doctor holds an account against.

Read there rather than computed again from the settings, so that doctor and deployment cannot differ.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.app import read_context, synthesize
from infra.node import choose_node
from infra.settings import Settings, read_settings
from pipeline.errors import BadConfig

COMPUTE_ENVIRONMENT = "AWS::Batch::ComputeEnvironment"
GATEWAY_SERVICES = ("s3", "dynamodb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A launch template's root volume."""

    device: str
    gib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container image that jobs run.

    Attributes:
        name: `neuron` or `cpu`, the folder of its Dockerfile.
        uri: as the settings give it, else repository and tag.
        repository: in ECR; None for an image that is elsewhere.
        version: tag or digest in that repository.
        registry, region: of the repository; None for our own.
    """

    name: str
    uri: str
    repository: str | None
    version: str
    registry: str | None
    region: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One compute environment.

    Attributes:
        name: of its resource in the template.
        market: EC2 (on demand), SPOT or FARGATE, as Batch calls them.
        instance_type: None on Fargate.
        max_vcpus: of all its hosts together.
        interfaces: network interfaces of a host's own, beside the one of a gang's container.
        subnet_ids: where an existing VPC's subnets are named.
        zones: where the subnets are our own.
        root: None on Fargate.
    """

    name: str
    market: str
    instance_type: str | None
    max_vcpus: int
    interfaces: int
    subnet_ids: tuple[str, ...]
    zones: tuple[str, ...]
    root: Root | None

    @property
    def family(self) -> str:
        """`Trn` or `Inf`, as EC2's quotas have it."""
        assert self.instance_type is not None
        return self.instance_type[:3].capitalize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A synthesized deployment.

    Attributes:
        settings: what it was synthesized from.
        templates: stack name -> its template.
        bootstrap_version: of the CDK bootstrap stack that a deployment takes.
        bootstrap_parameter: SSM parameter in which an account's version stands.
        endpoint_services: interface endpoints that hosts without a way to the internet need, e.g. `ecr.api`.
        containers: the images that jobs run.
    """

    settings: Settings
    templates: Mapping[str, Mapping[str, Any]]
    bootstrap_version: int
    bootstrap_parameter: str
    endpoint_services: tuple[str, ...]
    containers: tuple[Container, ...]

    @property
    def pipeline_stack(self) -> str:
        return self.settings.name

    @property
    def data_stack(self) -> str:
        return f"{self.settings.name}-data"

    def resources(self, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Logical id and properties of every resource of a type, in all stacks."""
        for template in self.templates.values():
            for logical_id, resource in template["Resources"].items():
                if resource["Type"] == kind:
                    yield logical_id, resource.get("Properties", {})

    def fleets(self) -> list[Fleet]:
        return [self._fleet(logical_id, properties) for logical_id, properties in self.resources(COMPUTE_ENVIRONMENT)]

    def _fleet(self, logical_id: str, properties: Mapping[str, Any]) -> Fleet:
        compute = properties["ComputeResources"]
        subnets = dict(self.resources("AWS::EC2::Subnet"))
        launch = {}
        if "LaunchTemplate" in compute:
            templates = dict(self.resources("AWS::EC2::LaunchTemplate"))
            launch = templates[compute["LaunchTemplate"]["LaunchTemplateId"]["Ref"]]["LaunchTemplateData"]
        roots = [
            Root(device=mapping["DeviceName"], gib=mapping["Ebs"]["VolumeSize"])
            for mapping in launch.get("BlockDeviceMappings", ())
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
            root=next(iter(roots), None),
        )


def chosen_context(options: Sequence[str], environment: str | None) -> dict[str, Any]:
    """The CDK context of cdk.json with what the command line lays over it.

    Args:
        options: `KEY=VALUE`, as after `cdk deploy -c`.
        environment: the same as `env=ENVIRONMENT`.

    Raises:
        BadConfig: not KEY=VALUE.
    """
    context = read_context()
    for option in [*options, *([f"env={environment}"] if environment else [])]:
        key, separator, value = option.partition("=")
        if not key or not separator:
            raise BadConfig(
                "an option of the context is not KEY=VALUE",
                value=option,
                rule="as after `cdk deploy -c`",
                remedy="e.g. -c trnpipe.region=us-east-2",
            )
        context[key] = value
    return context


def draw(context: Mapping[str, Any]) -> Blueprint:
    """Synthesize what the context describes.

    Raises:
        BadConfig: the settings are refused.
    """
    settings = read_settings(context)
    with tempfile.TemporaryDirectory(prefix="trnpipe-doctor-") as folder:
        return read_blueprint(synthesize(context, folder), settings)


def read_blueprint(assembly: Path, settings: Settings) -> Blueprint:
    """Read a cloud assembly.

    Args:
        assembly: the folder that `cdk synth` wrote.
    """
    manifest = json.loads((assembly / "manifest.json").read_text(encoding="utf-8"))
    stacks = {
        artifact.get("properties", {}).get("stackName", name): artifact["properties"]
        for name, artifact in manifest["artifacts"].items()
        if artifact["type"] == "aws:cloudformation:stack"
    }
    return Blueprint(
        settings=settings,
        templates={
            name: json.loads((assembly / properties["templateFile"]).read_text(encoding="utf-8"))
            for name, properties in stacks.items()
        },
        bootstrap_version=max(properties["requiresBootstrapStackVersion"] for properties in stacks.values()),
        bootstrap_parameter=next(iter(stacks.values()))["bootstrapStackVersionSsmParameter"],
        endpoint_services=_endpoint_services(),
        containers=_containers(settings),
    )


def _endpoint_services() -> tuple[str, ...]:
    choose_node()
    # CDK starts its Node.js process when it is imported, so not before the choice above.
    from aws_cdk import aws_ec2 as ec2

    from infra.network import INTERFACE_ENDPOINTS

    return tuple(getattr(ec2.InterfaceVpcEndpointAwsService, name).short_name for name in INTERFACE_ENDPOINTS)


def _containers(settings: Settings) -> tuple[Container, ...]:
    from infra.jobs import PRIVATE_IMAGE

    found = []
    for name, uri in (("neuron", settings.images.neuron), ("cpu", settings.images.cpu)):
        private = PRIVATE_IMAGE.match(uri or "")
        if uri is None:
            repository, version = f"{settings.name}/{name}", settings.images.tag
            uri, registry, region = f"{repository}:{version}", None, None
        elif private is None:
            repository, version, registry, region = None, "", None, None
        else:
            repository, registry, region = private["name"], private["account"], private["region"]
            version = uri[private.end() + 1 :].rpartition("@")[2] or "latest"
        found.append(Container(name=name, uri=uri, repository=repository, version=version, registry=registry, region=region))
    return tuple(found)
