"""`StageReplica`: one worker's copy of a stage, and everything that is computed with it.

A gradient is that of the weights of now, which may have moved on since the forward pass that it belongs to; it counts
as long as that is at most `StageConfig.max_staleness` steps off (spec P-14, P-15).

The version counts steps, dropped ones too, as `InnerLoop` counts them: schedule and synchronisation go by it, and a
replica that stood still on a bad gradient would hold up the others.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import NonFiniteActivationError, StaleGradientError, TrainerUsageError
from trainer.inner import InnerConfig, NonFiniteGuard, lr_at
from trainer.model.loss import IGNORED_LABEL
from trainer.pipeline.stage.accumulator import GradientAccumulator
from trainer.pipeline.stage.config import StageConfig
from trainer.pipeline.stage.forwards import Forwards
from trainer.pipeline.stage.norm_bound import NormBound
from trainer.pipeline.stage.passes import Gradients, StagePasses
from trainer.pipeline.stage.results import Accumulated, BackwardResult, LossSum, StageKind, StepInfo, TailResult
from trainer.pipeline.stage.saved import SavedStage, read_saved, to_saved

__all__ = ["BeforeApply", "StageReplica"]

logger = logging.getLogger(__name__)

_CLIP_EPS = 1e-6
"""What torch, and so `InnerLoop`, adds to a norm before it divides by it."""

_OUTLIERS_SAID_S = 60.0

BeforeApply = Callable[[], None]
"""Called when nothing but adding up is left to do; what it raises ends the call with nothing applied."""


class StageReplica:
    """A stage's weights, optimizer, accumulators and version.

    Args:
        module: maps ids (head) or hidden states to hidden states; a tail has ``loss_sum(hidden, labels)``.
        optimizer: of its parameters (`trainer.inner.make_optimizer`).
        inner: schedule, precision, compilation, and how many steps in a row may be dropped.
        config: the options of the stage.
        kind: which end of the model it is.
        num_stages: of the whole model; clipping shares the norm out among them.
        after_update: called with the module whenever its weights have changed: a subspace projects them.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        inner: InnerConfig,
        config: StageConfig,
        *,
        kind: StageKind,
        num_stages: int,
        after_update: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.kind = kind
        self.clip_norm = (config.tail_clip_factor if kind == "tail" else config.clip_factor) / math.sqrt(num_stages)
        """The norm that this stage's gradient is scaled down to."""
        self._inner = inner
        self._config = config
        self._after_update = after_update
        self._passes = StagePasses(module, inner, kind)
        self._guard = NonFiniteGuard(inner.max_skipped_in_a_row)
        self._accumulator = GradientAccumulator(self._passes.parameters)
        self._forwards = Forwards(self._passes, config)
        self._norm_bound = NormBound(config.outlier_factor)
        self._outliers = 0
        self._say_outliers_from_s = 0.0
        self._version = 0

    @property
    def version(self) -> int:
        """Steps behind the weights, dropped ones included."""
        return self._version

    @property
    def accumulated(self) -> Accumulated:
        """What the next step will be of."""
        return self._accumulator.accumulated

    @property
    def skipped_steps(self) -> int:
        """Steps dropped because their gradient was not finite."""
        return self._guard.skipped

    @property
    def outliers(self) -> int:
        """Micro-batches whose gradient was scaled down, since this process began."""
        return self._outliers

    @property
    def cached_bytes(self) -> int:
        """Kept for backward passes to come."""
        return self._forwards.size_bytes

    def forward(self, key: str, x: Tensor) -> Tensor:
        """Runs the stage, and keeps under ``key`` what its backward pass needs.

        Args:
            key: the micro-batch's; what was kept under it before is replaced.
            x: int[rows, positions] ids (head) or float[rows, positions, dim] hidden states, on any device. It must
                not be changed afterwards.

        Returns:
            fp32[rows, positions, dim] on the stage's device, without a graph.

        Raises:
            NonFiniteActivationError: the output is not finite; nothing is kept.
        """
        return self._forwards.run(key, x, self._version)

    def forward_many(self, requests: Sequence[tuple[str, Tensor]]) -> list[Tensor | NonFiniteActivationError]:
        """Runs several micro-batches; those of one length as one batch, where no graphs are kept.

        Returns:
            For each, in order, what `forward` returns or raises: a bad one does not spoil its neighbours.
        """
        return self._forwards.run_many(requests, self._version)

    def backward(
        self,
        key: str,
        x: Tensor | None,
        grad_y: Tensor,
        num_tokens: int,
        forward_version: int,
        *,
        before_apply: BeforeApply | None = None,
    ) -> BackwardResult:
        """Counts a micro-batch's gradient. Whatever is raised, the accumulators are as they were.

        One that is far larger than usual is scaled down first (`NormBound`), the input's with it: as if the losses that
        it is of had weighed less, in this stage and those before.

        Args:
            key: as in `forward`.
            x: its input again; None: the one that this replica may still have.
            grad_y: of the sum of its losses, by this stage's output.
            num_tokens: labels that count; with 0 nothing is computed, and the gradient is 0.
            forward_version: of the weights its forward pass saw, here or at another replica.
            before_apply: the last chance to stop.

        Raises:
            StaleGradientError: the forward pass is too many steps off.
            NonFiniteActivationError: an activation or gradient is not finite.
            PipelineError: there is no input, or the gradient is not of the output's shape.
        """
        self._check_staleness(key, forward_version)
        if not num_tokens:
            self._forwards.forget(key)
            self._accumulate_nothing(before_apply)
            grad_x = None if self.kind == "head" else torch.zeros_like(self._passes.moved(grad_y).float())
            return BackwardResult(grad_x, self._version, recomputed=False)
        graph = self._forwards.graph(key, x, grad_y)
        gradients = self._passes.gradients(graph.y, graph.leaf, grad_y, key=key)
        if before_apply is not None:
            before_apply()
        gradients, scale = self._add(key, gradients, num_tokens)
        return BackwardResult(gradients.of_input, self._version, graph.recomputed, scale)

    def tail(self, key: str, hidden: Tensor, labels: Tensor, *, before_apply: BeforeApply | None = None) -> TailResult:
        """Loss and gradient of a micro-batch, counted as by `backward`. Whatever is raised, nothing was.

        Args:
            key: the micro-batch's, for messages.
            hidden: float[rows, positions, dim].
            labels: int[rows, positions]; -100 does not count. Where none counts nothing is computed.
            before_apply: the last chance to stop.

        Raises:
            NonFiniteActivationError: loss or gradient is not finite.
        """
        leaf, labels = self._passes.leaf(hidden), self._passes.moved(labels).long()
        num_tokens = int((labels != IGNORED_LABEL).sum())
        if not num_tokens:
            self._accumulate_nothing(before_apply)
            return TailResult(0.0, 0, torch.zeros_like(leaf, requires_grad=False), self._version)
        loss_sum, gradients = self._passes.loss_gradients(leaf, labels, key=key)
        if gradients.of_input is None:
            raise TrainerUsageError("expected a tail whose loss depends on its input, found one that ignores it")
        if before_apply is not None:
            before_apply()
        gradients, scale = self._add(key, gradients, num_tokens, loss_sum)
        return TailResult(loss_sum, num_tokens, cast(Tensor, gradients.of_input), self._version, scale)

    def step(self, lr_step: int) -> StepInfo:
        """Applies what has been accumulated, or drops it where it is not finite.

        Without a token the version advances alone: no sample is invented.

        Args:
            lr_step: where in the schedule.

        Raises:
            NonFiniteTrainingError: the gradient was not finite once too often in a row. The step is counted.
        """
        began = time.perf_counter()
        was, norm, lr = self.accumulated, self._accumulator.norm(), lr_at(lr_step, self._inner)
        coefficient = min(1.0, self.clip_norm / (norm + _CLIP_EPS))
        applied = was.num_tokens > 0 and self._guard.allows(was.loss_sum, norm)
        if applied:
            self._update(coefficient / was.num_tokens, lr)
        self._accumulator.drop()
        self.set_version(self._version + 1)
        if applied:
            self.weights_changed()
        loss = was.loss_sum / was.num_tokens if self.kind == "tail" and was.num_tokens else None
        if was.num_tokens:
            self._guard.raise_if_hopeless(lr_step, math.nan if loss is None else loss, norm, lr)
        return StepInfo(
            version=self._version,
            lr=lr,
            grad_norm=norm,
            clip_coefficient=coefficient,
            num_tokens=was.num_tokens,
            num_micro_batches=was.num_micro_batches,
            loss=loss,
            applied=applied,
            seconds=time.perf_counter() - began,
        )

    def weights_changed(self) -> None:
        """To be called when an average, an outer step or a state from elsewhere has changed the weights.

        Graphs that saw the old ones are dropped, and ``after_update`` is called.
        """
        self._forwards.weights_changed()
        if self._after_update is not None:
            with torch.no_grad():
                self._after_update(self.module)

    def set_version(self, version: int) -> None:
        """Takes up another version without an update, to follow the other replicas.

        Raises:
            TrainerUsageError: it is negative.
        """
        if version < 0:
            raise TrainerUsageError(f"version: expected 0 or more, found {version}")
        self._version = version
        self._forwards.keep_versions(version - self._config.max_staleness, version + self._config.max_staleness)

    def drop(self) -> Accumulated:
        """Forgets what was accumulated; returns how much that was."""
        return self._accumulator.drop()

    def forget(self, key: str) -> None:
        """Forgets a forward pass whose backward pass will not come."""
        self._forwards.forget(key)

    def evaluate(self, x: Tensor) -> Tensor:
        """Head, body: the output for held-out data; nothing is kept.

        Raises:
            NonFiniteActivationError: it is not finite.
        """
        return self._passes.output(self._passes.leaf(x), key="held-out data")

    def evaluate_loss(self, hidden: Tensor, labels: Tensor) -> LossSum:
        """Tail: the loss of held-out data, NaN if it is that.

        Raises:
            TrainerUsageError: this is no tail.
        """
        return self._passes.loss(hidden, labels)

    def evaluate_gradient(self, x: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        """Body: the output, and the gradient that `backward` would answer but for its scale; nothing is counted.

        Raises:
            NonFiniteActivationError: an activation or gradient is not finite.
            PipelineError: the gradient is not of the output's shape.
            TrainerUsageError: this is the head, whose input has no gradient.
        """
        if self.kind == "head":
            raise TrainerUsageError("expected a body, found the head; ids have no gradient")
        return self._passes.input_gradient(self._passes.leaf(x), grad_y, key="a comparison")

    def evaluate_loss_gradient(self, hidden: Tensor, labels: Tensor) -> tuple[LossSum, Tensor]:
        """Tail: the loss, and the gradient that `tail` would answer but for its scale; nothing is counted.

        Raises:
            NonFiniteActivationError: the gradient is not finite.
            TrainerUsageError: this is no tail.
        """
        leaf, labels = self._passes.leaf(hidden), self._passes.moved(labels).long()
        return self._passes.loss_input_gradient(leaf, labels, key="a comparison")

    def state_dict(self) -> dict[str, Any]:
        """Where the replica stands: weights, optimizer, accumulators, counters. Its tensors are the living ones."""
        return to_saved(
            SavedStage(
                module=self.module.state_dict(),
                optimizer=self.optimizer.state_dict(),
                sums=self._accumulator.sums(self._names()),
                accumulated=self.accumulated,
                version=self._version,
                skipped_steps=self._guard.skipped,
                skipped_in_a_row=self._guard.skipped_in_a_row,
                norms=self._norm_bound.seen,
            )
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where a state says; options are the configuration's. Forward passes before it are forgotten.

        Raises:
            CheckpointMismatchError: it is of another release, stage or model; nothing has changed.
        """
        saved = read_saved(state, self.module, self.optimizer)
        self.module.load_state_dict(dict(saved.module))
        self.optimizer.load_state_dict(dict(saved.optimizer))
        self._accumulator.restore([saved.sums.get(name) for name in self._names()], saved.accumulated)
        self._guard.skipped, self._guard.skipped_in_a_row = saved.skipped_steps, saved.skipped_in_a_row
        self._norm_bound.restore(saved.norms)
        self._forwards.clear()
        self._version = saved.version
        self.weights_changed()

    def _names(self) -> list[str]:
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def _check_staleness(self, key: str, forward_version: int) -> None:
        apart = abs(self._version - forward_version)
        if apart > self._config.max_staleness:
            raise StaleGradientError(
                f"expected a forward pass of {key} at most {self._config.max_staleness} steps from version "
                f"{self._version}, found version {forward_version}; run it forward again"
            )

    def _add(self, key: str, gradients: Gradients, num_tokens: int, loss_sum: float = 0.0) -> tuple[Gradients, float]:
        """Counts a gradient by as much as it may weigh; returns what was counted, and how it was scaled."""
        norm, scale = gradients.norm, self._norm_bound.coefficient(gradients.norm, num_tokens)
        self._norm_bound.note(norm, num_tokens)
        if scale < 1.0:
            self._note_outlier(key, norm, norm * scale)
            gradients = gradients.scaled(scale)
        self._accumulator.add(gradients.of_parameters, num_tokens, loss_sum)
        return gradients, scale

    def _note_outlier(self, key: str, norm: float, counted_norm: float) -> None:
        """Counts it, and says so once in a while: who sends such can send many."""
        self._outliers += 1
        now_s = time.monotonic()
        if now_s >= self._say_outliers_from_s:
            self._say_outliers_from_s = now_s + _OUTLIERS_SAID_S
            logger.warning(
                "the gradient of %s has a norm of %.3g where %.3g is usual, and counts as one of %.3g; %d such so far",
                *(key, norm, counted_norm / self._config.outlier_factor, counted_norm, self._outliers),
            )

    def _accumulate_nothing(self, before_apply: BeforeApply | None) -> None:
        if before_apply is not None:
            before_apply()
        self._accumulator.add((), 0)

    def _update(self, scale: float, lr: float) -> None:
        self._accumulator.hand_over(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
