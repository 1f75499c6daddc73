"""What goes wrong with storage, in our own terms, and for how long a call puts up with it.

Absent is `MissingInput`; denied or refused otherwise is `StorageRefused`, which handlers of absence do not catch;
credentials that do not work are `BadConfig`; throttling, server errors and connections that break are `Transient`, once the
call's patience is over. The exceptions are botocore's, s3transfer's, urllib3's and the file system's.
"""

from __future__ import annotations

import logging
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

from pipeline.errors import BadConfig, MissingInput, StorageRefused, Transient
from pipeline.store.aws_errors import AwsError, classify_aws_error, error_code, error_text

log = logging.getLogger("trnpipe")

PATIENCE_SECONDS = 180.0
"""From a call's first failure until it gives up, plus one last request (REQUEST_SECONDS of s3.py at the most).

Longer than S3's own slow-downs, in which it divides a prefix that is suddenly busy; together with the last request a third of the
time without a heartbeat after which a rank counts as standing still (progress_seconds of the supervisor), so that trouble with
storage ends as what it is. TRNPIPE_STORAGE_SECONDS sets it otherwise."""

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0

ABSENT = {"NoSuchKey", "NoSuchBucket", "404"}
CHANGED = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}

Answer = TypeVar("Answer")


class Conflict(Exception):
    """A condition on an object's version did not hold: another process has written it."""


def persistently(uri: str, call: Callable[[], Answer]) -> Answer:
    """Call until there is an answer, with growing pauses of random length, so that many hosts do not come back at once.

    A write that took effect although its answer was lost is made again: one with a condition then ends with `Conflict`.

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
            if waited + pause > patience_seconds():
                error.value = [error.value, f"given up after {attempt} attempts in {waited:.0f} seconds"]
                raise
            log.warning("%s: %s; trying again in %.1f seconds", error.what, error.value, pause)
            time.sleep(pause)
    raise AssertionError("counting ends never")


def patience_seconds() -> float:
    return float(os.environ.get("TRNPIPE_STORAGE_SECONDS") or PATIENCE_SECONDS)


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
        raise _explained(uri, _answer_in(error) or error) from error
    except (ClientError, BotoCoreError, HTTPError, ConnectionError, TimeoutError) as error:
        raise _explained(uri, error) from error


def _answer_in(error: BaseException | None) -> ClientError | None:
    """The service's answer that an exception was made of: s3transfer's say it only in their context."""
    while error is not None and not isinstance(error, ClientError):
        error = error.__cause__ or error.__context__
    return error


def _explained(uri: str, error: Exception) -> Exception:
    code, value = error_code(error), f"{uri}: {error_text(error)}"
    if code in ABSENT:
        return MissingInput("the object or bucket does not exist", value=uri, remedy="check the URI and that it was uploaded")
    if code in CHANGED:
        return Conflict(uri)
    match classify_aws_error(error):
        case AwsError.NO_CREDENTIALS | AwsError.SETUP:
            return BadConfig(
                "storage cannot be asked like this",
                value=value,
                rule="a valid bucket name; region and credentials of a role, or from `aws configure`",
                remedy="run `aws configure` or use a role, and check the URI",
            )
        case AwsError.CREDENTIALS:
            return BadConfig(
                "storage does not accept the credentials",
                value=value,
                rule="credentials are valid for as long as the stage runs: those of a role renew themselves",
                remedy="renew them (`aws sso login`, `aws configure`), or use a role",
            )
        case AwsError.DENIED:
            return StorageRefused(
                "access to the object is denied",
                value=value,
                rule="the stage's role may read and write what the run names, for as long as the run lasts",
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
                # Answers to HEAD have no body that would say more.
                remedy="check the URI; a bare 400 may mean credentials that have expired",
            )
