"""What a round of gradients averages: the form of its vector, and where a member's gradients come from.

A member's vector is its sum of gradients over the tokens it *expected* to have when the round was agreed on, its weight
that expectation, and one more number the tokens it has over those it expected. The weighted mean of the vectors over
the weighted mean of that number is then the mean over all tokens exactly, though members and weights were agreed on
before the work was done:  Σ w·(g/w) / Σ w·(t/w) = Σ g / Σ t.

The number fills a block of its own (that of the int8 codec, so that it shares no scale with gradients), small enough to
change no cosine between members.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from trainer.compression.vectors import BLOCK_VALUES
from trainer.outer.diloco.flat import FlatLayout

_SHARE_SCALE: Final = 2.0**-12
"""A power of two, so that scaling is exact, and a normal number in fp16."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientSum:
    """Gradients added up at one replica: of the sum of the losses of all tokens."""

    vector: Tensor  # [P] fp32 on the CPU, owned by the holder.
    num_tokens: int
    num_micro_batches: int
    loss_sum: float = 0.0  # Where the loss is known: over those tokens.


class GradientSource(Protocol):
    """Where a replica's gradients add up between two rounds."""

    def take_gradient(self, layout: FlatLayout) -> GradientSum:
        """Returns all that has been added up, and is empty afterwards."""

    def give_back(self, layout: FlatLayout, gradient: GradientSum) -> None:
        """Adds what was taken, and was in no step, to what has come since."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of a round's vector: the gradient [P], zeros up to a whole block, and the block of the share."""

    layout: FlatLayout
    """Names and shapes of the whole vector: those of the parameters, then ``padding`` and ``token_share``."""
    num_gradient_values: int

    @classmethod
    def of(cls, layout: FlatLayout) -> Packing:
        """Returns the packing of gradients with this layout."""
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        padding = -layout.num_values % BLOCK_VALUES
        shapes |= {"padding": (padding,)} if padding else {}
        return cls(FlatLayout.from_shapes({**shapes, "token_share": (BLOCK_VALUES,)}), layout.num_values)

    @property
    def num_values(self) -> int:
        """Length of the vector."""
        return self.layout.num_values

    def fill(self, vector: Tensor, gradient: GradientSum | None, expected_tokens: int) -> None:
        """Writes a member's part to a vector of zeros, [num_values]; None: it brings nothing."""
        if gradient is None or not expected_tokens:
            return
        vector[: self.num_gradient_values].copy_(gradient.vector).div_(float(expected_tokens))
        vector[-BLOCK_VALUES:] = gradient.num_tokens / expected_tokens * _SHARE_SCALE

    def token_share(self, result: Tensor) -> float:
        """Returns the members' tokens over those they expected; 0 where nobody had any."""
        return max(0.0, float(result[-1]) / _SHARE_SCALE)

    def gradient(self, result: Tensor) -> Tensor:
        """Returns the gradient's part of a result, to be divided by `token_share`: a view."""
        return result[: self.num_gradient_values]
