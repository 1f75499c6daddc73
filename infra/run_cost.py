"""Costs of a deployment: the prices of its hosts, the estimate for a run (printed at synth), and a budget on its cost tag.

A run's own account is kept by pipeline/cost.py; the prices reach it in `input.json`.
"""

from __future__ import annotations

from collections.abc import Iterator

from aws_cdk import CfnOutput, Stack
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from constructs import Construct

from infra.settings import COST_TAG, Settings
from pipeline.contract import FARGATE_DISK_GIB, FARGATE_MEMORY_MIB, FARGATE_VCPUS, STAGES, Queue, Stage
from pipeline.cost import CURRENCY, cost_of, fargate_hour, instance_hour, most, nodes_of


class MonthlyBudget(Construct):
    """A monthly budget on the deployment's tag; it notifies the topic when 80 % is spent, and when the forecast exceeds it."""

    def __init__(
        self, scope: Construct, construct_id: str, *, name: str, usd: float, topic: sns.ITopic, topic_key: kms.IKey
    ) -> None:
        super().__init__(scope, construct_id)
        stack = Stack.of(self)
        principal = iam.ServicePrincipal(
            "budgets.amazonaws.com",
            # docs.aws.amazon.com/cost-management/latest/userguide/budgets-sns-policy.html
            conditions={
                "StringEquals": {"aws:SourceAccount": stack.account},
                "ArnLike": {"aws:SourceArn": f"arn:{stack.partition}:budgets::{stack.account}:*"},
            },
        )
        topic.grant_publish(principal)
        topic_key.grant(principal, "kms:GenerateDataKey*", "kms:Decrypt")
        budget = budgets.CfnBudget(
            self,
            "Monthly",
            # Without a name of its own: CloudFormation replaces a budget whose notifications change.
            budget=budgets.CfnBudget.BudgetDataProperty(
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=budgets.CfnBudget.SpendProperty(amount=usd, unit=CURRENCY),
                cost_filters={"TagKeyValue": [f"user:{COST_TAG}${name}"]},
            ),
            notifications_with_subscribers=[
                budgets.CfnBudget.NotificationWithSubscribersProperty(
                    notification=budgets.CfnBudget.NotificationProperty(
                        notification_type=kind, comparison_operator="GREATER_THAN", threshold=percent, threshold_type="PERCENTAGE"
                    ),
                    subscribers=[budgets.CfnBudget.SubscriberProperty(subscription_type="SNS", address=topic.topic_arn)],
                )
                for kind, percent in (("ACTUAL", 80), ("FORECASTED", 100))
            ],
        )
        # AWS Budgets checks its permission to publish when the budget is created.
        budget.node.add_dependency(topic.node.find_child("Policy"))
        CfnOutput(
            self,
            "CostAllocationTag",
            value=COST_TAG,
            description="The budget counts nothing until this tag is activated in the account that pays, a day after its first "
            "use: aws ce update-cost-allocation-tags-status --cost-allocation-tags-status "
            f"TagKey={COST_TAG},Status=Active",
        ).override_logical_id("CostAllocationTag")


def host_names(settings: Settings) -> dict[Queue, str]:
    """Names of the nodes of each queue; empty where all stages share one machine, which is not paid by the hour."""
    if settings.local_paths:
        return {}
    return {
        Queue.TRAIN: settings.instance_type,
        Queue.EMBED: settings.embed_instance_type,
        Queue.CPU: f"Fargate, {FARGATE_VCPUS} vCPU",
    }


def hourly_prices(settings: Settings) -> dict[Queue, float]:
    """USD for an hour of one node of each queue: as the settings say, else the published price. Unknown prices are left out:
    of Spot hosts, whose price moves, everything but what the settings say of their queue."""
    prices = highest_prices(settings)
    if settings.embed_market == "spot" and Queue.EMBED.value not in settings.prices:
        prices.pop(Queue.EMBED, None)
    return prices


def highest_prices(settings: Settings) -> dict[Queue, float]:
    """The same, but with the on-demand price for Spot hosts of an unknown price: Batch bids no more."""
    published = {
        Queue.TRAIN: instance_hour(settings.region, settings.instance_type),
        Queue.EMBED: instance_hour(settings.region, settings.embed_instance_type),
        Queue.CPU: fargate_hour(
            settings.region, vcpus=FARGATE_VCPUS, memory_gib=FARGATE_MEMORY_MIB / 1024, disk_gib=FARGATE_DISK_GIB
        ),
    }
    found = {
        queue: settings.prices.get(queue.value, settings.prices.get(host, published[queue]))
        for queue, host in host_names(settings).items()
    }
    return {queue: round(price, 6) for queue, price in found.items() if price is not None}


def most_embed_hosts(settings: Settings) -> int:
    """Number of children of embed that run at once: each takes a host."""
    return settings.embed_max_vcpus // settings.embed_hardware.vcpus


def expectation(settings: Settings) -> Iterator[str]:
    """Yield the lines of the cost estimate at synth; none where no host is paid by the hour."""
    names, prices, config = host_names(settings), highest_prices(settings), settings.run_config()
    if not names:
        return
    apart = config.compile.where == "cpu" and settings.train_hardware.neuron_devices > 0
    children = {
        Stage.COLLECT: config.nodes * apart,
        Stage.PRECOMPILE: STAGES[Stage.PRECOMPILE].size * apart,
        Stage.INGEST: min(config.data.ingest_children, settings.cpu_max_vcpus // FARGATE_VCPUS),
        Stage.MINE: min(config.embed.children, most_embed_hosts(settings)) * bool(config.train.mine),
        Stage.EMBED: min(config.embed.children, most_embed_hosts(settings)),
    }
    budget_hours = config.time_budget.total_seconds() / 3600
    yield f"What a run costs in {settings.region}, at most; prices are those of pipeline/cost.py and of the setting `prices`."
    yield f"  {'stage':<14}{'nodes':>6}  {'each':<16}{'USD/h':>9}{'hours':>7}{'USD':>11}"
    for stage, spec in STAGES.items():
        if nodes := nodes_of(stage, nodes=config.nodes, children=children):
            hours = min(settings.minutes(stage) / 60, budget_hours)
            price, usd = _figure(prices.get(spec.queue), 4), _figure(cost_of({stage: nodes * hours}, prices), 2)
            yield f"  {stage:<14}{nodes:>6}  {names[spec.queue]:<16}{price:>9}{hours:>7.1f}{usd:>11}"
    yield f"  hours: the longest that one attempt may take, and no longer than time_budget ({budget_hours:g} h)."
    if (total := most(prices, nodes=config.nodes, children=children, time_budget=config.time_budget)) is None:
        unknown = dict.fromkeys(name for queue, name in names.items() if queue not in prices)
        yield f"  No total: the price of {' and '.join(unknown)} in {settings.region} is not known. remedy: the setting `prices`."
        return
    monthly = total * 52 / 12
    yield f"  Within time_budget: {total:,.2f} USD, retries included: {budget_hours:g} h of the most expensive stage's nodes."
    yield f"  A run a week: {monthly:,.2f} USD a month. Not counted: hosts that boot or wait for the next job, storage, logs."
    if settings.budget is not None and monthly > settings.budget:
        yield f"warning: that is above the budget of {settings.budget:,.2f} USD a month."
        yield "  remedy: a shorter config.time_budget, fewer config.nodes or config.embed.children, or a higher budget"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
