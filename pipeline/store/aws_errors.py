"""Classes of AWS errors, by the service's code and status, or by botocore's exception."""

from __future__ import annotations

from enum import Enum

from botocore.exceptions import (
    ClientError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

DENIED = {
    "403",
    "AccessDenied",
    "AccessDeniedException",
    "AccountProblem",
    "AllAccessDisabled",
    "AuthorizationError",
    "AuthorizationErrorException",
    "Forbidden",
    "InvalidObjectState",
    "KmsAccessDeniedException",
    "NotAuthorized",
    "UnauthorizedOperation",
}
CREDENTIALS = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "IncompleteSignature",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "InvalidToken",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "UnrecognizedClientException",
}
BUSY = {
    "429",
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "NoSuchUpload",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "TooManyRequests",
    "TooManyRequestsException",
}
"""Without the codes for throttling, for which every service has its own."""

NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, ProfileNotFound, SSOError, TokenRetrievalError)
SETUP = (InvalidRegionError, NoRegionError, ParamValidationError)
"""botocore's exceptions that a new attempt cannot avoid."""


class AwsError(Enum):
    DENIED = "the service denies this call to these credentials"
    CREDENTIALS = "the service does not accept the credentials"
    BUSY = "the service failed or throttled the call; a new attempt may succeed"
    REFUSED = "the service has a reason of its own"
    NO_CREDENTIALS = "there are no credentials to call with"
    SETUP = "the call cannot be made: no region, or an invalid parameter"
    UNREACHABLE = "no service answered; a new attempt may succeed"


def classify_aws_error(error: Exception) -> AwsError:
    """Return the class of an exception that a call to AWS raised.

    Codes for absent objects depend on the call and are `REFUSED` here. Everything that is neither a service's answer nor a setup
    error is `UNREACHABLE`: botocore has an exception for each way in which a connection fails.
    """
    if not isinstance(error, ClientError):
        if isinstance(error, NO_CREDENTIALS):
            return AwsError.NO_CREDENTIALS
        return AwsError.SETUP if isinstance(error, SETUP) else AwsError.UNREACHABLE
    code = error_code(error)
    if code in CREDENTIALS:
        return AwsError.CREDENTIALS
    if code in DENIED:
        return AwsError.DENIED
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return AwsError.BUSY if code in BUSY or "Throttl" in code or status >= 500 else AwsError.REFUSED


def error_code(error: Exception) -> str:
    """Return the service's error code, or the exception's name without one."""
    return str(error.response["Error"].get("Code", "")) if isinstance(error, ClientError) else type(error).__name__


def error_message(error: Exception) -> str:
    """Return the service's message, or the exception's text without one."""
    return str(error.response["Error"].get("Message", "")) if isinstance(error, ClientError) else str(error)


def error_text(error: Exception) -> str:
    """Return the service's code and message, or the exception's text without them."""
    return f"{error_code(error)}: {error_message(error)}" if isinstance(error, ClientError) else str(error)
