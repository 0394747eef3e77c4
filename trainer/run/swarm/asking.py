"""Asking a driver over HTTP how its pipeline stands; what it answers is checked like anything else from outside."""

from __future__ import annotations

from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from trainer.errors import MalformedAnswerError, PeerUnavailableError, TrainerUsageError
from trainer.monitor.pipeline import ACCOUNT_PATH, STAGES_PATH, SwarmAccount, SwarmStages

__all__ = ["ask_account", "ask_stages"]

AnswerT = TypeVar("AnswerT", bound=BaseModel)

_MAX_BYTES = 8 << 20
_NOT_YET = 503


def ask_stages(api_url: str, timeout_s: float = 5.0) -> SwarmStages:
    """The stages as a driver sees them.

    Args:
        api_url: of the driver, ``http://host:port``.
        timeout_s: for connecting, and for each wait for data.

    Raises:
        PeerUnavailableError: nobody answers there.
        MalformedAnswerError: it is no driver, or answers what cannot be read.
        TrainerUsageError: that is no address.
    """
    found = _ask(api_url, STAGES_PATH, SwarmStages, timeout_s)
    if found is None:
        raise PeerUnavailableError(f"{api_url}: expected the stages, found that it cannot tell yet; ask again")
    return found


def ask_account(api_url: str, timeout_s: float = 5.0) -> SwarmAccount | None:
    """The account of the data; None: the driver has not heard from its keeper yet.

    Raises:
        PeerUnavailableError: nobody answers there.
        MalformedAnswerError: it is no driver, or answers what cannot be read.
        TrainerUsageError: that is no address.
    """
    return _ask(api_url, ACCOUNT_PATH, SwarmAccount, timeout_s)


def _ask(api_url: str, path: str, kind: type[AnswerT], timeout_s: float) -> AnswerT | None:
    url = api_url.rstrip("/") + path
    try:
        with httpx.Client(trust_env=False, timeout=timeout_s) as client, client.stream("GET", url) as answer:
            content = _bounded(answer, url)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise TrainerUsageError(f"--api: expected http://host:port of a driver, found {api_url!r} ({error})") from None
    except httpx.HTTPError as error:
        raise PeerUnavailableError(f"{api_url}: no driver answers ({error or type(error).__name__})") from None
    if answer.status_code == _NOT_YET:
        return None
    if answer.status_code != httpx.codes.OK:
        raise MalformedAnswerError(
            f"{url}: expected a driver's answer, found status {answer.status_code}; is that the API of a driver?"
        )
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise MalformedAnswerError(
            f"{url}: expected what this release answers, found {place}: {first['msg']}"
        ) from None


def _bounded(answer: httpx.Response, url: str) -> bytes:
    content = b""
    for part in answer.iter_bytes():
        content += part
        if len(content) > _MAX_BYTES:
            raise MalformedAnswerError(f"{url}: expected at most {_MAX_BYTES} bytes, found more")
    return content
