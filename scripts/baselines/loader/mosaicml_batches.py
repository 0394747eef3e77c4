"""mosaicml-streaming's StreamingDataset: samples of T + 1 tokens, uint16 of a fixed shape, local and shuffled.

As its documentation has it for one node: ``shuffle=True`` with the default algorithm, ``batch_size`` given, the default
shards of 64 MB, no compression, no hashes (its default: nothing is verified). Fixed shape and uint16 are the cheapest
form the format has. Without a DataLoader the samples of a batch are stacked and widened at
once; inputs and labels are copied from that tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from contestant import batched, run, split

if TYPE_CHECKING:
    from contestant import Pass


def ensure_torchvision() -> None:
    """Puts names in torchvision's place where it cannot be imported: PyPI's is built for CUDA, this torch may not be.

    `streaming` takes two names from it as it is imported, for image datasets alone.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
        sys.modules.update({name: module_from_spec(ModuleSpec(name, None)) for name in names})
        vars(sys.modules["torchvision.datasets"])["VisionDataset"] = object
        vars(sys.modules["torchvision.transforms.functional"])["to_tensor"] = None


ensure_torchvision()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402


def collate(samples: list[dict[str, Any]]) -> torch.Tensor:
    """Samples as int64[B, T + 1]."""
    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))


def prepare(options: dict[str, Any]) -> Callable[[], Pass]:
    """A pass is an epoch."""
    size = options["batch_size"]
    dataset = StreamingDataset(local=options["data"], shuffle=True, batch_size=size)
    workers, views = options.get("workers"), options.get("views", False)
    if workers is None:
        return lambda: split(map(collate, batched(dataset, size)), views=views)
    loader = StreamingDataLoader(dataset, batch_size=size, num_workers=workers, collate_fn=collate, drop_last=True)
    return lambda: split(loader)


def convert(tokens: Path, out: Path, seq_len: int) -> None:
    """Samples of T + 1 tokens."""
    data = np.memmap(tokens, dtype=np.uint16, mode="r")
    columns = {"tokens": f"ndarray:uint16:{seq_len + 1}"}
    with MDSWriter(out=str(out), columns=columns, compression=None, hashes=[]) as writer:
        for sample in data[: len(data) // (seq_len + 1) * (seq_len + 1)].reshape(-1, seq_len + 1):
            writer.write({"tokens": np.ascontiguousarray(sample)})


if __name__ == "__main__":
    run(prepare, convert)
