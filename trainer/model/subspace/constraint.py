"""What keeps a network in its subspace: a projection of all that writes to the residual stream, and a fixed embedding.

An optimizer's step leaves the subspace (one AdamW step of 1e-3 raises a link's error from 1e-7 to 4e-2), so weights are
projected after each step, average and load (spec P-50). Gradients are projected before they are clipped, since the part
outside never crosses a link: else a whole and its cut would clip by different norms and keep other second moments.

A token's embedding is the one thing in the stream that is not of low rank. It is a fixed random row, which every stage
makes from seed and row number (vocabulary · dim · 4 bytes, 7 ns a value), plus a learnable row within the subspace. The
ordinary model that computes the same bits has their sum as its embedding, and the constant gains as parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig
from trainer.model.init import EMBEDDING, STREAM_WRITER, fill_seeded_, init_std
from trainer.model.subspace.basis import Basis, Projector, basis_of, projector

_FIXED_NAME = "subspace.fixed_embedding"
_STD_WITHOUT_INPUT_NORM = 1.0
"""With re-ordered norms nothing scales up what a layer reads: after 200 steps `tiny`, rank 8 of 128, has a loss of 4.69
against 5.44 with an ordinary embedding's 0.2."""
_TOLERANCE = 1e-6  # Relative distance from the subspace that is rounding.


def _constrained_parameters(module: nn.Module, config: ModelConfig) -> dict[str, nn.Parameter]:
    """Returns the parameters of a stage that have to stay within the subspace, by name, in the model's order."""
    if config.subspace_rank == 0:
        return {}
    found = {}
    for name, parameter in module.named_parameters():
        writer = STREAM_WRITER.fullmatch(name)
        if name == EMBEDDING or (writer is not None and config.is_constrained(int(writer[1]))):
            found[name] = parameter
    return found


@torch.no_grad()
def zero_writers_(module: nn.Module, config: ModelConfig) -> None:
    """Sets the constrained parameters of a stage to their first values: zeros, in any basis and on any machine.

    `tiny` with rank 8 of 128 had a loss of 4.64 after 200 steps, and 4.67 from an ordinary model's weights, projected.
    """
    for parameter in _constrained_parameters(module, config).values():
        parameter.zero_()


class SubspaceConstraint:
    """Keeps one model, or one stage, within the subspace of a basis, by default the config's. It holds no state.

    Raises `TrainerUsageError`: an ordinary model's config, or a basis of another shape. Raises `BasisError`: no basis.
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
        """Projects weights, gradients or sums of gradients in place, by default the parameters themselves.

        Those that are not constrained stay as they are. Raises `TrainerUsageError`: one has another shape.
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
        """Projects what is not within the subspace after a state was loaded; returns `distance` from before."""
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


def fixed_table(num_rows: int, dim: int, seed: int, std: float, device: torch.device | str = "cpu") -> Tensor:
    """Returns the fixed rows, fp32[num_rows, dim]."""
    table = torch.empty(num_rows, dim, dtype=torch.float32, device=device)
    if not table.is_meta:
        fill_seeded_(table.view(-1), seed, _FIXED_NAME, std)
    return table


def fixed_table_of(config: ModelConfig, num_rows: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Returns the fixed rows of a subspace network's vocabulary, fp32[rows, dim]; by default all of the config's."""
    std = _STD_WITHOUT_INPUT_NORM if config.reorder_norm else init_std(EMBEDDING, config)
    return fixed_table(num_rows or config.vocab_size, config.dim, config.subspace_seed, std, device)


class SubspaceEmbedding(nn.Embedding):
    """Learnable rows (the parameter ``weight``, kept within the subspace) plus fixed ones (no part of the state)."""

    fixed: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.vocab_size, config.dim)
        self._config = config
        self.register_buffer("fixed", fixed_table_of(config, device=self.weight.device), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """Maps ids[batch, tokens] to fp32[batch, tokens, dim]."""
        return functional.embedding(input, self.weight) + functional.embedding(input, self.fixed)

    def grow(self, num_rows: int) -> None:
        """Extends the fixed rows to those of a grown vocabulary; the old ones stay the same bits."""
        self.fixed = fixed_table_of(self._config, num_rows, self.fixed.device).to(self.fixed.dtype)


def make_embedding(config: ModelConfig) -> nn.Embedding:
    """Returns the embedding of a model: an ordinary one, or a subspace network's."""
    return SubspaceEmbedding(config) if config.subspace_rank else nn.Embedding(config.vocab_size, config.dim)


def plain_config(config: ModelConfig) -> ModelConfig:
    """Returns the shape of the ordinary model of which `plain_state` is the state."""
    return replace(config, subspace_rank=0, subspace_seed=0, subspace_free_layers=0)


def plain_state(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Returns the state of an ordinary model that computes the same; unchanged tensors are shared.

    ``state`` is of the whole, or of one stage; the embedding may have grown since ``config``.
    """
    plain = dict(state)
    if config.subspace_rank == 0:
        return plain
    if EMBEDDING in plain:
        learned = plain[EMBEDDING].detach()
        plain[EMBEDDING] = learned + fixed_table_of(config, learned.shape[0], learned.device).to(learned.dtype)
    if config.reorder_norm:
        for number in filter(config.is_constrained, range(config.num_layers)):
            writer = plain.get(f"layers.{number}.attention.o_proj.weight")
            if writer is not None:
                gain = writer.new_full((config.dim,), config.subspace_gain)
                plain |= {f"layers.{number}.{part}_norm.weight": gain.clone() for part in ("attention", "feed_forward")}
    return plain
