"""What a worker shows of itself: steps and rounds as any node, and the figures of its stage and links beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from trainer.compression.activations import LinkMeter
from trainer.inner import StepResult
from trainer.outer.engine.strategy import OuterResult
from trainer.pipeline.stage import StepInfo
from trainer.pipeline.worker import StageWorker
from trainer.run.config import RunConfig
from trainer.run.node.network import Network
from trainer.run.node.watching import Watch

__all__ = ["WorkerWatch"]


class WorkerWatch(Watch):
    """Log, metrics and HTTP interface of a worker; a context manager."""

    def __init__(
        self,
        config: RunConfig,
        network: Network[Any],
        worker: StageWorker,
        meter: LinkMeter,
        stop: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._meter = meter
        super().__init__(config, network, stop, self._figures)

    def stepped(self, info: StepInfo) -> None:
        """Shows a step of the stage; only the tail knows a loss."""
        self.observer.step(
            StepResult(
                step=info.version - 1,
                loss=math.nan if info.loss is None else info.loss,
                grad_norm=info.grad_norm,
                lr=info.lr,
                num_tokens=info.num_tokens,
                skipped=not info.applied and info.num_tokens > 0,
                seconds=info.seconds,
            )
        )

    def round(self, result: OuterResult) -> None:
        """Shows a round that has ended."""
        if result.report is None:
            self.observer.round_failed(result.round_index, result.error)
        else:
            self.observer.round(result.report, outer_step=result.outer_step, state_digest="")

    def _figures(self) -> Iterator[tuple[str, str, float]]:
        figures, link, replica = self._worker.runtime.figures, self._meter.figures(), self._worker.replica
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
        yield "link_raw_bytes", "Activations and gradients sent, before the codec.", link.raw_bytes
        yield "link_wire_bytes", "What was sent for them.", link.wire_bytes
        yield "link_ratio", "Of these two.", link.ratio
        yield "link_error", "Relative reconstruction error of activations, a moving average.", link.error
        yield "link_error_max", "The largest measured.", link.max_error
        yield "link_alarms", "Measurements above the limit.", link.alarms
