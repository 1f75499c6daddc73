"""Settings: what cdk.json may say, and how a wrong value is refused."""

from __future__ import annotations

from typing import Any

import pytest

from infra.app import read_context
from infra.settings import HARDWARE, Settings, read_settings
from pipeline.errors import BadConfig, ExitCode

BASE: dict[str, Any] = {"ami": "ami-0123456789abcdef0"}


def settings(**values: Any) -> Settings:
    return read_settings({"trnpipe": {**BASE, **values}})


def test_the_repositorys_own_cdk_json_is_valid_and_runs_on_neuron() -> None:
    found = read_settings(read_context())
    assert found.run_config().device.kind == "neuron"
    assert found.schedule.share in found.shares


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        settings().region = "eu-west-1"  # type: ignore[misc]


def test_context_given_on_the_command_line_lies_over_the_file() -> None:
    context = {
        "trnpipe": {**BASE, "schedule": {"share": "manual"}},
        "trnpipe.schedule.enabled": "false",
        "trnpipe.max_vcpus": "1024",
    }
    found = read_settings(context)
    assert (found.schedule.enabled, found.schedule.share, found.max_vcpus) == (False, "manual", 1024)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ami": "ssm:/aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended/image_id:1"}, "trnpipe.ami"),
        ({"ami": "ssm:/company/ami"}, "must be an image id"),
        ({"ami": "latest"}, "trnpipe.ami"),
        ({"regoin": "us-east-2"}, "trnpipe.regoin"),
        ({"zone": "us-east-1a"}, "zone us-east-1a is not in region us-west-2"),
        ({"instance_type": "trn1.2xlarge"}, "trnpipe.instance_type"),
        ({"instance_type": "p4d.24xlarge"}, "trnpipe.instance_type"),
        ({"embed_instance_type": "p4d.24xlarge"}, "embed_instance_type 'p4d.24xlarge' is none of"),
        ({"allowed_nodes": [4, 2]}, "ascend"),
        ({"allowed_nodes": []}, "ascend"),
        ({"allowed_nodes": [1, 8]}, "max_vcpus 512 is below 1024"),
        ({"embed_max_vcpus": 64}, "below one trn1.32xlarge"),
        ({"shares": {"weekly": 1, "man-ual": 1}}, "alphanumeric"),
        ({"shares": {"weekly": 0, "manual": 1}}, "trnpipe.shares.weekly"),
        ({"shares": {"manual": 1}}, "share 'weekly' is none of the declared shares"),
        ({"config": {"share": "night"}}, "share 'night'"),
        ({"config": {"nodes": 3}}, "config.nodes 3 is none of allowed_nodes [1, 2, 4]"),
        ({"config": {"run": "one"}}, "per execution"),
        ({"images": {"tag": "latest"}}, "moves under a run"),
        ({"images": {"cpu": "example.com/cpu:latest"}}, "moves under a run"),
        ({"notify": ["nobody"]}, "trnpipe.notify.0"),
        ({"read": ["/data"]}, "s3://BUCKET/PREFIX"),
        ({"gang_submit": "both"}, "trnpipe.gang_submit"),
        ({"vpc": {"vpc_id": "vpc-1"}}, "trnpipe.vpc.default_security_group_id"),
        ({"schedule": {"cron": "0 3 * * SUN"}}, "trnpipe.schedule.cron"),
        ({"capacity_wait_hours": 48}, "trnpipe.capacity_wait_hours"),
        ({"budget": 500}, "put an e-mail address into `notify`"),
        ({"budget": 0, "notify": ["team@example.com"]}, "trnpipe.budget"),
        ({"prices": {"p4d.24xlarge": 30}}, "prices for ['p4d.24xlarge']: a key is one of"),
        ({"prices": {"train": 0}}, "trnpipe.prices.train"),
        ({"ami": None}, "trnpipe.ami"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig) as caught:
        settings(**values)
    assert caught.value.exit_code == ExitCode.BAD_CONFIG
    assert any(words in line for line in caught.value.lines()), caught.value.lines()
    assert caught.value.remedy


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


def test_what_the_configuration_reads_is_granted_and_nothing_beside_it() -> None:
    found = settings(
        read=["s3://more/x"],
        local_paths=True,
        config={
            "data": {"train": ["s3://pairs/a/", "/local"], "corpus": ["s3://texts"]},
            "model": {"parent": "s3://models/bert", "base": "s3://models/base/"},
        },
    )
    listed, data = ("more/x", "more/x/*"), ("pairs/a/*", "texts/*")
    model = ("models/bert", "models/bert/*", "models/base/*")
    assert found.readable_objects(shards=True, parent=True) == (*listed, *data, *model)
    assert found.readable_objects(shards=True, parent=False) == (*listed, *data)
    assert found.readable_objects(shards=False, parent=True) == (*listed, *model)
    named = ("s3://pairs/a/", "s3://texts", "s3://models/bert", "s3://models/base/")
    assert found.readable() == ("s3://more/x", *named)


def test_a_deployment_names_no_local_path_that_its_hosts_do_not_have() -> None:
    with pytest.raises(BadConfig, match="settings") as caught:
        settings(config={"model": {"parent": "/models/bert"}})
    assert "config.model.parent = /models/bert" in caught.value.value[0]


@pytest.mark.parametrize("uri", ["s3://lake/../x", "s3://lake//x", "lake/x"])
def test_folders_to_read_are_well_formed(uri: str) -> None:
    with pytest.raises(BadConfig):
        settings(read=[uri])


def test_a_parent_that_is_a_file_is_granted_with_the_folder_its_tokenizer_stands_in() -> None:
    found = settings(config={"model": {"parent": "s3://models/bert/weights.pt"}})
    assert "models/bert/*" in found.readable_objects(shards=False, parent=True)


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_a_job_takes_more_than_half_a_host_and_leaves_room_for_the_agent(name: str) -> None:
    hardware = HARDWARE[name]
    assert hardware.vcpus / 2 < hardware.job_vcpus <= hardware.vcpus
    # The ECS agent and the kernel take some: a task that asks for all of it never starts.
    assert 0.8 * hardware.memory_mib < hardware.job_memory_mib < hardware.memory_mib - 1024
