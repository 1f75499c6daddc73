"""Storage failures as our own errors, and how long a call retries.

Absent objects are `MissingInput`; refusals are `StorageRefused`, which handlers of absence do not catch; invalid credentials are
`BadConfig`; throttling, server errors and broken connections are `Transient`, once the call's patience is over. The exceptions
are botocore's, s3transfer's, urllib3's and the file system's.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from pipeline.errors import BadConfig, MissingInput, StorageRefused, Transient, causes
from pipeline.log import log
from pipeline.store.aws_errors import AwsError, classify_aws_error, error_code, error_text

PATIENCE_SECONDS = 180.0
"""Time from a call's start until it gives up, plus one last request (at most REQUEST_SECONDS of s3.py).

Longer than the slow-downs in which S3 divides a suddenly busy prefix. Together with the last request it is a third of the time
without a heartbeat after which a rank counts as stalled (progress_seconds of the supervisor), so that a storage failure is
reported as one. TRNPIPE_STORAGE_SECONDS overrides it."""

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0

ABSENT = {"NoSuchKey", "NoSuchBucket", "404"}
CHANGED = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}

Answer = TypeVar("Answer")


class Conflict(Exception):
    """A condition on an object's version did not hold: another process has written it."""


def persistently(uri: str, call: Callable[[], Answer]) -> Answer:
    """Retry a call until it succeeds, with growing pauses of random length, so that many hosts do not return at once.

    A write whose answer was lost is repeated although it took effect: with a condition it then ends with `Conflict`.

    Raises:
        Transient: the patience is over.
        MissingInput, StorageRefused, BadConfig, Conflict: at once.
    """
    started = time.monotonic()
    for attempt in count(1):
        try:
            with translated(uri):
                return call()
        except Transient as error:
            pause = random.uniform(0.5, 1.0) * min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**attempt)
            waited = time.monotonic() - started
            if waited + pause > float(os.environ.get("TRNPIPE_STORAGE_SECONDS") or PATIENCE_SECONDS):
                error.value = [error.value, f"given up after {attempt} attempts in {waited:.0f} seconds"]
                raise
            log.warning("%s: %s; trying again in %.1f seconds", error.what, error.value, pause)
            time.sleep(pause)
    raise AssertionError("unreachable")


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Turn what the libraries and the file system raise into our exceptions. A full disk stays an OSError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise MissingInput("the file does not exist", value=uri, remedy="check the path") from error
    except PermissionError as error:
        raise StorageRefused("the file may not be read or written", value=uri, remedy="check its permissions") from error
    except Boto3Error as error:
        # The service's answer: s3transfer's exceptions have it only in their context.
        answer = next((cause for cause in causes(error) if isinstance(cause, ClientError)), error)
        raise _explained(uri, answer) from error
    except (ClientError, BotoCoreError, HTTPError, ConnectionError, TimeoutError) as error:
        raise _explained(uri, error) from error


def _explained(uri: str, error: Exception) -> Exception:
    code, value = error_code(error), f"{uri}: {error_text(error)}"
    if code in ABSENT:
        return MissingInput("the object or bucket does not exist", value=uri, remedy="check the URI and that it was uploaded")
    if code in CHANGED:
        return Conflict(uri)
    match classify_aws_error(error):
        case AwsError.NO_CREDENTIALS | AwsError.SETUP:
            return BadConfig(
                "invalid setup for storage requests",
                value=value,
                rule="a valid bucket name; region and credentials of a role, or from `aws configure`",
                remedy="run `aws configure` or use a role, and check the URI",
            )
        case AwsError.CREDENTIALS:
            return BadConfig(
                "storage does not accept the credentials",
                value=value,
                rule="credentials stay valid while the stage runs: those of a role renew themselves",
                remedy="renew them (`aws sso login`, `aws configure`), or use a role",
            )
        case AwsError.DENIED:
            return StorageRefused(
                "access to the object is denied",
                value=value,
                rule="the stage's role may read and write the run's URIs while the run lasts",
                remedy="grant this stage's role access to it: see the bucket's policy, its key's, and the role's; then run again",
            )
        case AwsError.BUSY:
            return Transient("storage answered with an error", value=f"{uri}: {code}", remedy="a new attempt may succeed")
        case AwsError.UNREACHABLE:
            return Transient("storage could not be reached", value=value, remedy="a new attempt may succeed")
        case AwsError.REFUSED:
            return StorageRefused(
                "storage refused the request",
                value=value,
                # Answers to HEAD have no body with a reason.
                remedy="check the URI; a bare 400 may mean expired credentials",
            )
