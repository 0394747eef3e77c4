"""`StagePasses`: forward and gradients of a stage's module, on its device and in its precision; remembers nothing.

What goes in is moved to the device and cut off from wherever it came from; what comes out is fp32, also under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from trainer.errors import NonFiniteActivationError, PipelineError, TrainerUsageError
from trainer.inner import InnerConfig, autocast_for, compiled
from trainer.pipeline.stage.finite import all_finite, norms_of
from trainer.pipeline.stage.graph_cache import GraphSizes
from trainer.pipeline.stage.results import LossSum, StageKind

__all__ = ["Gradients", "StagePasses"]

_MAX_NORM = 1e12
"""Of a micro-batch's gradient: a sum over 65,536 tokens that trains has some 1e6. A million of them then add up to
something whose norm is finite, so that nobody can end a worker with gradients that overflow together."""


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Of one micro-batch, finite (and so are sums of a million), and nobody else's."""

    of_parameters: tuple[Tensor | None, ...]
    """In the order of `StagePasses.parameters`; None: untouched."""
    of_input: Tensor | None
    """fp32; None for ids."""
    norm: float
    """Of those of parameters."""

    def scaled(self, coefficient: float) -> Gradients:
        """As if the losses had been multiplied by this."""
        present = [each for each in self.of_parameters if each is not None]
        multiplied = iter(torch._foreach_mul(present, coefficient) if present else ())
        return Gradients(
            tuple(None if each is None else next(multiplied) for each in self.of_parameters),
            None if self.of_input is None else self.of_input * coefficient,
            self.norm * coefficient,
        )


class _Tail(Protocol):
    def loss_sum(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...


class StagePasses:
    """The arithmetic of a stage.

    Args:
        module: maps ids (head) or hidden states to hidden states; a tail has ``loss_sum(hidden, labels)``.
        inner: precision and compilation.
        kind: which end of the model it is.
    """

    def __init__(self, module: nn.Module, inner: InnerConfig, kind: StageKind) -> None:
        self.kind = kind
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.device = next(module.parameters()).device
        self._forward = compiled(cast(Callable[[Tensor], Tensor], module), inner.compile, self.device)
        self._loss_sum = compiled(cast(_Tail, module).loss_sum, inner.compile, self.device) if kind == "tail" else None
        self._autocast = autocast_for(self.device, inner.precision)
        self._graph_sizes = GraphSizes(module)

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor on the stage's device, without a graph."""
        return tensor.detach().to(self.device, non_blocking=self.device.type == "cuda")

    def leaf(self, x: Tensor) -> Tensor:
        """An input to begin a graph with: ids as int64, hidden states as fp32 whose gradient is wanted."""
        x = self.moved(x)
        return x.long() if self.kind == "head" else x.float().requires_grad_()

    def output(self, x: Tensor, *, key: str) -> Tensor:
        """The stage's output, without a graph.

        Raises:
            NonFiniteActivationError: it is not finite.
        """
        with torch.no_grad():
            y = self._run(x)
        return _checked(y, key)

    def graph(self, leaf: Tensor, *, key: str) -> tuple[Tensor, int]:
        """The stage's output with its graph, and the bytes that the graph keeps beside the input.

        Raises:
            NonFiniteActivationError: it is not finite.
        """
        with torch.enable_grad():
            y, graph_bytes = self._graph_sizes.measured(leaf, self._run)
        _checked(y.detach(), key)
        return y, graph_bytes

    def gradients(self, y: Tensor, leaf: Tensor, grad_y: Tensor, *, key: str) -> Gradients:
        """Goes back through a graph, which is gone then.

        Raises:
            PipelineError: ``grad_y`` has not the output's shape.
            NonFiniteActivationError: a gradient is not finite, or too large to be one.
        """
        if grad_y.shape != y.shape:
            raise PipelineError(
                f"expected a gradient of shape {list(y.shape)} for {key}, found {list(grad_y.shape)}; "
                "is it of another micro-batch?"
            )
        return self._back(y, leaf, self.moved(grad_y).to(y.dtype), key)

    def loss_gradients(self, leaf: Tensor, labels: Tensor, *, key: str) -> tuple[float, Gradients]:
        """The sum of the losses, and its gradients.

        Raises:
            NonFiniteActivationError: loss or gradient is not finite.
        """
        with torch.enable_grad(), self._autocast():
            total, _ = self._losses()(leaf, labels)
        gradients = self._back(total, leaf, None, key)
        loss_sum = float(total.detach())  # Behind the backward pass: a GPU is waited for once.
        if not math.isfinite(loss_sum):
            raise NonFiniteActivationError(f"expected a finite loss of {key}, found {loss_sum}; it was not counted")
        return loss_sum, gradients

    def input_gradient(self, leaf: Tensor, grad_y: Tensor, *, key: str) -> tuple[Tensor, Tensor]:
        """Output and gradient of an input, and of no parameter: three quarters of the work of a counted pass.

        Raises:
            PipelineError: ``grad_y`` has not the output's shape.
            NonFiniteActivationError: output or gradient is not finite.
        """
        with torch.enable_grad():
            y = self._run(leaf)
        _checked(y.detach(), key)
        if grad_y.shape != y.shape:
            raise PipelineError(
                f"expected a gradient of shape {list(y.shape)} for {key}, found {list(grad_y.shape)}; "
                "is it of another micro-batch?"
            )
        (of_input,) = torch.autograd.grad(y, [leaf], self.moved(grad_y).to(y.dtype))
        return y.detach(), _checked(of_input, key)

    def loss_input_gradient(self, leaf: Tensor, labels: Tensor, *, key: str) -> tuple[LossSum, Tensor]:
        """The sum of the losses and the gradient of the input, as `input_gradient`.

        Raises:
            NonFiniteActivationError: the gradient is not finite.
        """
        with torch.enable_grad(), self._autocast():
            total, num_tokens = self._losses()(leaf, labels)
        (of_input,) = torch.autograd.grad(total, [leaf])
        return LossSum(float(total.detach()), int(num_tokens)), _checked(of_input, key)

    def loss(self, hidden: Tensor, labels: Tensor) -> LossSum:
        """The sum of the losses, without a graph."""
        with torch.no_grad(), self._autocast():
            total, num_tokens = self._losses()(self.moved(hidden).float(), self.moved(labels).long())
        return LossSum(float(total), int(num_tokens))

    def _run(self, x: Tensor) -> Tensor:
        with self._autocast():
            return self._forward(x).float()

    def _losses(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        if self._loss_sum is None:
            raise TrainerUsageError(f"expected the tail, found a {self.kind}; the tail alone has losses")
        return self._loss_sum

    def _back(self, y: Tensor, leaf: Tensor, grad_y: Tensor | None, key: str) -> Gradients:
        inputs = [*self.parameters, leaf] if leaf.requires_grad else self.parameters
        found = torch.autograd.grad(y, inputs, grad_y, allow_unused=True)
        count = len(self.parameters)
        of_parameters, of_input = found[:count], found[-1] if leaf.requires_grad else None
        own_norm, input_norm = norms_of(
            [each for each in of_parameters if each is not None], [] if of_input is None else [of_input]
        )
        norm = math.hypot(own_norm, input_norm)
        if not norm <= _MAX_NORM:
            raise NonFiniteActivationError(
                f"expected gradients of {key} with a norm of at most {_MAX_NORM:g}, found {norm:g}; nothing was counted"
            )
        return Gradients(tuple(of_parameters), of_input, own_norm)


def _checked(y: Tensor, key: str) -> Tensor:
    if not all_finite([y]):
        raise NonFiniteActivationError(f"expected finite activations of {key}, found others; is its input finite?")
    return y
