"""Muon for the matrices within the blocks, AdamW for embedding, output, norms and vectors: one optimizer of two.

Muon (torch.optim.Muon, torch 2.9 and later) moves a matrix by its momentum made orthogonal, which takes five rounds of
products of the matrix with itself a step in bf16, and keeps one moment instead of two: 12 bytes a parameter where AdamW
has 16. Its updates are scaled to the size of AdamW's (``match_rms_adamw``), so that learning rate, schedule and decay
are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from trainer.errors import TrainerUsageError
from trainer.model.init import EMBEDDING, OUTPUT

MOMENTUM: Final = 0.95


def muon_groups(model: nn.Module, parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Divides parameters into the matrices that Muon moves, and the rest."""
    tables = {id(parameter) for name, parameter in model.named_parameters() if name in (EMBEDDING, OUTPUT)}
    tables |= {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    matrices = [each for each in parameters if each.ndim == 2 and id(each) not in tables]
    chosen = set(map(id, matrices))
    return matrices, [each for each in parameters if id(each) not in chosen]


class MuonAdamW(Optimizer):
    """Both optimizers behind the interface of one: their groups in a row, one state by parameter.

    ``groups`` are AdamW's; without any all parameters are Muon's. Raises `TrainerUsageError`: torch has no Muon.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool | None,
    ) -> None:
        try:
            from torch.optim import Muon
        except ImportError as error:
            raise TrainerUsageError(
                f"inner.optimizer muon: expected torch 2.9 or later, found {torch.__version__}; update torch"
            ) from error
        muon = Muon(list(matrices), lr=lr, weight_decay=weight_decay, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
        parts: list[Optimizer] = [muon]
        if groups:
            parts.append(AdamW(list(groups), lr=lr, betas=betas, eps=eps, fused=fused))
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step with both."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes; see torch.optim.Optimizer."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Lets both work on this optimizer's groups and state."""
        muon, *adamw = self._parts
        muon.param_groups = self.param_groups[:1]
        for part in adamw:
            part.param_groups = self.param_groups[1:]
        for part in self._parts:
            part.state = self.state
