"""Token ids beside an activation, as int32.

They name the fixed rows that the far end adds, so one wrong id is one wrong position. Carried as another channel of the
activation they would not survive half precision (fp16 makes 50,264 of it 50,272, bf16 makes 257 into 256); hence a
tensor of their own, 4 bytes a position.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from trainer.errors import CodecError
from trainer.network.transfer.descriptor import TensorSpec

__all__ = ["IDS", "check_ids", "ids_spec"]

IDS: Final = "ids"
"""The tensor's name beside a message."""


def ids_spec(num_rows: int, num_positions: int) -> TensorSpec:
    """What is expected of the ids of a micro-batch."""
    return TensorSpec(name=IDS, dtype="int32", shape=(num_rows, num_positions))


def check_ids(ids: Tensor, num_ids: int) -> None:
    """Refuses what are no ids of rows and positions.

    Raises:
        CodecError: not int32 or int64 of two dimensions, none at all, or one outside of 0 to ``num_ids`` − 1.
    """
    if ids.dtype not in (torch.int32, torch.int64) or ids.ndim != 2 or ids.numel() == 0:
        raise CodecError(f"ids: expected whole numbers [rows, positions], found {ids.dtype} {list(ids.shape)}")
    lowest, highest = (int(value) for value in torch.aminmax(ids))
    if lowest < 0 or highest >= num_ids:
        raise CodecError(f"ids: expected 0 to {num_ids - 1}, found {lowest} to {highest}")
