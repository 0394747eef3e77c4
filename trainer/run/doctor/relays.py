"""Whether a node that others do not reach can be relayed: relays that its run has, and whether one takes it.

Looked at are those that were given (--relay), else port 4002 of the hosts that were given as initial peers, and relays
that nodes of the run announce: four at most, all at once. Each is asked for a port as the node's start would, with what
the run's authority lets it show, and the node then connects to itself at that port.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from genesis.doctor import Finding
from trainer.network.discovery import open_discovery
from trainer.network.relay import RelayedReach
from trainer.network.relay.client import LinkState
from trainer.network.rpc import Endpoint
from trainer.run.config import RunConfig
from trainer.run.node.relaying import announced_relays

MOST_TRIED: Final = 4
_TRIAL_S: Final = 15.0
_LOOK_S: Final = 0.1
_ANNOUNCED_S: Final = 5.0
_NONE_CURE: Final = (
    "ask whoever runs this run to start a relay (python -m trainer seed --relay, or --set relay.serve=true at a node "
    "that is reached), and give --relay HOST:4002 here"
)


@dataclass(frozen=True, slots=True)
class Tried:
    """A relay that was asked for a port."""

    relay: str
    address: str  # Where others would reach this node; empty: it has given no port.
    why: str  # Why it has given none; empty: it has.


async def try_relays(reach: RelayedReach, relays: Sequence[str]) -> tuple[Tried, ...]:
    """Asks relays for a port, at most four of them; the first that gives one stays in use, and the others are left.

    Returns that one alone, or all that were asked with the reason why they gave none, after 15 s at the latest.
    """
    asked = tuple(dict.fromkeys(relays))[:MOST_TRIED]
    for relay in asked:
        reach.use(relay)
    ends_s = time.monotonic() + _TRIAL_S
    while True:
        states = [state for state in reach.states() if state.relay in asked]
        taken = next((state for state in states if _address(state)), None)
        if taken is not None or all(state.failure for state in states) or time.monotonic() >= ends_s:
            break
        await asyncio.sleep(_LOOK_S)
    for state in states:
        if state is not taken:
            await reach.leave(state.relay)
    if taken is not None:
        return (Tried(taken.relay, _address(taken), ""),)
    return tuple(Tried(state.relay, "", state.failure or f"no answer in {_TRIAL_S:g} s") for state in states)


async def announced(endpoint: Endpoint, config: RunConfig) -> tuple[str, ...]:
    """Returns relays that nodes announce to each other, where the run has no DHT; empty: none within some seconds.

    Raises DiscoveryError: the discovery does not start.
    """
    discovery = open_discovery(endpoint, config.discovery)
    try:
        await discovery.start()
        ends_s = time.monotonic() + _ANNOUNCED_S
        while not (found := announced_relays(await discovery.peers())) and time.monotonic() < ends_s:
            await asyncio.sleep(_LOOK_S)
        return found
    finally:
        await discovery.close()


def relay_finding(tried: Sequence[Tried]) -> Finding:
    """Whether a relay of the run takes this node."""
    taken = next((each for each in tried if each.address), None)
    if taken is not None:
        text = f"{taken.relay} accepts a reservation: others reach this node at {taken.address} by way of it"
        return Finding.ok("network", "relay", text)
    if not tried:
        text = "expected a relay for this node, found none: no node announces one, and nobody was named to look at"
        return Finding.failed("network", "relay", text, _NONE_CURE)
    text = "expected a relay that takes this node, found: " + "; ".join(f"{it.relay}: {it.why}" for it in tried)
    return Finding.failed("network", "relay", text, _NONE_CURE)


def with_relay(finding: Finding, tried: Sequence[Tried]) -> Finding:
    """Returns a finding that others do not reach this node, as it is where a relay does that."""
    taken = next((each for each in tried if each.address), None)
    if finding.status != "failed" or taken is None:
        return finding
    cure = f"give --relay {taken.relay} (without it the start looks for relays itself: relay.auto), or {finding.cure}"
    return finding.model_copy(update={"status": "warning", "cure": cure})


def named_findings(states: Sequence[LinkState]) -> list[Finding]:
    """How it stands with the relays that were given; one that serves is enough."""
    serving = [state for state in states if _address(state)]
    findings = [
        Finding.ok(
            "network",
            "reachable",
            f"directly, at {state.direct_address}, says relay {state.relay}"
            if state.direct_address
            else f"by way of relay {state.relay}, at {state.lent_address}",
        )
        for state in serving
    ]
    silent = [state for state in states if not _address(state)]
    cure = "check --relay and that it runs (python -m trainer seed --relay); see its log"
    make = Finding.warning if serving else Finding.failed
    return findings + [
        make("network", "relay", f"{state.relay}: {state.failure or 'it does not answer'}", cure) for state in silent
    ]


def _address(state: LinkState) -> str:
    return state.direct_address or state.lent_address
