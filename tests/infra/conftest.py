"""Fixtures of the CDK app's tests: synthesized deployments, and validation against the services' own models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.model import ListShape, MapShape, Shape, StringShape, StructureShape
from botocore.validate import ParamValidator
from filelock import FileLock

from infra.cdk_context import CDK_JSON, ENVIRONMENTS, read_context
from infra.nodejs import choose_node
from infra.templates import Stacks

choose_node()  # before any test module imports CDK


@dataclass(frozen=True)
class Deployment:
    """One synthesized deployment: its cloud assembly, the context that it was made from, and both templates."""

    folder: Path
    context: dict[str, Any]
    stacks: Stacks
    region: str

    def build(self) -> Any:
        """Build the app once more, for packs that walk its constructs."""
        from infra.stacks import build

        return build(self.context)

    @property
    def data(self) -> dict[str, Any]:
        return self.stacks.templates["data"]

    @property
    def pipeline(self) -> dict[str, Any]:
        return self.stacks.templates["pipeline"]

    def resources(self, kind: str) -> list[dict[str, Any]]:
        """Properties of every resource of a type, in both stacks."""
        return [properties for _, _, properties in self.stacks.unresolved(kind)]

    def only(self, kind: str) -> dict[str, Any]:
        [properties] = self.resources(kind)
        return properties

    def named(self, kind: str, key: str, name: str) -> dict[str, Any]:
        [properties] = [properties for properties in self.resources(kind) if properties.get(key) == name]
        return properties


def deploy(folder: Path, **settings: Any) -> Deployment:
    """Synthesize cdk.json with other settings into a folder, or read what another worker has synthesized there."""
    context = read_context()
    # The CDK CLI sets the flag: every resource then says where in the construct tree it comes from.
    context = {**context, "aws:cdk:enable-path-metadata": True, "trnpipe": {**context["trnpipe"], **settings}}
    with FileLock(f"{folder}.lock"):
        if not (folder / "manifest.json").exists():
            from infra.stacks import build

            build(context, str(folder)).synth()
    name = settings.get("name", "trnpipe")
    templates = Stacks.read(folder).templates
    stacks = Stacks({"data": templates[f"{name}-data"], "pipeline": templates[name]})
    return Deployment(folder=folder, context=context, stacks=stacks, region=settings.get("region", context["trnpipe"]["region"]))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session, the same one in all workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def deployment(shared: Path) -> Deployment:
    """The deployment of cdk.json, with the schedule switched on."""
    schedules = read_context()["trnpipe"]["schedules"]
    return deploy(shared / "cdk", schedules={**schedules, "weekly": {**schedules["weekly"], "enabled": True}})


@pytest.fixture(scope="session")
def other_deployment(shared: Path) -> Deployment:
    """Everything that can be set to something else, set to something else."""
    return deploy(
        shared / "cdk-other",
        name="ranker",
        account="123456789012",
        region="us-east-2",
        zone="us-east-2a",
        vpc={
            "vpc_id": "vpc-0a1b2c3d",
            "subnets": {"us-east-2a": {"subnet_id": "subnet-0a1b2c3d", "route_table_id": "rtb-0a1b2c3d"}},
            "default_security_group_id": "sg-0a1b2c3d",
            "resolvers": ["10.9.0.2"],
            "egress": [{"cidr": "10.9.1.0/24", "port": 3128}],
        },
        instance_type="trn1n.32xlarge",
        embed_instance_type="inf2.8xlarge",
        allowed_nodes=[2],
        config={
            "nodes": 2,
            "registry": None,
            "data": {"train": ["s3://their-data/pairs/"]},
            "model": {"initial": "s3://their-models/e5/model.safetensors"},
            "compile": {"cache": "s3://their-caches/neuron/"},
        },
        read=["s3://shared/more"],
        kms_keys=["arn:aws:kms:us-east-2:210987654321:key/0a1b2c3d"],
        ami="ami-0123456789abcdef0",
        capacity_reservation={
            "group": "arn:aws:resource-groups:us-east-2:123456789012:group/gangs",
            "placement_group": "gangs",
        },
        tags={"team": "ranking", "cost-center": "42"},
        permissions_boundary="teams/boundary",
        bootstrap_qualifier="ranker",
        images={
            "neuron": "123456789012.dkr.ecr.us-east-2.amazonaws.com/team/neuron:7",
            "cpu": "123456789012.dkr.ecr.us-east-2.amazonaws.com/team/neuron:7-cpu",
        },
        schedules={
            "weekly": {"when": "cron(0 3 ? * SUN *)", "every_days": 7, "flexible_minutes": 0},
            "refresh": {"when": "rate(12 hours)", "mode": "refresh", "enabled": True},
            "products": {
                "when": {"object": "s3://their-catalog/ready/"},
                "enabled": True,
                "every_days": 3,
                "registry": "products",
                "share": "experiments",
                "config": {"data": {"train": ["s3://their-catalog/pairs/"]}},
            },
        },
        timeouts={"train": 2000},
        environment={"TRNPIPE_PEER_START_SECONDS": 1200, "FI_EFA_USE_DEVICE_RDMA": "0"},
        local_paths=True,
        notify=["team@example.com", {"protocol": "sqs", "endpoint": "arn:aws:sqs:us-east-2:123456789012:runs"}],
        budget=2500,
    )


@pytest.fixture(scope="session")
def small_deployment(shared: Path) -> Deployment:
    """Development on single small hosts: no EFA, Spot hosts that embed in two zones, a reservation for other shares."""
    return deploy(
        shared / "cdk-small",
        name="dev",
        zone="us-west-2d",
        embed_zones=["us-west-2a", "us-west-2b"],
        instance_type="trn1.2xlarge",
        embed_instance_type="inf2.24xlarge",
        embed_market="spot",
        allowed_nodes=[1],
        max_vcpus=32,
        capacity_reservation={"id": "cr-0a1b2c3d"},
        compute_reservation=50,
        shares={"weekly": 0.5, "manual": 1, "team*": 4},
        keep_hosts_minutes=45,
        customer_key="arn:aws:kms:us-west-2:123456789012:key/0a1b2c3d",
        update_minutes=7200,
        retention={"resume_days": 7, "noncurrent_days": 8, "cold_days": 0, "upload_days": 1, "log_days": 30},
        schedules={"weekly": {"enabled": True, "when": "cron(15 4 ? * MON#1 *)", "every_days": 35, "time_zone": "Europe/Berlin"}},
    )


@pytest.fixture(scope="session")
def smoke_deployment(shared: Path) -> Deployment:
    """A first deployment without Trainium, as its file has it."""
    return deploy(shared / "cdk-smoke", **yaml.safe_load((ENVIRONMENTS / "smoke.yaml").read_text()))


@pytest.fixture(scope="session")
def gpu_deployment(shared: Path) -> Deployment:
    """Hosts with GPUs, as their file has it."""
    return deploy(shared / "cdk-gpu", **yaml.safe_load((ENVIRONMENTS / "gpu.yaml").read_text()))


@dataclass(frozen=True)
class Synth:
    """The output of synth in its own process: the assembly's folder, and module -> file."""

    folder: Path
    modules: dict[str, Path]
    told_people: str
    told_programs: str


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Synth:
    """cdk.json synthesized by a process without environment, Node.js on PATH, credentials or network, by another hash seed."""
    folder = tmp_path_factory.mktemp("cdk-alone")
    program = (
        "import json, socket, sys\n"
        "def refuse(*_): raise OSError('synth asks the network')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse\n"
        "from infra.app import main\n"
        "code = main([])\n"
        "print(json.dumps({name: getattr(module, '__file__', None) for name, module in sys.modules.items()}))\n"
        "sys.exit(code)\n"
    )
    environment = {
        "CDK_OUTDIR": str(folder),
        "CDK_CONTEXT_JSON": json.dumps(
            {**read_context(), "trnpipe.schedules.weekly.enabled": "true", "aws:cdk:enable-path-metadata": True}
        ),
        "PATH": str(folder / "nothing"),
        "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2",
        "PYTHONPATH": str(CDK_JSON.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *told, loaded = done.stdout.splitlines()
    modules = {name: Path(file or "") for name, file in json.loads(loaded).items()}
    return Synth(folder=folder, modules=modules, told_people=done.stderr, told_programs="\n".join(told))


@lru_cache
def _service(name: str) -> Any:
    return botocore.session.get_session().get_service_model(name)


class ServiceModel:
    """AWS's own description of an operation's input, as botocore ships it."""

    def problems(self, service: str, operation: str, request: Mapping[str, Any]) -> str:
        """Violations of the service's model: unknown or missing members, wrong types, values outside an enumeration or range."""
        shape = _service(service).operation_model(operation).input_shape
        report = ParamValidator().validate(dict(request), shape)
        return "; ".join([report.generate_report(), *_outside(request, shape)]).strip("; ")

    def enumeration(self, service: str, operation: str, member: str) -> list[str]:
        """The allowed values of a member of a request."""
        shape = _service(service).operation_model(operation).input_shape
        return list(shape.members[member].enum)

    def from_template(self, service: str, operation: str, properties: Mapping[str, Any]) -> dict[str, Any]:
        """CloudFormation properties spelled as the API spells them; references become text."""
        shape = _service(service).operation_model(operation).input_shape
        converted = _spelled(properties, shape)
        assert isinstance(converted, dict)
        return converted


@pytest.fixture(scope="session")
def service_model() -> ServiceModel:
    return ServiceModel()


def _spelled(value: Any, shape: Shape | None) -> Any:
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)).startswith(("Ref", "Fn::")):
        return json.dumps(value)
    if isinstance(value, dict) and isinstance(shape, StructureShape):
        members = {name.lower(): (name, member) for name, member in shape.members.items()}
        spelled = {}
        for key, inner in value.items():
            name, member = members.get(key.lower(), (key, None))
            spelled[name] = _spelled(inner, member)
        return spelled
    if isinstance(value, list):
        return [_spelled(inner, shape.member if isinstance(shape, ListShape) else None) for inner in value]
    if isinstance(value, dict):
        return {key: _spelled(inner, shape.value if isinstance(shape, MapShape) else None) for key, inner in value.items()}
    return value


def _outside(value: Any, shape: Shape) -> Iterator[str]:
    """Values that the model's enumerations, patterns and upper bounds exclude; botocore's own validation looks at lower ones."""
    if isinstance(shape, StructureShape) and isinstance(value, Mapping):
        for key, inner in value.items():
            if key in shape.members:
                yield from _outside(inner, shape.members[key])
        return
    size = value if isinstance(value, (int, float)) else len(value) if isinstance(value, (str, list, Mapping)) else 0
    if size > (most := shape.metadata.get("max", float("inf"))):
        yield f"{shape.name}: {size} is more than {most}"
    if isinstance(shape, ListShape) and isinstance(value, list):
        for inner in value:
            yield from _outside(inner, shape.member)
    elif isinstance(shape, StringShape) and isinstance(value, str):
        if shape.enum and value not in shape.enum:
            yield f"{shape.name}: {value!r} is none of {shape.enum}"
        # Java switches to any case in the middle of a pattern, Python only at its beginning.
        pattern = shape.metadata.get("pattern", "").replace("|(?i)", "|")
        if pattern and not re.fullmatch(pattern, value):
            yield f"{shape.name}: {value!r} does not match {pattern}"
