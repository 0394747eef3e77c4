"""What keeps a model within its subspace: a projection of everything trained that writes to the residual stream.

An optimizer's step leaves the subspace: one AdamW step of 1e-3 on an unprojected gradient raises the error of a link
from 1e-7 to 4e-2 (pre-norm) or 3e-1 (re-ordered norms). So weights are projected after each step, after each average
that may have rounded, and after a state is loaded if it needs it.

Gradients are projected too, before they are clipped and given to the optimizer. What of a gradient lies outside the
subspace never crosses a link; without that projection the stages of one process would therefore clip by another norm
and keep other second moments than the same stages with links between them, and AdamW would spend most of its step
(15/16 of the gradient's energy at 16 times compression) on what the next projection takes away.

With a basis of coordinates all of that is setting values to zero; with another one 4 · dim · rank operations a column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig
from trainer.model.subspace.basis import Basis, basis_of
from trainer.model.subspace.projector import Projector, projector

__all__ = ["EMBEDDING", "SubspaceConstraint", "basis_for", "writes_to_stream", "zero_writers_"]

EMBEDDING = "embedding.weight"

_WRITER = re.compile(r"layers\.(\d+)\.(?:attention\.o_proj|feed_forward\.down_proj)\.weight")
_TOLERANCE = 1e-6
"""Relative distance from the subspace that is rounding."""


def basis_for(config: ModelConfig) -> Basis:
    """The basis of a model.

    Raises:
        TrainerUsageError: it is an ordinary one.
    """
    if config.subspace_rank == 0:
        raise TrainerUsageError("model.subspace_rank: expected the rank of a subspace network, found 0")
    return basis_of(config.dim, config.subspace_rank, config.subspace_seed)


def writes_to_stream(name: str, config: ModelConfig) -> bool:
    """Whether the parameter of that name has to stay within the subspace."""
    if config.subspace_rank == 0:
        return False
    found = _WRITER.fullmatch(name)
    return name == EMBEDDING or (found is not None and config.is_constrained(int(found[1])))


@torch.no_grad()
def zero_writers_(module: nn.Module, config: ModelConfig) -> None:
    """First values of what has to stay within the subspace: zeros, in any basis and on any machine.

    The stream begins as the fixed embedding alone. Narrow as it is, it is soon full of what untrained layers write:
    `tiny` with rank 8 of 128 had a loss of 4.64 after 200 steps from here, and 4.67 from an ordinary model's first
    weights, projected.

    Args:
        module: a `trainer.model.stages.Stage`; an ordinary model is left as it is.
        config: its shape.
    """
    for name, parameter in module.named_parameters():
        if writes_to_stream(name, config):
            parameter.zero_()


class SubspaceConstraint:
    """Keeps one model, or one stage, within its subspace. It holds no state of its own.

    Args:
        module: a `trainer.model.stages.Stage`.
        config: its shape.
        basis: the run's; None: the one of the config's seed.

    Raises:
        TrainerUsageError: the config is of an ordinary model, or the basis is of another shape.
        BasisError: the basis is not orthonormal.
    """

    def __init__(self, module: nn.Module, config: ModelConfig, basis: Basis | None = None) -> None:
        basis = basis or basis_for(config)
        if (basis.dim, basis.rank) != (config.dim, config.subspace_rank):
            raise TrainerUsageError(
                f"expected a basis of {config.dim} by {config.subspace_rank}, found {basis.dim} by {basis.rank}"
            )
        basis.check()
        self._parameters = {
            name: parameter for name, parameter in module.named_parameters() if writes_to_stream(name, config)
        }
        self._basis = basis
        self._projectors: dict[tuple[torch.device, torch.dtype], Projector] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are kept within the subspace, in the model's order; none in a tail that is free."""
        return tuple(self._parameters)

    def project_(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Projects in place.

        Args:
            tensors: by parameter name, of the parameters' shapes: weights, gradients, sums of gradients; those that are
                not constrained stay as they are. None: the parameters themselves.

        Raises:
            TrainerUsageError: one has another shape.
        """
        for name, tensor in (self._parameters if tensors is None else tensors).items():
            if name in self._parameters:
                self._check_shape(name, tensor)
                self._project_one_(name, tensor.detach())

    def distance(self) -> float:
        """How far from the subspace the parameter is that is farthest, relative to its norm."""
        return max((self._distance(name, parameter) for name, parameter in self._parameters.items()), default=0.0)

    def ensure(self) -> float:
        """Projects what is not within the subspace; what is, stays the same bits. Call it after a state was loaded.

        Returns:
            `distance` as it was found.
        """
        found = {name: self._distance(name, parameter) for name, parameter in self._parameters.items()}
        for name, distance in found.items():
            if not distance <= _TOLERANCE:
                self._project_one_(name, self._parameters[name].detach())
        return max(found.values(), default=0.0)

    def attach(self, optimizer: Optimizer) -> None:
        """Projects gradients as they are made and parameters after each step, from now on, in any training loop.

        Gradients of `torch.autograd.grad` are projected as well. A deep copy of the model has lost this.
        """
        for name, parameter in self._parameters.items():
            parameter.register_hook(partial(self._projected, name))  # type: ignore[no-untyped-call]  # torch's stub
        optimizer.register_step_post_hook(lambda *_: self.project_())

    def _projected(self, name: str, gradient: Tensor) -> Tensor:
        projected = gradient.clone()
        self._project_one_(name, projected)
        return projected

    def _check_shape(self, name: str, tensor: Tensor) -> None:
        expected = self._parameters[name].shape
        if tensor.shape != expected:
            raise TrainerUsageError(f"{name}: expected the shape {list(expected)}, found {list(tensor.shape)}")

    @torch.no_grad()
    def _project_one_(self, name: str, tensor: Tensor) -> None:
        self._projector_for(tensor).project_(_rows(name, tensor))

    @torch.no_grad()
    def _distance(self, name: str, parameter: Tensor) -> float:
        rows = _rows(name, parameter.detach())
        kept = rows.clone()
        self._projector_for(kept).project_(kept)
        norm = float(rows.norm())
        return float((rows - kept).norm()) / norm if norm else 0.0

    def _projector_for(self, tensor: Tensor) -> Projector:
        key = (tensor.device, tensor.dtype)
        if key not in self._projectors:
            self._projectors[key] = projector(self._basis, *key)
        return self._projectors[key]


def _rows(name: str, tensor: Tensor) -> Tensor:
    """A view in which what is written to the stream are rows."""
    return tensor if name == EMBEDDING else tensor.T
