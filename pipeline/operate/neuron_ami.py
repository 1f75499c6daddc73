"""Find an AMI of Amazon's that holds Neuron driver 2.27.x, and copy it into the account: no AMI has to be built.

Amazon ECS publishes AMIs for Neuron. Their names hold the day of the release; no name, tag or description holds the driver.

Sure, from AWS's sources:

- Since January 2026 their build installs the newest `aws-neuronx-dkms` of Neuron's package repository, without a version; before
  that it pinned 2.21: https://github.com/aws/amazon-ecs-ami/pull/604, scripts/enable-ecs-agent-inferentia-support.sh.
- Driver 2.27.4.0 came with Neuron 2.29.0 on 2026-04-09, and 2.28.0.0 with Neuron 2.30.0 on 2026-05-21; Neuron 2.29.1 between them
  kept 2.27.4.0: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/release-notes/components/runtime.html and
  https://github.com/aws-neuron/aws-neuron-sdk/blob/master/src/helperscripts/n2-manifest.json.
- ECS released AMIs for AL2023 as 20260414, 20260424, 20260504, 20260506, 20260511, 20260514 and 20260518 within that period:
  https://github.com/aws/amazon-ecs-ami/blob/main/CHANGELOG.md.
- ECS deprecates an AMI two years after its creation:
  https://docs.aws.amazon.com/AmazonECS/latest/developerguide/ecs-optimized_AMI.html.

Not sure, because no host was started from one:

- Each of these AMIs holds 2.27.4.0. This follows from the dates alone. A package may appear in the repository days before or
  after the release notes, so an AMI from the middle of the period is surer than the first or the last.
- The kernel's own EFA module is new enough. The build of these AMIs installs no other.
- Amazon lets other accounts copy the snapshots behind these AMIs, and does not remove the AMIs before it deprecates them.

The tag of a copy therefore says "presumed". health_check reads the driver's version and counts the EFA devices on every host
before training (pipeline/health/neuron_host.py).
"""

from __future__ import annotations

from typing import Any

from botocore.exceptions import WaiterError

from pipeline.errors import MissingInput, Transient
from pipeline.operate.deployment import Site

NAMES = "al2023-ami-ecs-neuron-hvm-2023.0.*-x86_64"
FIRST_DAY, LAST_DAY = "2026-04-10", "2026-05-20"
"""Days of creation, in UTC, on which 2.27.4.0 was the newest driver throughout."""

DRIVER_TAG = "neuron-driver"
DRIVER = "2.27.x presumed"

POLL = {"Delay": 15, "MaxAttempts": 240}
"""Seconds between two looks at a copy, and how many: an hour."""


def find_amis(site: Site) -> list[dict[str, Any]]:
    """Return Amazon's AMIs of the region that should hold the driver, oldest first, as EC2's DescribeImages describes them.

    Raises:
        MissingInput: there is none; see also `Site.asking`.
    """
    filters = [{"Name": "name", "Values": [NAMES]}, {"Name": "state", "Values": ["available"]}]
    asked: dict[str, Any] = {"Owners": ["amazon"], "IncludeDeprecated": True, "Filters": filters}
    found = site.ask("AMIs of Amazon's", "ec2", "describe_images", **asked)["Images"]
    fitting = [image for image in found if FIRST_DAY <= image["CreationDate"][:10] <= LAST_DAY]
    if not fitting:
        raise MissingInput(
            "this region has no AMI of Amazon's with Neuron driver 2.27",
            value=f"{site.client('ec2').meta.region_name}: {len(found)} named {NAMES}",
            rule=f"created from {FIRST_DAY} to {LAST_DAY}, while the driver was the newest",
            remedy="look in another region with -c trnpipe.region=...; or bake one: docs/deploy.md, section 2",
        )
    return sorted(fitting, key=lambda image: str(image["CreationDate"]))


def copy_ami(site: Site, image_id: str, parameter: str) -> str:
    """Copy one of Amazon's AMIs into the account, tag it, wait for it and name it in a new version of an SSM parameter.

    A second call with the same AMI continues with the copy of the first.

    Args:
        image_id: one of `find_amis`.
        parameter: name of the SSM parameter, such as /trnpipe/ami/neuron-driver-2.27.

    Returns:
        The setting `ami`: ssm:NAME:VERSION.

    Raises:
        MissingInput: it is not one of them.
        Transient: the copy is not available after an hour, or failed; see also `Site.asking`.
    """
    fitting = {image["ImageId"]: image for image in find_amis(site)}
    if image_id not in fitting:
        raise MissingInput(
            "not an AMI of Amazon's with Neuron driver 2.27",
            value=image_id,
            rule=f"one of {', '.join(fitting)}",
            remedy="name one of them",
        )
    name = fitting[image_id]["Name"]
    own: dict[str, Any] = {"Owners": ["self"], "Filters": [{"Name": "name", "Values": [name]}]}
    copies = site.ask(name, "ec2", "describe_images", **own)["Images"]
    source = {"Name": name, "SourceImageId": image_id, "SourceRegion": site.client("ec2").meta.region_name}
    copy = (copies[0] if copies else site.ask(image_id, "ec2", "copy_image", **source))["ImageId"]
    tag = {"Key": DRIVER_TAG, "Value": f"{DRIVER} from its creation on {fitting[image_id]['CreationDate'][:10]}"}
    site.ask(copy, "ec2", "create_tags", Resources=[copy], Tags=[tag])
    with site.asking(f"the copy {copy}"):
        try:
            site.client("ec2").get_waiter("image_available").wait(ImageIds=[copy], WaiterConfig=POLL)
        except WaiterError as error:
            raise Transient(
                "the copy of the AMI is not available",
                value=f"{copy}: {error}",
                rule="a copy takes minutes",
                remedy="the same command continues to wait; deregister a copy that failed first",
            ) from error
    given: dict[str, Any] = {"Name": parameter, "Value": copy, "Type": "String", "DataType": "aws:ec2:image", "Overwrite": True}
    return f"ssm:{parameter}:{site.ask(parameter, 'ssm', 'put_parameter', **given)['Version']}"
