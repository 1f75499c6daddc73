"""Settings: what cdk.json may say, and how a wrong value is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.cdk_context import CDK_JSON, ENVIRONMENTS, read_context, read_settings
from infra.settings import Settings
from pipeline.contract import STAGES
from pipeline.cost import HARDWARE
from pipeline.errors import BadConfig, ExitCode

BASE: dict[str, Any] = {"ami": "ami-0123456789abcdef0"}
GPUS = {"instance_type": "g6e.48xlarge", "embed_instance_type": "g6e.12xlarge", "allowed_nodes": [1]}
CUDA = {"device": {"kind": "cuda"}}


EVERY_WEEK = {"when": "cron(0 3 ? * SUN *)", "every_days": 7}
OTHER = {**EVERY_WEEK, "registry": "two", "share": "manual"}
QUEUE, STREAM = "arn:aws:sqs:us-west-2:123456789012:runs", "arn:aws:firehose:us-west-2:123456789012:deliverystream/runs"
ROLE = "arn:aws:iam::123456789012:role/firehose"


def settings(**values: Any) -> Settings:
    return read_settings({"trnpipe": {**BASE, **values}})


def two(second: dict[str, Any]) -> dict[str, Any]:
    """Settings with a weekly schedule and a second one."""
    return {"schedules": {"weekly": EVERY_WEEK, "two": second}}


def test_the_repositorys_own_cdk_json_is_valid_and_runs_on_neuron() -> None:
    found = read_settings(read_context())
    assert found.run_config().device.kind == "neuron"
    assert {one.share for one in found.schedules.values()} <= found.shares.keys()


@pytest.mark.parametrize("environment", [None, "example"])
def test_every_schedule_is_off_until_a_file_switches_it_on(environment: str | None) -> None:
    """A first deployment starts nothing; and what an option of one deployment switches on, the next one would switch off."""
    context = read_context() if environment is None else {**read_context(), "env": environment}
    assert {one.enabled for one in read_settings(context).schedules.values()} == {False}
    pages = ("README.md", "docs/deploy.md", "docs/runbook.md")
    assert not any(".enabled=" in (CDK_JSON.parent / name).read_text() for name in pages)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        settings().region = "eu-west-1"  # type: ignore[misc]


def test_context_given_on_the_command_line_lies_over_the_file() -> None:
    context = {
        "trnpipe": {**BASE, "schedules": {"weekly": {**EVERY_WEEK, "share": "manual"}}},
        "trnpipe.schedules.weekly.enabled": "true",
        "trnpipe.max_vcpus": "1024",
    }
    found = read_settings(context)
    weekly = found.schedules["weekly"]
    assert (weekly.enabled, weekly.share, found.max_vcpus) == (True, "manual", 1024)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ami": "ssm:/aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended/image_id:1"}, "trnpipe.ami"),
        ({"ami": None}, "without a Neuron driver"),
        ({"instance_type": "c7i.2xlarge", "config": {"device": {"kind": "neuron"}}}, "a c7i.2xlarge is of kind cpu"),
        ({"regoin": "us-east-2"}, "trnpipe.regoin"),
        ({"instance_type": "p4de.24xlarge"}, "trnpipe.instance_type"),
        ({"instance_type": "p5.48xlarge", "allowed_nodes": [1]}, "config.device.kind auto: a p5.48xlarge is of kind cuda"),
        ({"shares": {"weekly": 0, "manual": 1}}, "trnpipe.shares.weekly"),
        ({"images": {"tag": "latest"}}, "moves under a run"),
        ({"images": {"cpu": "example.com/cpu:latest"}}, "moves under a run"),
        ({"notify": [{"protocol": "pager", "endpoint": "team"}]}, "trnpipe.notify.0.protocol"),
        ({"schedules": {"Weekly": {"when": "rate(1 day)", "every_days": 1}}}, "trnpipe.schedules.Weekly"),
        ({"schedules": {"weekly": {"when": "0 3 * * SUN", "every_days": 7}}}, "trnpipe.schedules.weekly.when"),
        ({"schedules": {"weekly": {"when": "rate(1 day)", "every_days": 0}}}, "trnpipe.schedules.weekly.every_days"),
        ({"schedules": {"weekly": {"when": {"object": "s3://bucket/"}}}}, "trnpipe.schedules.weekly.when.Marker.object"),
        ({"schedules": {"weekly": {"when": "rate(1 day)", "weekday": "sunday"}}}, "trnpipe.schedules.weekly.weekday"),
        ({"schedules": {"weekly": {"enabled": True}}}, "trnpipe.schedules.weekly.when"),
        ({"schedule": {"enabled": True}}, "trnpipe.schedule"),
        ({"read": ["/data"]}, "s3://BUCKET/PREFIX"),
        ({"gang_submit": "sync"}, "trnpipe.gang_submit"),
        ({"embed_market": "reserved"}, "trnpipe.embed_market"),
        ({"vpc": {"vpc_id": "vpc-1"}}, "trnpipe.vpc.vpc_id"),
        ({"capacity_wait_hours": 48}, "trnpipe.capacity_wait_hours"),
        ({"budget": 500}, "put an e-mail address into `notify`"),
        ({"budget": 0, "notify": ["team@example.com"]}, "trnpipe.budget"),
        ({"prices": {"p4de.24xlarge": 30}}, "prices for ['p4de.24xlarge']: a key is one of"),
        ({"prices": {"train": 0}}, "trnpipe.prices.train"),
        ({"prices": {"train": float("inf")}}, "trnpipe.prices.train"),
        ({"compute_reservation": 100}, "trnpipe.compute_reservation"),
        ({"keep_hosts_minutes": 19}, "trnpipe.keep_hosts_minutes"),
        ({"keep_hosts_minutes": 10_081}, "trnpipe.keep_hosts_minutes"),
        ({"vpc": {"resolvers": ["ns.example.com"]}}, "trnpipe.vpc.resolvers.0"),
        ({"vpc": {"egress": [{"cidr": "10.0.0.1/8", "port": 3128}]}}, "trnpipe.vpc.egress.0.cidr"),
        ({"kms_keys": ["alias/ours"]}, "aws kms describe-key"),
        ({"timeouts": {"train": 7201}}, "trnpipe.timeouts.train"),
        ({"timeouts": {"training": 60}}, "trnpipe.timeouts.training"),
        ({"environment": {"FI LOG": "warn"}}, "invalid name"),
        ({"environment": {"FI_LOG_LEVEL": ["warn"]}}, "trnpipe.environment.FI_LOG_LEVEL"),
        ({"environment": {"AWS_BATCH_JOB_ID": "1"}}, "AWS Batch sets these"),
        ({"environment": {"AWS_SECRET_ACCESS_KEY": "x"}}, "under its stage's role"),
        ({"environment": {"AWS_REGION": "us-east-1"}}, "trnpipe.region"),
        ({"environment": {"TRNPIPE_ATTEMPT_SECONDS": 60}}, "trnpipe.timeouts"),
        ({"environment": {"TRNPIPE_STAGE": "train"}}, "TRNPIPE_STAGE is reserved"),
        ({"environment": {"MASTER_PORT": 1}}, "every rank gets its own"),
        ({"update_minutes": 7201}, "trnpipe.update_minutes"),
        ({"retention": {"resume_days": 1}}, "trnpipe.retention.resume_days"),
        ({"retention": {"log_days": 31}}, "trnpipe.retention.log_days"),
        ({"cpu_max_vcpus": 3}, "trnpipe.cpu_max_vcpus"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig) as caught:
        settings(**values)
    assert caught.value.exit_code == ExitCode.BAD_CONFIG
    assert any(words in line for line in caught.value.lines()), caught.value.lines()
    assert caught.value.remedy


VPC = {
    "vpc_id": "vpc-0a1b2c3d",
    "default_security_group_id": "sg-0a1b2c3d",
    "subnets": {"us-west-2d": {"subnet_id": "subnet-0a1b2c3d", "route_table_id": "rtb-0a1b2c3d"}},
}
GROUP = "arn:aws:resource-groups:us-west-2:123456789012:group/gangs"
WEEKLY = {"weekly": 0.5, "manual": 1}
NEURON = {"device": {"kind": "neuron"}}


@pytest.mark.parametrize(
    ("values", "words", "remedy"),
    [
        ({"zone": "us-east-1a"}, "zone us-east-1a is not in region us-west-2", "name zones of us-west-2, such as us-west-2a"),
        ({"zone": "us-west-2-lax-1a"}, "is not in region us-west-2", "name zones of us-west-2"),
        ({"zone": ["us-west-2a", "us-west-2d"]}, "EFA and a cluster placement group", "further ones under embed_zones"),
        ({"zone": "us-west-2a,us-west-2d"}, "EFA and a cluster placement group", "name the one zone of the gangs here"),
        ({"embed_zones": ["us-west-2a", "us-east-1a"]}, "zone us-east-1a is not in region", "name zones of us-west-2"),
        ({"embed_zones": ["us-west-2a", "us-west-2a"]}, "names a zone twice", "name each zone once"),
        ({"vpc": VPC, "embed_zones": ["us-west-2a"]}, "has none in us-west-2a", "add vpc.subnets.us-west-2a with the subnet_id"),
        (
            {"vpc": {key: value for key, value in VPC.items() if key != "default_security_group_id"}},
            "trnpipe.vpc.default_security_group_id: Field required",
            "set trnpipe.vpc.default_security_group_id: The VPC's default security group",
        ),
        ({"train_market": "spot"}, "no multi-node job on Spot", "set embed_market: spot"),
        ({"instance_type": "trn1.2xlarge"}, "a trn1.2xlarge trains alone", "set allowed_nodes: [1]"),
        ({"instance_type": "trn1.2xlarge", "allowed_nodes": [2]}, "trains alone", "or take instance_type trn1.32xlarge"),
        ({"instance_type": "p4d.24xlarge", "config": CUDA}, "a p4d.24xlarge trains alone", "set allowed_nodes: [1]"),
        ({"config": CUDA}, "config.device.kind cuda: a trn1.32xlarge is of kind neuron", "set config.device.kind: neuron"),
        (
            {"embed_instance_type": "g6e.12xlarge", "config": NEURON},
            "config.device.kind neuron: a g6e.12xlarge is of kind cuda",
            "or take other hosts",
        ),
        (
            {**GPUS, "config": {"device": {"kind": "cuda", "ranks_per_node": 9}}},
            "config.device.ranks_per_node 9: a g6e.48xlarge has 8 GPUs",
            "set config.device.ranks_per_node to 8 or less",
        ),
        ({"embed_instance_type": "p4de.24xlarge"}, "embed_instance_type 'p4de.24xlarge' is none of", "name one of them"),
        ({"allowed_nodes": [4, 2]}, "ascend", "list them as in [1, 2, 4]"),
        ({"allowed_nodes": []}, "ascend", "list them"),
        (
            {"allowed_nodes": [1, 8], "max_vcpus": 512},
            "max_vcpus 512 is below 1024, what 8 nodes need",
            "set max_vcpus to 1024 or more, or leave it out for 1152: one host more",
        ),
        ({"capacity_reservation": {}}, "names either `id` or `group`", "name one of them"),
        ({"capacity_reservation": {"id": "cr-0a1b2c3d", "group": GROUP}}, "either `id` or `group`", "name one of them"),
        ({"capacity_reservation": {"group": GROUP, "block": True}}, "by its id alone", "take `group` and `placement_group` out"),
        (
            {"capacity_reservation": {"id": "cr-0a1b2c3d", "block": True, "placement_group": "mine"}},
            "EC2 places its hosts together itself",
            "take `group` and `placement_group` out",
        ),
        (
            {"capacity_reservation": {"id": "cr-0a1b2c3d", "block": True}, "instance_type": "trn1n.32xlarge"},
            "hosts of trn1n.32xlarge start in none",
            "take trn1.32xlarge instead",
        ),
        (
            {
                "capacity_reservation": {"id": "cr-0a1b2c3d", "placement_group": "mine"},
                "instance_type": "trn1.2xlarge",
                "allowed_nodes": [1],
            },
            "outside any placement group",
            "take capacity_reservation.placement_group out",
        ),
        (
            {"capacity_reservation": {"group": GROUP.replace("us-west-2", "eu-west-1")}},
            "is not in region us-west-2",
            "name a resource group of us-west-2",
        ),
        (
            {"service_zones": ["us-west-2a", "us-west-2a"]},
            "service_zones ['us-west-2a', 'us-west-2a'] names",
            "name each zone once",
        ),
        ({"vpc": VPC, "service_zones": ["us-west-2a"]}, "has none in us-west-2a", "add vpc.subnets.us-west-2a"),
        ({"zone": "us-west-2z"}, "zone us-west-2z is not in region us-west-2", "such as us-west-2a"),
        ({"tags": {"aws:team": "search"}}, "tag aws:team=search", "choose another key or value"),
        ({"tags": {"trnpipe": "mine"}}, "not Name or trnpipe", "choose another key or value"),
        ({"tags": {"team": "a\nb"}}, "tag team=a", "choose another key or value"),
        ({"tags": {f"key{number}": "" for number in range(41)}}, "41 tags", "take some out"),
        ({"embed_max_vcpus": 64}, "below 128, one trn1.32xlarge", "set embed_max_vcpus to 128 or more"),
        (
            {"compute_reservation": 30},
            "compute_reservation 30 leaves a single share 448 of max_vcpus 640, and what 4 nodes need is 512",
            "set max_vcpus to 732 or more, or compute_reservation to at most 20",
        ),
        (
            {"compute_reservation": 30, "max_vcpus": 1000, "embed_max_vcpus": 150},
            "of embed_max_vcpus 150, and one trn1.32xlarge is 128",
            "set embed_max_vcpus to 183 or more, or compute_reservation to at most 14",
        ),
        (
            {"compute_reservation": 30, "max_vcpus": 1000, "cpu_max_vcpus": 5},
            "of cpu_max_vcpus 5, and one job on Fargate is 4",
            "set cpu_max_vcpus to 6 or more",
        ),
        (
            {
                "compute_reservation": 30,
                "cpu_max_vcpus": 22,
                "max_vcpus": 1000,
                "embed_max_vcpus": 183,
                "config": {**NEURON, "compile": {"where": "cpu"}},
            },
            "too few of cpu_max_vcpus 22 for precompile",
            "set cpu_max_vcpus to 23 or more, or config.compile.where: gang",
        ),
        ({"shares": {**WEEKLY, "man-ual": 1}}, "share 'man-ual': AWS Batch share identifiers", "use letters and digits only"),
        ({"shares": {**WEEKLY, "te*am": 1}}, "share 'te*am'", "a `*` at the end"),
        ({"shares": {**WEEKLY, "team*": 1, "teamA1": 1}}, "shares team* and teamA1 overlap", "remove teamA1"),
        ({"shares": {**WEEKLY, "team*": 1, "tea*": 1}}, "shares tea* and team* overlap", "choose a prefix"),
        ({"shares": {**WEEKLY, **{f"s{n}": 1 for n in range(499)}}}, "501 shares", "join shares of one weight under a prefix"),
        ({"shares": {"weekly": 1}}, "share 'manual' is none of the declared shares", "add manual to shares"),
        ({"config": {"share": "night"}}, "share 'night' is none of", "add night to shares, with a weight"),
        ({"config": {"nodes": 3}}, "config.nodes 3 is none of allowed_nodes [1, 2, 4]", "add it to allowed_nodes"),
        ({"config": {"run": "one"}}, "into one run folder", "give `run` per execution"),
        (
            {"config": {"device": {"kind": "neuron", "ranks_per_node": 33}}},
            "config.device.ranks_per_node 33: a trn1.32xlarge has 32 NeuronCores",
            "set config.device.ranks_per_node to 32 or less",
        ),
        (
            {"config": {**NEURON, "embed": {"ranks_per_child": 3}}, "embed_instance_type": "inf2.8xlarge"},
            "config.embed.ranks_per_child 3: a inf2.8xlarge has 2",
            "set config.embed.ranks_per_child to 2 or less",
        ),
        ({"ami": "ssm:/company/ami"}, "must be an image id", "pin an image with driver 2.27"),
        ({"ami": "latest"}, "moves without notice", "pin an image with driver 2.27"),
        ({"ami": "ami-0123"}, "must be an image id", "pin an image"),
        (two({"when": "rate(3 days)"}), "has no every_days", "set every_days to the most days"),
        (two({**EVERY_WEEK, "time_zone": "Europe/Berln"}), "is no time zone", "such as Europe/Berlin"),
        (two({**EVERY_WEEK, "time_zone": "PST"}), "is no time zone", "name a zone such as"),
        (two({**EVERY_WEEK, "share": "manual"}), "both train registry current", "give schedules.two.registry another name"),
        (two({**EVERY_WEEK, "registry": "two"}), "have the share weekly, but not", "set schedules.two.share to another one"),
        (two({**EVERY_WEEK, "registry": "two", "share": "two"}), "'two' is none of the declared", "add two to shares"),
        (two({**OTHER, "config": {"nodes": 3}}), "schedules.two.config.nodes 3 is none of", "add it to allowed_nodes"),
        (two({**OTHER, "config": {"data": {"train": ["/data"]}}}), "schedules.two.config.data.train = /data", "put it on S3"),
        (two({**OTHER, "config": {"registry": "three"}}), "config has registry, of which", "move them from config"),
        ({"notify": ["http://example.com"]}, "is no endpoint of the protocol email", "such as team@example.com"),
        ({"notify": [{"protocol": "https", "endpoint": "http://x.y"}]}, "of the protocol https", "such as https://"),
        ({"notify": [{"protocol": "sms", "endpoint": "0123"}]}, "of the protocol sms", "such as +1"),
        ({"notify": [{"protocol": "firehose", "endpoint": STREAM}]}, "firehose has a `role`", "name the role"),
        ({"notify": [{"protocol": "sqs", "endpoint": QUEUE, "role": ROLE}]}, "no other has one", "take `role` out"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(values: dict[str, Any], words: str, remedy: str) -> None:
    with pytest.raises(BadConfig) as caught:
        settings(**values)
    assert any(words in found for found in caught.value.value), caught.value.value
    assert remedy in caught.value.remedy


def test_what_was_refused_works_with_the_remedy() -> None:
    """The limits are where the messages say that they are."""
    assert settings(compute_reservation=30, max_vcpus=732, embed_max_vcpus=183, cpu_max_vcpus=6).compute_reservation == 30
    assert settings(max_vcpus=1024, allowed_nodes=[1, 8]).train_max_vcpus == 1024
    assert settings(allowed_nodes=[1, 8]).train_max_vcpus == 1152
    assert settings(instance_type="trn1.2xlarge", allowed_nodes=[1]).train_max_vcpus == 16
    assert settings(instance_type="trn1.2xlarge", allowed_nodes=[1], max_vcpus=8).train_hardware.efa_interfaces == 0
    assert settings(shares={**WEEKLY, "team*": 1}, config={"share": "teamA1"}).run_config().share == "teamA1"
    assert len(settings(shares={**WEEKLY, **{f"s{n}": 1 for n in range(498)}}).shares) == 500
    assert settings(vpc=VPC, embed_zones=["us-west-2d"]).zones == ("us-west-2d",)


def test_what_the_hosts_are_lies_under_the_configuration() -> None:
    """A configuration's defaults are a trn1.32xlarge's: prepare plans ranks, memory and devices by them."""
    assert settings(config=NEURON).deployed_config() == NEURON
    small = settings(
        instance_type="trn1.2xlarge", embed_instance_type="inf2.24xlarge", allowed_nodes=[1], config=NEURON
    ).run_config()
    assert (small.device.ranks_per_node, small.embed.ranks_per_child) == (2, 12)
    assert small.device.host_memory_gib == 29
    assert (small.health_check.neuron_devices, small.health_check.efa_devices) == (1, 0)
    assert settings(instance_type="trn1n.32xlarge", config=NEURON).run_config().health_check.efa_devices == 16
    # What the configuration says itself counts, and other kinds of device have no NeuronCores.
    own = {**NEURON, "embed": {"ranks_per_child": 1}}
    assert settings(embed_instance_type="inf2.8xlarge", config=own).run_config().embed.ranks_per_child == 1
    assert settings(instance_type="trn1.2xlarge", allowed_nodes=[1]).deployed_config() == {}
    # Runs are planned where no GPU can be asked.
    gpus = settings(**GPUS, config=CUDA).run_config()
    assert (gpus.device.ranks_per_node, gpus.embed.ranks_per_child, gpus.device.precision) == (8, 4, "bf16")
    assert (gpus.device.memory_gib, gpus.device.host_memory_gib) == (44, 1439)
    # Hosts on processors differ from each other in memory alone.
    processors = settings(instance_type="c7i.2xlarge", embed_instance_type="c7i.2xlarge", ami=None).deployed_config()
    assert processors == {"device": {"host_memory_gib": 14}}


def test_an_update_waits_for_the_longest_job_there_is() -> None:
    assert settings().update_minutes == max(spec.timeout_minutes for spec in STAGES.values())
    assert settings(timeouts={"train": 2000}).update_minutes == 2000


# ---- environments --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    (tmp_path / "staging.yaml").write_text(
        "name: staging\nmax_vcpus: 1024\nschedules: {weekly: {enabled: true}}\nnotify: [a@b.c]"
    )
    (tmp_path / "broken.yaml").write_text("- a list\n")
    (tmp_path / "doubled.yaml").write_text("name: doubled\nschedules:\n  two: {enabled: true}\n  two: {enabled: false}\n")
    (tmp_path / "wrong.yaml").write_text("regoin: us-east-2\n")
    (tmp_path / "notes.txt").write_text("none of them")
    return tmp_path


def test_an_environment_lies_over_cdk_json_and_the_command_line_over_both(environments: Path) -> None:
    context = {
        "trnpipe": {**BASE, "name": "base", "schedules": {"weekly": EVERY_WEEK}, "notify": ["x@y.z"]},
        "env": "staging",
        "trnpipe.max_vcpus": "2048",
    }
    found = read_settings(context, environments)
    assert (found.name, found.max_vcpus, [one.endpoint for one in found.notify]) == ("staging", 2048, ["a@b.c"])
    assert (found.schedules["weekly"].enabled, found.schedules["weekly"].when) == (True, EVERY_WEEK["when"])
    del context["env"]
    assert read_settings(context, environments).name == "base"


@pytest.mark.parametrize(
    "name",
    ["prod", "", "notes", "../staging", "staging/../staging", "/etc/passwd", "staging.yaml", ".", "STAGING", 7, ["staging"]],
)
def test_an_environment_that_is_none_is_refused_with_those_that_are(environments: Path, name: Any) -> None:
    with pytest.raises(BadConfig) as caught:
        read_settings({"trnpipe": BASE, "env": name}, environments)
    assert f"-c env={name}" in caught.value.lines()[1]
    assert "name one of: broken, doubled, staging, wrong" in caught.value.remedy


def test_a_file_outside_of_the_folder_is_no_environment(environments: Path) -> None:
    inside = environments / "inside"
    inside.mkdir()
    with pytest.raises(BadConfig, match="unknown environment"):
        read_settings({"trnpipe": BASE, "env": "../staging"}, inside)


@pytest.mark.parametrize(
    ("name", "words"),
    [("broken", "does not hold an object"), ("doubled", "the key 'two' is repeated"), ("wrong", "trnpipe.regoin")],
)
def test_a_wrong_file_is_named(environments: Path, name: str, words: str) -> None:
    with pytest.raises(BadConfig) as caught:
        read_settings({"trnpipe": BASE, "env": name}, environments)
    assert words in str(caught.value)


def test_the_example_is_a_deployment_and_shows_what_it_explains() -> None:
    found = read_settings({**read_context(), "env": "example"})
    assert (found.name, found.embed_market, found.retention.resume_days) == ("trnpipe-example", "spot", 30)
    assert found.zones == ("us-east-2c", "us-east-2b")
    assert found.run_config().embed.ranks_per_child == 2
    # What is commented out is valid, too.
    text = (ENVIRONMENTS / "example.yaml").read_text()
    uncommented = yaml.safe_load(re.sub(r"^# ?((vpc:|  )|(?=capacity_reservation))", r"\2", text, flags=re.M))
    assert {"vpc", "capacity_reservation"} <= uncommented.keys()
    assert read_settings({"trnpipe": {**read_context()["trnpipe"], **uncommented}}).vpc is not None


def test_recommended_is_refused_with_the_driver_rule() -> None:
    with pytest.raises(BadConfig) as caught:
        settings(ami="ssm:/aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended/image_id:1")
    assert "2.27" in caught.value.rule
    assert "pin an image" in caught.value.remedy


def test_a_wrong_run_configuration_is_refused_by_the_configurations_own_rules() -> None:
    with pytest.raises(BadConfig) as caught:
        settings(config={"train": {"batchsize": 4}})
    assert "did you mean train.batch_size?" in str(caught.value)


@pytest.mark.parametrize("context", [{}, {"trnpipe": None}, {"trnpipe": "us-east-1"}])
def test_missing_settings(context: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="missing"):
        read_settings(context)


def test_only_locations_that_the_configuration_reads_are_granted() -> None:
    found = settings(
        read=["s3://more/x"],
        local_paths=True,
        config={
            "data": {
                "train": ["s3://pairs/a/", "/local"],
                "corpus": ["s3://texts"],
                "delete": ["s3://privacy/lists/"],
                "tasks": {"stars": {"train": ["s3://reviews/b/"]}},
            },
            "model": {"initial": "s3://models/bert", "base": "s3://models/base/"},
        },
    )
    listed, data = ("more/x", "more/x/*"), ("pairs/a/*", "reviews/b/*", "texts/*", "privacy/lists/*")
    model = ("models/bert", "models/bert/*", "models/base/*")
    assert found.readable_objects(shards=True, model=True) == (*listed, *data, *model)
    assert found.readable_objects(shards=True, model=False) == (*listed, *data)
    assert found.readable_objects(shards=False, model=True) == (*listed, *model)
    named = ("s3://pairs/a/", "s3://texts", "s3://privacy/lists/", "s3://models/bert", "s3://models/base/", "s3://reviews/b/")
    assert found.readable() == ("s3://more/x", *named)


def test_a_deployment_names_no_local_path_that_its_hosts_do_not_have() -> None:
    with pytest.raises(BadConfig, match="settings") as caught:
        settings(config={"model": {"initial": "/models/bert"}})
    assert "config.model.initial = /models/bert" in caught.value.value[0]


def test_a_deployment_names_no_parent_that_every_run_would_continue_from() -> None:
    with pytest.raises(BadConfig) as caught:
        settings(config={"model": {"parent": "s3://models/bert"}})
    assert "s3://models/bert" in caught.value.value[0]
    assert "config.model.initial" in caught.value.remedy
    assert "input of one execution" in caught.value.remedy


@pytest.mark.parametrize("uri", ["s3://lake/../x", "s3://lake//x", "lake/x"])
def test_folders_to_read_are_well_formed(uri: str) -> None:
    with pytest.raises(BadConfig):
        settings(read=[uri])


def test_a_model_that_is_a_file_is_granted_with_the_folder_its_tokenizer_stands_in() -> None:
    found = settings(config={"model": {"initial": "s3://models/bert/weights.pt"}})
    assert "models/bert/*" in found.readable_objects(shards=False, model=True)


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_a_job_takes_more_than_half_a_host_and_leaves_room_for_the_agent(name: str) -> None:
    hardware = HARDWARE[name]
    assert hardware.vcpus / 2 < hardware.job_vcpus <= hardware.vcpus
    # The ECS agent and the kernel take some: a task that asks for all of it never starts.
    assert 0.8 * hardware.memory_mib < hardware.job_memory_mib < hardware.memory_mib - 1024
