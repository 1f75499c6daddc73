"""Build the container images in the account, where CodeBuild has the Docker that the operator's machine may lack.

Packs what the Dockerfiles copy, uploads it, starts the project of the deployment's data stack, and follows the build.
"""

from __future__ import annotations

import io
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.cost import IMAGE_KINDS
from pipeline.errors import BadConfig, Defect, Transient, plain
from pipeline.operate.deployment import Site, stack_outputs

POLL_SECONDS = 15.0
LOG_LINES = 40


def build_images(stack: str, kinds: Sequence[str], tag: str, root: Path) -> str:
    """Build images, push them to the deployment's repositories, and return the settings that name them, as YAML.

    Args:
        stack: name of the pipeline's stack; the build needs its data stack alone.
        kinds: which of IMAGE_KINDS.
        root: the clone.

    Raises:
        BadConfig: an unknown kind, a tag that is taken, a data stack without the project, or a build that failed.
        MissingInput: there is no data stack.
        Transient: the build timed out, was stopped, or CodeBuild failed; see also `Site.asking`.
        Defect: a build succeeded without pushing an image.
    """
    if unknown := set(kinds) - set(IMAGE_KINDS):
        raise BadConfig("unknown kind of image", value=sorted(unknown), rule=f"--kinds is {','.join(IMAGE_KINDS)} or one of them")
    site = Site("", stack=stack)
    outputs = stack_outputs(site, f"{stack}-data")
    if "ImageProject" not in outputs:
        raise BadConfig(
            "the data stack has no project that builds images",
            value=f"{stack}-data",
            remedy="deploy the data stack with this version of trnpipe",
        )
    repositories = {kind: outputs[f"{kind.capitalize()}RepositoryUri"] for kind in kinds}
    if taken := [f"{uri}:{tag}" for uri in repositories.values() if _digest(site, uri, tag)]:
        raise BadConfig("the tag is taken", value=taken, rule="tags never move", remedy="name another with --tag")
    bucket, _, key = outputs["ImageSource"].partition("/")
    version = site.ask("the source", "s3", "put_object", Bucket=bucket, Key=key, Body=pack(root))["VersionId"]
    # The shell, because it takes the absence of Git for no commit.
    head = subprocess.run(["sh", "-c", "git rev-parse HEAD"], cwd=root, capture_output=True, text=True, check=False)
    variables = {"KINDS": " ".join(kinds), "TAG": tag, "REVISION": head.stdout.strip()}
    started = site.ask(
        "the build",
        "codebuild",
        "start_build",
        projectName=outputs["ImageProject"],
        sourceVersion=version,
        environmentVariablesOverride=[{"name": name, "value": value} for name, value in variables.items()],
    )["build"]
    _note(f"build {started['id']} started; Ctrl-C does not stop it: aws codebuild stop-build --id {started['id']}")
    _check(site, _follow(site, started["id"]))
    digests = {kind: _digest(site, uri, tag) for kind, uri in repositories.items()}
    if lost := [kind for kind, digest in digests.items() if digest is None]:
        raise Defect("the build pushed no image", value=[f"{repositories[kind]}:{tag}" for kind in lost])
    pinned = {kind: f"{repositories[kind]}@{digest}" for kind, digest in digests.items()}
    return yaml.safe_dump({"images": {"tag": tag, **pinned}}, sort_keys=False, width=1000)


def pack(root: Path) -> bytes:
    """Return a zip file of what `make images` reads: the Makefile, .dockerignore, and all that .dockerignore lets into an image.

    The same files give the same bytes.
    """
    allowed = [line[1:] for line in (root / ".dockerignore").read_text(encoding="utf-8").split() if line.startswith("!")]
    found = [
        path
        for name in ("Makefile", ".dockerignore", *allowed)
        for path in (root / name, *(root / name).rglob("*"))
        if "__pycache__" not in path.parts
    ]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(path for path in found if path.is_file()):
            # Without a time of its own a file has that of 1980.
            entry = zipfile.ZipInfo(path.relative_to(root).as_posix())
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _digest(site: Site, uri: str, tag: str) -> str | None:
    """Return the digest of a repository's image, None where no image has the tag."""
    given: dict[str, Any] = {"repositoryName": uri.partition("/")[2], "imageIds": [{"imageTag": tag}]}
    answer = site.ask(uri, "ecr", "describe_images", ("ImageNotFoundException",), **given)
    return None if answer is None else str(answer["imageDetails"][0]["imageDigest"])


def _follow(site: Site, build_id: str) -> dict[str, Any]:
    """Print a line for each phase as it ends; return the build once it has ended."""
    told = 0
    while True:
        [build] = site.ask("the build", "codebuild", "batch_get_builds", ids=[build_id])["builds"]
        ended = [phase for phase in build.get("phases", ()) if phase.get("phaseStatus")]
        for phase in ended[told:]:
            reasons = (context.get("message", "") for context in phase.get("contexts", ()))
            _note(
                " ".join((phase["phaseType"], phase["phaseStatus"], f"{phase.get('durationInSeconds', 0)} s", *reasons)).rstrip()
            )
        told = len(ended)
        if build["buildStatus"] != "IN_PROGRESS":
            return dict(build)
        time.sleep(POLL_SECONDS)


def _check(site: Site, build: dict[str, Any]) -> None:
    """Print the end of the log of a build that did not succeed.

    Raises:
        BadConfig: the build failed.
        Transient: it ended otherwise without success.
    """
    if (status := build["buildStatus"]) == "SUCCEEDED":
        return
    group, stream = (build.get("logs", {}).get(key) for key in ("groupName", "streamName"))
    given: dict[str, Any] = {"logGroupName": group, "logStreamName": stream, "limit": LOG_LINES}
    # A build that ends before its first command has no log.
    log = site.ask("the log", "logs", "get_log_events", ("ResourceNotFoundException",), **given) if stream else None
    for event in (log or {}).get("events", ()):
        _note(event["message"].rstrip())
    raise (BadConfig if status == "FAILED" else Transient)(
        "the build of the images did not succeed",
        value=f"{build['id']}: {status}",
        remedy=f"read its log: log group {group}, stream {stream}",
    )


def _note(line: str) -> None:
    sys.stderr.write(f"{plain(line)}\n")
