"""A node's metrics for Prometheus: docs/observing.md lists the names, which carry their units.

The registry belongs to the node, not to the process. What the tracker, the RPC endpoint and the log count anyway is
read when a page is requested (2 ms). Labels that other nodes can influence (reasons) take at most 32 values of 32
letters, and ``other``, so that no peer can add series without end. The rest of a node reports to the `Observer`, which
passes each fact to the tracker, the metrics and the log: 11 µs a step in a tight loop, 30 to 35 µs between real steps.
"""

from __future__ import annotations

import collections
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from trainer.monitor.curves import CurveLog
from trainer.monitor.event_log import EventLog
from trainer.monitor.facts import AnnouncedNode, EvaluationFacts, LossFacts, RoundFacts, StepFacts
from trainer.monitor.pages.node_history import NodeHistory
from trainer.monitor.status import TrainingStatus
from trainer.monitor.tracker import TrainingTracker
from trainer.monitor.work import WorkTally

METRICS_MEDIA_TYPE = CONTENT_TYPE_LATEST
CheckpointOutcome = Literal["saved", "skipped", "failed"]

_STEP_SECONDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_ROUND_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0)
_REASON = re.compile(r"([A-Za-z][A-Za-z0-9_ -]{0,31})(?:$|[:;,(])")
_MAX_REASONS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Numbers that other parts count, read when a page is requested."""

    status: Callable[[], TrainingStatus]  # `TrainingTracker.status`.
    refused: Callable[[], Mapping[str, int]] = field(default=dict)  # Messages the RPC endpoint refused, by reason.
    rpc_bytes: Callable[[], tuple[int, int]] = field(default=lambda: (0, 0))
    """Bytes the RPC endpoint sent and received."""
    relayed_bytes: Callable[[], tuple[int, int]] = field(default=lambda: (0, 0))
    """Among them, those by way of relays."""
    lost_events: Callable[[], int] = field(default=lambda: 0)  # `EventLog.lost_events`.
    withdrawals: Callable[[], int] = field(default=lambda: 0)  # `WorkDone.withdrawals`.
    further: Callable[[], Iterable[tuple[str, str, float]]] = field(default=tuple)
    """Name, help and value of additional gauges; names without the prefix ``genesis_training_``."""


class TrainingMetrics(Collector):
    """The counters of one node; what other parts count is collected when a page is requested."""

    def __init__(
        self, sources: Sources, *, node_id: str, run_id: str = "", role: str = "node", stage: str = ""
    ) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "genesis_training", "registry": self._registry}
        whose = {"node_id": node_id, "run_id": run_id, "role": role, "stage": stage}
        Info("node", "Whose figures these are.", **own).info(whose)
        self._steps = Counter("steps", "Inner steps since the start, skipped ones included.", **own)
        self._skipped = Counter("skipped_steps", "Steps not applied: loss or gradient not finite.", **own)
        self._tokens = Counter("tokens", "Tokens trained on since the start.", **own)
        self._step_index = Gauge("step_index", "Latest step in the schedule.", **own)
        self._loss = Gauge("loss_nats", "Latest finite loss, nats a token.", **own)
        self._lr = Gauge("learning_rate", "Learning rate of the latest step.", **own)
        self._grad_norm = Gauge("gradient_norm", "Latest finite L2 norm, before clipping.", **own)
        self._step_seconds = Histogram("step_seconds", "Wall time of steps.", buckets=_STEP_SECONDS, **own)
        self._loader_wait = Counter("loader_wait_seconds", "Seconds training waited for batches.", **own)
        self._rounds = Counter(
            "rounds",
            "Rounds by outcome: shared (others' contributions are in), alone (only this node's), failed.",
            ["outcome"],
            **own,
        )
        for outcome in ("shared", "alone", "failed"):
            self._rounds.labels(outcome)
        text = "Wall time of rounds with a result."
        self._stage_rounds = Counter(
            "stage_rounds", "Rounds by stage and outcome, at a node with all stages.", ["stage", "outcome"], **own
        )
        self._round_seconds = Histogram("round_seconds", text, buckets=_ROUND_SECONDS, **own)
        self._round_bytes = Counter("round_bytes", "Bytes of rounds with a result.", ["direction"], **own)
        text = "Bits of the latest result's round for each parameter in it, agreement and vote included."
        self._round_bits = Gauge("round_bits_per_parameter", text, ["direction"], **own)
        text = "Seconds of rounds with a result, by phase: agree (on who takes part), reduce (the tensors), vote."
        self._round_phases = Counter("round_phase_seconds", text, ["phase"], **own)
        text = "Share of the contributions agreed upon that the latest result has."
        self._completeness = Gauge("round_completeness_ratio", text, **own)
        self._members = Gauge("round_members", "Members of the latest round.", **own)
        self._dropped = Counter("dropped_members", "Members left out of rounds, by reason.", ["reason"], **own)
        text = "Checkpoints by outcome: saved, skipped (the one before was still being written), failed."
        self._checkpoints = Counter("checkpoints", text, ["outcome"], **own)
        text = "Seconds the training thread gave to checkpoints."
        self._checkpoint_seconds = Counter("checkpoint_seconds", text, **own)
        self._held_out: LossFacts | None = None
        self._step_at: float | None = None  # Seconds since 1970, as the next.
        self._saved_at: float | None = None
        self._reasons: set[str] = set()
        self._refusal_reasons: set[str] = set()
        self._sources = sources
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def step(self, step: StepFacts, *, loader_wait_s: float = 0.0) -> None:
        """Counts an inner step."""
        self._step_at = time.time()
        self._steps.inc()
        self._tokens.inc(step.num_tokens)
        self._step_index.set(step.step)
        self._lr.set(step.lr)
        self._step_seconds.observe(step.seconds)
        if step.skipped:
            self._skipped.inc()
        if math.isfinite(step.loss):
            self._loss.set(step.loss)
        if math.isfinite(step.grad_norm):
            self._grad_norm.set(step.grad_norm)
        if loader_wait_s > 0:
            self._loader_wait.inc(loader_wait_s)

    def round(self, report: RoundFacts, stage: str = "") -> None:
        """Counts a round that ended with a result, of a stage at a node that has several."""
        outcome = "alone" if len(report.members) < 2 else "shared"
        self._rounds.labels(outcome).inc()
        if stage:
            self._stage_rounds.labels(stage, outcome).inc()
        self._round_seconds.observe(report.seconds)
        self._round_bytes.labels("sent").inc(report.sent_bytes)
        self._round_bytes.labels("received").inc(report.received_bytes)
        for phase, seconds in zip(("agree", "reduce", "vote"), report.phases, strict=True):
            self._round_phases.labels(phase).inc(max(0.0, seconds))
        if report.bits_per_value is not None:
            for direction, bits in zip(("sent", "received"), report.bits_per_value, strict=True):
                self._round_bits.labels(direction).set(bits)
        self._completeness.set(report.completeness)
        self._members.set(len(report.members))
        for _, why in report.dropped:
            self._dropped.labels(_bounded(why, self._reasons)).inc()

    def round_failed(self, stage: str = "") -> None:
        """Counts a round that ended without one; ``stage`` as for `round`."""
        self._rounds.labels("failed").inc()
        if stage:
            self._stage_rounds.labels(stage, "failed").inc()

    def checkpoint(self, outcome: CheckpointOutcome, seconds: float) -> None:
        """Counts a checkpoint that was due; ``seconds`` is what it cost the training thread."""
        if outcome == "saved":
            self._saved_at = time.time()
        self._checkpoints.labels(outcome).inc()
        self._checkpoint_seconds.inc(max(0.0, seconds))

    def held_out(self, loss: LossFacts) -> None:
        """Records the latest loss on held-out shards."""
        self._held_out = loss

    def page(self) -> bytes:
        """Returns the metrics in Prometheus' text form."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yields nothing, or registering would already collect."""
        yield from ()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields what other parts count, and the status."""
        by_word: collections.Counter[str] = collections.Counter()
        for reason, count in dict(self._sources.refused()).items():
            by_word[_bounded(reason, self._refusal_reasons)] += count
        text = "Messages and calls refused, by reason."
        refused = CounterMetricFamily("genesis_training_rpc_refused", text, labels=["reason"])
        for word, count in sorted(by_word.items()):
            refused.add_metric([word], count)
        yield refused
        sent_bytes, received_bytes = self._sources.rpc_bytes()
        rpc_bytes = CounterMetricFamily("genesis_training_rpc_bytes", "Bytes of all RPCs.", labels=["direction"])
        rpc_bytes.add_metric(["sent"], sent_bytes)
        rpc_bytes.add_metric(["received"], received_bytes)
        yield rpc_bytes
        relayed_sent, relayed_received = self._sources.relayed_bytes()
        relayed = CounterMetricFamily(
            "genesis_training_relayed_bytes", "Among them, those that came by way of a relay.", labels=["direction"]
        )
        relayed.add_metric(["sent"], relayed_sent)
        relayed.add_metric(["received"], relayed_received)
        yield relayed
        yield CounterMetricFamily(
            "genesis_training_lost_events", "Events that could not be logged.", self._sources.lost_events()
        )
        text = "Times this node took itself out, to take up the others' state."
        yield CounterMetricFamily("genesis_training_withdrawals", text, self._sources.withdrawals())
        status = self._sources.status()
        own = (*_gauges(status), *_held_out_gauges(self._held_out), *self._moments())
        for name, text, value in (*own, *self._sources.further()):
            if value is not None:
                yield GaugeMetricFamily(f"genesis_training_{name}", text, value)
        if status.diloco.stages:
            text = "Outer steps in this node's state, by stage, at a node with all stages."
            steps = GaugeMetricFamily("genesis_training_stage_outer_step", text, labels=["stage"])
            for stage, count in status.diloco.stages.items():
                steps.add_metric([stage], count)
            yield steps
        if status.speed is not None:
            shares = GaugeMetricFamily(
                "genesis_training_time_share_ratio", "Of the latest steps' wall time, by phase.", labels=["phase"]
            )
            for phase, share in status.speed.time_shares.items():
                shares.add_metric([phase], share)
            yield shares

    def _moments(self) -> Iterator[tuple[str, str, float | None]]:
        """Yields when something happened last, for rules to take from the time; left out before the first."""
        yield "last_step_timestamp_seconds", "When the latest step ended, seconds since 1970.", self._step_at
        text = "When the latest checkpoint was taken, seconds since 1970."
        yield "last_checkpoint_timestamp_seconds", text, self._saved_at


def _bounded(reason: str, known: set[str]) -> str:
    """Returns a reason up to its first colon or the like; ``other`` once there are many reasons."""
    found = _REASON.match(reason)
    word = found[1].strip().lower().replace(" ", "_") if found else "other"
    if word not in known and len(known) >= _MAX_REASONS:
        return "other"
    known.add(word)
    return word


def _gauges(status: TrainingStatus) -> Iterator[tuple[str, str, float | None]]:
    """Yields name, help and value of what the status says; None is left out of the page."""
    yield "verified", "1 if the loss is below its beginning by more than its noise.", float(status.training_verified)
    yield "peers", "Other nodes known to train.", status.training_nodes - 1
    yield "nodes_behind", "Nodes that have not reached the common outer step.", status.hash_agreement.num_behind
    yield "hash_agreement_percent", "Compared nodes with the same state.", status.hash_agreement_rate
    yield "model_convergence_percent", "All nodes with the same state.", status.model_convergence
    yield "sync_success_percent", "Of the latest 100 rounds attempted.", status.sync_success_rate
    yield "global_loss_nats", "Mean over the nodes of their averaged losses.", status.global_loss
    yield "global_steps", "Inner steps of all nodes.", status.total_steps
    yield "global_tokens_per_second", "Speed of all nodes.", status.tokens_per_s
    yield "data_shards", "Different shards that the nodes train on.", status.data_shards
    yield "outer_step", "Outer steps in this node's state.", status.diloco.outer_step
    yield "inner_step", "Inner steps since the last outer step.", status.diloco.inner_step
    speed = status.speed
    yield "tokens_per_second", "Speed of this node over its latest 50 steps.", speed.tokens_per_s if speed else None
    yield "mfu_ratio", "Model FLOPs utilisation of this node's devices.", speed.mfu if speed else None


def _held_out_gauges(loss: LossFacts | None) -> Iterator[tuple[str, str, float | None]]:
    """Yields the loss on held-out shards, once it was measured."""
    if loss is not None:
        yield "held_out_loss_nats", "Latest loss on held-out shards, nats a token.", loss.nats_per_token
        yield "held_out_bits_per_byte", "Latest loss on held-out shards, bits a byte of text.", loss.bits_per_byte


class Observer:
    """Passes on what happens. Any thread may call it; nothing here waits."""

    def __init__(
        self,
        tracker: TrainingTracker,
        metrics: TrainingMetrics,
        log: EventLog | None = None,
        curves: CurveLog | None = None,
        work: WorkTally | None = None,
        history: NodeHistory | None = None,
    ) -> None:
        self._history = history
        self._work = WorkTally() if work is None else work
        self._tracker = tracker
        self._metrics = metrics
        self._log = log
        self._curves = curves
        self._steps_taken = self._num_tokens = 0  # As of the latest step.

    def step(self, step: StepFacts, *, loader_wait_s: float = 0.0, num_tokens: int = 0) -> None:
        """Reports an inner step that waited so long for batches (`MeteredIterator.take_wait_s`).

        ``num_tokens`` are those of the run so far.
        """
        self._steps_taken, self._num_tokens = step.step + 1, num_tokens
        self._work.step(step)
        self._tracker.add_step(step)
        self._metrics.step(step, loader_wait_s=loader_wait_s)
        if self._log:
            self._log.step(step, loader_wait_s=loader_wait_s)
        if self._curves:
            self._curves.step(step, num_tokens=num_tokens, loader_wait_s=loader_wait_s)
        if self._history:
            self._history.step(step, num_tokens)

    def evaluation(self, found: EvaluationFacts) -> None:
        """Reports a measurement of the model on text that is not trained on."""
        if found.held_out is not None:
            parts = {"": found.held_out.whole, **found.held_out.by_source}
            spelled = {name: _spelled(part) for name, part in parts.items()}
            self._metrics.held_out(parts[""])
            by_source = {name: part for name, part in spelled.items() if name}
            seconds = round(found.held_out.seconds, 6)
            self.event("held_out", step=found.step, **spelled[""], by_source=by_source, seconds=seconds)
        for sample in found.samples:
            self.event("sample", step=found.step, prompt=sample.prompt, text=sample.text)
        if self._curves:
            self._curves.evaluation(found, num_tokens=self._num_tokens)

    def round(self, report: RoundFacts, *, outer_step: int, state_digest: str, stage: str = "") -> None:
        """Reports a round that ended with an outer step; step and digest are those of the state after it.

        ``stage`` is that of the round, at a node that has several.
        """
        self._work.round(report, stage)
        self._tracker.add_round(report, outer_step=outer_step, state_digest=state_digest, stage=stage)
        self._metrics.round(report, stage)
        if self._log:
            self._log.round(report, outer_step=outer_step, state_digest=state_digest, stage=stage)
        if self._curves and self._steps_taken:
            self._curves.round(self._steps_taken, report, outer_step=outer_step)
        if self._history:
            self._history.round(report, step=self._steps_taken, stage=stage)

    def round_failed(self, round_index: int, reason: str, stage: str = "") -> None:
        """Reports a round without a result; its work goes into the next. ``stage`` as for `round`."""
        self._work.round_failed(round_index, reason, stage)
        self._tracker.add_failed_round()
        self._metrics.round_failed(stage)
        if self._history:
            self._history.round_failed(round_index, reason, step=self._steps_taken, stage=stage)
        fields = {"stage": stage} if stage else {}
        self.event("round_failed", round_index=round_index, reason=reason, **fields)

    def checkpoint(self, outcome: CheckpointOutcome, *, step: int, seconds: float) -> None:
        """Reports a checkpoint that was due, and the seconds it cost the training thread."""
        if outcome == "saved":
            self._work.saved()
        self._metrics.checkpoint(outcome, seconds)
        self.event("checkpoint", outcome=outcome, step=step, seconds=round(seconds, 6))

    def peers(self, announcements: Iterable[AnnouncedNode]) -> None:
        """Reports what all other nodes announce now."""
        self._tracker.peers(announcements)

    def event(self, kind: str, **fields: object) -> None:
        """Logs any other event."""
        if self._log:
            self._log.event(kind, **fields)
        if self._history:
            self._history.event(kind, fields)


def _spelled(loss: LossFacts) -> dict[str, object]:
    """Returns a loss's fields as a line of the log has them: 7 digits, as of a step's loss."""
    figures = {"loss": loss.nats_per_token, "bits_per_byte": loss.bits_per_byte}
    return {
        **{name: float(f"{value:.7g}") for name, value in figures.items()},
        "num_tokens": loss.num_tokens,
        "num_bytes": loss.num_bytes,
    }


T = TypeVar("T")


class MeteredIterator(Generic[T], Iterator[T]):
    """Yields another iterator's items and adds up how long they took; 0.2 µs an item."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._wait_s = 0.0

    def __next__(self) -> T:
        begun = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self._wait_s += time.perf_counter() - begun

    def take_wait_s(self) -> float:
        """Returns the seconds waited since the last call."""
        wait_s, self._wait_s = self._wait_s, 0.0
        return wait_s
