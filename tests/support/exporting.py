"""Stores of chosen documents, the forms of their exports written and read by a few lines of numpy, for comparison."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from manifests import sha256_hex
from tests.support.token_store import TokenStore

EOS = 2
Ids = npt.NDArray[np.int64]
RECORD = "genesis-export.json"


def random_documents(seed: int, count: int, mean: int = 60, ids: int = 1_000) -> list[Ids]:
    """Documents with their EOS; some of that alone, some many times the mean."""
    generator = np.random.default_rng(seed)
    lengths = generator.geometric(1 / mean, count) - 1
    lengths[:: max(count // 5, 1)] *= 7
    return [np.append(generator.integers(10, ids, length), EOS) for length in lengths]


def document_store(
    folder: Path, documents: Mapping[str, Sequence[Ids]], *, shard_tokens: int = 500, turns: int = 2, **options: Any
) -> TokenStore:
    """A store that holds each source's documents, ``turns`` shards of one source and then of the next.

    What fills no shard at a source's end is left out, as populate leaves it behind the checkpoint.
    """
    store = TokenStore(folder, shard_tokens=shard_tokens, **options)
    rows = {name: np.concatenate(each) for name, each in documents.items()}
    position = dict.fromkeys(rows, 0)
    while any(position[name] + shard_tokens <= len(row) for name, row in rows.items()):
        for name, row in rows.items():
            for _ in range(turns):
                start = position[name]
                if start + shard_tokens > len(row):
                    break
                ends = np.cumsum([len(document) for document in documents[name]])
                entry = store.add(row[start : start + shard_tokens], source=name)
                first, last = np.searchsorted(ends, [start, start + shard_tokens - 1], side="right").tolist()
                store.change(entry.id, first_document=first, last_document=last)
                position[name] = start + shard_tokens
    store.publish()
    return store


def whole_documents(store: TokenStore, documents: Mapping[str, Sequence[Ids]]) -> list[Ids]:
    """The documents that end in the store, one source after the other by name."""
    held = dict.fromkeys(documents, 0)
    for entry in store.entries:
        held[entry.source] += entry.tokens
    found: list[Ids] = []
    for name in sorted(documents):
        ends = np.cumsum([len(document) for document in documents[name]])
        found += documents[name][: int(np.searchsorted(ends, held[name], side="right"))]
    return found


def same(found: Sequence[npt.NDArray[Any]], expected: Sequence[npt.NDArray[Any]]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


def bytes_of(folder: Path) -> dict[str, str]:
    """Digests of an export's files, its record aside, which says when it went on."""
    return {path.name: sha256_hex(path.read_bytes()) for path in folder.iterdir() if path.name != RECORD}


def split(ids: npt.NDArray[Any], ends: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return np.split(ids, ends[:-1].astype(np.int64)) if len(ends) else []


def read_megatron(prefix: Path) -> list[npt.NDArray[Any]]:
    body = prefix.with_suffix(".idx").read_bytes()
    magic, version, code, sequences, borders = struct.unpack_from("<9sQBQQ", body)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    dtype = {8: "<u2", 4: "<i4"}[code]
    lengths = np.frombuffer(body, "<i4", sequences, 34)
    starts = np.frombuffer(body, "<i8", sequences, 34 + 4 * sequences)
    assert np.frombuffer(body, "<i8", borders, 34 + 12 * sequences).tolist() == list(range(sequences + 1))
    assert len(body) == 34 + 12 * sequences + 8 * borders
    ids = prefix.with_suffix(".bin").read_bytes()
    assert len(ids) == int(lengths.sum()) * np.dtype(dtype).itemsize
    return [np.frombuffer(ids, dtype, length, start) for length, start in zip(lengths, starts.tolist(), strict=True)]


def read_datatrove(path: Path) -> list[npt.NDArray[Any]]:
    ends = np.fromfile(f"{path}.index", "<u8")
    name, count, _ = Path(f"{path}.metadata").read_text().split("\n")
    ids = np.fromfile(path, {"2": "<u2", "4": "<u4"}[name.split("|")[1]])
    assert len(ids) == int(count) == int(ends[-1])
    return split(ids, ends)


def read_npy(path: Path) -> list[npt.NDArray[Any]]:
    ids = np.load(path, mmap_mode="r", allow_pickle=False)
    return split(ids, np.load(path.with_suffix(".ends.npy"), allow_pickle=False))


def read_mds(folder: Path) -> list[npt.NDArray[Any]]:
    samples = []
    for shard in json.loads((folder / "index.json").read_text())["shards"]:
        body = (folder / (shard["zip_data"] or shard["raw_data"])["basename"]).read_bytes()
        if shard["zip_data"]:
            assert len(body) == shard["zip_data"]["bytes"]
            body = zstandard.decompress(body)
        assert len(body) == shard["raw_data"]["bytes"]
        for algorithm, digest in shard["raw_data"]["hashes"].items():
            assert (algorithm, digest) == ("sha256", sha256_hex(body))
        count = int.from_bytes(body[:4], "little")
        assert count == shard["samples"] > 0
        offsets = np.frombuffer(body, "<u4", count + 1, 4).tolist()
        _, dtype, *shape = shard["column_encodings"][0].split(":")
        head = 0 if shape else 4
        for start, end in pairwise(offsets):
            skipped = head if shape else head + 1 + (1 << (body[start + 4] & 3))
            samples.append(np.frombuffer(body[start + skipped : end], np.dtype(dtype)))
    return samples


def read_export(target: str, folder: Path, name: str = "tokens") -> list[npt.NDArray[Any]]:
    """The documents of an export."""
    if target == "mds":
        return read_mds(folder)
    if target == "megatron":
        return read_megatron(folder / name)
    return read_datatrove(folder / f"{name}.ds") if target == "datatrove" else read_npy(folder / f"{name}.npy")


def write_megatron(
    prefix: Path, documents: Sequence[npt.NDArray[Any]], *, dtype: str = "<u2", pieces: int = 1, **lies: Any
) -> Path:
    """A .bin/.idx whose documents are cut into ``pieces`` sequences each; ``lies`` replace what the index says."""
    sequences = [piece for document in documents for piece in np.array_split(document, pieces)]
    lengths = np.array([len(piece) for piece in sequences], np.int64)
    starts = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    facts: dict[str, Any] = {
        "magic": b"MMIDIDX\0\0", "version": 1, "code": {"<u2": 8, "<i4": 4, "u1": 1}[dtype], "count": len(sequences),
        "num_borders": len(documents) + 1, "lengths": lengths, "starts": starts,
        "borders": np.arange(len(documents) + 1) * pieces, **lies,
    }  # fmt: skip
    head = struct.pack("<9sQBQQ", *(facts[name] for name in ("magic", "version", "code", "count", "num_borders")))
    arrays = [facts["lengths"].astype("<i4"), facts["starts"].astype("<i8"), facts["borders"].astype("<i8")]
    prefix.with_suffix(".idx").write_bytes(head + b"".join(each.tobytes() for each in arrays))
    rows = [np.asarray(document).astype(dtype).tobytes() for document in documents]
    prefix.with_suffix(".bin").write_bytes(b"".join(rows))
    return prefix


def write_datatrove(path: Path, documents: Sequence[npt.NDArray[Any]], *, dtype: str = "<u2") -> Path:
    path.write_bytes(b"".join(np.asarray(document).astype(dtype).tobytes() for document in documents))
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    Path(f"{path}.index").write_bytes(ends.astype("<u8").tobytes())
    return path
