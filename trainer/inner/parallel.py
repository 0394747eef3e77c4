"""How the ranks of one node train one model: each on its rows of every batch, with DDP, FSDP2 or HSDP.

Guarantees: a step is that of one process with the same batch, up to the order of sums (in bf16 with shards also up to
the rounding of norms, whose weights blocks gather in bf16): each loss weighs by the tokens that count at all ranks, the
clipped norm is that of the whole gradient, and all ranks apply or drop a step alike, since they decide on the same
numbers. DDP exchanges gradients once a step, whatever the accumulation. Shards are reduced to at each backward pass, so
that no rank ever holds a gradient of the whole model, and exchanged between machines once a step.

The trade-off: losses, tokens and norm are added up behind the backward pass, in one exchange of some hundred bytes, so
gradients are weighed by the tokens that a step has where every label counts. What some labels that do not count change
about that goes into the factor that clips; before the backward pass, another exchange would have to be waited for at
every step. On a GPU the host waits for none of it before clipping and optimizer are queued (`trainer.inner.queueing`).

FSDP wraps block by block; embedding, last norm and output are one more group, which stays gathered through the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, Protocol, cast

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

_has_forward_sync = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
BUFFERS_STAY: Final[Mapping[str, Any]] = {"forward_sync_buffers" if _has_forward_sync else "broadcast_buffers": False}
"""For DDP, by its name in this torch: buffers are tables that never change, and each step would broadcast them."""
_CLIP_EPS: Final = 1e-6  # What torch adds to the norm before it divides by it.


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
    if place.num_hosts > 1:
        names = ("replicate", "shard")
        mesh = init_device_mesh(device.type, (place.num_hosts, place.local_size), mesh_dim_names=names)
    else:
        mesh = init_device_mesh(device.type, (place.local_size,))
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
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **BUFFERS_STAY)
    for _ in range(2):  # The order is taken up at the beginning of the second.
        tokens = torch.zeros((1, min(2, seq_len)), dtype=torch.int64, device=device)
        (wrapped(tokens, tokens) * 0.0).backward()
    wrapped.zero_grad(set_to_none=True)
    return wrapped


def local_part(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, as a view that can be written to."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class StepSums:
    """A step over all ranks, in fp64 on the device: nothing of it has been waited for."""

    losses: Tensor
    """[batches]: each one's mean, NaN where no label counts."""
    counts: Tensor
    """[batches]: its tokens."""
    grad_norm: Tensor
    """Of the gradient of the mean loss, before clipping."""
    scale: Tensor
    """What the ranks' gradients have to be multiplied with to be that gradient."""

    @property
    def values(self) -> Tensor:
        """Losses, tokens and norm in one tensor, as `read` takes them."""
        return torch.cat([self.losses, self.counts, self.grad_norm.reshape(1)])

    @staticmethod
    def read(values: Sequence[float]) -> tuple[list[float], list[int], float]:
        """Returns losses, tokens and norm."""
        num_batches = len(values) // 2
        counts = [int(count) for count in values[num_batches : 2 * num_batches]]
        return list(values[:num_batches]), counts, values[-1]

    @property
    def is_finite(self) -> Tensor:
        """Whether the step may be applied: as the host decides it."""
        counting = self.counts > 0
        losses = torch.where(counting, self.losses, torch.zeros_like(self.losses))
        return torch.isfinite(losses).all() & torch.isfinite(self.grad_norm) & counting.any()


class Exchange(Protocol):
    """What the inner loop asks of the other ranks in a step."""

    def forward(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Encloses a forward pass; gradients that a rank has whole are exchanged in a step's last pass alone."""

    def share(self, count: int) -> float:
        """Returns the weight of this rank's mean loss over so many tokens."""

    def combine(self, losses: Sequence[Tensor], counts: Sequence[int], gradients: Sequence[Tensor]) -> StepSums:
        """Returns what all ranks decide by; the host does not wait for it."""

    def clip(self, gradients: Sequence[Tensor], sums: StepSums, max_norm: float) -> None:
        """Makes gradients those of the mean loss, of at most this norm, in place."""


class RankExchange:
    """The exchanges of one wrapped model; ``step_tokens`` are those of a step of all ranks where every label counts."""

    def __init__(
        self, wrapped: nn.Module, kind: Wrapped, place: RankPlace, step_tokens: int, device: torch.device
    ) -> None:
        self._wrapped = wrapped
        self._place = place
        self._step_tokens = step_tokens
        self._device = device
        self._kind = kind
        self._num_replicas = {"ddp": place.size, "fsdp": 1, "hsdp": place.num_hosts}[kind]
        self._is_exchanging = True

    def forward(self, *, is_last: bool) -> AbstractContextManager[object]:
        """See `Exchange`."""
        if isinstance(self._wrapped, DistributedDataParallel):
            return nullcontext() if is_last else cast(AbstractContextManager[object], self._wrapped.no_sync())
        # What a backward pass makes is cut into shards at once, or a rank would hold the whole gradient in fp32.
        if self._kind == "hsdp" and is_last != self._is_exchanging:
            cast(FSDPModule, self._wrapped).set_requires_all_reduce(is_last)
            self._is_exchanging = is_last
        return nullcontext()

    def share(self, count: int) -> float:
        """See `Exchange`. Both wrappers average over all ranks."""
        return count * self._place.size / self._step_tokens

    def combine(self, losses: Sequence[Tensor], counts: Sequence[int], gradients: Sequence[Tensor]) -> StepSums:
        """See `Exchange`."""
        parts = [_local(gradient) for gradient in gradients]
        square = get_total_norm(parts).to(self._device, torch.float64).square()
        tokens = torch.tensor(counts, dtype=torch.float64)
        if self._device.type == "cuda":  # Else the copy would wait for the backward pass.
            tokens = tokens.pin_memory().to(self._device, non_blocking=True)
        weighted = torch.stack(list(losses)).to(torch.float64) * tokens
        sums = torch.cat([weighted, tokens, square.reshape(1) / self._num_replicas])
        dist.all_reduce(sums)
        losses_of_all, counts_of_all, square_of_all = sums[: len(losses)], sums[len(losses) : -1], sums[-1]
        scale = self._step_tokens / counts_of_all.sum().clamp(min=1.0)
        norm = square_of_all.sqrt() * scale
        return StepSums(losses_of_all / counts_of_all, counts_of_all, norm, scale)  # Of no tokens it is 0 / 0, NaN.

    def clip(self, gradients: Sequence[Tensor], sums: StepSums, max_norm: float) -> None:
        """See `Exchange`."""
        parts = [_local(gradient) for gradient in gradients]
        factor = sums.scale * (max_norm / (sums.grad_norm + _CLIP_EPS)).clamp(max=1.0)
        torch._foreach_mul_(parts, factor.to(parts[0].dtype))


def _local(gradient: Tensor) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient  # Without DTensor's dispatch.


def rows_of(batch: dict[str, Any], place: RankPlace) -> dict[str, Any]:
    """Returns a rank's rows of a batch of all ranks: every ``size``-th, so that each has its part of every shard."""
    return {name: value[place.rank :: place.size] for name, value in batch.items()}
