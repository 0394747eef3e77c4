"""megatron-core, mosaicml-streaming and datatrove as released: their readers over an export, their writers over ids.

    python -m tests.support.export_peers read megatron|mds|datatrove FOLDER OUT.npz
    python -m tests.support.export_peers write megatron|mds|datatrove IN.npz FOLDER

In a process of its own, since they need packages that this project does not. ``.npz`` has ``ids`` and ``ends``.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

MEGATRON = ("megatron-core==0.16.1",)
MDS = ("mosaicml-streaming==0.13.0", "python-snappy", "cramjam", "Brotli", "zstd", "catalogue")
DATATROVE = ("datatrove==0.10.1", "loguru", "humanize")
REQUIREMENTS = {"megatron": MEGATRON, "mds": MDS, "datatrove": DATATROVE}
"""What each needs beside this project's own requirements, installed without their dependencies."""

MDS_LIMIT_BYTES = 4_096


def without_torchvision() -> None:
    """Lets streaming be imported without torchvision, a build of which must fit torch's.

    Only its sets of images use that, whose classes derive from one of torchvision's; reading and writing MDS do not.
    """
    importlib.import_module("transformers")  # Which looks for torchvision, and must not find what follows.
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[1]].VisionDataset = type("VisionDataset", (), {})  # type: ignore[attr-defined]
    sys.modules[names[3]].to_tensor = None  # type: ignore[attr-defined]


def read(kind: str, folder: Path) -> list[Any]:
    if kind == "megatron":
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(str(folder / "tokens"))
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
        return [dataset[number].copy() for number in range(len(dataset))]  # It closes its map when it goes.
    if kind == "mds":
        without_torchvision()
        from streaming import StreamingDataset

        with tempfile.TemporaryDirectory() as local:  # Where it puts what it unpacks.
            samples = StreamingDataset(remote=str(folder), local=local, batch_size=1)
            return [samples[number]["tokens"].copy() for number in range(len(samples))]
    return list(_read_datatrove(folder))


def _read_datatrove(folder: Path) -> Iterator[Any]:
    """All whole windows of 16 ids, and the documents by the positions that the reader derives from the index."""
    from datatrove.utils.dataset import DatatroveFolderDataset

    width = int((folder / "tokens.ds.metadata").read_text().split("\n")[0].split("|")[1])
    dataset = DatatroveFolderDataset(str(folder), seq_len=15, token_size=width, return_positions=True)
    ids = np.concatenate([dataset[number]["input_ids"].numpy() for number in range(len(dataset))])
    positions = np.concatenate([dataset[number]["positions"].numpy() for number in range(len(dataset))])
    # A position of 0 is the beginning of a document, or of a window.
    begins = np.flatnonzero(positions == 0)
    yield from np.split(ids, begins[begins > 0])


def write(kind: str, documents: list[Any], folder: Path) -> None:
    if kind == "megatron":
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(str(folder / "tokens.bin"), dtype=np.uint16)
        for document in documents:
            builder.add_document(torch.from_numpy(document.astype(np.int32)), [len(document)])
        builder.finalize(str(folder / "tokens.idx"))
    elif kind == "mds":
        without_torchvision()
        from streaming import MDSWriter

        columns = {"tokens": "ndarray:uint16"}
        with MDSWriter(columns=columns, out=str(folder), size_limit=MDS_LIMIT_BYTES, hashes=["sha256"]) as writer:
            for document in documents:
                writer.write({"tokens": document})
    else:
        from datatrove.pipeline.tokens.tokenizer import TokenizedFile

        file = TokenizedFile(str(folder), "tokens.ds", save_final_metadata=True, tokenizer_name_or_path="theirs")
        for document in documents:
            file.write(document.tolist(), None)
        file.close()


def main() -> None:
    warnings.simplefilter("ignore")
    what, kind, source, target = sys.argv[1:]
    if what == "read":
        documents = read(kind, Path(source))
        np.savez(target, ids=np.concatenate(documents), ends=np.cumsum([len(each) for each in documents]))
        return
    with np.load(source) as given:
        documents = np.split(given["ids"].astype(np.uint16), given["ends"][:-1])
    write(kind, documents, Path(target))


if __name__ == "__main__":
    main()
