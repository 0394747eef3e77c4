"""What a process tells others of its work once a minute: its figures, as a signed report (`NodeReport`).

The figures are read when a report is signed, in the event loop, from sums that the training thread has made anyway: it
costs training nothing, and the loop a signature a minute. Nothing here waits. A figure that the platform does not tell
is 0, or None where 0 would say something.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from genesis import __version__
from trainer.monitor.tracker import TrainingTracker
from trainer.monitor.work import RoundNote, WorkDone
from trainer.network.discovery.base import Discovery
from trainer.network.discovery.node_report import NodeReport, ReportedRound, Role
from trainer.network.discovery.report_exchange import ReportExchange
from trainer.network.discovery.stage_report import MAX_REASON
from trainer.network.rpc import Endpoint
from trainer.run.config import RunConfig

_CALLED_WITHIN_S: Final = 300.0
_YOUNG_S: Final = 120.0
"""A process that is younger says nothing of whether it is called: others may not have heard of it."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFigures:
    """A process's figures at a moment; sums are since it became this incarnation."""

    role: Role
    incarnation: str
    began_at: float  # Seconds since 1970.
    stage: str = ""
    flops: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    micro_batches: int = 0
    active_s: float = 0.0
    loss: float | None = None
    tokens_per_s: float = 0.0
    checkpoint_age_s: float | None = None
    checkpoint_problem: str = ""
    done: WorkDone = field(default_factory=WorkDone)


class NodeReporter:
    """Reports on this process to the run it belongs to; for the event loop of its endpoint."""

    def __init__(
        self, config: RunConfig, endpoint: Endpoint, discovery: Discovery, figures: Callable[[], OwnFigures]
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._discovery = discovery
        self._figures = figures
        self._called_s: float | None = None
        self._began_s = time.monotonic()
        self._exchange = ReportExchange(
            endpoint,
            discovery,
            self.report,
            interval_s=config.discovery.report_interval_s,
            max_clock_skew_s=config.discovery.max_clock_skew_s,
        )

    def register(self) -> None:
        """Has the endpoint answer who asks for reports; before it starts."""
        self._exchange.register()
        self._endpoint.contacts.when_served.append(self._served)

    async def run(self) -> None:
        """Reports until it is cancelled."""
        await self._exchange.run()

    def report(self) -> NodeReport:
        """Returns the report as of now, not stamped."""
        figures, counters = self._figures(), self._endpoint.counters
        done = figures.done
        return NodeReport(
            peer_id=self._endpoint.peer_id,
            node_id=self._config.node_id,
            run_id=self._config.run_id,
            role=figures.role,
            incarnation=figures.incarnation,
            stage=figures.stage,
            software=__version__[:64],
            began_at=figures.began_at,
            flops=float(figures.flops),
            num_tokens=figures.num_tokens,
            num_steps=figures.num_steps,
            micro_batches=figures.micro_batches,
            active_s=figures.active_s,
            rounds_shared=done.rounds_shared,
            rounds_alone=done.rounds_alone,
            rounds_failed=done.rounds_failed,
            withdrawals=done.withdrawals,
            rounds=tuple(map(_reported, done.rounds)),
            loss=figures.loss,
            tokens_per_s=figures.tokens_per_s,
            sent_bytes=counters.sent_bytes,
            received_bytes=counters.received_bytes,
            memory_bytes=resident_bytes(),
            is_called=self._is_called(),
            checkpoint_age_s=figures.checkpoint_age_s,
            checkpoint_problem=_printable(figures.checkpoint_problem),
            dht=self._discovery.dht_traffic,
        )

    def _served(self, peer_id: str, _host: str, _method: str) -> None:
        if peer_id != self._endpoint.peer_id:
            self._called_s = time.monotonic()

    def _is_called(self) -> bool | None:
        now_s = time.monotonic()
        if self._called_s is not None and now_s - self._called_s < _CALLED_WITHIN_S:
            return True
        return None if now_s - self._began_s < _YOUNG_S else False


def _reported(note: RoundNote) -> ReportedRound:
    agree_s, reduce_s, vote_s = note.phases
    return ReportedRound(
        round_index=max(0, note.round_index),
        stage=note.stage,
        ended_at=note.ended_at,
        num_members=note.num_members,
        num_dropped=note.num_dropped,
        completeness=min(1.0, max(0.0, note.completeness)),
        seconds=note.seconds,
        agree_s=agree_s,
        reduce_s=reduce_s,
        vote_s=vote_s,
        sent_bytes=note.sent_bytes,
        received_bytes=note.received_bytes,
        error=_printable(note.error),
    )


def _printable(text: str) -> str:
    """Returns text that fits a report: printable, in one line, and short in bytes too."""
    return "".join(char if char.isprintable() and char.isascii() else "?" for char in text)[:MAX_REASON]


def resident_bytes() -> int:
    """Returns the bytes of main memory that this process occupies; 0 where the platform does not tell."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Tracked(Protocol):
    """What watches a node's training (`trainer.run.node.watch.Watch`)."""

    @property
    def tracker(self) -> TrainingTracker:
        """Its steps and rounds, as shown over HTTP."""
        ...

    def work_done(self) -> WorkDone:
        """Returns the sums of its work."""
        ...


@dataclass(slots=True)
class NodeFigures:
    """The figures of a node that holds a whole model, or of a driver, whose steps compute nothing here."""

    watch: Tracked
    role: Role
    flops_per_token: int = 0
    makes_checkpoints: bool = True
    began_at: float = field(default_factory=time.time)
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))

    def __call__(self) -> OwnFigures:
        """Returns them as of now."""
        done, tracker = self.watch.work_done(), self.watch.tracker
        now = time.time()
        saved_at = self.began_at if done.checkpoint_at is None else done.checkpoint_at
        is_driver = self.role == "driver"
        return OwnFigures(
            role=self.role,
            incarnation=self.incarnation,
            began_at=self.began_at,
            flops=float(done.num_tokens) * self.flops_per_token,
            num_tokens=done.num_tokens,
            num_steps=done.num_steps,
            active_s=max(0.0, now - self.began_at) if is_driver else done.active_s,
            loss=tracker.smoothed_loss,
            tokens_per_s=tracker.tokens_per_s,
            checkpoint_age_s=max(0.0, now - saved_at) if self.makes_checkpoints else None,
            done=done,
        )
