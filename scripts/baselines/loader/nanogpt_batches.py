"""nanoGPT's way: one uint16 file, mapped anew for every batch (its guard against a leak), random starts, no order.

Every row is widened to int64 by itself and the rows are stacked; there is no state to resume from, and what was read
cannot be told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from contestant import run

if TYPE_CHECKING:
    from contestant import Pass


def prepare(options: dict[str, Any]) -> Callable[[], Pass]:
    """A pass is ``batches`` batches."""
    path, seq_len = options["data"], options["seq_len"]

    def one_pass() -> Pass:
        for _ in range(options["batches"]):
            tokens = np.memmap(path, dtype=np.uint16, mode="r")
            starts = torch.randint(len(tokens) - seq_len, (options["batch_size"],)).tolist()
            rows = [torch.from_numpy(tokens[start : start + seq_len].astype(np.int64)) for start in starts]
            shifted = [torch.from_numpy(tokens[start + 1 : start + 1 + seq_len].astype(np.int64)) for start in starts]
            yield torch.stack(rows), torch.stack(shifted)

    return one_pass


if __name__ == "__main__":
    run(prepare)
