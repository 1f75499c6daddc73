"""Deployments that AWS Batch refuses, or never starts, although its service model lets them pass.

Each rule names the page that states it: `API_NAME` is https://docs.aws.amazon.com/batch/latest/APIReference/API_NAME.html and
`userguide/NAME` is https://docs.aws.amazon.com/batch/latest/userguide/NAME.html.

`problems` looks at a whole deployment: compute environments, launch templates, queues, policies, job definitions and the
submissions of the state machine, all with their references resolved.
"""

from __future__ import annotations

import base64
import email
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infra.settings import HARDWARE
from infra.templates import Resource, Stacks

Properties = dict[str, Any]

FARGATE_MEMORY = {
    0.25: (512, 1024, 2048),
    0.5: range(1024, 4096 + 1, 1024),
    1: range(2048, 8192 + 1, 1024),
    2: range(4096, 16384 + 1, 1024),
    4: range(8192, 30720 + 1, 1024),
    8: range(16384, 61440 + 1, 4096),
    16: range(32768, 122880 + 1, 8192),
}
"""vCPUs of a task -> MiB that go with them (API_ResourceRequirement)."""

ACTED_ON = {
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
}
"""Reasons that support jobStateTimeLimitActions in every edition of
https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable_time_limit_actions.html. The same page excludes
MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS, ACTION_REQUIRED and UNDETERMINED; its newest edition alone adds
MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED."""

NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
"""https://docs.aws.amazon.com/batch/latest/APIReference/API_CreateJobQueue.html and API_RegisterJobDefinition.html"""

IMAGE = re.compile("[A-Za-z0-9_:./#@-]{1,255}")
"""https://docs.aws.amazon.com/batch/latest/APIReference/API_ContainerProperties.html; with the `@` of a digest"""

EXIT_PATTERNS = {
    "OnExitCode": re.compile(r"[0-9]{0,511}\*?"),
    "OnReason": re.compile(r"[A-Za-z0-9.:\s]{0,511}\*?"),
    "OnStatusReason": re.compile(r"[A-Za-z0-9.:\s]{0,511}\*?"),
}
"""https://docs.aws.amazon.com/batch/latest/APIReference/API_EvaluateOnExit.html"""

EC2_TYPES, FARGATE_TYPES = {"EC2", "SPOT"}, {"FARGATE", "FARGATE_SPOT"}
NOT_ON_FARGATE = ("AllocationStrategy", "MinvCpus", "DesiredvCpus", "InstanceTypes", "InstanceRole", "PlacementGroup")
NOT_ON_FARGATE += (
    "LaunchTemplate",
    "Ec2Configuration",
    "Ec2KeyPair",
    "BidPercentage",
    "SpotIamFleetRole",
    "Tags",
    "ScalingPolicy",
)


@dataclass(frozen=True)
class Batch:
    """Everything of a deployment that AWS Batch sees, as CloudFormation properties by name.

    Attributes:
        templates: launch templates (EC2's, but Batch judges them).
        submissions: state name -> parameters of the state machine's submitJob.
    """

    environments: dict[str, Properties]
    templates: dict[str, Properties]
    queues: dict[str, Properties]
    policies: dict[str, Properties]
    definitions: dict[str, Properties]
    submissions: dict[str, Properties]

    @classmethod
    def of(cls, stacks: Stacks) -> Batch:
        def named(kind: str) -> dict[str, Properties]:
            return {found.name: found.properties for found in stacks.of_type(kind)}

        return cls(
            environments=named("AWS::Batch::ComputeEnvironment"),
            templates=named("AWS::EC2::LaunchTemplate"),
            queues=named("AWS::Batch::JobQueue"),
            policies=named("AWS::Batch::SchedulingPolicy"),
            definitions=named("AWS::Batch::JobDefinition"),
            submissions=dict(_submissions(stacks.of_type("AWS::StepFunctions::StateMachine"))),
        )

    def resources(self, environment: str) -> Properties:
        found: Properties = self.environments[environment]["ComputeResources"]
        return found

    def interfaces(self, environment: str) -> list[Properties]:
        """Network interfaces of the environment's launch template."""
        template = self.resources(environment).get("LaunchTemplate")
        data = self.templates[template["LaunchTemplateId"]]["LaunchTemplateData"] if template else {}
        return list(data.get("NetworkInterfaces", ()))

    def in_a_block(self, environment: str) -> bool:
        template = self.templates[self.resources(environment)["LaunchTemplate"]["LaunchTemplateId"]]["LaunchTemplateData"]
        return bool(template.get("InstanceMarketOptions", {}).get("MarketType") == "capacity-block")

    def environments_of(self, queue: str) -> list[str]:
        order = self.queues[queue]["ComputeEnvironmentOrder"]
        return [_by_arn(self.environments, entry["ComputeEnvironment"]) for entry in order]

    def runs(self) -> Iterator[tuple[str, Properties, str]]:
        """Every (job definition, its properties, queue) that the state machine brings together."""
        for parameters in self.submissions.values():
            queue = _by_arn(self.queues, parameters["JobQueue"])
            if "JobDefinition" in parameters:
                name = parameters["JobDefinition"].rpartition("/")[2].partition(":")[0]
                yield name, self.definitions[name], queue
            else:
                # The state machine looks a gang's definition up by stage and number of nodes.
                stage = parameters["JobDefinition.$"].rpartition(".")[2]
                for name, properties in self.definitions.items():
                    if re.search(rf"-{stage}-\d+$", name):
                        yield name, properties, queue


Rule = Callable[[Batch], Iterator[str]]
RULES: list[Rule] = []


def rule(check: Rule) -> Rule:
    RULES.append(check)
    return check


def problems(batch: Batch) -> list[str]:
    """`NAME: why` for everything that Batch would refuse or never start."""
    return [found for check in RULES for found in check(batch)]


@rule
def groups_stand_in_one_place(batch: Batch) -> Iterator[str]:
    """Groups in the environment, or on the launch template's interfaces (aws/aws-cdk#21577: both are refused with a 400)."""
    for name in batch.environments:
        groups = batch.resources(name).get("SecurityGroupIds")
        on_interfaces = [interface for interface in batch.interfaces(name) if interface.get("Groups")]
        if groups is not None and batch.interfaces(name):
            yield f"{name}: security groups in addition to the launch template's network interfaces"
        if not groups and not on_interfaces:
            yield f"{name}: no security group, neither of its own nor on the launch template's interfaces"
        if len(groups or ()) > 5:
            yield f"{name}: more than five security groups"


@rule
def fargate_environments_name_no_hosts(batch: Batch) -> Iterator[str]:
    """API_ComputeResource: "This parameter isn't applicable to jobs that are running on Fargate resources. Don't specify it"."""
    for name in batch.environments:
        resources = batch.resources(name)
        if resources["Type"] in FARGATE_TYPES:
            for key in NOT_ON_FARGATE:
                if key in resources:
                    yield f"{name}: {key} does not go with {resources['Type']}"
            if len(resources["Subnets"]) > 16:
                yield f"{name}: more than 16 subnets on Fargate"


@rule
def allocation_goes_with_the_market(batch: Batch) -> Iterator[str]:
    """API_ComputeResource, allocationStrategy; updates in place need another than BEST_FIT
    (userguide/updating-compute-environments)."""
    for name, properties in batch.environments.items():
        resources = batch.resources(name)
        if resources["Type"] not in EC2_TYPES:
            continue
        strategy = resources.get("AllocationStrategy", "BEST_FIT")
        if strategy.startswith("SPOT_") != (resources["Type"] == "SPOT") and strategy != "BEST_FIT":
            yield f"{name}: {strategy} on {resources['Type']}"
        if strategy == "BEST_FIT" and properties.get("ReplaceComputeEnvironment") is False:
            yield f"{name}: BEST_FIT cannot be updated in place"
        if resources.get("MinvCpus", 0) > resources["MaxvCpus"]:
            yield f"{name}: MinvCpus above MaxvCpus"


@rule
def hosts_are_kept_for_twenty_minutes_or_a_week_at_most(batch: Batch) -> Iterator[str]:
    """API_ComputeScalingPolicy: minScaleDownDelayMinutes: 20 to 10080, or 0 for none."""
    for name in batch.environments:
        delay = batch.resources(name).get("ScalingPolicy", {}).get("MinScaleDownDelayMinutes", 0)
        if delay and not 20 <= delay <= 10_080:
            yield f"{name}: a scale-down delay of {delay} minutes"


@rule
def chips_have_an_image_with_their_driver(batch: Batch) -> Iterator[str]:
    """No image of Batch's own has a Neuron driver, and new environments take no Batch-provided Amazon Linux 2
    (userguide/compute_resource_AMIs)."""
    for name in batch.environments:
        resources = batch.resources(name)
        for instance_type in resources.get("InstanceTypes", ()):
            images = resources.get("Ec2Configuration", [{}])
            if instance_type.split(".")[0] in ("trn1", "trn1n", "inf2") and not all(
                "ImageIdOverride" in image for image in images
            ):
                yield f"{name}: {instance_type} with an image of Batch's own"
        for image in resources.get("Ec2Configuration", ()):
            if image["ImageType"] == "ECS_AL2" and "ImageIdOverride" not in image:
                yield f"{name}: Batch's own image of Amazon Linux 2"


@rule
def gpus_have_the_image_with_their_driver(batch: Batch) -> Iterator[str]:
    """API_Ec2Configuration: only images of the types ..._NVIDIA have the driver; on Fargate "GPUs aren't available"
    (API_ResourceRequirement)."""
    for name in batch.environments:
        resources = batch.resources(name)
        for instance_type in resources.get("InstanceTypes", ()):
            on_nvidia = [image["ImageType"].endswith("_NVIDIA") for image in resources.get("Ec2Configuration", ())]
            if on_nvidia != [instance_type.startswith(("g6e.", "p4d.", "p5."))]:
                yield f"{name}: {instance_type} with the image types {resources.get('Ec2Configuration')}"
    for name, container in _containers(batch):
        if "FARGATE" in batch.definitions[name].get("PlatformCapabilities", ()) and "GPU" in _needs(container):
            yield f"{name}: GPUs on Fargate"


@rule
def interfaces_fit_their_cards(batch: Batch) -> Iterator[str]:
    """One primary interface, one index per card and device; no public address with several
    (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-eni.html#network-cards)."""
    for name, template in batch.templates.items():
        interfaces = template["LaunchTemplateData"].get("NetworkInterfaces", [])
        places = [(interface.get("NetworkCardIndex", 0), interface["DeviceIndex"]) for interface in interfaces]
        if interfaces and places.count((0, 0)) != 1:
            yield f"{name}: no primary interface"
        if len(set(places)) != len(places):
            yield f"{name}: two interfaces in one place"
        if any(card > 0 and device == 0 for card, device in places):
            yield f"{name}: device index 0 on another card than the first"
        if len(interfaces) > 1 and any(interface.get("AssociatePublicIpAddress") for interface in interfaces):
            yield f"{name}: a public address with several interfaces"
        if any("SubnetId" in interface for interface in interfaces):
            yield f"{name}: a subnet, which Batch ignores"


@rule
def efa_stays_in_one_zone(batch: Batch) -> Iterator[str]:
    """One subnet (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa.html); a cluster placement group (userguide/mnp-ce),
    except in a Capacity Block, whose hosts EC2 places close together
    (https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html)."""
    for name in batch.environments:
        if any(interface.get("InterfaceType") == "efa" for interface in batch.interfaces(name)):
            resources = batch.resources(name)
            if len(resources["Subnets"]) != 1:
                yield f"{name}: EFA over {len(resources['Subnets'])} subnets"
            if ("PlacementGroup" in resources) == batch.in_a_block(name):
                yield f"{name}: EFA without a placement group, or one for a Capacity Block"


@rule
def queues_act_on_known_reasons(batch: Batch) -> Iterator[str]:
    """https://docs.aws.amazon.com/batch/latest/APIReference/API_JobStateTimeLimitAction.html; a queue has three environments at
    most, of one kind."""
    for name, queue in batch.queues.items():
        for action in queue.get("JobStateTimeLimitActions", ()):
            if action["Reason"] not in ACTED_ON:
                yield f"{name}: the reason {action['Reason']}"
            if (action["State"], action["Action"]) != ("RUNNABLE", "CANCEL"):
                yield f"{name}: {action['Action']} in the state {action['State']}"
            if not 600 <= action["MaxTimeSeconds"] <= 86_400:
                yield f"{name}: a limit of {action['MaxTimeSeconds']} seconds"
        kinds = {batch.resources(each)["Type"] in FARGATE_TYPES for each in batch.environments_of(name)}
        if len(kinds) != 1 or len(queue["ComputeEnvironmentOrder"]) > 3:
            yield f"{name}: more than three environments, or Fargate mixed with EC2"


@rule
def shares_are_told_apart(batch: Batch) -> Iterator[str]:
    """API_ShareAttributes and API_FairsharePolicy."""
    for name, policy in batch.policies.items():
        fair = policy["FairsharePolicy"]
        shares = [share["ShareIdentifier"] for share in fair.get("ShareDistribution", ())]
        for share in shares:
            if not re.fullmatch(r"[A-Za-z0-9]{1,254}\*?", share):
                yield f"{name}: the share {share} is not alphanumeric"
            if share.endswith("*") and any(other != share and other.startswith(share[:-1]) for other in shares):
                yield f"{name}: the share {share} overlaps with another"
        if len(shares) > 500 or len(set(shares)) != len(shares):
            yield f"{name}: more than 500 shares, or one twice"
        if any(not 0.0001 <= share.get("WeightFactor", 1) <= 999.9999 for share in fair.get("ShareDistribution", ())):
            yield f"{name}: a weight outside 0.0001 to 999.9999"
        if not 0 <= fair.get("ComputeReservation", 0) <= 99:
            yield f"{name}: a compute reservation outside 0 to 99"
        if not 0 <= fair.get("ShareDecaySeconds", 0) <= 604_800:
            yield f"{name}: a decay outside 0 to 604800 seconds"


@rule
def retries_end(batch: Batch) -> Iterator[str]:
    """https://docs.aws.amazon.com/batch/latest/userguide/job_retries.html and EXIT_PATTERNS: 1 to 10 attempts, five rules, a
    trailing `*` only; no match means another attempt."""
    for name, properties in batch.definitions.items():
        strategy = properties.get("RetryStrategy", {})
        rules = strategy.get("EvaluateOnExit", [])
        if not 1 <= strategy.get("Attempts", 1) <= 10:
            yield f"{name}: {strategy['Attempts']} attempts"
        if rules and "Attempts" not in strategy:
            yield f"{name}: exit rules without attempts"
        if len(rules) > 5:
            yield f"{name}: {len(rules)} exit rules"
        for exit_rule in rules:
            patterns = {key: str(value) for key, value in exit_rule.items() if key != "Action"}
            if not patterns:
                yield f"{name}: an exit rule without a pattern"
            if exit_rule["Action"].upper() not in ("RETRY", "EXIT"):
                yield f"{name}: the action {exit_rule['Action']}"
            for key, pattern in patterns.items():
                if not EXIT_PATTERNS[key].fullmatch(pattern):
                    yield f"{name}: {key} cannot be {pattern}"
        everything = [set(exit_rule.values()) - {exit_rule["Action"]} == {"*"} for exit_rule in rules]
        if True in everything[:-1]:
            yield f"{name}: exit rules behind one that matches everything"


@rule
def names_are_in_form(batch: Batch) -> Iterator[str]:
    """Names as in NAME; 50 tags at most, none that begins with `aws:`
    (https://docs.aws.amazon.com/batch/latest/userguide/tag-basics.html)."""
    for name, properties in (batch.queues | batch.definitions).items():
        if not NAME.fullmatch(name):
            yield f"the name {name}"
        tags = properties.get("Tags", {})
        if len(tags) > 50 or any(key.lower().startswith("aws:") for key in tags):
            yield f"{name}: the tags {sorted(tags)}"
        if not 0 <= properties.get("SchedulingPriority", 0) <= 9999:
            yield f"{name}: a priority outside 0 to 9999"
    for name, container in _containers(batch):
        if not IMAGE.fullmatch(container["Image"]):
            yield f"{name}: the image {container['Image']}"


@rule
def user_data_can_be_merged(batch: Batch) -> Iterator[str]:
    """Batch merges a launch template's user data with its own, in the MIME multi-part format only: another one makes the
    environment INVALID (https://docs.aws.amazon.com/batch/latest/userguide/launch-templates.html)."""
    for name, template in batch.templates.items():
        data = template["LaunchTemplateData"].get("UserData")
        if data is None:
            continue
        message = email.message_from_bytes(base64.b64decode(data, validate=True))
        defects = [type(defect).__name__ for part in message.walk() for defect in part.defects]
        if message.get_content_type() != "multipart/mixed" or not message.is_multipart() or defects:
            yield f"{name}: user data of the type {message.get_content_type()}, {defects}"


@rule
def jobs_have_a_minute_at_least(batch: Batch) -> Iterator[str]:
    """API_JobTimeout."""
    for name, properties in batch.definitions.items():
        if properties.get("Timeout", {}).get("AttemptDurationSeconds", 60) < 60:
            yield f"{name}: a timeout below 60 seconds"


@rule
def resources_are_asked_for_once(batch: Batch) -> Iterator[str]:
    """API_ContainerProperties: `vcpus` and `memory` are deprecated, and exclude resourceRequirements in overrides."""
    for name, container in _containers(batch):
        if "Vcpus" in container or "Memory" in container:
            yield f"{name}: vcpus or memory together with resourceRequirements"
        if {"VCPU", "MEMORY"} - _needs(container).keys():
            yield f"{name}: no vCPUs or no memory asked for"


@rule
def fargate_jobs_have_a_size_that_exists(batch: Batch) -> Iterator[str]:
    """API_ResourceRequirement, API_EphemeralStorage, API_LinuxParameters: what they say of Fargate."""
    for name, container in _containers(batch):
        if "FARGATE" not in batch.definitions[name].get("PlatformCapabilities", ()):
            continue
        needs = _needs(container)
        if needs["MEMORY"] not in FARGATE_MEMORY.get(needs["VCPU"], ()):
            yield f"{name}: {needs['VCPU']} vCPUs with {needs['MEMORY']} MiB on Fargate"
        if not 21 <= container.get("EphemeralStorage", {}).get("SizeInGiB", 21) <= 200:
            yield f"{name}: a disk outside 21 to 200 GiB on Fargate"
        if container.get("LinuxParameters", {}).keys() - {"InitProcessEnabled"} or container.get("Privileged"):
            yield f"{name}: devices, shared memory or privileges on Fargate"
        if container.get("Ulimits"):
            yield f"{name}: ulimits on Fargate"
        if "ExecutionRoleArn" not in container:
            yield f"{name}: no execution role on Fargate"


@rule
def hosts_take_no_fargate_parameters(batch: Batch) -> Iterator[str]:
    """API_ContainerProperties: networkConfiguration and the like "must not be specified" for EC2 resources."""
    for name, container in _containers(batch):
        if "FARGATE" not in batch.definitions[name].get("PlatformCapabilities", ()):
            for key in ("NetworkConfiguration", "FargatePlatformConfiguration", "EphemeralStorage", "RuntimePlatform"):
                if key in container:
                    yield f"{name}: {key} on EC2"


@rule
def devices_keep_their_names(batch: Batch) -> Iterator[str]:
    """userguide/efa: a device's path in the container is the host's. Permissions are upper case."""
    for name, container in _containers(batch):
        devices = container.get("LinuxParameters", {}).get("Devices", ())
        for device in devices:
            if device["HostPath"].startswith("/dev/infiniband/") and device.get("ContainerPath") != device["HostPath"]:
                yield f"{name}: the EFA device {device['HostPath']} under another name"
            if set(device.get("Permissions", ())) - {"READ", "WRITE", "MKNOD"}:
                yield f"{name}: the permissions {device['Permissions']}"
        if len({device["HostPath"] for device in devices}) != len(devices):
            yield f"{name}: a device twice"


@rule
def reserved_names_stay_unset(batch: Batch) -> Iterator[str]:
    """API_ContainerProperties, environment: names must not start with AWS_BATCH."""
    for name, container in _containers(batch):
        names = [variable["Name"] for variable in container.get("Environment", ())]
        if reserved := [variable for variable in names if variable.startswith("AWS_BATCH")]:
            yield f"{name}: the reserved variables {reserved}"


@rule
def node_ranges_cover_the_gang(batch: Batch) -> Iterator[str]:
    """userguide/mnp-node-groups: five at most, every node in one, a thousand nodes at most, one instance type for all."""
    for name, properties in batch.definitions.items():
        nodes = properties.get("NodeProperties")
        if (nodes is not None) != (properties["Type"] == "multinode"):
            yield f"{name}: node properties and the type {properties['Type']}"
        if nodes is None:
            continue
        ranges = nodes["NodeRangeProperties"]
        covered = {node for entry in ranges for node in _range(entry["TargetNodes"], nodes["NumNodes"])}
        if covered != set(range(nodes["NumNodes"])) or len(ranges) > 5 or nodes["NumNodes"] > 1000:
            yield f"{name}: node ranges {[entry['TargetNodes'] for entry in ranges]} of {nodes['NumNodes']} nodes"
        if not 0 <= nodes["MainNode"] < nodes["NumNodes"]:
            yield f"{name}: the main node {nodes['MainNode']} of {nodes['NumNodes']}"
        types = {tuple(entry.get("InstanceTypes", ())) for entry in ranges}
        if len(types) > 1 or any(len(found) > 1 for found in types):
            yield f"{name}: several instance types"
        if "PlatformCapabilities" in properties and "FARGATE" in properties["PlatformCapabilities"]:
            yield f"{name}: a gang on Fargate"


@rule
def gangs_find_hosts(batch: Batch) -> Iterator[str]:
    """userguide/mnp-ce: On-Demand hosts of one type, one for each node; above maxvCpus a job stays RUNNABLE."""
    for name, properties, queue in batch.runs():
        if (nodes := properties.get("NodeProperties")) is None:
            continue
        for environment in batch.environments_of(queue):
            resources = batch.resources(environment)
            if resources["Type"] != "EC2":
                yield f"{name}: a gang on {resources['Type']}"
                continue
            [instance_type] = nodes["NodeRangeProperties"][0].get("InstanceTypes") or resources["InstanceTypes"]
            if instance_type not in resources["InstanceTypes"]:
                yield f"{name}: {instance_type}, which {environment} does not have"
            elif nodes["NumNodes"] * HARDWARE[instance_type].vcpus > _usable(batch, queue, environment):
                yield f"{name}: {nodes['NumNodes']} hosts are more than {environment} may use at once"
            host = HARDWARE[instance_type]
            if nodes["NumNodes"] > 1 and (host.neuron_devices or host.gpus) and not host.efa_interfaces:
                yield f"{name}: several nodes on {instance_type}, which has no EFA"


@rule
def jobs_fit_their_hosts(batch: Batch) -> Iterator[str]:
    """userguide/job_stuck_in_runnable, MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT; and the platform is the queue's."""
    for name, properties, queue in batch.runs():
        for environment in batch.environments_of(queue):
            resources = batch.resources(environment)
            on_fargate = "FARGATE" in properties.get("PlatformCapabilities", ())
            if on_fargate != (resources["Type"] in FARGATE_TYPES):
                yield f"{name}: platform {properties.get('PlatformCapabilities')} on {resources['Type']}"
            for container in _containers_of(properties):
                needs = _needs(container)
                for instance_type in resources.get("InstanceTypes", ()):
                    host = HARDWARE[instance_type]
                    if needs.get("VCPU", 0) > host.vcpus or needs.get("MEMORY", 0) >= host.memory_mib:
                        yield f"{name}: asks for more than a {instance_type} has"
                    if needs.get("GPU", 0) != host.gpus:
                        yield f"{name}: {needs.get('GPU', 0):g} GPUs of the {host.gpus} of a {instance_type}"


@rule
def shares_go_with_a_policy(batch: Batch) -> Iterator[str]:
    """API_SubmitJob, shareIdentifier: with a fair-share policy share and priority are needed, without one refused."""
    for state, parameters in batch.submissions.items():
        fair = "SchedulingPolicyArn" in batch.queues[_by_arn(batch.queues, parameters["JobQueue"])]
        given = [key.removesuffix(".$") for key in parameters]
        for key in ("ShareIdentifier", "SchedulingPriorityOverride"):
            if fair != (key in given):
                yield f"{state}: {key} {'missing' if fair else 'given'} where the queue has {'a' if fair else 'no'} policy"
        if not 0 <= parameters.get("SchedulingPriorityOverride", 0) <= 9999:
            yield f"{state}: a priority outside 0 to 9999"


@rule
def arrays_have_two_children(batch: Batch) -> Iterator[str]:
    """API_ArrayProperties: 2 to 10000; no gang is an array."""
    for state, parameters in batch.submissions.items():
        size = parameters.get("ArrayProperties", {}).get("Size", 2)
        if not 2 <= size <= 10_000:
            yield f"{state}: an array of {size}"
        if "ArrayProperties" in parameters and "JobDefinition.$" in parameters:
            yield f"{state}: a gang as an array"


@rule
def parameters_have_values(batch: Batch) -> Iterator[str]:
    """userguide/job_definition_parameters: every `Ref::name` of a command has a value, of the definition or of the submission."""
    for state, parameters in batch.submissions.items():
        given = {key.removesuffix(".$") for key in parameters.get("Parameters", {})}
        for name, properties, queue in batch.runs():
            if queue != _by_arn(batch.queues, parameters["JobQueue"]):
                continue
            known = given | properties.get("Parameters", {}).keys()
            for container in _containers_of(properties):
                words = [word.removeprefix("Ref::") for word in container["Command"] if word.startswith("Ref::")]
                if absent := set(words) - known:
                    yield f"{state}: {name} needs the parameters {sorted(absent)}"


@rule
def gangs_take_no_container_overrides(batch: Batch) -> Iterator[str]:
    """API_SubmitJob, containerOverrides: multi-node jobs take nodeOverrides instead."""
    for state, parameters in batch.submissions.items():
        if "JobDefinition.$" in parameters and "ContainerOverrides" in parameters:
            yield f"{state}: container overrides of a gang"


def _submissions(machines: list[Resource]) -> Iterator[tuple[str, Properties]]:
    for machine in machines:
        for name, state in json.loads(machine.properties["DefinitionString"])["States"].items():
            if "batch:submitJob" in str(state.get("Resource")):
                yield name, state["Parameters"]


def _by_arn(found: Mapping[str, Properties], arn: str) -> str:
    [name] = [name for name in found if re.search(rf"[:/]{re.escape(name)}$", arn)]
    return name


def _usable(batch: Batch, queue: str, environment: str) -> float:
    """vCPUs that one active share may use: a reservation holds back (reservation / 100) ^ 1 of them (API_FairsharePolicy)."""
    arn = batch.queues[queue].get("SchedulingPolicyArn")
    fair = batch.policies[_by_arn(batch.policies, arn)]["FairsharePolicy"] if arn else {}
    usable: float = batch.resources(environment)["MaxvCpus"] * (100 - fair.get("ComputeReservation", 0)) / 100
    return usable


def _containers(batch: Batch) -> Iterator[tuple[str, Properties]]:
    for name, properties in batch.definitions.items():
        for container in _containers_of(properties):
            yield name, container


def _containers_of(properties: Properties) -> list[Properties]:
    if "NodeProperties" in properties:
        return [entry["Container"] for entry in properties["NodeProperties"]["NodeRangeProperties"]]
    return [properties["ContainerProperties"]]


def _needs(container: Properties) -> dict[str, float]:
    return {need["Type"]: float(need["Value"]) for need in container.get("ResourceRequirements", ())}


def _range(target: str, nodes: int) -> range:
    low, _, high = target.partition(":")
    return range(int(low or 0), int(high) + 1 if high else nodes)
