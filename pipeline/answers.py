"""What an error that a service of AWS answered with means to whoever asked, by its code and its HTTP status."""

from __future__ import annotations

from enum import Enum

from botocore.exceptions import ClientError

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
"""Besides whatever throttling is called: every service has a name of its own for it."""

SERVER_ERROR = 500


class Meaning(Enum):
    DENIED = "the credentials may not make this call"
    CREDENTIALS = "the credentials are not accepted"
    BUSY = "a new attempt may succeed"
    REFUSED = "the service has a reason of its own"


def meaning(error: ClientError) -> Meaning:
    """What a service's error means. Whether something is absent depends on what was asked for: that is `REFUSED` here."""
    code = str(error.response["Error"].get("Code", ""))
    if code in CREDENTIALS:
        return Meaning.CREDENTIALS
    if code in DENIED:
        return Meaning.DENIED
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    busy = code in BUSY or "Throttl" in code or status >= SERVER_ERROR
    return Meaning.BUSY if busy else Meaning.REFUSED
