"""First weights: a truncated normal, narrower for deeper layers, the same bits on every machine (spec T-3).

Every value is a function of seed, parameter name and position in the parameter. The random integers are numpy's Philox
stream (frozen by numpy's compatibility policy), and the normal comes from a table of 4,097 quantiles with one fp32
multiplication and addition: no function whose last bit differs between processors. It takes 7 ns a value on one core.

Matrices have std sqrt(2 / (5·dim)); those that write to the residual stream are divided by sqrt(2·(layer + 1)); norms
are ones, biases zeros. The embedding has 0.2, unless it is the output matrix too: after 120 steps of `tiny` the loss
was 3.85, against 4.17 with an embedding as narrow as the matrices and 4.06 with std 1. Values beyond 3 std do not
occur.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.model.config import ModelConfig

EMBEDDING, OUTPUT = "embedding.weight", "readout.output.weight"  # The two parameters with a row for each id.

_CUT = 3.0  # Standard deviations beyond which there are no values.
_EMBEDDING_STD = 0.2
_TABLE_BITS = 12
_FRACTION_BITS = 32 - _TABLE_BITS
_VALUES_PER_BLOCK = 8  # 32-bit numbers that one step of the Philox counter yields.
_CHUNK = 1 << 18  # Values made at a time: what lies between fits a processor's cache.

STREAM_WRITER = re.compile(r"layers\.(\d+)\.(?:attention\.o_proj|feed_forward\.down_proj)\.weight")
"""Names of the matrices that write to the residual stream; the group is their layer."""


def init_weights(module: nn.Module, config: ModelConfig, seed: int) -> None:
    """Gives every parameter of a stage or of the whole its first value; ``config`` is the whole model's shape."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
            else:
                fill_seeded_(parameter.view(-1), seed, name, init_std(name, config))


def init_std(name: str, config: ModelConfig) -> float:
    """Returns the standard deviation, before the cut, of the first values of a matrix of this name."""
    if name == EMBEDDING and not config.tie_embeddings:
        return _EMBEDDING_STD
    std = math.sqrt(2 / (5 * config.dim))
    matched = STREAM_WRITER.fullmatch(name)
    return std / math.sqrt(2 * (int(matched[1]) + 1)) if matched else std


def truncated_normal(seed: int, name: str, start: int, count: int) -> NDArray[np.float32]:
    """Returns values [start, start + count) of the sequence of a seed and a name; their std before the cut is 1."""
    first_block, skipped = divmod(start, _VALUES_PER_BLOCK)
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:16], "little")
    bits = np.random.Philox(key=key, counter=first_block).random_raw(-(-(skipped + count) // 2))
    numbers = bits.astype("<u8", copy=False).view("<u4")[skipped : skipped + count]
    values, slopes = _quantiles()
    cells = numbers >> np.uint32(_FRACTION_BITS)
    fractions = (numbers & np.uint32((1 << _FRACTION_BITS) - 1)).astype(np.float32)
    fractions *= slopes[cells]
    fractions += values[cells]
    return fractions


def seeded_normal(seed: int, name: str, start: int, count: int, std: float) -> Iterator[Tensor]:
    """Yields the same values times ``std``, as fp32 tensors of at most 262,144 values, in order."""
    for begin in range(start, start + count, _CHUNK):
        size = min(_CHUNK, start + count - begin)
        yield torch.from_numpy(truncated_normal(seed, name, begin, size)).mul_(std)


def fill_seeded_(flat: Tensor, seed: int, name: str, std: float, start: int = 0) -> None:
    """Sets the values of a flat tensor from position ``start`` on to those of the sequence at the same positions."""
    for values in seeded_normal(seed, name, start, flat.numel() - start, std):
        flat[start : start + values.numel()].copy_(values)
        start += values.numel()


@lru_cache(maxsize=1)
def _quantiles() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the inverse of the cut normal's distribution at the edges of 4,096 cells, and its slope in each."""
    normal, num_cells = NormalDist(), 1 << _TABLE_BITS
    low, high = normal.cdf(-_CUT), normal.cdf(_CUT)
    edges = [normal.inv_cdf(low + (high - low) * cell / num_cells) for cell in range(num_cells + 1)]
    table = np.array(edges, dtype=np.float32)
    return table[:-1], np.diff(table) / np.float32(1 << _FRACTION_BITS)
