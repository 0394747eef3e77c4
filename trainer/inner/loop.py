"""`InnerLoop`: batches in, steps of AdamW out; accumulation, clipping, the guard against NaN, and the optimizer.

In a step ``accumulation_steps`` batches go forward and backward, each weighted by its tokens. Then losses and gradient
norm go to the host in one transfer; then the step is applied, or dropped if one of them is not finite. On a GPU the
device itself decides that, so that it never waits for the host (`trainer.inner.queueing`). The step index
advances with a dropped step too, since schedule, synchronisation and checkpoints go by it. Under DDP all ranks decide
alike, or their replicas would diverge: the gradient norm is common, and losses are added up over the ranks.

The learning rate is that of `trainer.inner.schedule`. At step 0 it is 0, so the first step changes nothing but the
moments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from trainer.errors import CheckpointMismatchError, NonFiniteTrainingError, TrainerUsageError
from trainer.inner.config import InnerConfig
from trainer.inner.machine import autocast_for, compiled, is_compiled
from trainer.inner.muon import MuonAdamW, muon_groups
from trainer.inner.queueing import BatchMover, Readback, StepClock, apply_if, can_decide_on_device
from trainer.inner.schedule import ScheduleClock
from trainer.model.loss import IGNORED_LABEL

if TYPE_CHECKING:
    from trainer.inner.parallel import Exchange, StepSums

Batch = Mapping[str, Tensor]
"""``input_ids`` and ``labels``, int64[B, T], on the CPU, as the loader gives them; other entries are ignored."""

_VERSION: Final = 1
_CLIP_EPS: Final = 1e-6  # What torch adds to the norm before it divides by it.


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: its index from 0, mean loss over its tokens, and gradient norm before clipping."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    skipped: bool  # Loss or gradient was not finite, under DDP at any rank: nothing was applied.
    seconds: float  # From requesting its first batch until its last kernel was queued.
    data_s: float = 0.0  # Of these, waiting for batches.
    compute_s: float = 0.0  # Forward and backward passes; on a GPU its own seconds.
    optimizer_s: float = 0.0  # Clipping and optimizer; on a GPU its own seconds of the step before.


class InnerLoop:
    """One node's training between two synchronisations.

    ``model(input_ids, labels)`` is the mean loss over the labels that are not -100, and on ``device`` already.
    ``on_loss`` is called with the loss of every batch, in order, after its step (the loader's ``report_loss``).
    ``exchange`` is with the other ranks that train the same model on other rows of the same batches: their losses and
    tokens are those of all ranks. ``num_rows`` are the most that one of ``batches`` has, if not ``micro_batch_size``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: InnerConfig,
        batches: Iterator[Batch],
        device: torch.device,
        *,
        on_loss: Callable[[float], object] | None = None,
        exchange: Exchange | None = None,
        num_rows: int | None = None,
    ) -> None:
        self._model = model
        self._exchange = exchange
        self._ddp = model if isinstance(model, DistributedDataParallel) and exchange is None else None
        self._forward = compiled(model, config.compile, device)
        self._optimizer = optimizer
        self._config = config
        self._batches = batches
        self._device = device
        self._on_loss = on_loss
        self._autocast = autocast_for(device, config.precision)
        self._guard = NonFiniteGuard(config.max_skipped_in_a_row)
        most_rows = config.micro_batch_size if num_rows is None else num_rows
        self._mover = BatchMover(device, most_rows if is_compiled(config.compile, device) else 0)
        self._clock = StepClock(device)
        self._schedule = ScheduleClock(config, num_parts=self._ddp.process_group.size() if self._ddp else 1)

    @property
    def step_index(self) -> int:
        """Index of the step to come; as many were taken, dropped ones counted."""
        return self._schedule.step_index

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps so far, under DDP of all ranks; those of dropped steps are counted."""
        return self._schedule.num_tokens

    @property
    def skipped_steps(self) -> int:
        """Steps dropped since the run began."""
        return self._guard.skipped

    def configure(self, config: InnerConfig) -> None:
        """Goes on by other rates, another schedule, limit of the norm or number of batches a step, from the next step.

        Options that model, optimizer or loader were built by stay as they were, whatever ``config`` says of them.
        """
        self._config = config
        self._schedule.config = config

    def set_step(self, global_step: int) -> None:
        """Moves to another place of the schedule: a late joiner takes up the others' step (`ScheduleClock.move_to`)."""
        if global_step < 0:
            raise TrainerUsageError(f"global_step: expected 0 or more, found {global_step}")
        self._schedule.move_to(global_step)

    def step(self) -> StepResult:
        """Trains on the next batches; the last step may have fewer.

        Raises StopIteration where the data have ended, and NonFiniteTrainingError where loss or gradient were not
        finite too often in a row: the step is counted, not applied.
        """
        began = time.perf_counter()
        batches = [next(self._batches), *islice(self._batches, self._config.accumulation_steps - 1)]
        data_s = time.perf_counter() - began
        if not self._model.training:
            self._model.train()
        self._optimizer.zero_grad(set_to_none=True)  # Of a step that was interrupted, or of other code.
        counts = [int((batch["labels"] != IGNORED_LABEL).sum()) for batch in batches]
        num_tokens, lr = sum(counts), self._schedule.lr
        begun = self._clock.mark()
        losses = self._backward(batches, counts)
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        sums = None if self._exchange is None else self._exchange.combine(losses, counts, gradients)
        norm = get_total_norm(gradients).to(self._device) if sums is None else sums.grad_norm
        values = torch.stack([*losses, norm]) if sums is None else sums.values
        computed, readback = self._clock.mark(), Readback(values)
        on_device = self._ddp is None and can_decide_on_device(self._optimizer, self._device)
        for group in self._optimizer.param_groups if on_device else ():
            group["lr"] = lr
        if on_device and (sums is not None or num_tokens):
            decisive = [*(loss for loss, count in zip(losses, counts, strict=True) if count), norm]
            is_good = torch.isfinite(torch.stack(decisive)).all() if sums is None else sums.is_finite
            self._clip(gradients, sums, norm)
            apply_if(self._optimizer, is_good)
        if sums is None:
            *batch_losses, grad_norm = readback.wait()
        else:
            batch_losses, counts, grad_norm = sums.read(readback.wait())
            num_tokens = sum(counts)
        weighted = (loss * count for loss, count in zip(batch_losses, counts, strict=True) if count)
        loss = sum(weighted) / num_tokens if num_tokens else math.nan
        index = self._schedule.step_index
        common, all_tokens = self._common_loss(loss, num_tokens)
        applied = self._guard.allows(common, grad_norm)
        if applied and not on_device:
            if sums is not None or grad_norm + _CLIP_EPS > self._config.max_grad_norm:
                self._clip(gradients, sums, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        stepped = self._clock.mark()
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.count(all_tokens)
        if self._on_loss is not None:
            for each in batch_losses:
                self._on_loss(each)
        self._guard.raise_if_hopeless(index, common, grad_norm, lr)
        return StepResult(
            index,
            loss,
            grad_norm,
            lr,
            num_tokens,
            not applied,
            time.perf_counter() - began,
            data_s=data_s,
            compute_s=self._clock.between(begun, computed),
            optimizer_s=self._clock.optimizer_s(computed, stepped),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the loop's state; the optimizer's tensors are the live ones, not copies."""
        return {
            "version": _VERSION,
            **self._schedule.state_dict(),
            "skipped_steps": self._guard.skipped,
            "skipped_in_a_row": self._guard.skipped_in_a_row,
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state; betas and decay stay configured. Raises CheckpointMismatchError if it is another's."""
        if state.get("version") != _VERSION:
            raise CheckpointMismatchError(
                f"expected inner-loop state of version {_VERSION}, found {state.get('version')!r}; "
                "use the release that wrote it"
            )
        try:
            clock = ScheduleClock.of(self._config, state, self._schedule.num_parts)
            counters = [int(state[name]) for name in ("skipped_steps", "skipped_in_a_row")]
            restored = state_for(self._optimizer, state["optimizer"])
            # Until the next step, the rate of the last one: a node that saves before it has the state it was given.
            for group, saved in zip(restored["param_groups"], state["optimizer"]["param_groups"], strict=True):
                group["lr"] = float(saved["lr"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointMismatchError(f"expected the state of an inner loop, found another: {error!r}") from error
        self._optimizer.load_state_dict(restored)
        self._schedule = clock
        self._guard.skipped, self._guard.skipped_in_a_row = counters

    def _clip(self, gradients: list[Tensor], sums: StepSums | None, norm: Tensor) -> None:
        """Scales gradients to the greatest norm allowed; those of ranks first to the mean over all tokens."""
        if sums is not None and self._exchange is not None:
            self._exchange.clip(gradients, sums, self._config.max_grad_norm)
        else:
            clip_grads_with_norm_(self._parameters(), self._config.max_grad_norm, norm)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _backward(self, batches: list[Batch], counts: list[int]) -> list[Tensor]:
        """Sums the gradients of batches, weighted by tokens; returns their losses, NaN where no label counts.

        DDP exchanges gradients with the last one that counts; a rank without any sends zeros, since the others wait.
        """
        if self._exchange is not None:
            return [
                self._ranked_backward(batch, count, self._exchange, is_last=batch is batches[-1])
                for batch, count in zip(batches, counts, strict=True)
            ]
        num_tokens = sum(counts)
        losses = [torch.full((), math.nan, device=self._device) for _ in batches]
        counting = [index for index, count in enumerate(counts) if count]
        if not counting and self._ddp is not None:
            ids, _ = self._mover.moved(batches[-1])
            with self._autocast():
                loss = self._forward(ids, torch.zeros_like(ids))
            (loss * 0.0).backward()
        moved = {index: self._mover.moved(batches[index]) for index in counting}
        for index in counting:
            exchange = nullcontext() if self._ddp is None or index == counting[-1] else self._ddp.no_sync()
            with exchange, self._autocast():
                loss = self._forward(*moved.pop(index))
            share = counts[index] / num_tokens
            (loss if share == 1.0 else loss * share).backward()
            losses[index] = loss.detach().float()
        return losses

    def _ranked_backward(self, batch: Batch, count: int, exchange: Exchange, *, is_last: bool) -> Tensor:
        """Adds the gradients of this rank's rows, also where no label counts: ranks go through each pass together."""
        with exchange.forward(is_last=is_last), self._autocast():
            loss = self._forward(*self._mover.moved(batch))
        (loss * exchange.share(count)).backward()
        value: Tensor = loss.detach().float()
        return value

    def _common_loss(self, loss: float, num_tokens: int) -> tuple[float, int]:
        """Returns the loss that decides, under DDP the sum over ranks with labels that count, and the tokens of all."""
        if self._ddp is None:
            return loss, num_tokens
        own = [loss, 1.0, num_tokens] if num_tokens else [0.0, 0.0, 0.0]
        summed = torch.tensor(own, dtype=torch.float64, device=self._device)  # Counts above 2**24 have no fp32.
        dist.all_reduce(summed, group=self._ddp.process_group)
        total, num_ranks, all_tokens = summed.tolist()
        return (total if num_ranks else math.nan), int(all_tokens)


class NonFiniteGuard:
    """Decides whether a step may be applied; ``max_in_a_row`` dropped steps in a row are an error."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self.skipped = 0  # Steps dropped since the run began.
        self.skipped_in_a_row = 0  # Steps dropped since the latest good one.

    def allows(self, loss: float, grad_norm: float) -> bool:
        """Returns whether to apply a step with this loss and gradient norm, which is finite only if every value is."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.skipped_in_a_row = 0
            return True
        self.skipped += 1
        self.skipped_in_a_row += 1
        return False

    def raise_if_hopeless(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        """Raises NonFiniteTrainingError after too many dropped steps in a row, of which ``step`` is the latest."""
        if self.skipped_in_a_row >= self._max_in_a_row:
            raise NonFiniteTrainingError(
                f"expected a finite loss and gradient, found loss {loss:.6g} and gradient norm {grad_norm:.6g} at step "
                f"{step}, the last of {self.skipped_in_a_row} such steps in a row (none was applied); go back to an "
                f"earlier checkpoint with a lower lr (now {lr:.3g}), or set precision to fp32"
            )


def make_optimizer(model: nn.Module, config: InnerConfig) -> Optimizer:
    """Builds AdamW over a model's, or a stage's, trainable parameters; first the group with decay.

    With ``optimizer: muon`` a group before it has the matrices within the blocks, and Muon moves them. The model must
    be on its final device: a parameter that is moved afterwards is lost to the optimizer. The fused kernel (CPU and
    CUDA) does a step in one pass over memory instead of a dozen.
    """
    decayed, plain = parameter_groups(model)
    parameters = decayed + plain
    if not parameters:
        raise TrainerUsageError("expected a model with trainable parameters, found none; is all of it frozen?")
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    matrices: list[nn.Parameter] = []
    if config.optimizer == "muon":
        matrices, decayed = muon_groups(model, decayed)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    of_adamw: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "fused": True if fused else None,
    }
    if matrices:
        return MuonAdamW(matrices, groups, weight_decay=config.weight_decay, **of_adamw)
    return AdamW(groups, **of_adamw)


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trainable parameters that decay, and those of norms (modules named so) or of one dimension."""
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    of_norms = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            without = parameter.ndim < 2 or id(parameter) in of_norms
            (plain if without else decayed).append(parameter)
    return decayed, plain


def state_for(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a saved state for ``load_state_dict``, under the optimizer's own rates, betas, decay and kernels.

    Raises CheckpointMismatchError if it belongs to parameters of other numbers or shapes.
    """
    own = optimizer.state_dict()
    sizes, saved_sizes = ([len(group["params"]) for group in each["param_groups"]] for each in (own, saved))
    if sizes != saved_sizes:
        raise CheckpointMismatchError(
            f"expected an optimizer of {sizes} parameters by group, found one of {saved_sizes}; is it of another "
            "model, or of another inner.optimizer?"
        )
    groups = [
        {**group, "params": list(was["params"])}
        for group, was in zip(own["param_groups"], saved["param_groups"], strict=True)
    ]
    state = {key: dict(saved["state"].get(key, {})) for group in groups for key in group["params"]}
    for live, group in zip(optimizer.param_groups, groups, strict=True):
        for parameter, key in zip(live["params"], group["params"], strict=True):
            for name, value in state[key].items():
                if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                    raise CheckpointMismatchError(
                        f"optimizer state {name} of parameter {key}: expected shape {tuple(parameter.shape)}, found "
                        f"{tuple(value.shape)}; is it of another model, or of a vocabulary that has grown?"
                    )
    return {"state": {key: values for key, values in state.items() if values}, "param_groups": groups}
