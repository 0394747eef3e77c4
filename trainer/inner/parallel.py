"""How the ranks of one node train one model: each on its rows of every batch, with DDP, FSDP2 or HSDP.

Guarantees: a step is that of one process with the same batch, up to the order of sums: each loss weighs by the tokens
that count at all ranks, the clipped norm is that of the whole gradient, and all ranks apply or drop a step alike, since
they decide on the same numbers. Gradients are exchanged once a step, whatever the accumulation.

The trade-off: losses, tokens and norm are added up behind the backward pass, in one exchange of some hundred bytes, so
gradients are weighed by the tokens that a step has where every label counts. Where some do not, the gradients are
scaled once more; before the backward pass, another exchange would have to be waited for at every step.

FSDP wraps block by block; embedding, last norm and output are one more group, which stays gathered through the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from trainer.inner.config import InnerConfig
from trainer.inner.machine import autocast_for
from trainer.inner.rank_place import RankPlace, Wrapped


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Lets modules be built without memory for parameters; buffers, such as tables of positions, are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # One that is on meta already may be tied to another.
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def shard_model(
    model: nn.Module, blocks: Sequence[nn.Module], place: RankPlace, device: torch.device, config: InnerConfig
) -> None:
    """Shards a model built by `parameters_on_meta` within each machine; parameters have memory then, but no values."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    mesh = init_device_mesh(device.type, (place.local_size,))
    if place.num_hosts > 1:
        names = ("replicate", "shard")
        mesh = init_device_mesh(device.type, (place.num_hosts, place.local_size), mesh_dim_names=names)
    # Autocast makes products bf16; what blocks gather for them is bf16 too, half the bytes. Sums of gradients are fp32.
    is_bf16 = device.type == "cuda" and autocast_for(device, config.precision) is not nullcontext
    gathered = torch.bfloat16 if is_bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    model.to_empty(device=device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def replicate_model(model: nn.Module, device: torch.device, seq_len: int) -> DistributedDataParallel:
    """Wraps a model for DDP, with its buckets of gradients in the order in which they come.

    DDP orders them behind its first backward pass, which is one of zeros here: else the first step after a restart
    would add up in another order than it would have without one.
    """
    ids = [device] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    for _ in range(2):  # The order is taken up at the beginning of the second.
        tokens = torch.zeros((1, min(2, seq_len)), dtype=torch.int64, device=device)
        (wrapped(tokens, tokens) * 0.0).backward()
    wrapped.zero_grad(set_to_none=True)
    return wrapped


def local_part(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, as a view that can be written to."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Exchange(Protocol):
    """What the inner loop asks of the other ranks in a step."""

    def num_rows(self, batch_rows: int) -> int:
        """Returns the most rows that one rank has of a batch of so many."""

    def forward(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Encloses a forward pass; its backward pass exchanges gradients only if it is a step's last."""

    def share(self, count: int) -> float:
        """Returns the weight of this rank's mean loss over so many tokens."""

    def combine(
        self, losses: Sequence[Tensor], counts: Sequence[int], gradients: Sequence[Tensor]
    ) -> tuple[list[float], list[int], float]:
        """Returns each batch's loss and tokens over all ranks, and the gradient's norm; gradients are scaled to fit."""

    def scale(self, gradients: Sequence[Tensor], factor: float) -> None:
        """Scales gradients in place."""


class RankExchange:
    """The exchanges of one wrapped model; ``step_tokens`` are those of a step of all ranks where every label counts."""

    def __init__(
        self, wrapped: nn.Module, kind: Wrapped, place: RankPlace, step_tokens: int, device: torch.device
    ) -> None:
        self._wrapped = wrapped
        self._place = place
        self._step_tokens = step_tokens
        self._device = device
        self._num_replicas = {"ddp": place.size, "fsdp": 1, "hsdp": place.num_hosts}[kind]
        self._is_exchanging = True

    def num_rows(self, batch_rows: int) -> int:
        """See `Exchange`; as `rows_of` cuts them."""
        return -(-batch_rows // self._place.size)

    def forward(self, *, is_last: bool) -> AbstractContextManager[object]:
        """See `Exchange`."""
        if isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext() if is_last else cast(AbstractContextManager[object], self._wrapped.no_sync())
        if is_last != self._is_exchanging:
            cast(FSDPModule, self._wrapped).set_requires_gradient_sync(is_last)
            self._is_exchanging = is_last
        return nullcontext()

    def share(self, count: int) -> float:
        """See `Exchange`. Both wrappers average over all ranks."""
        return count * self._place.size / self._step_tokens

    def combine(
        self, losses: Sequence[Tensor], counts: Sequence[int], gradients: Sequence[Tensor]
    ) -> tuple[list[float], list[int], float]:
        """See `Exchange`."""
        parts = [_local(gradient) for gradient in gradients]
        square = get_total_norm(parts).to(self._device, torch.float64).square()
        tokens = torch.tensor(counts, dtype=torch.float64, device=self._device)
        weighted = torch.stack(list(losses)).to(torch.float64) * tokens
        sums = torch.cat([weighted, tokens, square.reshape(1) / self._num_replicas])
        dist.all_reduce(sums)
        *found, square_of_all = sums.tolist()
        totals = [int(count) for count in found[len(losses) :]]
        batch_losses = [
            loss / count if count else math.nan for loss, count in zip(found[: len(losses)], totals, strict=True)
        ]
        num_tokens, norm = sum(totals), math.sqrt(square_of_all) if square_of_all >= 0.0 else math.nan
        if num_tokens and num_tokens != self._step_tokens:
            self.scale(gradients, self._step_tokens / num_tokens)
            norm *= self._step_tokens / num_tokens
        return batch_losses, totals, norm

    def scale(self, gradients: Sequence[Tensor], factor: float) -> None:
        """See `Exchange`."""
        parts = [_local(gradient) for gradient in gradients]
        torch._foreach_mul_(parts, factor)


def _local(gradient: Tensor) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient  # Without DTensor's dispatch.


def rows_of(batch: dict[str, Any], place: RankPlace) -> dict[str, Any]:
    """Returns a rank's rows of a batch of all ranks: every ``size``-th, so that each has its part of every shard."""
    return {name: value[place.rank :: place.size] for name, value in batch.items()}
