"""What a replica hands to a joiner: its parameters, AdamW's memory, and where it stands.

Replicas differ a little, so this is one replica's state, not the common one: a joiner becomes that replica's twin. It
costs 12 bytes a parameter to make, since parameters go on changing meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import IncompatiblePeerError
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.sparta.moments import AdamMoments

__all__ = ["SpartaState"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpartaState:
    """One replica's state; tensors are on the CPU, and never changed."""

    round_index: int
    """The round that is next."""
    num_inner_steps: int
    """Optimizer steps behind it: where the schedule of a joiner begins."""
    vocab_rows: int
    """Rows of embedding and output; 0 for a stage with neither."""
    layout_digest: str
    """Which value is whose, :meth:`FlatLayout.digest`."""
    parameters: Tensor
    """[P] fp32."""
    exp_avg: Tensor
    """[P] fp32, AdamW's first moments."""
    exp_avg_sq: Tensor
    """[P] fp32, AdamW's second moments; 0 or more."""
    steps: Tensor
    """[T] fp32, AdamW's steps of each tensor of the layout, whole numbers."""

    @property
    def moments(self) -> AdamMoments:
        """AdamW's memory."""
        return AdamMoments(self.exp_avg, self.exp_avg_sq, self.steps)

    def check(self, layout: FlatLayout, *, vocab_rows: int) -> None:
        """Refuse what is no state of a model of this layout.

        Args:
            layout: of the parameters.
            vocab_rows: of the model.

        Raises:
            IncompatiblePeerError: the message names the first thing that does not fit.
        """
        layout.require_same(self.layout_digest, "the state to adopt")
        if self.round_index < 0 or self.num_inner_steps < 0 or self.vocab_rows != vocab_rows:
            raise IncompatiblePeerError(
                f"expected round and step 0 or later and {vocab_rows} rows of vocabulary in the state to adopt, found "
                f"round {self.round_index}, step {self.num_inner_steps} and {self.vocab_rows} rows"
            )
        for name in ("parameters", "exp_avg", "exp_avg_sq"):
            _check(getattr(self, name), layout.num_values, name)
        _check(self.steps, len(layout.names), "steps")
        if bool((self.exp_avg_sq < 0).any()):
            raise IncompatiblePeerError(
                "expected second moments of 0 or more in the state to adopt, found negative ones"
            )
        if bool((self.steps < 0).any()) or not torch.equal(self.steps, self.steps.round()):
            raise IncompatiblePeerError("expected whole numbers as steps of the state to adopt, found others")


def _check(tensor: Tensor, num_values: int, name: str) -> None:
    fits = tensor.shape == (num_values,) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    if not fits or not bool(torch.isfinite(tensor).all()):
        raise IncompatiblePeerError(
            f"expected {num_values} finite fp32 values on the CPU as {name} of the state to adopt, "
            f"found {list(tensor.shape)} {tensor.dtype}{' with values that are not finite' if fits else ''}"
        )
