"""The stacks as a whole: grants, findings of cdk-nag, outputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.contract import STAGES, Stage
from tests.infra.accepted_findings import ACCEPTED

CACHE_WRITERS = (Stage.COLLECT, Stage.PRECOMPILE, Stage.COMPILE, Stage.TRAIN)
"""Stages that write to the compiler's cache."""


def statements(deployment: Any, role: str) -> Iterator[dict[str, Any]]:
    """Statements of every policy of a role, by its path in the construct tree."""
    for resource in deployment.pipeline["Resources"].values():
        path = resource.get("Metadata", {}).get("aws:cdk:path", "")
        if resource["Type"] in ("AWS::IAM::Policy", "AWS::IAM::ManagedPolicy") and f"/{role}/" in path:
            yield from resource["Properties"]["PolicyDocument"]["Statement"]


def granted(deployment: Any, role: str, action: str) -> set[str]:
    """Resources on which a role may do something, references shortened to the text around them."""
    found: set[str] = set()
    for statement in statements(deployment, role):
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        if action in actions:
            resources = statement["Resource"] if isinstance(statement["Resource"], list) else [statement["Resource"]]
            found |= {_text(resource) for resource in resources}
    return found


def _text(resource: Any) -> str:
    if isinstance(resource, str):
        return resource
    if "Fn::Join" in resource:
        return "".join(part if isinstance(part, str) else "" for part in resource["Fn::Join"][1])
    return json.dumps(resource)


def role_of(stage: Stage) -> str:
    return "Jobs/" + "".join(word.capitalize() for word in stage.value.split("_")) + "Role"


def test_cdk_nag_finds_nothing_that_is_not_accepted_with_a_reason(
    deployment: Any, other_deployment: Any, small_deployment: Any
) -> None:
    from cdk_nag import AwsSolutionsChecks

    findings = []
    for app in (deployment.build(), other_deployment.build(), small_deployment.build()):
        violations = AwsSolutionsChecks(app).validate_scope(app).violations
        assert len(violations) > 10, "the pack looked at nothing"
        findings += [(each.rule_name, resource.construct_path) for each in violations for resource in each.violating_resources]
    assert [finding for finding in findings if not any(accepted.covers(*finding) for accepted in ACCEPTED)] == []
    assert [accepted for accepted in ACCEPTED if not any(accepted.covers(*finding) for finding in findings)] == []


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_stage_writes_its_own_part_of_a_run_only(deployment: Any, stage: Stage) -> None:
    written = granted(deployment, role_of(stage), "s3:PutObject")
    assert f"/runs/*/{stage}/*" in written
    others = [other for other in STAGES if other is not stage and f"/runs/*/{other}/*" in written]
    assert others == []
    assert ("/registry/*.json" in written) == (stage is Stage.PUBLISH)
    assert ("/registry/*/index.html" in written) == (stage is Stage.REPORT)
    assert ("/runs/*/plan.json" in written) == (stage is Stage.PLAN)
    own = {resource for resource in granted(deployment, role_of(stage), "s3:DeleteObject") if "/runs/" in resource}
    assert own == {f"/runs/*/{stage}/*"}
    assert "/runs/*" in granted(deployment, role_of(stage), "s3:GetObject")


@pytest.mark.parametrize("stage", list(STAGES))
@pytest.mark.parametrize(
    ("folder", "writer", "readers"),
    [
        ("ingested", Stage.INGEST, {"prepare", "ingest", "mine", "plan", "evaluate", "embed", "publish"}),
        ("mined", Stage.MINE, {"prepare", "mine", "plan"}),
        ("seen", Stage.TRAIN, {"prepare", "plan", "train"}),
    ],
)
def test_ingested_shards_and_seen_rows_have_one_writer_and_rows_are_removed_by_ingest_alone(
    deployment: Any, stage: Stage, folder: str, writer: Stage, readers: set[str]
) -> None:
    granted_for = {
        action: any(found.startswith(f"/{folder}/") for found in granted(deployment, role_of(stage), action))
        for action in ("s3:PutObject", "s3:GetObject", "s3:DeleteObject")
    }
    expected = {
        "s3:PutObject": stage is writer,
        "s3:GetObject": stage.value in readers,
        "s3:DeleteObject": folder in ("ingested", "mined") and stage is Stage.INGEST,
    }
    assert granted_for == expected


@pytest.mark.parametrize("stage", list(STAGES))
def test_only_checkpoints_are_tagged(deployment: Any, stage: Stage) -> None:
    """A write with a tag needs the permission to tag; an object without one never expires."""
    tagged = granted(deployment, role_of(stage), "s3:PutObjectTagging")
    assert tagged == ({"/runs/*/train/checkpoints/*"} if stage is Stage.TRAIN else set())


@pytest.mark.parametrize("stage", list(STAGES))
def test_compiled_sets_are_compile_s_and_those_who_load_them_only_read(deployment: Any, stage: Stage) -> None:
    """prepare and plan ask whether they are there, and health_check has graphs of its own. The compiler's cache is also written
    by collect and precompile, and by train for an unforeseen graph."""
    cache = "/graphs/neuron-cache/*"
    health = {"/graphs/health/*"}
    wide = {Stage.COMPILE: {"/graphs/*"}, Stage.HEALTH_CHECK: health}
    written = wide.get(stage, {cache} if stage in CACHE_WRITERS else set())
    read = {"/graphs/*"} if stage not in (Stage.INGEST, Stage.HEALTH_CHECK, Stage.PUBLISH, Stage.REPORT) else set()
    read |= health if stage is Stage.HEALTH_CHECK else set()
    removed = {cache} if stage in CACHE_WRITERS else set()
    for action, expected in (("s3:GetObject", read), ("s3:PutObject", written), ("s3:DeleteObject", removed)):
        assert {found for found in granted(deployment, role_of(stage), action) if "graphs" in found} == expected, action
    # Without it S3 says of an absent set that access is denied.
    assert any(statement["Action"] == "s3:ListBucket" for statement in statements(deployment, role_of(stage)))


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_compiler_s_cache_elsewhere_is_open_to_those_who_compile(other_deployment: Any, stage: Stage) -> None:
    role, compiles = role_of(stage), stage in CACHE_WRITERS
    for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
        assert ("arn:aws:s3:::their-caches/neuron/*" in granted(other_deployment, role, action)) == compiles, action
    assert ("arn:aws:s3:::their-caches" in granted(other_deployment, role, "s3:ListBucket")) == compiles


KEY = "arn:aws:kms:us-east-2:210987654321:key/0a1b2c3d"


@pytest.mark.parametrize("stage", list(STAGES))
def test_who_reads_inputs_may_decrypt_them_through_s3_alone(other_deployment: Any, stage: Stage) -> None:
    reads = stage not in (Stage.MINE, Stage.HEALTH_CHECK, Stage.EMBED, Stage.REPORT)
    compiles = stage in CACHE_WRITERS
    role = role_of(stage)
    assert (KEY in granted(other_deployment, role, "kms:Decrypt")) == reads
    assert (KEY in granted(other_deployment, role, "kms:GenerateDataKey")) == compiles
    uses = [one for one in statements(other_deployment, role) if KEY in str(one["Resource"])]
    assert all(one["Condition"] == {"StringEquals": {"kms:ViaService": "s3.us-east-2.amazonaws.com"}} for one in uses)


@pytest.mark.parametrize("role", ["Workflow", *(role_of(stage) for stage in STAGES)])
def test_who_uses_the_bucket_may_use_its_key(small_deployment: Any, role: str) -> None:
    key = "arn:aws:kms:us-west-2:123456789012:key/0a1b2c3d"
    for action in ("kms:Decrypt", "kms:GenerateDataKey"):
        assert key in granted(small_deployment, role, action)
    services = {
        one["Condition"]["StringEquals"]["kms:ViaService"] for one in statements(small_deployment, role) if key in str(one)
    }
    expected = {"s3.us-west-2.amazonaws.com"} | ({"dynamodb.us-west-2.amazonaws.com"} if role == "Workflow" else set())
    assert services == expected


@pytest.mark.parametrize("stage", list(STAGES))
def test_only_hosts_with_chips_may_leave_their_cluster_and_no_other(deployment: Any, stage: Stage) -> None:
    drained = granted(deployment, role_of(stage), "ecs:UpdateContainerInstancesState")
    on_chips = STAGES[stage].queue.value != "cpu"
    assert bool(drained) == on_chips
    assert all("container-instance/" in resource and "Batch" in resource for resource in drained)


def test_no_policy_allows_every_action(deployment: Any) -> None:
    for resource in deployment.resources("AWS::IAM::Policy"):
        for statement in resource["PolicyDocument"]["Statement"]:
            actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
            assert not [action for action in actions if action == "*" or action.endswith(":*")]


@pytest.mark.parametrize("stage", list(STAGES))
def test_inputs_are_readable_where_they_are_read(other_deployment: Any, stage: Stage) -> None:
    """prepare and publish list the shards, ingest reads them, plan golden sets; the parent, perhaps of no run, is loaded."""
    reads_shards = stage in (Stage.PREPARE, Stage.INGEST, Stage.PLAN, Stage.PUBLISH)
    compiles = stage in CACHE_WRITERS
    loads_parent = compiles or stage in (Stage.PREPARE, Stage.INGEST, Stage.PLAN, Stage.EVALUATE)
    readable = granted(other_deployment, role_of(stage), "s3:GetObject")
    listed = granted(other_deployment, role_of(stage), "s3:ListBucket")
    for bucket, key, reads in (("their-data", "pairs/*", reads_shards), ("their-models", "e5/*", loads_parent)):
        assert (f"arn:aws:s3:::{bucket}/{key}" in readable) == reads
        assert (f"arn:aws:s3:::{bucket}" in listed) == reads
    assert ("arn:aws:s3:::shared/more/*" in readable) == (reads_shards or loads_parent)
    assert ("/data/*" in readable) == (reads_shards or loads_parent)


@pytest.mark.parametrize(
    ("action", "resource"),
    [
        ("batch:SubmitJob", "job-definition/trnpipe-train-2:*"),
        ("batch:TerminateJob", "job/*"),
        ("batch:TagResource", "job/*"),
        ("batch:DescribeJobs", "*"),
        ("events:PutRule", "rule/StepFunctionsGetEventsForBatchJobsRule"),
        ("s3:PutObject", "/runs/*/input.json"),
        ("s3:GetObject", "/runs/*/result.json"),
        ("s3:GetObject", "/runs/*/failure.json"),
        ("states:DescribeExecution", "execution:trnpipe:*"),
    ],
)
def test_the_machine_may_do_what_its_states_do(deployment: Any, action: str, resource: str) -> None:
    assert any(found.endswith(resource) for found in granted(deployment, "Workflow/StateMachine/Role", action))


def test_the_machine_logs_everything_and_is_traced(deployment: Any) -> None:
    for machine in deployment.resources("AWS::StepFunctions::StateMachine"):
        assert machine["LoggingConfiguration"]["Level"] == "ALL"
        assert machine["TracingConfiguration"] == {"Enabled": True}


def test_people_find_what_they_need_in_the_outputs(deployment: Any) -> None:
    outputs = {*deployment.data["Outputs"], *deployment.pipeline["Outputs"]}
    assert {"BucketName", "NeuronRepositoryUri", "CpuRepositoryUri", "StateMachineArn", "TopicArn", "JobLogGroup"} <= outputs
    assert {"ImageProject", "ImageSource"} <= outputs


def test_the_definition_is_far_below_a_megabyte_and_wired_to_the_stacks_own_resources(deployment: Any) -> None:
    machine = deployment.named("AWS::StepFunctions::StateMachine", "StateMachineName", "trnpipe")
    text = json.dumps(machine["DefinitionString"])
    assert len(text) < 500_000
    assert "Fn::ImportValue" in text
    assert text.count('"Ref"') >= len(STAGES)


def test_conventions_of_a_company_reach_every_resource_and_role(other_deployment: Any) -> None:
    assert {role["PermissionsBoundary"] for role in other_deployment.resources("AWS::IAM::Role")} == {
        "arn:aws:iam::123456789012:policy/teams/boundary"
    }
    manifest = json.loads((other_deployment.folder / "manifest.json").read_text())
    stacks = [one for one in manifest["artifacts"].values() if one["type"] == "aws:cloudformation:stack"]
    assert {one["properties"]["bootstrapStackVersionSsmParameter"] for one in stacks} == {"/cdk-bootstrap/ranker/version"}
    tags = {"team": "ranking", "cost-center": "42"}
    for kind in ("AWS::Batch::JobQueue", "AWS::Batch::JobDefinition", "AWS::S3::Bucket", "AWS::IAM::Role"):
        for properties in other_deployment.resources(kind):
            found = properties["Tags"]
            found = found if isinstance(found, dict) else {one["Key"]: one["Value"] for one in found}
            assert tags.items() <= found.items(), kind
    # Their own tags can never change, those of their hosts can.
    for properties in other_deployment.resources("AWS::Batch::ComputeEnvironment"):
        assert properties["Tags"] == {"trnpipe": "ranker"}
        if properties["ComputeResources"]["Type"] != "FARGATE":
            assert tags.items() <= properties["ComputeResources"]["Tags"].items()
