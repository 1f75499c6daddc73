"""Costs of a deployment: prices, the estimate at synth, tags, and the budget."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from infra.cdk_context import read_context, read_settings
from infra.run_cost import expectation, hourly_prices, most_embed_hosts
from infra.settings import COST_TAG, Settings
from pipeline.contract import STAGES, UNUSUAL, Queue
from pipeline.cost import HARDWARE, INSTANCE_HOUR

UNPRICED: set[str] = set()
"""Instance types that can be deployed and whose price could not be confirmed."""


def settings(**changes: Any) -> Settings:
    return read_settings({"trnpipe": {**read_context()["trnpipe"], **changes}})


def lines(**changes: Any) -> list[str]:
    return list(expectation(settings(**changes)))


def test_every_type_that_can_be_deployed_has_a_price_or_is_listed_as_having_none() -> None:
    assert HARDWARE.keys() - INSTANCE_HOUR.keys() == UNPRICED


def test_prices_are_the_published_ones_unless_the_settings_say_otherwise() -> None:
    assert hourly_prices(settings()) == {Queue.TRAIN: 21.5, Queue.EMBED: 21.5, Queue.CPU: pytest.approx(0.31525)}
    both = hourly_prices(settings(prices={"trn1.32xlarge": 12.9, "cpu": 0.2}))
    assert both == {Queue.TRAIN: 12.9, Queue.EMBED: 12.9, Queue.CPU: 0.2}
    # A queue goes first: one instance type on demand for gangs, on the Spot market for embed.
    spot = hourly_prices(settings(prices={"trn1.32xlarge": 12.9, "embed": 4.1}))
    assert (spot[Queue.TRAIN], spot[Queue.EMBED]) == (12.9, 4.1)


def test_spot_hosts_cost_what_the_settings_say_of_their_queue_and_at_most_what_they_cost_on_demand() -> None:
    assert Queue.EMBED not in hourly_prices(settings(embed_market="spot"))
    assert Queue.EMBED not in hourly_prices(settings(embed_market="spot", prices={"trn1.32xlarge": 12.9}))
    assert hourly_prices(settings(embed_market="spot", prices={"embed": 6.5}))[Queue.EMBED] == 6.5
    assert lines(embed_market="spot") == lines()


def test_no_price_is_made_up_for_a_region_that_is_not_in_the_table() -> None:
    elsewhere = {"region": "eu-north-1", "zone": "eu-north-1a"}
    assert hourly_prices(settings(**elsewhere)) == {}
    told = lines(**elsewhere)
    assert "the price of trn1.32xlarge and Fargate, 4 vCPU in eu-north-1 is not known. remedy: the setting `prices`." in told[-1]
    assert not any("month" in line for line in told)
    assert "month" in " ".join(lines(**elsewhere, prices={"trn1.32xlarge": 20, "cpu": 1}))


def test_one_machine_for_all_stages_has_no_hourly_price() -> None:
    assert hourly_prices(settings(local_paths=True, prices={"train": 5})) == {}
    assert lines(local_paths=True) == []


def test_synth_says_what_each_stage_and_a_run_cost_at_most() -> None:
    told = lines(config={"nodes": 2, "time_budget": "PT6H", "embed": {"children": 3}}, embed_instance_type="inf2.48xlarge")
    by_stage = {line.split()[0]: line.split() for line in told if line.split()[0] in set(map(str, STAGES))}
    assert list(by_stage) == [str(stage) for stage in STAGES if stage not in UNUSUAL]
    mining = lines(config={"embed": {"children": 3}, "train": {"negatives": 1, "mine": {}}}, embed_instance_type="inf2.48xlarge")
    assert next(line.split()[1] for line in mining if line.split()[0] == "mine") == "2"
    # nodes x hours x price: an attempt of train may take a day, but the budget is six hours.
    assert by_stage["train"][1:] == ["2", "trn1.32xlarge", "21.5000", "6.0", f"{2 * 6 * 21.5:.2f}"]
    assert by_stage["health_check"][-2:] == ["0.5", f"{2 * 0.5 * 21.5:.2f}"]
    # Three children, and hosts for two.
    assert by_stage["embed"][1] == "2"
    text = " ".join(told)
    assert f"Within time_budget: {2 * 6 * 21.5:.2f} USD" in text
    assert f"{2 * 6 * 21.5 * 52 / 12:,.2f} USD a month" in text
    assert "warning" not in text


def test_a_deployment_without_trainium_is_tried_for_two_dollars() -> None:
    smoke = read_settings({**read_context(), "env": "smoke"})
    told = list(expectation(smoke))
    stages = [line.split() for line in told if line.split()[0] in set(map(str, STAGES))]
    assert len(stages) == len(STAGES) - len(UNUSUAL)
    assert sum(float(words[-1]) for words in stages) < 2
    assert smoke.run_config().time_budget == timedelta(hours=1)


def test_precompile_counts_as_four_ordinary_jobs_on_fargate() -> None:
    told = lines(config={"nodes": 2, "device": {"kind": "neuron"}, "compile": {"where": "cpu"}})
    by_stage = {line.split()[0]: line.split() for line in told}
    assert [by_stage[stage][1] for stage in ("collect", "precompile", "report")] == ["2", "4", "1"]


def test_as_many_children_count_as_have_hosts() -> None:
    config = {"data": {"ingest_children": 5}}
    told = [next(line for line in lines(config=config, **more) if "ingest" in line) for more in ({}, {"cpu_max_vcpus": 8})]
    assert [line.split()[1] for line in told] == ["5", "2"]
    assert most_embed_hosts(settings(embed_max_vcpus=512)) == 4
    embed = next(line for line in lines(config={"embed": {"children": 64}}) if line.split()[0] == "embed")
    assert embed.split()[1] == "4"


def test_a_budget_below_what_is_expected_is_warned_of_at_synth() -> None:
    budget = {"notify": ["team@example.com"]}
    assert any(line.startswith("warning:") for line in lines(budget=100, **budget))
    assert not any(line.startswith("warning:") for line in lines(budget=1e6, **budget))


def test_the_budget_counts_the_deployments_tag_and_tells_the_topic(
    deployment: Any, other_deployment: Any, service_model: Any
) -> None:
    assert deployment.resources("AWS::Budgets::Budget") == []
    found = other_deployment.only("AWS::Budgets::Budget")
    assert found["Budget"]["CostFilters"] == {"TagKeyValue": ["user:trnpipe$ranker"]}
    assert found["Budget"]["BudgetLimit"] == {"Amount": 2500, "Unit": "USD"}
    # CloudFormation replaces a budget whose notifications change, which a name of its own would forbid.
    assert "BudgetName" not in found["Budget"]
    told = {
        (each["Notification"]["NotificationType"], each["Notification"]["Threshold"]): [
            (subscriber["SubscriptionType"], json.dumps(subscriber["Address"])) for subscriber in each["Subscribers"]
        ]
        for each in found["NotificationsWithSubscribers"]
    }
    assert told.keys() == {("ACTUAL", 80), ("FORECASTED", 100)}
    assert all(kind == "SNS" and "Topic" in address for [(kind, address)] in told.values())
    limit = {**found["Budget"]["BudgetLimit"], "Amount": str(found["Budget"]["BudgetLimit"]["Amount"])}
    request = {
        "AccountId": "123456789012",
        "Budget": {**found["Budget"], "BudgetLimit": limit, "BudgetName": "any"},
        "NotificationsWithSubscribers": [
            {**each, "Subscribers": [{"SubscriptionType": "SNS", "Address": "arn:aws:sns:us-east-2:123456789012:topic"}]}
            for each in found["NotificationsWithSubscribers"]
        ],
    }
    assert service_model.problems("budgets", "CreateBudget", request) == ""


def test_budgets_may_publish_to_the_encrypted_topic_for_this_account_alone(other_deployment: Any) -> None:
    policies = [
        *other_deployment.only("AWS::SNS::TopicPolicy")["PolicyDocument"]["Statement"],
        *other_deployment.only("AWS::KMS::Key")["KeyPolicy"]["Statement"],
    ]
    granted = [each for each in policies if each["Principal"] == {"Service": "budgets.amazonaws.com"}]
    actions = {action for each in granted for action in ([each["Action"]] if isinstance(each["Action"], str) else each["Action"])}
    assert actions == {"sns:Publish", "kms:GenerateDataKey*", "kms:Decrypt"}
    for each in granted:
        assert each["Condition"]["StringEquals"] == {"aws:SourceAccount": "123456789012"}
        assert each["Condition"]["ArnLike"] == {"aws:SourceArn": "arn:aws:budgets::123456789012:*"}


def test_the_output_says_how_the_tag_is_activated(deployment: Any, other_deployment: Any) -> None:
    assert "CostAllocationTag" not in deployment.pipeline["Outputs"]
    output = other_deployment.pipeline["Outputs"]["CostAllocationTag"]
    assert output["Value"] == COST_TAG
    assert "aws ce update-cost-allocation-tags-status" in output["Description"]


@pytest.mark.parametrize(
    "kind",
    ["AWS::Batch::ComputeEnvironment", "AWS::Batch::JobQueue", "AWS::Batch::JobDefinition", "AWS::S3::Bucket", "AWS::SNS::Topic"],
)
def test_what_costs_money_carries_the_tag(other_deployment: Any, kind: str) -> None:
    found = other_deployment.resources(kind)
    assert found
    for properties in found:
        tags = properties["Tags"]
        tags = tags if isinstance(tags, dict) else {tag["Key"]: tag["Value"] for tag in tags}
        assert tags[COST_TAG] == "ranker"


def test_hosts_their_volumes_and_the_tasks_of_jobs_carry_the_tag(other_deployment: Any) -> None:
    """The stack's tags stop at its resources: what Batch starts gets Batch's own."""
    fleets = [each["ComputeResources"] for each in other_deployment.resources("AWS::Batch::ComputeEnvironment")]
    assert [each["Tags"][COST_TAG] for each in fleets if each["Type"] == "EC2"] == ["ranker", "ranker"]
    for template in other_deployment.resources("AWS::EC2::LaunchTemplate"):
        [volume] = template["LaunchTemplateData"]["TagSpecifications"]
        assert {"Key": COST_TAG, "Value": "ranker"} in volume["Tags"]
    assert all(job["PropagateTags"] for job in other_deployment.resources("AWS::Batch::JobDefinition"))


def test_prices_and_hosts_reach_the_run(deployment: Any, other_deployment: Any) -> None:
    def told(found: Any, name: str) -> str:
        machine = found.named("AWS::StepFunctions::StateMachine", "StateMachineName", name)
        return "".join(part for part in machine["DefinitionString"]["Fn::Join"][1] if isinstance(part, str))

    prices = hourly_prices(settings())
    expected = {"prices": {**{queue.value: usd for queue, usd in prices.items()}, "currency": "USD"}}
    assert json.dumps(expected)[1:-1] in told(deployment, "trnpipe")
    assert '"cpu": "Fargate, 4 vCPU"}, "embed_hosts": 4' in told(deployment, "trnpipe")
    # Where all stages share one machine there is nothing to price.
    assert '"prices": {"currency": "USD"}, "hosts": {}' in told(other_deployment, "ranker")
