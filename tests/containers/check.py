"""Run the stages on Fargate inside a built CPU image, against an S3 endpoint on loopback, and print its layers' sizes.

    python -m tests.containers.check ENGINE IMAGE

ENGINE is docker, podman or buildah. `make images-check` builds the image first. Ends with the exit code of the stage that fails,
e.g. of prepare when the image lacks a module that prepare imports.

Where no registry is in reach, root can build on Debian's own Python, and with torch's ordinary build where the index of its CPU
builds is out of reach, too:

    mmdebstrap --variant=minbase --include=python3-venv,python3-pip,python-is-python3,ca-certificates bookworm base.tar
    buildah from --name base scratch
    buildah add base base.tar
    export BUILDAH_ISOLATION=chroot
    buildah run base rm /usr/lib/python3.11/EXTERNALLY-MANAGED
    buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin base
    buildah commit base localhost/python:3.11
    make images-check ENGINE=buildah PYTHON_IMAGE=localhost/python:3.11 TORCH_BACKEND=

BUILDAH_LAYERS=true keeps a layer for each instruction; STORAGE_DRIVER=vfs does without overlay mounts and copies every layer. The
Neuron image builds in the same way with a Python 3.12, on a base that holds fakes instead of Neuron's packages:

    buildah build -f tests/containers/neuron-base/Dockerfile --build-arg PYTHON_IMAGE=localhost/python:3.12 -t neuron-base tests
    make images KINDS=neuron ENGINE=buildah PYTHON_IMAGE=localhost/python:3.12 NEURON_IMAGE=localhost/neuron-base@sha256:...
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from infra.local.server import endpoint_environment
from pipeline.contract import RunPaths, Stage, stage_command
from tests.tiny import make_model, write_pairs

BUCKET = "images-check"
RUN = RunPaths(f"s3://{BUCKET}/runs/tiny")
ROWS = 400
CONFIG = {
    "data": {"train": [f"s3://{BUCKET}/data/pairs/"]},
    "model": {"parent": f"s3://{BUCKET}/data/encoder"},
    "device": {"kind": "cpu"},
    "train": {"batch_size": 8, "query_length": 12, "length": 32},
    "gate": {"undecided": "accept"},
    "embed": {"length": 32},
}
STAGES = (
    (Stage.PREPARE, RUN.inputs),
    (Stage.INGEST, RUN.result(Stage.INGEST)),
    (Stage.PLAN, RUN.plan),
    (Stage.REPORT, RUN.report),
)
"""The stages, and the object that each must have written."""


def main(engine: str, image: str) -> int:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        environment = endpoint_environment(f"http://127.0.0.1:{port}", "check")
        os.environ.update(environment)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        _put_inputs(client)
        with _container(engine, image, environment) as run:
            for stage, written in STAGES:
                command = [RUN.root if word.startswith("Ref::") else word for word in stage_command(stage)]
                if code := subprocess.run([*run, *command], check=False).returncode:
                    print(f"{image}: {stage} ended with {code}", file=sys.stderr)
                    return code
                size = client.head_object(Bucket=BUCKET, Key=_key(written))["ContentLength"]
                print(f"{stage}: {written}, {size} bytes")
    finally:
        server.stop()
    layers = list(_layers(engine, image))
    for size, created_by in [*layers, (sum(size for size, _ in layers), f"{image}, all layers")]:
        print(f"{size / 1e6:9.1f} MB  {created_by[:150]}")
    return 0


def _put_inputs(client: Any) -> None:
    """Put training rows, the parent and the execution's input where prepare looks for them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for key in ("data/pairs", _key(RUN.root)):
            (root / key).mkdir(parents=True)
        write_pairs(root / "data/pairs/week.jsonl", ROWS)
        make_model(root / "data/encoder")
        (root / _key(RUN.input)).write_text(json.dumps({"execution": CONFIG}))
        for path in (path for path in root.rglob("*") if path.is_file()):
            client.upload_file(str(path), BUCKET, path.relative_to(root).as_posix())


def _key(uri: str) -> str:
    return uri.removeprefix(f"s3://{BUCKET}/")


@contextmanager
def _container(engine: str, image: str, environment: dict[str, str]) -> Iterator[Sequence[str]]:
    """The words before a command that run it in the image, on the host's network."""
    options = ["--network", "host", *(f"--env={name}={value}" for name, value in environment.items())]
    if not _is_buildah(engine):
        yield [engine, "run", "--rm", *options, image]
        return
    name = _output(engine, "from", image)
    try:
        yield [engine, "run", *options, name, "--"]
    finally:
        subprocess.run([engine, "rm", name], check=True, stdout=subprocess.DEVNULL)


def _layers(engine: str, image: str) -> Iterator[tuple[int, str]]:
    """Uncompressed size in bytes and instruction of each layer; of one that holds several instructions, the last."""
    if _is_buildah(engine):
        manifest, config = (
            json.loads(_output(engine, "inspect", "--type", "image", "--format", f"{{{{.{field}}}}}", image))
            for field in ("Manifest", "Config")
        )
        steps = [step.get("created_by", "") for step in config["history"] if not step.get("empty_layer")]
        yield from zip((layer["size"] for layer in manifest["layers"]), steps, strict=True)
        return
    # Without --human=false the sizes are rounded and have units.
    listed = _output(engine, "history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", image)
    for line in reversed(listed.splitlines()):
        size, _, created_by = line.partition(" ")
        yield int(size), created_by


def _is_buildah(engine: str) -> bool:
    return Path(engine).name == "buildah"


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
