"""What an S3 error means: try again, a refused condition, or one line for the user.

Amazon's codes, those of the common gateways (MinIO, Ceph, R2, rclone), and botocore's own exceptions. A code nobody
here knows is judged by its HTTP status: 429 and 5xx may pass, 401 and 403 are about access.
"""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.parsers import ResponseParserError

from genesis.errors import StoreAccessError, StoreError, StoreFullError
from genesis.store.conditions import ConditionRefused
from genesis.store.headers import parse_retry_after_s
from genesis.store.retrying import TransientError

__all__ = ["error_code", "error_status", "refuses_checksum", "translate"]

_CHECK_KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in AWS_PROFILE"
_CHECK_REGION = "set AWS_DEFAULT_REGION to the bucket's region"
_SIGN_IN = "sign in again (such as 'aws sso login') or set fresh AWS_* variables"
_NOT_PERMITTED = (
    "the credentials do not permit it; grant s3:ListBucket on the bucket (without it a missing object looks the "
    "same) and s3:GetObject, s3:PutObject, s3:DeleteObject on its objects"
)

_ACCESS = {
    "NoSuchBucket": "there is no such bucket; create it or check the address",
    "InvalidBucketName": "no bucket can have this name; check the address",
    "AccessDenied": _NOT_PERMITTED,
    "AllAccessDisabled": _NOT_PERMITTED,
    "AccountProblem": "the account is not in good standing",
    "InvalidAccessKeyId": f"the server knows no such access key; {_CHECK_KEYS}",
    "SignatureDoesNotMatch": f"the secret key does not fit the access key; {_CHECK_KEYS}",
    "ExpiredToken": f"the session token has expired; {_SIGN_IN}",
    "InvalidToken": f"the session token is not valid; {_SIGN_IN}",
    "TokenRefreshRequired": f"the session token must be refreshed; {_SIGN_IN}",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
    "PermanentRedirect": f"the bucket is in another region; {_CHECK_REGION}",
    "AuthorizationHeaderMalformed": f"the request was signed for another region; {_CHECK_REGION}",
    "IllegalLocationConstraintException": f"the bucket is in another region; {_CHECK_REGION}",
    "MethodNotAllowed": "the store can only be read",
    "401": f"not signed in; {_CHECK_KEYS}",
    "403": _NOT_PERMITTED,
}
_FULL = {"QuotaExceeded", "QuotaExceededException", "InsufficientStorage", "XMinioStorageFull", "507"}
_FULL_WORDS = ("no space left", "quota exceeded", "storage full", "disk full")
_TRANSIENT = {
    "SlowDown", "SlowDownRead", "SlowDownWrite", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling",
    "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "BadDigest", "IncompleteBody", "OperationAborted",
    "ConditionalRequestConflict", "RequestTimeoutException", "BandwidthLimitExceeded",
}  # fmt: skip
_CREDENTIALS = (
    NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, TokenRetrievalError, SSOTokenLoadError,
    UnauthorizedSSOTokenError,
)  # fmt: skip
_CONNECTING = (EndpointConnectionError, ConnectTimeoutError, ConnectionError)
_PASSING = (HTTPClientError, IncompleteReadError, FlexibleChecksumError, ResponseParserError)


def error_code(error: ClientError) -> str:
    """The S3 error code; the HTTP status as text where the answer had no body (HEAD)."""
    return str(error.response.get("Error", {}).get("Code", ""))


def error_status(error: ClientError) -> int:
    """The HTTP status."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def refuses_checksum(error: ClientError) -> bool:
    """Whether the server does not take the CRC32 a body was sent with (gateways older than 2022)."""
    message = str(error.response.get("Error", {}).get("Message", "")).lower()
    return error_code(error) == "NotImplemented" or (error_status(error) == 400 and "checksum" in message)


def translate(
    error: ClientError | BotoCoreError | ResponseParserError, what: str, endpoint: str
) -> StoreError | TransientError | ConditionRefused:
    """The exception to raise for botocore's.

    Args:
        error: what botocore raised.
        what: what was attempted, such as ``write s3://bucket/manifest.json``.
        endpoint: the server's address.
    """
    if isinstance(error, ClientError):
        return _translate_answer(error, what, endpoint)
    if isinstance(error, _CREDENTIALS):
        return StoreAccessError(
            f"cannot {what}: no usable AWS credentials ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
            "AWS_PROFILE, or read a public bucket by its https:// address"
        )
    if isinstance(error, ProfileNotFound):
        return StoreAccessError(f"cannot {what}: {error}; check AWS_PROFILE")
    if isinstance(error, _CONNECTING):
        return TransientError(f"cannot connect to {endpoint}: {error}", connecting=True)
    if isinstance(error, _PASSING):
        return TransientError(f"{endpoint}: {error}")
    return StoreError(f"cannot {what} at {endpoint}: {error}")


def _translate_answer(error: ClientError, what: str, endpoint: str) -> StoreError | TransientError | ConditionRefused:
    code, status = error_code(error), error_status(error)
    message = str(error.response.get("Error", {}).get("Message", ""))
    if code == "PreconditionFailed" or status == 412:
        return ConditionRefused(message)
    if code in _FULL or status == 507 or any(words in message.lower() for words in _FULL_WORDS):
        return StoreFullError(f"cannot {what}: {endpoint} has no space left ({code}: {message}); make room there")
    if code in _TRANSIENT or status in (429, 500, 502, 503, 504):
        return TransientError(
            f"{endpoint} answered {status} {code} {message}".rstrip(), retry_after_s=_retry_after(error)
        )
    if code in _ACCESS or status in (401, 403):
        return StoreAccessError(f"cannot {what} at {endpoint}: {code}: {_ACCESS.get(code, _ACCESS['403'])}")
    return StoreError(f"cannot {what}: {endpoint} answered {status} {code} {message}".rstrip())


def _retry_after(error: ClientError) -> float | None:
    return parse_retry_after_s(error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", ""))
