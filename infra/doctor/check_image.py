"""Images that the hosts boot and run: the AMI with its Neuron driver, and the two container images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from infra.app import CDK
from infra.doctor.asking import Findings, Refused, Subject, check, ok, problem, warning
from infra.doctor.blueprint import ContainerImage
from infra.settings import AMI_ID, AMI_PARAMETER, DRIVER_RULE
from pipeline.contract import ROOT_DEVICE, ROOT_VOLUME_GIB

DRIVER = (2, 27)
TOO_NEW = (2, 29)
DRIVER_WORDS = re.compile(
    r"(?:neuron[-_ .x]*(?:driver|dkms)|neuronx[-_ ]?dkms|driver)[^0-9]{0,12}(?P<major>2)\.(?P<minor>\d+)(?:\.x presumed)?", re.I
)
"""A driver's version after one of its usual names, as in `aws-neuronx-dkms 2.27.4.0` or `neuron-driver-2.27`; `trnpipe ami` tags
a copy as `2.27.x presumed`."""

GONE = ("RepositoryNotFoundException", "ImageNotFoundException")


@check("Images", "ssm:GetParameter", "ec2:DescribeImages")
def ami(subject: Subject) -> Findings:
    if (setting := subject.settings.ami) is None:
        yield ok("AMI", "the one that AWS Batch chooses")
        return
    image_id = setting
    if parameter := AMI_PARAMETER.fullmatch(setting):
        name = f"{parameter['name']}:{parameter['version']}"
        if (answer := subject.seek(("ParameterNotFound", "ParameterVersionNotFound"), "ssm", "GetParameter", Name=name)) is None:
            yield problem(
                "the AMI's SSM parameter does not exist",
                value=name,
                rule="trnpipe.ami names a parameter of this account and region, with its version",
                remedy="trnpipe ami --copy AMI_ID writes it; or "
                f"aws ssm put-parameter --region {subject.settings.region} --type String --data-type aws:ec2:image "
                f"--name {parameter['name']} --value ami-..., and put the version that it prints into trnpipe.ami",
            )
            return
        image_id = answer["Parameter"]["Value"]
        if not AMI_ID.fullmatch(image_id):
            yield problem(
                "the AMI's SSM parameter holds no image id",
                value=f"{name} = {image_id}",
                rule="its value is ami-...",
                remedy=f"aws ssm put-parameter --overwrite --name {parameter['name']} --value ami-..., and name the new version",
            )
            return
        yield ok("SSM parameter of the AMI", f"{name} = {image_id}")
    gone = ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidAMIID.Malformed")
    answer = subject.seek(gone, "ec2", "DescribeImages", ImageIds=[image_id])
    if answer is None or not answer["Images"]:
        yield problem(
            "the AMI does not exist",
            value=image_id,
            rule=f"an image of region {subject.settings.region} that this account may use",
            remedy=f"aws ec2 copy-image brings one from another region; its owner shares one with account {subject.account}",
        )
    else:
        yield from judge_ami(answer["Images"][0], subject.account)


def judge_ami(image: Mapping[str, Any], account: str) -> Findings:
    """Judge one image of EC2's DescribeImages."""
    named = f"{image['ImageId']} ({image.get('Name', 'without a name')})"
    other = "choose another image: trnpipe.ami"
    wrong = [
        problem(what, value=f"{named}: {value}", rule=f"{wanted}: {why}", remedy=other)
        for what, value, wanted, why in (
            ("the AMI is not available", image["State"], "available", "hosts boot from available images only"),
            ("the AMI is for another processor", image["Architecture"], "x86_64", "Trainium and Inferentia hosts are x86_64"),
            (
                "the AMI's root device has another name than the launch template assumes",
                image.get("RootDeviceName", ""),
                ROOT_DEVICE,
                "the template would add a second volume and leave the root at the image's size, too small for the container",
            ),
        )
        if value != wanted
    ]
    sizes = [device["Ebs"].get("VolumeSize", 0) for device in image.get("BlockDeviceMappings", ()) if "Ebs" in device]
    if max(sizes, default=0) > ROOT_VOLUME_GIB:
        wrong.append(
            problem(
                "the AMI's volume is larger than the launch template's",
                value=f"{named}: {max(sizes)} GiB",
                rule=f"EC2 makes no volume smaller than its snapshot; the template has {ROOT_VOLUME_GIB} GiB",
                remedy=other,
            )
        )
    yield from wrong
    owner = image.get("ImageOwnerAlias") or ("self" if image["OwnerId"] == account else image["OwnerId"])
    if owner not in ("amazon", "aws-marketplace", "self"):
        yield warning(
            "another account owns the AMI",
            value=f"{named}: owner {owner}",
            rule="the owner of an image can withdraw it, and then no host starts",
            remedy=f"aws ec2 copy-image --source-image-id {image['ImageId']} makes it your own",
        )
    if not wrong:
        yield ok("AMI", f"{named}, owner {owner}")
    tags = (f"{tag['Key']} {tag['Value']}" for tag in image.get("Tags", ()))
    if (driver := DRIVER_WORDS.search("\n".join([image.get("Name", ""), image.get("Description", ""), *tags]))) is None:
        yield warning(
            "the AMI's name, description and tags do not name its Neuron driver",
            value=named,
            rule=f"{DRIVER_RULE}; the first test of health_check reads the driver's version, before anything is trained",
            remedy=f"aws ec2 create-tags --resources {image['ImageId']} --tags Key=neuron-driver,Value=2.27.x names it",
        )
        return
    version, found = (int(driver["major"]), int(driver["minor"])), f"{named}: {driver[0]}"
    bake = "trnpipe ami lists AMIs of Amazon's with driver 2.27; or bake one"
    if version == DRIVER:
        yield ok("Neuron driver", driver[0])
    elif version >= TOO_NEW:
        yield problem("the AMI's Neuron driver is too new", value=found, rule=DRIVER_RULE, remedy=bake)
    else:
        yield warning("the AMI has another Neuron driver", value=found, rule=DRIVER_RULE, remedy=bake)


@check("Images", "ecr:DescribeImages")
def containers(subject: Subject) -> Findings:
    for container in subject.blueprint.containers:
        if container.repository is None:
            yield warning(
                f"the {container.name} image cannot be looked at",
                value=container.uri,
                rule="only images in ECR can; hosts need a way to any other registry",
                remedy=f"push it to {subject.account}.dkr.ecr.{subject.settings.region}.amazonaws.com",
            )
        elif container.region not in (None, subject.settings.region):
            yield warning(
                f"the {container.name} image is in another region",
                value=container.uri,
                rule="endpoints of a VPC without a way to the internet reach this region's registry only",
                remedy=f"push it to a repository in {subject.settings.region}",
            )
        else:
            yield from _container(subject, container)


def _container(subject: Subject, container: ContainerImage) -> Findings:
    reference: dict[str, Any] = {
        "repositoryName": container.repository,
        **({"registryId": container.registry} if container.registry else {}),
    }
    wanted = {"imageDigest" if container.version.startswith("sha256:") else "imageTag": container.version}
    named = f"{container.repository}:{container.version}"
    pushed = f"{container.registry or subject.account}.dkr.ecr.{subject.settings.region}.amazonaws.com/{named}"
    push = (
        f"make images KINDS={container.name} TAG=new && docker tag trnpipe/{container.name}:new {pushed} && docker push {pushed}"
    )
    try:
        [details] = subject.ask("ecr", "DescribeImages", imageIds=[wanted], **reference)["imageDetails"]
    except Refused as refused:
        if refused.code == "RepositoryNotFoundException" and container.registry is None and not subject.after:
            yield warning(
                f"the image repository {container.repository} does not exist yet",
                rule="the data stack creates it",
                remedy=f"{CDK} deploy {subject.blueprint.data_stack}, then {push}",
            )
        elif refused.code in GONE:
            yield problem(
                f"the image {named} has not been pushed",
                value=refused.code,
                rule="every job pulls it; without it every attempt fails with CannotPullContainerError",
                remedy=push,
            )
        else:
            raise
        return
    # ECR gives no size for an index of several images.
    yield ok(f"image {named}", f"{size / 2**30:.1f} GiB compressed" if (size := details.get("imageSizeInBytes")) else "there")
