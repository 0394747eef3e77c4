"""`StageReplica`: one worker's copy of a stage, everything that is computed with it, and its state.

A gradient is computed at the current weights; it counts if they are at most `StageConfig.max_staleness` steps away from
its forward pass (spec P-14, P-15). A kept graph is used while weights and input are those of its forward pass, with the
same bits (on a CPU) as one computed again, a third more compute. The version counts dropped steps too, as `InnerLoop`
does: schedule and synchronisation follow it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import (
    CheckpointMismatchError,
    NonFiniteActivationError,
    PipelineError,
    StaleGradientError,
    TrainerUsageError,
)
from trainer.inner import InnerConfig, NonFiniteGuard, lr_at
from trainer.inner.loop import state_for
from trainer.model.loss import IGNORED_LABEL
from trainer.network.rpc.token_buckets import TokenBuckets
from trainer.outer.diloco import FlatLayout, synchronised_parameters
from trainer.outer.grad import GradientSum
from trainer.pipeline.stage.config import StageConfig
from trainer.pipeline.stage.interface import Accumulated, BackwardResult, StageKind, StepInfo, TailResult
from trainer.pipeline.stage.passes import (
    CachedForward,
    GradientAccumulator,
    Gradients,
    GraphCache,
    NormBound,
    StagePasses,
)

logger = logging.getLogger(__name__)

_STATE_VERSION: Final = 1
_CLIP_EPS = 1e-6  # What torch, and so `InnerLoop`, adds to a norm before it divides by it.

_Count = Annotated[int, Field(ge=0)]
_Norm = Annotated[float, Field(ge=0, strict=True)]
_Tokens = Annotated[int, Field(ge=1, strict=True)]

_NOTHING = Gradients((), None, 0.0)

BeforeApply = Callable[[], None]
"""Called when only the adding up is left to do; an exception from it ends the call with nothing applied."""


class StageReplica:
    """A stage's weights, optimizer, accumulated gradients and version.

    ``module`` maps ids (head) or hidden states to hidden states; a tail has ``loss_sum(hidden, labels)``. Each of
    ``num_stages`` clips to its share of the norm. ``after_update`` is called with the module after each change of its
    weights; a subspace projects them.
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
        self.clip_norm = clip_norm_of(config, kind, num_stages)
        """The norm that this stage's gradient is scaled down to."""
        self._num_stages = num_stages
        self.outliers = 0  # Micro-batches whose gradient was scaled down, since this process began.
        self._inner = inner
        self._config = config
        self._after_update = after_update
        self._passes = StagePasses(module, inner, kind)
        self._guard = NonFiniteGuard(inner.max_skipped_in_a_row)
        self._accumulator = GradientAccumulator(self._passes.parameters)
        self._cache = GraphCache(config.max_cached_bytes)
        self._keeps_graphs = config.backward == "cached" and config.max_cached_bytes > 0
        self._num_changes = 0
        self._norm_bound = NormBound(config.outlier_factor)
        self._outlier_log = TokenBuckets(1.0, 1.0 / 60.0)  # A line a minute.
        self._version = 0

    def configure(self, inner: InnerConfig, config: StageConfig) -> None:
        """Goes on by other rates, another schedule and limit of the norm, from the next step on; the rest stays."""
        self._inner = inner
        self.clip_norm = clip_norm_of(config, self.kind, self._num_stages)

    @property
    def version(self) -> int:
        """Steps taken, dropped ones included."""
        return self._version

    @property
    def accumulated(self) -> Accumulated:
        """Micro-batches counted since the last step."""
        return self._accumulator.accumulated

    @property
    def skipped_steps(self) -> int:
        """Steps dropped because their gradient was not finite."""
        return self._guard.skipped

    @property
    def cached_bytes(self) -> int:
        """Kept for backward passes to come."""
        return self._cache.size_bytes

    def forward(self, key: str, x: Tensor) -> Tensor:
        """Runs the stage, and keeps under ``key`` what the backward pass needs, in place of what was there.

        ``x`` is int[rows, positions] ids (head) or float[rows, positions, dim] hidden states, on any device, and must
        not be changed afterwards. The output is fp32[rows, positions, dim] on the stage's device, without a graph. If
        it is not finite, nothing is kept, and NonFiniteActivationError is raised.
        """
        leaf = self._passes.leaf(x)
        if not self._keeps_graphs:
            y = self._passes.output(leaf, key=key)
            self._keep(key, leaf)
            return y
        y, graph_bytes = self._passes.graph(leaf, key=key)
        self._keep(key, leaf, y, graph_bytes)
        return y.detach()

    def forward_many(self, requests: Sequence[tuple[str, Tensor]]) -> list[Tensor | NonFiniteActivationError]:
        """Runs several micro-batches of one length, as one batch where no graphs are kept (they come back one at a
        time).

        For each, in order, it returns what `forward` returns or raises: a bad one does not spoil the others.
        """
        if not self._keeps_graphs and len(requests) > 1:
            leaves = [self._passes.leaf(x) for _, x in requests]
            try:
                outputs = self._passes.output(torch.cat([leaf.detach() for leaf in leaves]), key=requests[0][0])
            except NonFiniteActivationError:
                pass  # One by one, to find the culprit.
            else:
                for (key, _), leaf in zip(requests, leaves, strict=True):
                    self._keep(key, leaf)
                return list(torch.split(outputs, [leaf.shape[0] for leaf in leaves]))
        answers: list[Tensor | NonFiniteActivationError] = []
        for key, x in requests:
            try:
                answers.append(self.forward(key, x))
            except NonFiniteActivationError as error:
                answers.append(error)
        return answers

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
        """Computes and counts a micro-batch's gradient. On any exception the accumulated gradients are unchanged.

        An outlier (`NormBound`) is scaled down first, with the input's gradient: as if its losses had weighed less.
        ``x`` is the input again; None: the one that this replica may still have. ``grad_y`` is of the sum of the losses
        of ``num_tokens`` labels that count; with 0 nothing is computed, and the gradient is 0. ``forward_version`` is
        of the weights its forward pass saw, here or elsewhere. ``before_apply`` may raise.

        Raises:
            StaleGradientError: the forward pass is too many steps away.
            NonFiniteActivationError: an activation or gradient is not finite.
            PipelineError: there is no input, or the gradient does not have the output's shape.
        """
        if abs(self._version - forward_version) > self._config.max_staleness:
            raise StaleGradientError(
                f"expected a forward pass of {key} at most {self._config.max_staleness} steps from version "
                f"{self._version}, found version {forward_version}; run it forward again"
            )
        if not num_tokens:
            self._cache.take(key)
            self._add(key, _NOTHING, 0, 0.0, before_apply)
            grad_x = None if self.kind == "head" else torch.zeros_like(self._passes.moved(grad_y).float())
            return BackwardResult(grad_x, self._version, recomputed=False)
        leaf, y, recomputed = self._graph(key, x, grad_y)
        gradients = self._passes.gradients(y, leaf, grad_y, key=key)
        gradients, scale = self._add(key, gradients, num_tokens, 0.0, before_apply)
        return BackwardResult(gradients.of_input, self._version, recomputed, scale)

    def tail(self, key: str, hidden: Tensor, labels: Tensor, *, before_apply: BeforeApply | None = None) -> TailResult:
        """Computes a micro-batch's loss, and computes and counts its gradient as `backward` does.

        ``hidden`` is float[rows, positions, dim], ``labels`` int[rows, positions] of which -100 does not count; where
        none counts nothing is computed.
        """
        leaf, labels = self._passes.leaf(hidden), self._passes.moved(labels).long()
        num_tokens = int((labels != IGNORED_LABEL).sum())
        if not num_tokens:
            self._add(key, _NOTHING, 0, 0.0, before_apply)
            return TailResult(0.0, 0, torch.zeros_like(leaf, requires_grad=False), self._version)
        loss_sum, gradients = self._passes.loss_gradients(leaf, labels, key=key)
        if gradients.of_input is None:
            raise TrainerUsageError("expected a tail whose loss depends on its input, found one that ignores it")
        gradients, scale = self._add(key, gradients, num_tokens, loss_sum, before_apply)
        return TailResult(loss_sum, num_tokens, gradients.of_input, self._version, scale)

    def step(self, lr_step: int) -> StepInfo:
        """Applies the accumulated gradients at that step of the schedule, or drops them where they are not finite.

        Without a token only the version advances. Raises NonFiniteTrainingError if the gradient was not finite once too
        often in a row; the step is counted.
        """
        began = time.perf_counter()
        was, norm, lr = self.accumulated, self._accumulator.norm(), lr_at(lr_step, self._inner)
        coefficient = min(1.0, self.clip_norm / (norm + _CLIP_EPS))
        applied = was.num_tokens > 0 and self._guard.allows(was.loss_sum, norm)
        if applied:
            self._accumulator.hand_over(coefficient / was.num_tokens)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
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

    def take_gradient(self, layout: FlatLayout) -> GradientSum:
        """Returns what has been added up, and is empty afterwards; see `trainer.outer.grad.GradientSource`."""
        return self._accumulator.take(list(synchronised_parameters(self.module)), layout)

    def give_back(self, layout: FlatLayout, gradient: GradientSum) -> None:
        """Adds what was taken, and was in no step, to what has come since."""
        self._accumulator.give_back(layout, gradient)

    def weights_changed(self) -> None:
        """Drops the graphs of the old weights and calls ``after_update``; for whoever else changes the weights."""
        self._num_changes += 1
        self._cache.drop_graphs()
        if self._after_update is not None:
            with torch.no_grad():
                self._after_update(self.module)

    def set_version(self, version: int) -> None:
        """Sets the version without an update, to follow the other replicas."""
        if version < 0:
            raise TrainerUsageError(f"version: expected 0 or more, found {version}")
        self._version = version
        self._cache.keep_versions(version - self._config.max_staleness, version + self._config.max_staleness)

    def drop(self) -> Accumulated:
        """Drops the accumulated gradients; returns what they held."""
        return self._accumulator.drop()

    def forget(self, key: str) -> None:
        """Drops a forward pass whose backward pass will not come."""
        self._cache.take(key)

    def evaluate(self, x: Tensor, grad_y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns head's or body's output; nothing is kept.

        For the output's gradient it also returns a body's that `backward` would answer before scaling.
        """
        if grad_y is None:
            return self._passes.output(self._passes.leaf(x), key="held-out data"), None
        if self.kind == "head":
            raise TrainerUsageError("expected a body, found the head; ids have no gradient")
        return self._passes.input_gradient(self._passes.leaf(x), grad_y, key="a comparison")

    def evaluate_loss(self, hidden: Tensor, labels: Tensor, *, with_gradient: bool = False) -> TailResult:
        """Returns the tail's loss, which may be NaN, and the gradient `tail` would answer before scaling, if wanted."""
        found = self._passes.loss(hidden, labels, with_gradient=with_gradient, key="a comparison")
        return TailResult(*found, self._version)

    def state_dict(self) -> dict[str, Any]:
        """Returns weights, optimizer state, accumulated gradients and counters; tensors are the live ones.

        The values are those that ``torch.load(weights_only=True)`` accepts; there are no sums right after a step.
        """
        return {
            "version": _STATE_VERSION,
            "module": dict(self.module.state_dict()),
            "optimizer": dict(self.optimizer.state_dict()),
            "sums": self._accumulator.sums(list(self._trained())),
            "num_tokens": self.accumulated.num_tokens,
            "num_micro_batches": self.accumulated.num_micro_batches,
            "loss_sum": self.accumulated.loss_sum,
            "stage_version": self._version,
            "skipped_steps": self._guard.skipped,
            "skipped_in_a_row": self._guard.skipped_in_a_row,
            "norms": [list(each) for each in self._norm_bound.seen],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state and drops all forward passes; options of the optimizer stay as configured.

        Raises CheckpointMismatchError if it is of another release, stage or model; nothing has changed then.
        """
        if state.get("version") != _STATE_VERSION:
            raise CheckpointMismatchError(
                f"expected stage state of version {_STATE_VERSION}, found {state.get('version')!r}; use the release "
                "that wrote it"
            )
        try:
            saved = _SavedStage.model_validate(dict(state))
            optimizer = state_for(self.optimizer, saved.optimizer)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise CheckpointMismatchError(f"expected the state of a stage, found another: {problem}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointMismatchError(f"expected the state of a stage, found another: {error!r}") from error
        own, trained = self.module.state_dict(), self._trained()
        _check_tensors(saved.module, own, "weights")
        if missing := sorted(own.keys() - saved.module.keys()):
            raise CheckpointMismatchError(f"expected the weight {missing[0]} in the state of a stage, found none")
        _check_tensors(saved.sums, trained, "sums")
        self.module.load_state_dict(saved.module)
        self.optimizer.load_state_dict(optimizer)
        accumulated = Accumulated(saved.num_tokens, saved.num_micro_batches, saved.loss_sum)
        self._accumulator.restore([saved.sums.get(name) for name in trained], accumulated)
        self._guard.skipped, self._guard.skipped_in_a_row = saved.skipped_steps, saved.skipped_in_a_row
        self._norm_bound.seen.clear()
        self._norm_bound.seen.extend(saved.norms)
        self._cache.clear()
        self._version = saved.stage_version
        self.weights_changed()

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def _weights(self) -> int:
        """Grows with every change of the weights: those reported, and those in place, which torch counts."""
        return self._num_changes + sum(parameter._version for parameter in self._passes.parameters)

    def _keep(self, key: str, leaf: Tensor, y: Tensor | None = None, graph_bytes: int = 0) -> None:
        self._cache.put(key, CachedForward(leaf, y, self._weights(), self._version, graph_bytes))

    def _graph(self, key: str, x: Tensor | None, grad_y: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Returns leaf and output of a graph at the current weights, to be run backward once, and whether it was run
        again.
        """
        kept = self._cache.get(key)
        given = None if x is None else self._passes.leaf(x)
        if kept is not None and given is not None and not torch.equal(given.detach(), kept.x.detach()):
            kept = None
        leaf = given if kept is None else kept.x
        if leaf is None:
            raise PipelineError(f"expected the input of {key}, found neither it nor a forward pass here; send it again")
        if grad_y.shape[:2] != leaf.shape[:2]:
            raise PipelineError(
                f"expected a gradient of {list(leaf.shape[:2])} rows and positions for {key}, found "
                f"{list(grad_y.shape)}; is it of another micro-batch?"
            )
        self._cache.take(key)
        if kept is not None and kept.y is not None and kept.weights == self._weights():
            return kept.x, kept.y, False
        leaf = self._passes.leaf(leaf)
        y, _ = self._passes.graph(leaf, key=key)
        return leaf, y, True

    def _add(
        self, key: str, gradients: Gradients, num_tokens: int, loss_sum: float, before_apply: BeforeApply | None
    ) -> tuple[Gradients, float]:
        """Counts a gradient within the norm bound; returns what was counted, and the factor it was scaled with."""
        if before_apply is not None:
            before_apply()
        norm, scale = gradients.norm, 1.0
        if num_tokens:
            scale = self._norm_bound.coefficient(norm, num_tokens)
            self._norm_bound.note(norm, num_tokens)
        if scale < 1.0:
            self.outliers += 1
            if self._outlier_log.take(""):
                logger.warning(
                    "the gradient of %s has a norm of %.3g; %.3g is usual, so it counts with %.3g; %d outliers so far",
                    *(key, norm, norm * scale / self._config.outlier_factor, norm * scale, self.outliers),
                )
            gradients = gradients.scaled(scale)
        self._accumulator.add(gradients.of_parameters, num_tokens, loss_sum)
        return gradients, scale


def clip_norm_of(config: StageConfig, kind: StageKind, num_stages: int) -> float:
    """Returns a stage's share of the norm that a gradient of the whole model is scaled down to."""
    return (config.tail_clip_factor if kind == "tail" else config.clip_factor) / math.sqrt(num_stages)


class _SavedStage(BaseModel):
    """The values of a state, of which the tensors are checked against the module."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    module: dict[str, Any]
    optimizer: dict[str, Any]
    sums: dict[str, Any]
    num_tokens: _Count
    num_micro_batches: _Count
    loss_sum: float
    stage_version: _Count
    skipped_steps: _Count
    skipped_in_a_row: _Count
    norms: list[Annotated[tuple[_Norm, _Tokens], Field(strict=False)]] = []
    """Absent from states of releases that kept none."""


def _check_tensors(found: Mapping[str, Any], expected: Mapping[str, Tensor], what: str) -> None:
    for name, value in found.items():
        own = expected.get(name)
        if own is None:
            raise CheckpointMismatchError(f"{what} of a stage: expected none called {name}, found it; is it another's?")
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape != tuple(own.shape):
            raise CheckpointMismatchError(
                f"{what} of a stage, {name}: expected shape {tuple(own.shape)}, found {shape}; is it of another model?"
            )
