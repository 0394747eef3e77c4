"""What a stage's compute takes, and what it answers: tensors on its device, without a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from trainer.errors import PipelineError
from trainer.model import ModelConfig
from trainer.model.loss import IGNORED_LABEL

StageKind: TypeAlias = Literal["head", "body", "tail"]


@dataclass(frozen=True, slots=True)
class StageShape:
    """The shape of a stage's input, by which tensors from elsewhere are checked before anything is computed.

    Every id is looked at: one beyond the vocabulary is an exception on a CPU and the end of the process on a GPU.
    Whether activations are finite shows in what comes out of them (`StagePasses`).
    """

    kind: StageKind
    dim: int
    vocab_size: int
    max_positions: int  # Tokens of the longest row.

    @classmethod
    def of(cls, config: ModelConfig, kind: StageKind) -> StageShape:
        """Returns the input's shape for a stage of a model."""
        return cls(kind, config.dim, config.vocab_size, config.max_seq_len)

    def check_input(self, x: Tensor) -> None:
        """Checks ids (head) or hidden states; raises PipelineError if type, shape or an id does not fit."""
        if self.kind == "head":
            self._check_rows(x, "ids", 2)
            _check_ids(x, "ids", 0, self.vocab_size)
            return
        self._check_rows(x, "hidden states", 3)
        if not x.is_floating_point() or x.shape[2] != self.dim:
            raise PipelineError(f"expected hidden states of {self.dim} channels, found {_described(x)}")

    def check_labels(self, labels: Tensor, x: Tensor) -> None:
        """Checks the labels of an input ``x``; raises PipelineError if type, shape or a label does not fit."""
        if labels.shape != x.shape[:2]:
            raise PipelineError(f"expected labels of shape {list(x.shape[:2])}, found {_described(labels)}")
        _check_ids(labels, "labels", IGNORED_LABEL, self.vocab_size)
        if bool(((labels < 0) & (labels != IGNORED_LABEL)).any()):
            raise PipelineError(f"expected labels of {IGNORED_LABEL} or from 0 on, found other negative ones")

    def _check_rows(self, x: Tensor, what: str, num_dimensions: int) -> None:
        if x.ndim != num_dimensions or not x.shape[0] or not 1 <= x.shape[1] <= self.max_positions:
            raise PipelineError(
                f"expected {what} of {num_dimensions} dimensions, a row or more, and 1 to {self.max_positions} "
                f"positions, found {_described(x)}"
            )


def _check_ids(ids: Tensor, what: str, lowest: int, above: int) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise PipelineError(f"expected {what} as int32 or int64, found {ids.dtype}")
    least, most = (int(value) for value in torch.aminmax(ids))
    if least < lowest or most >= above:
        raise PipelineError(f"expected {what} from {lowest} to {above - 1}, found {least} to {most}")


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class Accumulated:
    """What the gradient accumulator holds."""

    num_tokens: int = 0  # Labels that count.
    num_micro_batches: int = 0  # Including those without such labels.
    loss_sum: float = 0.0  # Tail: over those labels; 0 elsewhere.


@dataclass(frozen=True, slots=True, eq=False)
class BackwardResult:
    """The answer to a backward pass whose gradient was counted."""

    grad_x: Tensor | None  # fp32[rows, positions, dim], of the sum of the losses; None at the head.
    version: int
    recomputed: bool  # The forward pass was run again, because the graph was gone or the weights had changed.
    scale: float = 1.0  # Factor applied to the gradient; below 1 for an outlier (`NormBound`).


@dataclass(frozen=True, slots=True, eq=False)
class TailResult:
    """The loss of a micro-batch whose gradient was counted, or of one that is only evaluated."""

    loss_sum: float
    num_tokens: int
    grad_hidden: Tensor | None  # fp32[rows, positions, dim], of `loss_sum`; None: not wanted.
    version: int
    scale: float = 1.0  # Factor applied to the gradient, as in `BackwardResult`.


@dataclass(frozen=True, slots=True)
class StepInfo:
    """Facts about one optimizer step."""

    version: int
    lr: float
    grad_norm: float  # Of this stage's mean gradient over tokens, before clipping; 0 where nothing was accumulated.
    clip_coefficient: float
    num_tokens: int
    num_micro_batches: int
    loss: float | None  # Tail: mean over the tokens.
    applied: bool  # False: there was no token, or the gradient was not finite; the weights are unchanged.
    seconds: float  # Until its last kernel was queued.
