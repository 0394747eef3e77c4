"""`StageShape`: whether tensors from elsewhere are what a stage takes, told before any of them is computed with.

Ids are looked at one by one: an id beyond the vocabulary is an exception on a CPU and the end of the process on a GPU.
Values of activations are not; what comes out of them is (see `trainer.pipeline.stage.finite`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import PipelineError
from trainer.model import ModelConfig
from trainer.model.loss import IGNORED_LABEL
from trainer.pipeline.stage.results import StageKind

__all__ = ["StageShape"]

_ID_TYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class StageShape:
    """What goes into a stage."""

    kind: StageKind
    dim: int
    """Width of hidden states."""
    vocab_size: int
    """Ids there are."""
    max_positions: int
    """Tokens of the longest row."""

    @classmethod
    def of(cls, config: ModelConfig, kind: StageKind) -> StageShape:
        """Of a stage of a model."""
        return cls(kind, config.dim, config.vocab_size, config.max_seq_len)

    def check_input(self, x: Tensor) -> None:
        """Checks ids (head) or hidden states.

        Raises:
            PipelineError: type, shape or an id is none of this stage.
        """
        if self.kind == "head":
            self._check_rows(x, "ids", 2)
            _check_ids(x, "ids", 0, self.vocab_size)
            return
        self._check_rows(x, "hidden states", 3)
        if not x.is_floating_point() or x.shape[2] != self.dim:
            raise PipelineError(f"expected hidden states of {self.dim} channels, found {_spell(x)}")

    def check_labels(self, labels: Tensor, x: Tensor) -> None:
        """Checks labels that go with hidden states or ids.

        Raises:
            PipelineError: type, shape or a label is none.
        """
        if labels.shape != x.shape[:2]:
            raise PipelineError(f"expected labels of shape {list(x.shape[:2])}, found {_spell(labels)}")
        _check_ids(labels, "labels", IGNORED_LABEL, self.vocab_size)
        if bool(((labels < 0) & (labels != IGNORED_LABEL)).any()):
            raise PipelineError(f"expected labels of {IGNORED_LABEL} or from 0 on, found other negative ones")

    def _check_rows(self, x: Tensor, what: str, num_dimensions: int) -> None:
        if x.ndim != num_dimensions or not x.shape[0] or not 1 <= x.shape[1] <= self.max_positions:
            raise PipelineError(
                f"expected {what} of {num_dimensions} dimensions, a row or more, and 1 to {self.max_positions} "
                f"positions, found {_spell(x)}"
            )


def _check_ids(ids: Tensor, what: str, lowest: int, above: int) -> None:
    if ids.dtype not in _ID_TYPES:
        raise PipelineError(f"expected {what} as int32 or int64, found {ids.dtype}")
    least, most = (int(value) for value in torch.aminmax(ids))
    if least < lowest or most >= above:
        raise PipelineError(f"expected {what} from {lowest} to {above - 1}, found {least} to {most}")


def _spell(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
