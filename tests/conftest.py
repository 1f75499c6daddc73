"""Fixtures that several test folders share: a real S3 endpoint over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import urllib3
from filelock import FileLock
from hypothesis import HealthCheck, settings
from moto.server import ThreadedMotoServer

from pipeline import store

BUCKET = "trnpipe-tests"

# A shell starts its background jobs with Ctrl-C ignored, and all their processes inherit that: what tests interrupt would run on.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Shared machines stall: how long an example takes says nothing about the code.
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
# The same examples every time, so that a change is what fails; HYPOTHESIS_PROFILE=long looks for new ones.
settings.register_profile("trnpipe", derandomize=True, **QUIET)
settings.register_profile("long", max_examples=20_000, print_blob=True, **QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "trnpipe"))


@pytest.fixture(scope="session")
def templates(request: pytest.FixtureRequest) -> Path:
    """The app of local runs, synthesized: kept between test runs, shared by all workers, made again when it has changed."""
    from infra.local.run import DEPLOYMENT_CONFIG
    from infra.local.template import local_context, synthesize

    folder: Path = request.config.cache.mkdir("cdk-out")
    with FileLock(f"{folder}.lock"):
        return synthesize(folder, local_context((1, 2), DEPLOYMENT_CONFIG))


def moto_server() -> Iterator[str]:
    """An AWS endpoint on a free loopback port."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A local S3 endpoint for the whole session."""
    yield from moto_server()


@pytest.fixture(scope="module")
def aws_endpoint() -> Iterator[str]:
    """The endpoint of `account`, which is emptied for each test."""
    yield from moto_server()


@pytest.fixture
def account(aws_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment with credentials of an empty account behind an endpoint of its own; returns its region."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": aws_endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-west-2",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    assert urllib3.request("POST", f"{aws_endpoint}/moto-api/reset", timeout=60).status == 200
    return "us-west-2"


@pytest.fixture
def s3_root(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of an empty bucket that the store and child processes reach through the environment."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    store._s3_client_of.cache_clear()
    bucket = boto3.resource("s3").Bucket(BUCKET)
    bucket.create()
    yield f"s3://{BUCKET}"
    bucket.objects.delete()
    bucket.delete()
    store._s3_client_of.cache_clear()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes, which fills up for real (tmpfs; mounting it takes root)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
