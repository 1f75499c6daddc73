"""The CodeBuild project that builds the container images where the operator has no Docker: `trnpipe images` starts it.

No deployment and no run starts a build, and a project that builds nothing costs nothing.
"""

from __future__ import annotations

from aws_cdk import aws_codebuild as codebuild
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.settings import Settings

BUILD_IMAGE = "aws/codebuild/standard:8.0"
"""Ubuntu 24.04 with Docker 28, buildx, make and the AWS CLI. Its package index has a skopeo with `--preserve-digests`; that
of standard:7.0 is older (https://github.com/aws/aws-codebuild-docker-images/blob/master/ubuntu/standard/8.0/Dockerfile)."""

COMPUTE_TYPE = "BUILD_GENERAL1_LARGE"
"""8 vCPUs, 15 GB of memory and 128 GB of disk; the build of the Neuron image takes 60 GB of it
(https://docs.aws.amazon.com/codebuild/latest/userguide/build-env-ref-compute-types.html)."""

BUILD_SPEC = """\
version: 0.2
env:
  shell: bash
phases:
  pre_build:
    commands:
      - aws ecr get-login-password | docker login --username AWS --password-stdin "${REPOSITORIES%%/*}"
      - aws ecr-public get-login-password --region us-east-1 | docker login --username AWS --password-stdin public.ecr.aws
  build:
    commands:
      - |
        (
          set -euo pipefail
          base=
          if [[ " $KINDS " == *" neuron "* ]]; then
            apt-get update -qq
            apt-get install -y -qq skopeo
            base=$(make -s mirror REPOSITORY="$REPOSITORIES/neuron-base" | sed -n 's/^make images //p')
          fi
          make images ENGINE=docker KINDS="$KINDS" TAG="$TAG" REVISION="$REVISION" $base
          for kind in $KINDS; do
            docker tag "trnpipe/$kind:$TAG" "$REPOSITORIES/$kind:$TAG"
            docker push "$REPOSITORIES/$kind:$TAG"
          done
        )
"""
"""The commands of docs/deploy.md, section 4. Both bases come from ECR Public, which limits pulls without a password and gives
passwords in us-east-1 (https://docs.aws.amazon.com/AmazonECR/latest/public/public-registry-auth.html)."""


class ImageBuilder(Construct):
    """One project and its role.

    Args:
        source: BUCKET/KEY of the zip file that it builds from.
        repositories: URI that the repositories' names follow: REGISTRY/NAME.
        log_group: name of the log group of the builds.

    Attributes:
        project_name: name of the project.
        role: the role that builds act under; stacks.py issues its grants.
    """

    def __init__(
        self, scope: Construct, construct_id: str, *, settings: Settings, source: str, repositories: str, log_group: str
    ) -> None:
        super().__init__(scope, construct_id)
        self.project_name = f"{settings.name}-images"
        self.role = iam.Role(
            self,
            "Role",
            assumed_by=iam.ServicePrincipal("codebuild.amazonaws.com"),
            description="Builds of the container images",
        )
        variables = {"REPOSITORIES": repositories, "KINDS": "cpu neuron", "TAG": settings.images.tag, "REVISION": ""}
        codebuild.CfnProject(
            self,
            "Project",
            name=self.project_name,
            description="Builds the container images of the jobs; `trnpipe images` starts it",
            service_role=self.role.role_arn,
            artifacts=codebuild.CfnProject.ArtifactsProperty(type="NO_ARTIFACTS"),
            source=codebuild.CfnProject.SourceProperty(type="S3", location=source, build_spec=BUILD_SPEC),
            environment=codebuild.CfnProject.EnvironmentProperty(
                type="LINUX_CONTAINER",
                image=BUILD_IMAGE,
                compute_type=COMPUTE_TYPE,
                # Docker runs in the build's container.
                privileged_mode=True,
                environment_variables=[
                    codebuild.CfnProject.EnvironmentVariableProperty(name=name, value=value) for name, value in variables.items()
                ],
            ),
            # CodeBuild's default (https://docs.aws.amazon.com/codebuild/latest/APIReference/API_CreateProject.html).
            encryption_key=settings.customer_key or "alias/aws/s3",
            logs_config=codebuild.CfnProject.LogsConfigProperty(
                cloud_watch_logs=codebuild.CfnProject.CloudWatchLogsConfigProperty(status="ENABLED", group_name=log_group)
            ),
            timeout_in_minutes=120,
            queued_timeout_in_minutes=60,
        )
