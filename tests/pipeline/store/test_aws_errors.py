"""Classes of AWS errors."""

from __future__ import annotations

import pytest
from botocore.exceptions import (
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ProfileNotFound,
    ReadTimeoutError,
    UnauthorizedSSOTokenError,
)

from pipeline.store.aws_errors import AwsError, classify_aws_error, error_code, error_text


def answered(code: str, status: int = 400) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "words"}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        "GetObject",
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (answered("AccessDenied", 403), AwsError.DENIED),
        (answered("ExpiredToken"), AwsError.CREDENTIALS),
        (answered("ThrottlingException"), AwsError.BUSY),
        (answered("RequestTimeout"), AwsError.BUSY),
        (answered("Odd", 503), AwsError.BUSY),
        (answered("NoSuchKey", 404), AwsError.REFUSED),
        (NoCredentialsError(), AwsError.NO_CREDENTIALS),
        (ProfileNotFound(profile="other"), AwsError.NO_CREDENTIALS),
        (UnauthorizedSSOTokenError(), AwsError.NO_CREDENTIALS),
        (NoRegionError(), AwsError.SETUP),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:9"), AwsError.UNREACHABLE),
        (ReadTimeoutError(endpoint_url="http://127.0.0.1:9"), AwsError.UNREACHABLE),
        (ConnectionResetError(), AwsError.UNREACHABLE),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_classes(error: Exception, expected: AwsError) -> None:
    assert classify_aws_error(error) is expected


def test_code_and_words() -> None:
    assert (error_code(answered("Odd")), error_text(answered("Odd"))) == ("Odd", "Odd: words")
    assert (error_code(NoRegionError()), error_text(NoRegionError())) == ("NoRegionError", "You must specify a region.")
