"""A snapshot of a swarm: its processes, if they are children of this one, and what its drivers report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trainer.errors import RpcError
from trainer.monitor.pipeline import SwarmAccount, SwarmStages
from trainer.run.swarm.asking import ask_account, ask_stages
from trainer.run.swarm.children import Child

__all__ = ["ProcessCount", "SwarmSnapshot", "process_counts", "snapshot_of", "snapshot_through"]

_TIMEOUT_S = 1.0
"""Of each wait for a driver of this machine, which answers in milliseconds unless it hangs."""


@dataclass(frozen=True, slots=True)
class ProcessCount:
    """Processes of a stage, or of the drivers."""

    name: str
    running: int
    wanted: int
    restarts: int


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """What there is to show."""

    processes: tuple[ProcessCount, ...] = ()
    """None where somebody else's swarm is looked at."""
    stages: SwarmStages | None = None
    """As the first driver that answers sees them."""
    account: SwarmAccount | None = None
    tokens_per_s: float = 0.0
    """Of all drivers that answer."""
    is_stale: bool = False
    """No driver answers now; this is what was said last."""


def snapshot_of(children: Iterable[Child]) -> SwarmSnapshot:
    """The swarm these processes are."""
    known = list(children)
    seen = snapshot_through(child.spec.api_url for child in known if child.spec.api_url and child.status == "running")
    return replace(seen, processes=process_counts(known))


def process_counts(children: Iterable[Child]) -> tuple[ProcessCount, ...]:
    """How many there are of each stage, of drivers and of seeds."""
    groups: dict[str, list[Child]] = {}
    for child in children:
        groups.setdefault(child.spec.stage or f"{child.spec.role}s", []).append(child)
    return tuple(_count(name, group) for name, group in groups.items())


def snapshot_through(api_urls: Iterable[str]) -> SwarmSnapshot:
    """What the drivers at these addresses say; one that does not answer is left out."""
    stages: SwarmStages | None = None
    account: SwarmAccount | None = None
    tokens_per_s = 0.0
    for url in api_urls:
        try:
            found = ask_stages(url, _TIMEOUT_S)
            tokens_per_s += found.tokens_per_s
            stages = stages or found
            account = account or ask_account(url, _TIMEOUT_S)
        except RpcError:
            continue  # Starting, busy or gone: which of them, its process tells.
    return SwarmSnapshot((), stages, account, tokens_per_s)


def _count(name: str, children: list[Child]) -> ProcessCount:
    running = sum(child.status == "running" for child in children)
    return ProcessCount(name, running, len(children), sum(child.num_restarts for child in children))
