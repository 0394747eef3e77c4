"""Keeps a model within its subspace: a projection of every trained parameter that writes to the residual stream.

An optimizer's step leaves the subspace: one AdamW step of 1e-3 on an unprojected gradient raises the error of a link
from 1e-7 to 4e-2 (pre-norm) or 3e-1 (re-ordered norms). So weights are projected after each step, after each average
that may have rounded, and after a state is loaded if it needs it (spec P-50).

Gradients are projected too, before they are clipped and given to the optimizer. The part of a gradient outside the
subspace never crosses a link. Without that projection the stages of one process would clip by another norm and keep
other second moments than the same stages with links between them, and AdamW would spend most of its step (15/16 of the
gradient's energy at 16 times compression) on what the next projection takes away.

With a basis of coordinates a projection sets values to zero; with another one it takes 4 · dim · rank operations a
column.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig
from trainer.model.init import STREAM_WRITER
from trainer.model.subspace.basis import Basis, Projector, basis_of, projector

__all__ = ["EMBEDDING", "SubspaceConstraint", "zero_writers_"]

EMBEDDING = "embedding.weight"

_TOLERANCE = 1e-6
"""Relative distance from the subspace that is rounding."""


def _constrained_parameters(module: nn.Module, config: ModelConfig) -> dict[str, nn.Parameter]:
    """Returns the parameters of a stage that have to stay within the subspace, by name, in the model's order."""
    return {name: each for name, each in module.named_parameters() if _is_constrained(name, config)}


def _is_constrained(name: str, config: ModelConfig) -> bool:
    writer = STREAM_WRITER.fullmatch(name)
    return config.subspace_rank > 0 and (
        name == EMBEDDING or (writer is not None and config.is_constrained(int(writer[1])))
    )


@torch.no_grad()
def zero_writers_(module: nn.Module, config: ModelConfig) -> None:
    """Sets the constrained parameters of a stage to their first values: zeros, in any basis and on any machine.

    The stream begins as the fixed embedding alone. Narrow as it is, it is soon full of what untrained layers write:
    `tiny` with rank 8 of 128 had a loss of 4.64 after 200 steps from here, and 4.67 from an ordinary model's first
    weights, projected.
    """
    for parameter in _constrained_parameters(module, config).values():
        parameter.zero_()


class SubspaceConstraint:
    """Keeps one model, or one stage, within the subspace of a basis, by default the config's. It holds no state.

    Raises:
        TrainerUsageError: the config is of an ordinary model, or the basis is of another shape.
        BasisError: the basis is not orthonormal.
    """

    def __init__(self, module: nn.Module, config: ModelConfig, basis: Basis | None = None) -> None:
        if config.subspace_rank == 0:
            raise TrainerUsageError("model.subspace_rank: expected the rank of a subspace network, found 0")
        basis = basis or basis_of(config.dim, config.subspace_rank, config.subspace_seed)
        if (basis.dim, basis.rank) != (config.dim, config.subspace_rank):
            raise TrainerUsageError(
                f"expected a basis of {config.dim} by {config.subspace_rank}, found {basis.dim} by {basis.rank}"
            )
        basis.check()
        self._parameters = _constrained_parameters(module, config)
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
                expected = self._parameters[name].shape
                if tensor.shape != expected:
                    raise TrainerUsageError(f"{name}: expected the shape {list(expected)}, found {list(tensor.shape)}")
                self._project_one_(name, tensor.detach())

    def distance(self) -> float:
        """Returns the greatest distance of a parameter from the subspace, relative to the parameter's norm."""
        return max(self._distances().values(), default=0.0)

    def ensure(self) -> float:
        """Projects what is not within the subspace, to be called after a state was loaded; the rest keeps its bits.

        Returns:
            `distance` before the projection.
        """
        found = self._distances()
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

    @torch.no_grad()
    def _project_one_(self, name: str, tensor: Tensor) -> None:
        key = (tensor.device, tensor.dtype)
        if key not in self._projectors:
            self._projectors[key] = projector(self._basis, *key)
        self._projectors[key].project_(tensor if name == EMBEDDING else tensor.T)  # What is written are its rows.

    @torch.no_grad()
    def _distances(self) -> dict[str, float]:
        found = {}
        for name, parameter in self._parameters.items():
            kept = parameter.detach().clone()
            self._project_one_(name, kept)
            norm = float(parameter.norm())
            found[name] = float((parameter - kept).norm()) / norm if norm else 0.0
        return found
