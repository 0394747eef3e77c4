"""The parts of a stage's arithmetic: its passes, what is kept from one to the other, and the sums of gradients.

Outputs are fp32, also under autocast, and checked to be finite by their Euclidean norm: it is finite only if every
value is, and costs 0.1 ms a million values on one core, where ``isfinite().all()`` costs 2. A finite tensor whose
squares overflow (values of some 1e19) is refused too. Such a tensor raises NonFiniteActivationError.

The cache is bounded by bytes. Above the bound, whole entries are dropped: the oldest of the driver that holds most,
which sends the input again. So a driver that floods the cache drops its own entries, and those of a driver that died go
when others need the memory. An entry is an input and, while it is of use, the output with its graph: some twenty times
the input a layer.

Sums of losses' gradients are added up, not means, so micro-batches weigh by their tokens (spec P-25). The first one's
gradients become the sums, and later ones are added in place.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import get_total_norm

from trainer.errors import NonFiniteActivationError, PipelineError, TrainerUsageError
from trainer.inner import InnerConfig, autocast_for, compiled
from trainer.network.rpc.token_buckets import count_down
from trainer.outer.diloco import FlatLayout
from trainer.outer.grad import GradientSum
from trainer.pipeline.stage.interface import Accumulated, StageKind

WINDOW: Final = 64  # Micro-batches whose norms are remembered.
WARM_UP: Final = 16  # Micro-batches before there is a bound.
ENTRY_BYTES = 2048  # Of a cache entry's Python objects: names, tensors and nodes without their values.
_MAX_NORM = 1e12
"""Of a micro-batch's gradient; a sum over 65,536 tokens that trains has some 1e6. The norm of a million of them added
up is still finite, so nobody can end a worker with gradients that overflow together."""
_MAX_SHAPES = 256  # Of inputs whose graphs' sizes are remembered; strangers choose the shapes.


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Gradients of one micro-batch; finite, and referenced by nobody else; ``norm`` is of those of parameters."""

    of_parameters: tuple[Tensor | None, ...]  # In the order of `StagePasses.parameters`; None: untouched.
    of_input: Tensor | None
    norm: float

    def scaled(self, coefficient: float) -> Gradients:
        """Returns the gradients of the losses multiplied by ``coefficient``."""
        *of_parameters, of_input = (
            None if each is None else each * coefficient for each in (*self.of_parameters, self.of_input)
        )
        return Gradients(tuple(of_parameters), of_input, self.norm * coefficient)


class _Tail(Protocol):
    def loss_sum(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...


class StagePasses:
    """The arithmetic of a stage; see `StageReplica` for the arguments."""

    def __init__(self, module: nn.Module, inner: InnerConfig, kind: StageKind) -> None:
        self.kind = kind
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.device = next(module.parameters()).device
        self._module = module
        self._forward = compiled(cast(Callable[[Tensor], Tensor], module), inner.compile, self.device)
        self._loss_sum = compiled(cast(_Tail, module).loss_sum, inner.compile, self.device) if kind == "tail" else None
        self._autocast = autocast_for(self.device, inner.precision)
        self._graph_bytes: dict[torch.Size, int] = {}

    def moved(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the stage's device, without a graph."""
        return tensor.detach().to(self.device, non_blocking=self.device.type == "cuda")

    def leaf(self, x: Tensor) -> Tensor:
        """Returns an input to begin a graph with: ids as int64, hidden states as fp32 that require a gradient."""
        x = self.moved(x)
        return x.long() if self.kind == "head" else x.float().requires_grad_()

    def output(self, x: Tensor, *, key: str) -> Tensor:
        """Returns the stage's output, without a graph."""
        with torch.no_grad():
            return _checked(self._run(x), key)

    def graph(self, leaf: Tensor, *, key: str) -> tuple[Tensor, int]:
        """Returns the stage's output with its graph, and the bytes that autograd saved beside the input.

        They are measured once for each shape of input, because that costs a tenth of a forward pass: each storage once,
        without parameters, buffers, and scratch memory of kernels.
        """
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        is_known = leaf.shape in self._graph_bytes
        measuring = nullcontext() if is_known else saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.enable_grad(), measuring:
            y = self._run(leaf)
        if not is_known:
            for there_anyway in (leaf, *self._module.parameters(), *self._module.buffers()):
                saved.pop(there_anyway.untyped_storage().data_ptr(), None)
            if len(self._graph_bytes) >= _MAX_SHAPES:
                self._graph_bytes.clear()
            self._graph_bytes[leaf.shape] = sum(saved.values())
        _checked(y.detach(), key)
        return y, self._graph_bytes[leaf.shape]

    def loss_gradients(self, leaf: Tensor, labels: Tensor, *, key: str) -> tuple[float, Gradients]:
        """Returns the sum of the losses, and its gradients."""
        total, _ = self._losses(leaf, labels)
        gradients = self.gradients(total, leaf, None, key=key)
        loss_sum = float(total.detach())  # After the backward pass, so that a GPU is waited for once.
        if not math.isfinite(loss_sum):
            raise NonFiniteActivationError(f"expected a finite loss of {key}, found {loss_sum}; it was not counted")
        return loss_sum, gradients

    def input_gradient(self, leaf: Tensor, grad_y: Tensor, *, key: str) -> tuple[Tensor, Tensor]:
        """Returns output and input gradient, without parameters' gradients: three quarters of a counted pass's work."""
        with torch.enable_grad():
            y = self._run(leaf)
        _checked(y.detach(), key)
        (of_input,) = torch.autograd.grad(y, [leaf], self._output_gradient(grad_y, y, key))
        return y.detach(), _checked(of_input, key)

    def loss(
        self, hidden: Tensor, labels: Tensor, *, with_gradient: bool, key: str
    ) -> tuple[float, int, Tensor | None]:
        """Returns the sum of the losses, labels that count and, if wanted, the input's gradient alone."""
        leaf, labels = self.leaf(hidden), self.moved(labels).long()
        total, num_tokens = self._losses(leaf, labels, with_graph=with_gradient)
        of_input = _checked(torch.autograd.grad(total, [leaf])[0], key) if with_gradient else None
        return float(total.detach()), int(num_tokens), of_input

    def _run(self, x: Tensor) -> Tensor:
        with self._autocast():
            return self._forward(x).float()

    def _losses(self, hidden: Tensor, labels: Tensor, *, with_graph: bool = True) -> tuple[Tensor, Tensor]:
        if self._loss_sum is None:
            raise TrainerUsageError(f"expected the tail, found a {self.kind}; the tail alone has losses")
        with torch.set_grad_enabled(with_graph), self._autocast():
            return self._loss_sum(hidden, labels)

    def _output_gradient(self, grad_y: Tensor, y: Tensor, key: str) -> Tensor:
        if grad_y.shape != y.shape:
            raise PipelineError(
                f"expected a gradient of shape {list(y.shape)} for {key}, found {list(grad_y.shape)}; "
                "is it of another micro-batch?"
            )
        return self.moved(grad_y).to(y.dtype)

    def gradients(self, y: Tensor, leaf: Tensor, grad_y: Tensor | None, *, key: str) -> Gradients:
        """Runs a graph backward, which frees it; raises PipelineError if ``grad_y`` has another shape than ``y``."""
        grad_y = None if grad_y is None else self._output_gradient(grad_y, y, key)
        inputs = [*self.parameters, leaf] if leaf.requires_grad else self.parameters
        found = torch.autograd.grad(y, inputs, grad_y, allow_unused=True)
        of_parameters, of_input = found[: len(self.parameters)], found[-1] if leaf.requires_grad else None
        norms = [
            get_total_norm([each for each in group if each is not None]).to(self.device)
            for group in (of_parameters, (of_input,))
        ]
        own_norm, input_norm = torch.stack(norms).tolist()  # One wait for the device.
        norm = math.hypot(own_norm, input_norm)
        if not norm <= _MAX_NORM:
            raise NonFiniteActivationError(
                f"expected gradients of {key} with a norm of at most {_MAX_NORM:g}, found {norm:g}; nothing was counted"
            )
        return Gradients(tuple(of_parameters), of_input, own_norm)


def _checked(y: Tensor, key: str) -> Tensor:
    if not math.isfinite(get_total_norm([y])):
        raise NonFiniteActivationError(f"expected finite activations of {key}, found others; is its input finite?")
    return y


@dataclass(frozen=True, slots=True, eq=False)
class CachedForward:
    """What is kept of one forward pass: the input, a leaf, and the graph's bytes beside it."""

    x: Tensor
    y: Tensor | None  # The output with its graph; None: to be computed again.
    weights: int  # Counts changes of the weights; tells which ones the graph saw.
    version: int
    graph_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole entry."""
        return ENTRY_BYTES + self.x.nbytes + self.graph_bytes

    def without_graph(self) -> CachedForward:
        """Returns the input alone, no longer part of a graph."""
        return replace(self, x=self.x.detach(), y=None, graph_bytes=0)


class GraphCache:
    """Forward passes by key, the oldest first. The part of a key after its first space names the owner."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, CachedForward] = OrderedDict()
        self._bytes_by_owner: Counter[str] = Counter()

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes_by_owner.total()

    def put(self, key: str, entry: CachedForward) -> None:
        """Keeps a forward pass in place of an earlier one of that key, and drops others to stay within the bound.

        Of an entry that alone exceeds the bound the input is kept, or nothing.
        """
        self.take(key)
        if entry.size_bytes > self._max_bytes:
            entry = entry.without_graph()
        if entry.size_bytes > self._max_bytes:
            return
        self._entries[key] = entry
        count_down(self._bytes_by_owner, _owner_of(key), -entry.size_bytes)
        while self.size_bytes > self._max_bytes:
            owner = max(self._bytes_by_owner, key=lambda name: self._bytes_by_owner[name])
            self.take(next(key for key in self._entries if _owner_of(key) == owner))

    def get(self, key: str) -> CachedForward | None:
        """Returns the entry under a key and keeps it."""
        return self._entries.get(key)

    def take(self, key: str) -> CachedForward | None:
        """Removes and returns the entry under a key."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            count_down(self._bytes_by_owner, _owner_of(key), entry.size_bytes)
        return entry

    def drop_graphs(self) -> None:
        """Drops all graphs and keeps the inputs."""
        for key, entry in self._entries.items():
            self._entries[key] = entry.without_graph()
            count_down(self._bytes_by_owner, _owner_of(key), entry.graph_bytes)

    def keep_versions(self, first: int, last: int) -> None:
        """Drops entries of versions outside ``first`` to ``last``."""
        for key in [key for key, entry in self._entries.items() if not first <= entry.version <= last]:
            self.take(key)

    def clear(self) -> None:
        """Drops everything."""
        self._entries.clear()
        self._bytes_by_owner.clear()


def _owner_of(key: str) -> str:
    return key.partition(" ")[2]


class GradientAccumulator:
    """Sums of gradients of ``parameters``."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.accumulated = Accumulated()  # Tokens, micro-batches and losses in the sums.
        self._parameters = parameters
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def sums(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the live sums by ``names`` of all parameters, without those that no gradient has touched."""
        return {name: total for name, total in zip(names, self._sums, strict=True) if total is not None}

    def add(self, gradients: Sequence[Tensor | None], num_tokens: int, loss_sum: float = 0.0) -> None:
        """Adds a micro-batch's gradients of the sum of its losses, and owns them from now on; empty: all are zero."""
        sums: list[Tensor] = []
        summands: list[Tensor] = []
        places: set[int] = set()
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if (total := self._sums[index]) is None:
                self._sums[index] = _own(gradient, self._parameters[index], is_shared=gradient.data_ptr() in places)
                places.add(gradient.data_ptr())
            else:
                sums.append(total)
                summands.append(gradient)
        if sums:
            torch._foreach_add_(sums, summands)
        was = self.accumulated
        self.accumulated = Accumulated(was.num_tokens + num_tokens, was.num_micro_batches + 1, was.loss_sum + loss_sum)

    def norm(self) -> float:
        """Returns the Euclidean norm of the mean over tokens, 0 without tokens; waits for the device."""
        sums = [total for total in self._sums if total is not None]
        num_tokens = self.accumulated.num_tokens
        return float(get_total_norm(sums)) / num_tokens if sums and num_tokens else 0.0

    def hand_over(self, scale: float) -> None:
        """Moves the sums, multiplied by ``scale``, to ``parameter.grad``, and is empty afterwards."""
        present = [total for total in self._sums if total is not None]
        if present and scale != 1.0:
            torch._foreach_mul_(present, scale)
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = total
        self.drop()

    def drop(self) -> Accumulated:
        """Drops the sums; returns what they held."""
        was, self.accumulated = self.accumulated, Accumulated()
        self._sums = [None] * len(self._parameters)
        return was

    def take(self, names: Sequence[str], layout: FlatLayout) -> GradientSum:
        """Returns the sums by ``names`` of all parameters as one vector, and is empty afterwards."""
        sums = self.sums(names)
        vector = torch.zeros(layout.num_values)
        for name, shape, place in layout.slices():
            if name in sums:
                vector[place].view(shape).copy_(sums[name])
        was = self.drop()
        return GradientSum(vector, was.num_tokens, was.num_micro_batches, was.loss_sum)

    def give_back(self, layout: FlatLayout, gradient: GradientSum) -> None:
        """Adds sums that were taken, and are in no step, to what has come since."""
        since = self.accumulated
        sums = [
            gradient.vector[place].view(shape).to(parameter.device, parameter.dtype, copy=True)
            for parameter, (_, shape, place) in zip(self._parameters, layout.slices(), strict=True)
        ]
        self.add(sums, 0)
        self.accumulated = Accumulated(
            since.num_tokens + gradient.num_tokens,
            since.num_micro_batches + gradient.num_micro_batches,
            since.loss_sum + gradient.loss_sum,
        )

    def restore(self, sums: Sequence[Tensor | None], accumulated: Accumulated) -> None:
        """Replaces the sums with a copy of saved ones."""
        self._sums = [
            None if total is None else total.to(parameter.device, parameter.dtype, copy=True)
            for parameter, total in zip(self._parameters, sums, strict=True)
        ]
        self.accumulated = accumulated


def _own(gradient: Tensor, parameter: Tensor, *, is_shared: bool) -> Tensor:
    """Returns the gradient in memory of its own and in the parameter's memory order, as kernels want it."""
    if not is_shared and gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype:
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


class NormBound:
    """Bounds a micro-batch's gradient by ``factor`` times the median norm of the last `WINDOW` counted here.

    This is centered clipping (Karimireddy et al. 2021) with a radius that follows the run, as AutoClip's percentile of
    past norms does (Seetharaman et al. 2020); no minority of liars can move a median. An outlier is scaled, not
    refused: a norm does not prove who is to blame. Norms are remembered unscaled, so a wrong bound corrects itself.

    A gradient of norm g over m tokens suggests up to g * max(n / m, sqrt(n / m)) over n tokens: signal grows with the
    tokens, noise with their root.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.seen: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        """Norm and tokens of each of the last micro-batches, the oldest first."""

    def usual(self, num_tokens: int) -> float | None:
        """Returns the usual norm of a micro-batch of so many tokens; None: too few have been seen."""
        if len(self.seen) < WARM_UP:
            return None
        ratios = [(norm, num_tokens / tokens) for norm, tokens in self.seen]
        return median_high(norm * max(ratio, math.sqrt(ratio)) for norm, ratio in ratios)

    def coefficient(self, norm: float, num_tokens: int) -> float:
        """Returns the factor to scale a gradient with, exactly 1 within the bound; ``norm`` is of the summed losses."""
        usual = self.usual(num_tokens)
        if not usual or norm <= self._factor * usual:
            return 1.0
        return self._factor * usual / norm

    def note(self, norm: float, num_tokens: int) -> None:
        """Remembers a counted micro-batch by the norm its gradient had before scaling."""
        self.seen.append((norm, num_tokens))
