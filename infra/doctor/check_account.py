"""The account itself: credentials, region, CDK bootstrap, service roles, names that are taken, budgets."""

from __future__ import annotations

from infra.app import CDK
from infra.doctor.asking import Ask, DoctorFinding, Findings, NotAuthenticated, Subject, check, ok, problem, warning
from infra.doctor.blueprint import Blueprint

CREDENTIALS = "Credentials"
CREDENTIAL_CALLS = ("sts:GetCallerIdentity",)

ROLES = (
    (
        ("EC2", "SPOT", "FARGATE"),
        "AWSServiceRoleForBatch",
        "batch.amazonaws.com",
        warning,
        "the service-linked role of Batch is missing",
        "the first compute environment creates it, if the deploying role may iam:CreateServiceLinkedRole",
    ),
    (
        ("SPOT",),
        "AWSServiceRoleForEC2Spot",
        "spot.amazonaws.com",
        problem,
        "the service-linked role of EC2 Spot is missing",
        "a Spot compute environment cannot request hosts without it",
    ),
)
"""Service-linked roles: markets that need it, name, service, and the finding where it is missing."""


def not_accepted(error: NotAuthenticated) -> DoctorFinding:
    """The finding about credentials that are missing, wrong or out of date."""
    return problem(
        "AWS does not accept the credentials",
        value=error,
        rule="the AWS SDK's usual places: environment, profile, SSO, instance role",
        remedy="aws sso login, or aws configure; then AWS_PROFILE=NAME trnpipe doctor",
    )


def who(ask: Ask, blueprint: Blueprint) -> tuple[str, DoctorFinding]:
    """The account of the credentials, and whether it is the one that the settings name.

    Raises:
        Denied, NotAuthenticated, Unavailable, Refused: as `ask` does.
    """
    caller = ask("sts", "GetCallerIdentity")
    account, wanted = str(caller["Account"]), blueprint.settings.account
    if wanted is not None and account != wanted:
        return account, problem(
            "the credentials are of another account",
            value=f"{account} ({caller['Arn']})",
            rule=f"the setting `account` is {wanted}",
            remedy="AWS_PROFILE=NAME trnpipe doctor with a profile of that account, or correct trnpipe.account",
        )
    return account, ok("credentials", f"{caller['Arn']}")


@check("Account", "account:GetRegionOptStatus")
def region(subject: Subject) -> Findings:
    name = subject.settings.region
    absent = problem(f"there is no region {name}", rule="trnpipe.region", remedy="aws account list-regions names them all")
    status = subject.require(absent, "account", "GetRegionOptStatus", RegionName=name)["RegionOptStatus"]
    yield (
        ok("region", f"{name}: {status}")
        if status in ("ENABLED", "ENABLED_BY_DEFAULT")
        else problem(
            f"the region {name} is not enabled in this account",
            value=status,
            rule="an opt-in region answers no call before it is enabled",
            remedy=f"aws account enable-region --region-name {name} (takes minutes to hours)",
        )
    )


@check("Account", "ssm:GetParameter")
def bootstrap(subject: Subject) -> Findings:
    blueprint = subject.blueprint
    qualifier = subject.settings.bootstrap_qualifier
    remedy = f"{CDK} bootstrap aws://{subject.account}/{subject.settings.region}" + (
        f" --qualifier {qualifier}" if qualifier else ""
    )
    rule = f"these stacks need CDK bootstrap version {blueprint.bootstrap_version} or newer"
    if (parameter := subject.seek(("ParameterNotFound",), "ssm", "GetParameter", Name=blueprint.bootstrap_parameter)) is None:
        yield problem(
            "the CDK is not bootstrapped in this account and region",
            value=f"no parameter {blueprint.bootstrap_parameter}",
            rule=rule,
            remedy=remedy,
        )
    elif (version := int(parameter["Parameter"]["Value"])) < blueprint.bootstrap_version:
        yield problem("the CDK bootstrap is too old", value=f"version {version}", rule=rule, remedy=remedy)
    else:
        yield ok("CDK bootstrap", f"version {version}, needed {blueprint.bootstrap_version}")


@check("Account", "iam:GetRole")
def service_roles(subject: Subject) -> Findings:
    markets = {fleet.market for fleet in subject.blueprint.fleets()}
    for needed_by, name, service, tell, what, rule in ROLES:
        if markets.intersection(needed_by):
            found = subject.seek(("NoSuchEntity",), "iam", "GetRole", RoleName=name)
            yield (
                ok("service-linked role", name)
                if found is not None
                else tell(what, value=name, rule=rule, remedy=f"aws iam create-service-linked-role --aws-service-name {service}")
            )


@check("Account", "cloudformation:DescribeStacks", "ecr:DescribeRepositories", "logs:DescribeLogGroups")
def names(subject: Subject) -> Findings:
    """Retained resources of a deleted stack block a first deployment if they have fixed names."""
    blueprint = subject.blueprint
    if subject.seek(("ValidationError",), "cloudformation", "DescribeStacks", StackName=blueprint.data_stack) is not None:
        return
    absent = ("RepositoryNotFoundException",)
    repositories = [properties["RepositoryName"] for properties in blueprint.resources("AWS::ECR::Repository").values()]
    taken = [
        f"image repository {name}"
        for name in repositories
        if subject.seek(absent, "ecr", "DescribeRepositories", repositoryNames=[name]) is not None
    ]
    for properties in blueprint.resources("AWS::Logs::LogGroup").values():
        name = properties.get("LogGroupName")
        if isinstance(name, str):
            groups = subject.ask("logs", "DescribeLogGroups", logGroupNamePrefix=name)["logGroups"]
            taken += [f"log group {name}" for group in groups if group["logGroupName"] == name]
    yield (
        problem(
            "names of the first deployment are taken",
            value=", ".join(taken),
            rule=f"the stack {blueprint.data_stack} does not exist, and cannot create resources that exist",
            remedy=f"{CDK} import {blueprint.data_stack} adopts them; or delete them, or set another trnpipe.name",
        )
        if taken
        else ok("names are free", f"for the first deployment of {blueprint.data_stack}")
    )


@check("Account", "budgets:DescribeBudgets")
def budgets(subject: Subject) -> Findings:
    found = subject.ask("budgets", "DescribeBudgets", AccountId=subject.account).get("Budgets", [])
    yield (
        ok("budgets", ", ".join(budget["BudgetName"] for budget in found))
        if found
        else warning(
            "this account has no budget",
            rule="an hour of a gang costs more than a month of everything else here, and no notification would report a runaway",
            remedy="https://console.aws.amazon.com/billing/home#/budgets/create",
        )
    )


@check("Notifications")
def addressees(subject: Subject) -> Findings:
    yield (
        ok("notifications go to", ", ".join(one.endpoint for one in subject.settings.notify))
        if subject.settings.notify
        else warning(
            "no address receives notifications",
            value="notify is empty",
            rule="failures, refusals and alarms go to the addresses in `notify`",
            remedy='put them into the settings: "notify": ["team@example.com"], and deploy',
        )
    )
