"""What a worker tells of itself: to the others of its run, to its owner's metrics, and to the run's monitor.

Each of the three is read from the worker's parts when it is asked for; nothing here changes them or waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from trainer.compression.activations import LinkMeter
from trainer.model.sizing import stage_flops_per_token
from trainer.network.discovery.stage_report import MAX_REASON, StageReport
from trainer.pipeline.worker import StageWorker
from trainer.run.config import RunConfig
from trainer.run.node.reporting import OwnFigures
from trainer.run.node.watch import Watch
from trainer.run.swarm.building import BuiltStage, WorkerSaving
from trainer.run.swarm.shape import SwarmShape

_STATUSES: Final = ("joining", "serving", "leaving")


def stage_report(
    uid: str, built: BuiltStage, worker: StageWorker, saving: WorkerSaving, place: tuple[int, float]
) -> StageReport:
    """Returns what a worker announces of its stage; ``place`` is its round, and how far it is in it."""
    figures, (round_index, position) = worker.runtime.figures, place
    resumed, resumed_through = saving.resumed if worker.service.status == "serving" else ("", 0)
    return StageReport(
        uid=uid,
        incarnation=worker.replies.incarnation,
        status=worker.service.status,
        version=built.replica.version,
        saved=saving.version,
        round_index=round_index,
        round_position=position,
        shared_through=worker.shared.count,
        num_tokens=built.replica.accumulated.num_tokens,
        queued=figures.queued,
        rows_per_s=figures.rows_per_s,
        busy=figures.busy,
        resumed=resumed,
        resumed_through=resumed_through,
        began_from=built.began_from,
        unsaved_s=saving.checkpoints.unsaved_s(time.time()),
        unsaved_because=saving.checkpoints.failure[:MAX_REASON],
    )


def stage_metrics(worker: StageWorker, meter: LinkMeter) -> Iterator[tuple[str, str, float]]:
    """Yields name, explanation and value of what Prometheus is told of a worker."""
    figures, link, replica = worker.runtime.figures, meter.figures(), worker.replica
    yield "stage_version", "Optimizer steps behind the stage's weights.", replica.version
    yield "stage_skipped_steps", "Steps not applied: gradient not finite.", replica.skipped_steps
    yield "stage_queued", "Requests that wait.", figures.queued
    yield "stage_queued_bytes", "Tensors of requests that wait.", figures.queued_bytes
    yield "stage_computed", "Requests computed since the start.", figures.computed
    yield "stage_batch_rows", "Rows computed at once, a moving average.", figures.batch_rows
    yield "stage_compute_seconds", "Of a request, a moving average.", figures.compute_s
    yield "stage_rows_per_second", "While there was work.", figures.rows_per_s
    yield "stage_busy", "Share of the last while in which it computed.", figures.busy
    yield "stage_cached_bytes", "Of forward passes whose backward pass is to come.", replica.cached_bytes
    yield "stage_status", "0 joining, 1 serving, 2 leaving.", _STATUSES.index(worker.service.status)
    yield "link_raw_bytes", "Activations and gradients sent, before the codec.", link.raw_bytes
    yield "link_wire_bytes", "What was sent for them.", link.wire_bytes
    yield "link_ratio", "Of these two.", link.ratio
    yield "link_error", "Relative reconstruction error of activations, a moving average.", link.error
    yield "link_error_max", "The largest measured.", link.max_error
    yield "link_alarms", "Measurements above the limit.", link.alarms


class WorkerFigures:
    """A worker's figures for its report: sums since it became the incarnation that it is."""

    def __init__(
        self,
        config: RunConfig,
        shape: SwarmShape,
        built: BuiltStage,
        worker: StageWorker,
        watch: Watch,
        saving: WorkerSaving,
    ) -> None:
        layers = shape.plan.ranges[shape.plan.index(built.name)]
        has_output = built.name == shape.plan.names[-1]
        each = stage_flops_per_token(shape.model, layers, has_output=has_output, seq_len=config.inner.seq_len)
        self._rows = max(1, config.inner.micro_batch_size)
        self._tokens = self._rows * config.inner.seq_len
        self._flops = each * self._tokens
        self._stage = built.name
        self._worker = worker
        self._watch = watch
        self._saving = saving
        self._incarnation = worker.replies.incarnation
        self._began_at = time.time()
        self._before_s = 0.0  # Of compute, by earlier incarnations.

    def __call__(self) -> OwnFigures:
        """Returns them as of now."""
        figures, computed_s = self._worker.runtime.figures, self._worker.runtime.computed_s
        incarnation, applied = self._worker.replies.incarnation, self._worker.replies.applied
        if incarnation != self._incarnation:
            self._incarnation, self._before_s, self._began_at = incarnation, computed_s, time.time()
        checkpoints, done = self._saving.checkpoints, self._watch.work_done()
        age_s = checkpoints.unsaved_s(time.time())
        return OwnFigures(
            role="worker",
            incarnation=incarnation,
            began_at=self._began_at,
            stage=self._stage,
            flops=float(applied * self._flops),
            num_tokens=applied * self._tokens,
            num_steps=done.num_steps,
            micro_batches=applied,
            active_s=max(0.0, computed_s - self._before_s),
            loss=self._watch.tracker.smoothed_loss,
            tokens_per_s=figures.rows_per_s * figures.busy * self._tokens / self._rows,
            checkpoint_age_s=age_s or None,
            checkpoint_problem=checkpoints.failure,
            done=done,
        )
