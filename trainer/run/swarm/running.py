"""Runs a whole swarm on this machine until its drivers are done, something cannot go on, or somebody says stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from genesis.file_lock import FileLock, FileLockedError
from trainer.errors import TrainerUsageError
from trainer.run.swarm.children import RestartPolicy, free_ports
from trainer.run.swarm.local import LocalSwarm, Ports, seed_address, seed_spec, swarm_specs
from trainer.run.swarm.swarm_snapshot import SwarmSnapshot, process_counts, snapshot_of
from trainer.run.swarm.tree import Outcome, ProcessTree

__all__ = ["Display", "run_local"]

_TICK_S = 0.1
_LOOK_S = 1.0
"""Between two questions to the drivers: what one said last is to be the end of it, or nearly."""
_SEED_READY_S = 90.0
_ASKED = Outcome(0, "asked to stop")


class Display(Protocol):
    """Where a swarm is shown."""

    every_s: float
    """How often there is something new to show."""

    def event(self, text: str) -> None:
        """Something happened."""
        ...

    def show(self, sight: SwarmSnapshot) -> None:
        """How it stands."""
        ...


def run_local(
    swarm: LocalSwarm, folder: Path, policy: RestartPolicy, display: Display, stop: Callable[[], bool]
) -> Outcome:
    """Starts all of it, watches it, ends all of it.

    Args:
        swarm: what to start.
        folder: for its logs, and the keys of its seeds; one swarm at a time.
        policy: what to do about processes that die.
        display: where it is shown.
        stop: asked ten times a second; True ends it.

    Returns:
        Why it is over; asked to stop, with exit code 0.

    Raises:
        TrainerUsageError: another swarm runs in that folder.
        OSError: a process cannot be started, or a log not be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "swarm.lock")
    try:
        lock.acquire()
    except FileLockedError:
        raise TrainerUsageError(f"{folder}: another swarm runs there; give this one another --folder") from None
    with lock:
        tree = ProcessTree(folder, policy, tell=display.event, asked=stop)
        with tree:
            outcome = _start(tree, swarm, folder, display, stop) or _watch(tree, display, stop)
            hint = "; Ctrl+C again kills them at once, with what they have not saved" if outcome is _ASKED else ""
            display.event(f"{outcome.reason}; ending all processes{hint}")
        return outcome if outcome.exit_code else _ended(tree, outcome)


def _ended(tree: ProcessTree, outcome: Outcome) -> Outcome:
    """The outcome, unless children failed on the way out: then all of these, each with its own reason."""
    failed = [child for child in tree.children if child.failed_to_end]
    said = [f"{child.spec.name} ended with an error: {child.last_words()}" for child in failed if not child.was_killed]
    killed = [child.spec.name for child in failed if child.was_killed]
    if killed:
        said.append(f"{', '.join(killed)} had to be killed: what was done there last may not be saved")
    return Outcome(1, "; ".join(said)) if said else outcome


def _start(
    tree: ProcessTree, swarm: LocalSwarm, folder: Path, display: Display, stop: Callable[[], bool]
) -> Outcome | None:
    """Starts all; an outcome if that does not come to its end."""
    ports = Ports.dealt(swarm, free_ports(swarm.num_ports))
    seeds: list[str] = []
    while len(seeds) < swarm.num_seeds:
        child = tree.add(seed_spec(swarm, ports, folder, seeds))
        found = _ready_seed(tree, child.log_path, stop)
        if isinstance(found, Outcome):
            return found
        seeds.append(found)
    for spec in swarm_specs(swarm, ports, seeds):
        tree.add(spec)
    for seed in seeds:
        display.event(f"seed at {seed}")
    for driver in tree.of("driver"):
        display.event(f"{driver.spec.name} answers at {driver.spec.api_url} once it is ready; logs are in {folder}")
    return None


def _ready_seed(tree: ProcessTree, log_path: Path, stop: Callable[[], bool]) -> str | Outcome:
    """Its address, once it has printed it."""
    deadline_s = time.monotonic() + _SEED_READY_S
    while time.monotonic() < deadline_s:
        address = seed_address(log_path.read_text(encoding="utf-8", errors="replace"))
        outcome = _ASKED if stop() else tree.look()
        if outcome is not None or address is not None:
            return outcome or address or ""
        time.sleep(_TICK_S)
    return Outcome(1, f"the seed was not ready within {_SEED_READY_S:g} s; see {log_path}")


def _watch(tree: ProcessTree, display: Display, stop: Callable[[], bool]) -> Outcome:
    """Until it is over; the last that is shown is the last that a driver said."""
    latest = SwarmSnapshot()
    next_look_s = next_show_s = time.monotonic() + min(_LOOK_S, display.every_s)
    outcome: Outcome | None = None
    while outcome is None:
        if time.monotonic() >= next_look_s:
            latest = _newer(latest, snapshot_of(tree.children))
            next_look_s = time.monotonic() + _LOOK_S
        if time.monotonic() >= next_show_s:
            display.show(latest)
            next_show_s = time.monotonic() + display.every_s
        time.sleep(_TICK_S)
        outcome = _ASKED if stop() else tree.look()
    display.show(replace(latest, processes=process_counts(tree.children), is_stale=False))
    return outcome


def _newer(latest: SwarmSnapshot, found: SwarmSnapshot) -> SwarmSnapshot:
    """What was found; or, where no driver answers (they begin, hang or end), what was said last."""
    if found.stages is not None or latest.stages is None:
        return replace(found, account=found.account or latest.account)
    return replace(latest, processes=found.processes, is_stale=True)
