"""Whole models under averaged gradients: a node's loop of micro-batches, and what nodes tell each other of them.

A step of `GradLoop` is a step of the run: micro-batches until all nodes have the target together, a round, and the
update that all make alike. So steps, checkpoints and schedules count the run's steps, the same at all nodes. Progress
is exchanged as among the workers of a stage.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.inner import Batch, InnerConfig, InnerLoop, StepResult
from trainer.model.loss import IGNORED_LABEL
from trainer.network.rpc import Peer
from trainer.outer.diloco import FlatLayout, synchronised_parameters
from trainer.outer.engine.strategy import OuterResult, StateValue
from trainer.outer.grad import GradientSum, GradOutcome, GradTrainer, Progress
from trainer.pipeline.protocol.messages import ProgressReport
from trainer.pipeline.stage.passes import GradientAccumulator
from trainer.pipeline.worker.progress import ProgressExchange, ProgressTracker

if TYPE_CHECKING:
    from trainer.run.config import RunConfig
    from trainer.run.node.network import Network

_INTERVAL_S = 0.5
_MAX_LEAD = 3


def target_tokens_of_node(config: RunConfig) -> int:
    """Tokens of a step that nodes of whole models take together: as the run file says, else eight micro-batches'."""
    return config.grad.target_tokens or 8 * max(1, config.inner.micro_batch_size) * config.inner.seq_len


class GradLoop(InnerLoop):
    """An `InnerLoop` whose steps are those that all nodes take together."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: InnerConfig,
        batches: Iterator[Batch],
        device: torch.device,
        *,
        on_loss: Callable[[float], object] | None,
        make_trainer: Callable[[GradLoop], GradTrainer],
    ) -> None:
        super().__init__(model, optimizer, config, batches, device, on_loss=on_loss)
        parameters = synchronised_parameters(model)
        self._names = list(parameters)
        self._accumulator = GradientAccumulator(list(parameters.values()))
        self._handed_tokens = 0
        self._outcomes: list[OuterResult] = []
        self.progress: NodeProgress | None = None  # None: the node is alone.
        self.is_over: Callable[[], bool] = lambda: False
        """Whether the node is to stop, be it within a step, which may take many micro-batches."""
        self.trainer = make_trainer(self)
        self.trainer.progress = self._progress_of_all

    @property
    def step_index(self) -> int:
        """Index of the run's step to come."""
        return self.trainer.num_steps

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps so far, of all nodes."""
        return self.trainer.num_tokens

    @property
    def counted_tokens(self) -> int:
        """This node's tokens towards the next step."""
        return self._accumulator.accumulated.num_tokens + self._handed_tokens

    def set_step(self, global_step: int) -> None:
        """Drops what was added up, after another node's state was taken up; the state says which step is next."""
        del global_step
        self._accumulator.drop()
        self._handed_tokens = 0

    def step(self) -> StepResult:
        """Trains until a step of the run is taken or fails, or the node is to stop; then nothing is lost."""
        began, data_s, compute_s = time.perf_counter(), 0.0, 0.0
        if not self._model.training:
            self._model.train()
        while True:
            while (outcome := self.trainer.look()) is not None:
                self._handed_tokens = 0
                self._outcomes.append(outcome.result)
                if not outcome.is_slice or not outcome.result.committed:
                    return self._result(outcome, time.perf_counter() - began, data_s, compute_s)
            if self.is_over():
                return self._result(None, time.perf_counter() - began, data_s, compute_s)
            asked = time.perf_counter()
            batch = next(self._batches)
            data_s += time.perf_counter() - asked
            begun = time.perf_counter()
            self._count(batch)
            compute_s += time.perf_counter() - begun

    def take_outcome(self) -> OuterResult | None:
        """Returns how the rounds since the last call ended: one that failed, if there is one, else the last."""
        outcomes, self._outcomes = self._outcomes, []
        failed = [outcome for outcome in outcomes if not outcome.committed]
        found = failed or outcomes
        return found[-1] if found else None

    def take_gradient(self, layout: FlatLayout) -> GradientSum:
        """See `trainer.outer.grad.GradientSource`."""
        self._handed_tokens = self._accumulator.accumulated.num_tokens
        return self._accumulator.take(self._names, layout)

    def give_back(self, layout: FlatLayout, gradient: GradientSum) -> None:
        """See `trainer.outer.grad.GradientSource`."""
        self._handed_tokens = 0
        self._accumulator.give_back(layout, gradient)

    def added_up(self) -> GradientSum | None:
        """Returns all that is in no step yet: handed over to a round, or added up since; None: nothing."""
        layout, flight = self.trainer.layout, self.trainer.handed_over
        sums, was = self._accumulator.sums(self._names), self._accumulator.accumulated
        if not was.num_micro_batches:
            return flight
        vector = torch.zeros(layout.num_values) if flight is None else flight.vector.clone()
        for name, shape, place in layout.slices():
            if name in sums:
                vector[place].view(shape).add_(sums[name].to(vector.device))
        before = GradientSum(vector, 0, 0) if flight is None else flight
        return GradientSum(
            vector,
            before.num_tokens + was.num_tokens,
            before.num_micro_batches + was.num_micro_batches,
            before.loss_sum + was.loss_sum,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the loop's state; see `InnerLoop.state_dict`."""
        self._schedule.step_index, self._schedule.num_tokens = self.step_index, self.num_tokens
        return super().state_dict()

    def _progress_of_all(self) -> Progress:
        own_tokens = self._accumulator.accumulated.num_tokens
        if self.progress is None:
            return Progress(own_tokens, own_tokens)
        self.progress.look(self.counted_tokens)
        return Progress(own_tokens, self.progress.tokens_of_all(self.trainer.num_steps, own_tokens))

    def _count(self, batch: Batch) -> None:
        """Adds the gradient of one batch to the sums, unless it is not finite."""
        self._optimizer.zero_grad(set_to_none=True)
        num_tokens = int((batch["labels"] != IGNORED_LABEL).sum())
        if not num_tokens:
            return
        (loss,) = (float(each) for each in self._backward([batch], [num_tokens]))
        gradients = [parameter.grad for parameter in self._parameters_in_order()]
        present = [gradient for gradient in gradients if gradient is not None]
        norm = float(torch.nn.utils.get_total_norm(present)) if present else 0.0
        if self._guard.allows(loss, norm):
            torch._foreach_mul_(present, float(num_tokens))
            self._accumulator.add(gradients, num_tokens, loss * num_tokens)
        self._optimizer.zero_grad(set_to_none=True)
        if self._on_loss is not None:
            self._on_loss(loss)
        self._guard.raise_if_hopeless(self.step_index, loss, norm, self.trainer.lr)

    def _parameters_in_order(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _result(self, outcome: GradOutcome | None, seconds: float, data_s: float, compute_s: float) -> StepResult:
        step = None if outcome is None else outcome.step
        own = None if step is None else step.own
        return StepResult(
            step=self.step_index - (step is not None),
            loss=own.loss_sum / own.num_tokens if own is not None and own.num_tokens else math.nan,
            grad_norm=0.0 if step is None else step.grad_norm,
            lr=self.trainer.lr if step is None else step.lr,
            num_tokens=0 if own is None else own.num_tokens,
            skipped=step is None or not step.applied,
            seconds=seconds,
            data_s=data_s,
            compute_s=compute_s,
            optimizer_s=0.0,
        )


class GradStrategy:
    """What the node's loop sees of the rounds, which `GradLoop.step` has had; an `OuterStrategy`."""

    def __init__(self, loop: GradLoop) -> None:
        self._loop = loop

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Returns how the step's round ended."""
        return self._loop.take_outcome()

    def drain(self) -> OuterResult | None:
        """Leaves the round that has begun, whose gradients would be of a step too many."""
        self._loop.trainer.leave()
        return None

    def state_dict(self) -> dict[str, StateValue]:
        """See `GradTrainer.state_dict`; what is added up, and in no step yet, goes on too."""
        return self._loop.trainer.state_dict(self._loop.added_up())

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """See `GradTrainer.load_state_dict`."""
        self._loop.trainer.load_state_dict(state)


class NodeProgress:
    """Exchanges a node's tokens towards the next step with the other nodes of its run.

    To be made before the network starts; ``run`` is for its event loop.
    """

    def __init__(self, network: Network[Any], loop: GradLoop, target_tokens: int) -> None:
        self._network = network
        self._grad_loop = loop
        self._incarnation = secrets.token_hex(8)
        self._tracker = ProgressTracker(_INTERVAL_S, _MAX_LEAD, time.monotonic)
        self._exchange = ProgressExchange(
            network.endpoint,
            self._tracker,
            self._peers,
            self._report,
            interval_s=_INTERVAL_S,
            target_tokens=target_tokens,
            on_news=lambda: None,
        )
        self._exchange.register()

    def start(self) -> None:
        """Begins; once the network has started."""
        asyncio.run_coroutine_threadsafe(self._exchange.run(), self._network.loop)

    def look(self, own_tokens: int) -> None:
        """Has progress exchanged if the node has counted much since the last time."""
        self._exchange.look(own_tokens)

    def tokens_of_all(self, version: int, own_tokens: int) -> int:
        """Returns the believed tokens of all nodes towards the step after ``version``."""
        return self._tracker.stage_tokens(version, own_tokens)

    def _peers(self) -> tuple[Peer, ...]:
        return tuple(said.peer() for said in self._network.alike())

    def _report(self) -> ProgressReport:
        return ProgressReport(
            incarnation=self._incarnation,
            version=self._grad_loop.trainer.num_steps,
            num_tokens=self._grad_loop.counted_tokens,
        )
