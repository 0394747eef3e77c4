"""A snapshot of a swarm: its processes, if they are children of this one, and what its drivers report over HTTP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from trainer.errors import MalformedAnswerError, PeerUnavailableError, RpcError, TrainerUsageError
from trainer.monitor.status import ACCOUNT_PATH, STAGES_PATH, SwarmAccount, SwarmStages
from trainer.run.swarm.children import Child

__all__ = [
    "ProcessCount",
    "SwarmSnapshot",
    "ask_account",
    "ask_stages",
    "process_counts",
    "snapshot_of",
    "snapshot_through",
]

AnswerT = TypeVar("AnswerT", bound=BaseModel)

_LOCAL_TIMEOUT_S = 1.0
"""For each wait for a driver of this machine, which answers in milliseconds unless it hangs."""
_MAX_BYTES = 8 << 20
_NOT_YET = 503


@dataclass(frozen=True, slots=True)
class ProcessCount:
    """Processes of a stage, or of the drivers."""

    name: str
    running: int
    wanted: int
    restarts: int


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """How a swarm stands."""

    processes: tuple[ProcessCount, ...] = ()
    """Empty for a swarm whose processes are not children of this one."""
    stages: SwarmStages | None = None
    """As the first driver that answers sees them."""
    account: SwarmAccount | None = None
    tokens_per_s: float = 0.0
    """Of all drivers that answer."""
    is_stale: bool = False
    """No driver answers now; these are the last answers."""


def snapshot_of(children: Iterable[Child]) -> SwarmSnapshot:
    """The swarm that consists of these processes."""
    known = list(children)
    seen = snapshot_through(child.spec.api_url for child in known if child.spec.api_url and child.status == "running")
    return replace(seen, processes=process_counts(known))


def process_counts(children: Iterable[Child]) -> tuple[ProcessCount, ...]:
    """How many processes each stage, the drivers and the seeds have."""
    groups: dict[str, list[Child]] = {}
    for child in children:
        groups.setdefault(child.spec.stage or f"{child.spec.role}s", []).append(child)
    return tuple(
        ProcessCount(
            name,
            sum(child.status == "running" for child in group),
            len(group),
            sum(child.num_restarts for child in group),
        )
        for name, group in groups.items()
    )


def snapshot_through(api_urls: Iterable[str]) -> SwarmSnapshot:
    """What the drivers at these addresses report; one that does not answer is left out."""
    stages: SwarmStages | None = None
    account: SwarmAccount | None = None
    tokens_per_s = 0.0
    for url in api_urls:
        try:
            found = ask_stages(url, _LOCAL_TIMEOUT_S)
            tokens_per_s += found.tokens_per_s
            stages = stages or found
            account = account or ask_account(url, _LOCAL_TIMEOUT_S)
        except RpcError:
            continue  # It starts, is busy or has ended; `process_counts` tells which.
    return SwarmSnapshot((), stages, account, tokens_per_s)


def ask_stages(api_url: str, timeout_s: float = 5.0) -> SwarmStages:
    """The stages as a driver sees them.

    Args:
        api_url: of the driver, ``http://host:port``.
        timeout_s: for connecting, and for each wait for data.

    Raises:
        PeerUnavailableError: nobody answers there.
        MalformedAnswerError: the answer is not a driver's, or cannot be read.
        TrainerUsageError: the address is malformed.
    """
    found = _ask(api_url, STAGES_PATH, SwarmStages, timeout_s)
    if found is None:
        raise PeerUnavailableError(f"{api_url}: expected the stages, found that it cannot tell yet; ask again")
    return found


def ask_account(api_url: str, timeout_s: float = 5.0) -> SwarmAccount | None:
    """The account of the data; None: the driver has not heard from its keeper yet.

    Raises:
        PeerUnavailableError, MalformedAnswerError, TrainerUsageError: as `ask_stages`.
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
            f"{url}: expected an answer of this release, found {place}: {first['msg']}"
        ) from None


def _bounded(answer: httpx.Response, url: str) -> bytes:
    content = b""
    for part in answer.iter_bytes():
        content += part
        if len(content) > _MAX_BYTES:
            raise MalformedAnswerError(f"{url}: expected at most {_MAX_BYTES} bytes, found more")
    return content
