"""One way to ask the Hub: the real client's session, headers and errors, under one retry policy with a deadline.

What `huggingface_hub` 2.4 does itself: `http_backoff` retries time-outs, cut connections, 408, 429 and 5xx five times
and waits as the RateLimit and Retry-After headers say. What it does not, and this module does: a total deadline (a
hostile or broken ``Retry-After: 86400`` would be slept out five times); time-outs on API calls
(`HfApi.list_repo_tree` passes none, so a stalled server hangs it for ever); going on at the byte after a cut
connection; HTTP dates in Retry-After. So requests go through its session directly and tenacity retries, once, here.

A host that cannot be reached at all is given up after a minute: that is a typing error or a missing network, while a
rate limit (the Hub counts in windows of five minutes) is worth a quarter of an hour.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import tenacity
from huggingface_hub import constants, get_session, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils import build_hf_headers, parse_ratelimit_headers  # type: ignore[attr-defined]

from genesis.errors import InputNotFoundError, SourceError
from genesis.store.resuming import parse_retry_after_s

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_OWN_FAULTS = ("UnsupportedProtocol", "LocalProtocolError", "UnicodeEncodeError")
"""What a request that cannot be sent ends in, one with an odd token, say; by name for the same reason as below."""
_HTTP_ERROR: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
"""Base of the client library's network errors: httpx's in huggingface_hub 1, its successor httpx2's in 2."""


_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class CutConnectionError(Exception):
    """A body ended before its announced length, or came too slowly; the rest is worth asking for again."""


@dataclass(frozen=True, slots=True)
class HubRetryPolicy:
    """How long the Hub is waited for."""

    deadline_s: float = 900.0
    """From the first attempt of one request (or of one range) to giving up: three of the Hub's rate windows."""
    unreachable_s: float = 60.0
    """The same while no connection could be made at all."""
    timeout_s: float = 30.0
    """For a connection, and for each read."""
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0

    @classmethod
    def from_environment(cls) -> HubRetryPolicy:
        """``GENESIS_HUB_DEADLINE_S`` and ``GENESIS_HUB_TIMEOUT_S``, where they are set.

        Raises:
            SourceError: one of them is not a positive number.
        """
        deadline_s = _seconds("GENESIS_HUB_DEADLINE_S", cls().deadline_s)
        return cls(
            deadline_s=deadline_s,
            unreachable_s=min(cls().unreachable_s, deadline_s),
            timeout_s=_seconds("GENESIS_HUB_TIMEOUT_S", cls().timeout_s),
        )


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not value > 0:
        raise SourceError(f"{variable}: expected a positive number of seconds, found {text!r}")
    return value


def retrying(what: str, attempt: Callable[[], T], policy: HubRetryPolicy) -> T:
    """Calls ``attempt`` until it succeeds, fails for good, or the deadline would pass.

    Args:
        what: what is asked for, for messages.
        attempt: one try.
        policy: how long to go on.

    Raises:
        InputNotFoundError: no such repository, revision or file.
        SourceError: refused, or still failing at the deadline.
    """
    controller = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_transient),
        wait=_Wait(policy),
        stop=_Stop(policy),
        before_sleep=_log_wait(what),
        reraise=True,
    )
    started = time.monotonic()
    try:
        return controller(attempt)
    except (_HTTP_ERROR, CutConnectionError, OfflineModeIsEnabled, UnicodeEncodeError) as error:
        raise _translate(what, error, time.monotonic() - started) from error


def api_pages(path: str, what: str, policy: HubRetryPolicy, params: dict[str, str]) -> list[object]:
    """The JSON documents of an API call, following ``Link: rel=next``.

    Args:
        path: path below ``/api/`` of the endpoint (``HF_ENDPOINT`` is honoured).
        what: what is asked for, for messages.
        policy: how long to go on, for each page.
        params: the first page's query.
    """
    pages: list[object] = []
    url: str | None = f"{endpoint()}/api/{path}"
    while url is not None:
        page, url = retrying(what, partial(_get_json, url, policy, {} if pages else params), policy)
        pages.append(page)
    return pages


def _get_json(url: str, policy: HubRetryPolicy, params: dict[str, str]) -> tuple[object, str | None]:
    response = get_session().get(url, params=params or None, headers=auth_headers(), timeout=policy.timeout_s)
    hf_raise_for_status(response)
    following = response.links.get("next", {}).get("url")
    return response.json(), following


def endpoint() -> str:
    """The Hub's address, ``HF_ENDPOINT`` or https://huggingface.co.

    Raises:
        SourceError: it is none.
    """
    found = constants.ENDPOINT
    try:
        parts = urlsplit(found)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise SourceError(
            f"HF_ENDPOINT: expected an address such as https://huggingface.co, found {found!r}; correct or unset it"
        )
    return found


def auth_headers() -> dict[str, str]:
    """The client's own headers, with the token of ``HF_TOKEN`` or `hf auth login` if there is one."""
    return dict(build_hf_headers(library_name="genesis"))


@dataclass(frozen=True, slots=True)
class _Wait(tenacity.wait.wait_base):
    """As long as the server says, else exponential with jitter."""

    policy: HubRetryPolicy

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        hint = _server_wait_s(_failure(retry_state))
        if hint is not None:
            return hint
        backoff = tenacity.wait_random_exponential(multiplier=self.policy.first_wait_s, max=self.policy.max_wait_s)
        return backoff(retry_state)


@dataclass(frozen=True, slots=True)
class _Stop(tenacity.stop.stop_base):
    """Stops when the next attempt would begin after the deadline: no wait is slept out in vain."""

    policy: HubRetryPolicy

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        error = _failure(retry_state)
        unreachable = type(error).__name__ in ("ConnectError", "ConnectTimeout")
        limit_s = self.policy.unreachable_s if unreachable else self.policy.deadline_s
        return (retry_state.seconds_since_start or 0.0) + retry_state.upcoming_sleep >= limit_s


def _failure(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT_STATUS
    if type(error).__name__ in _OWN_FAULTS:
        return False
    return isinstance(error, (_HTTP_ERROR, CutConnectionError))


def _server_wait_s(error: BaseException | None) -> float | None:
    """What the response's RateLimit or Retry-After header asks for."""
    if not isinstance(error, HfHubHTTPError):
        return None
    headers = error.response.headers
    limit = parse_ratelimit_headers(headers)
    if error.response.status_code == 429 and limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return parse_retry_after_s(headers.get("retry-after", ""))


def _log_wait(what: str) -> Callable[[tenacity.RetryCallState], None]:
    def log(state: tenacity.RetryCallState) -> None:
        logger.warning("%s: %s; trying again in %.1f s", what, _first_line(_failure(state)), state.upcoming_sleep)

    return log


def _first_line(error: BaseException | None) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"HTTP {error.response.status_code}"
    return (str(error) or type(error).__name__).splitlines()[0]


def _translate(what: str, error: Exception, elapsed_s: float) -> SourceError:
    """The error a user can act on."""
    if isinstance(error, OfflineModeIsEnabled):
        return SourceError(f"{what}: HF_HUB_OFFLINE is set; unset it, or read local files with --input")
    if type(error).__name__ in _OWN_FAULTS:
        return SourceError(f"{what}: the request cannot be sent ({_first_line(error)}); check HF_ENDPOINT and HF_TOKEN")
    if not isinstance(error, HfHubHTTPError):
        return SourceError(
            f"{what}: {constants.ENDPOINT} cannot be reached, given up after {elapsed_s:.0f} s ({_first_line(error)}); "
            "check the network and HF_ENDPOINT, then run the same command again"
        )
    status = error.response.status_code
    code = error.response.headers.get("x-error-code", "")
    if status in (401, 403) or code == "RepoNotFound":
        return _no_access(what, error, status, code)
    if status == 404 or code in ("RevisionNotFound", "EntryNotFound"):
        return InputNotFoundError(
            f"{what}: the Hub has none (HTTP {status} {code}); check hf_path, revision and data_files"
        )
    return SourceError(f"{what}: still HTTP {status} after {elapsed_s:.0f} s; run the same command again later")


def _no_access(what: str, error: HfHubHTTPError, status: int, code: str) -> SourceError:
    """Why a repository is not to be had, which depends on whether a token was sent.

    The Hub answers 401 for a token it does not know even where the repository is public, and hides those that a token
    may not read as if they did not exist.
    """
    token = _token_origin(error)
    answer = f"HTTP {status} {code}".rstrip()
    if code == "GatedRepo":
        how = (
            f"with the account of {token}, and let that token read gated repositories" if token else "then set HF_TOKEN"
        )
        return SourceError(f"{what}: access refused ({answer}); accept the dataset's terms on its page, {how}")
    if token and status == 401:
        return SourceError(
            f"{what}: the Hub does not accept {token} (HTTP 401): it is mistyped, expired or revoked; make a new one "
            f"at {constants.ENDPOINT}/settings/tokens, or read public data without one"
        )
    if status == 401 or isinstance(error, RepositoryNotFoundError):
        how = f"whether the account of {token} may read it" if token else "set HF_TOKEN to read a private one"
        return InputNotFoundError(
            f"{what}: no such repository, or a private one (HTTP {status}); check hf_path, and {how}"
        )
    how = f"let {token} read it" if token else "accept the dataset's terms on its page, then set HF_TOKEN"
    return SourceError(f"{what}: access refused ({answer}); {how}")


def _token_origin(error: HfHubHTTPError) -> str:
    """Where the token of a request came from, for messages; empty if there was none."""
    if "authorization" not in error.response.request.headers:
        return ""
    named = next((name for name in _TOKEN_VARIABLES if os.environ.get(name)), None)
    return f"the token in {named}" if named else "the token of 'hf auth login'"
