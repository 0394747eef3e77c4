"""A snapshot is whole or not there, reads back bit for bit, and is named by what is in it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.serialisation import sha256_hex
from trainer.errors import StateTransferError, TrainerUsageError
from trainer.network.transfer.descriptor import CHUNK_BYTES, Expectation, parse_descriptor, snapshots_in
from trainer.network.transfer.snapshot import describe, load_snapshot, write_snapshot
from trainer.network.transfer.tensor_bytes import all_finite, chunks_of, payload_of

Make = Callable[..., dict[str, torch.Tensor]]

_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64]


def _all_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    def content(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
        return {name: (it.dtype, it.shape, bytes(payload_of({name: it}))) for name, it in tensors.items()}

    return content(found) == content(expected)


def test_it_reads_back_bit_for_bit(tmp_path: Path, make_tensors: Make) -> None:
    tensors = make_tensors(700_000)
    descriptor = write_snapshot(tmp_path, {"outer_step": 3}, tensors)
    assert descriptor.num_chunks == 6
    snapshot = load_snapshot(tmp_path, descriptor.digest)
    assert snapshot.meta == {"outer_step": 3}
    assert _all_same(snapshot.tensors, tensors)
    snapshot.tensors["anchor"].add_(1)  # Its own memory, to be changed.


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tensors_read_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shapes = st.lists(st.integers(0, 5), max_size=3)
    tensors = {}
    for name in data.draw(st.sets(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), max_size=5)):
        shape = data.draw(shapes)
        dtype = data.draw(st.sampled_from(_DTYPES))
        tensors[name] = torch.randint(0, 2, shape).to(dtype)
    folder = tmp_path_factory.mktemp("snapshots")
    digest = write_snapshot(folder, {}, tensors).digest
    assert _all_same(load_snapshot(folder, digest).tensors, tensors)
    assert describe({}, tensors).digest == digest


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_chunks_hold_exactly_the_bytes(num_bytes: int) -> None:
    first = torch.randint(0, 256, (num_bytes // 2,), dtype=torch.uint8)
    second = torch.randint(0, 256, (num_bytes - num_bytes // 2,), dtype=torch.uint8)
    chunks = [bytes(chunk) for chunk in chunks_of({"a": first, "b": second})]
    assert b"".join(chunks) == first.numpy().tobytes() + second.numpy().tobytes()
    assert all(len(chunk) == CHUNK_BYTES for chunk in chunks[:-1])
    assert bytes(payload_of({"a": first, "b": second})) == b"".join(chunks)
    assert bytes(payload_of({"b": second})) == second.numpy().tobytes()


def test_equal_content_has_an_equal_digest_and_other_content_another(make_tensors: Make) -> None:
    tensors = make_tensors(1000)
    digest = describe({"step": 1}, tensors).digest
    assert describe({"step": 1}, dict(reversed(tensors.items()))).digest == digest
    strided = {**tensors, "anchor": torch.stack([tensors["anchor"]] * 2, dim=1)[:, 0]}
    assert describe({"step": 1}, strided).digest == digest
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["momentum"][-1] += 1
    others = [({"step": 2}, tensors), ({"step": 1}, changed), ({"step": 1}, {"x": tensors["anchor"]})]
    assert len({digest, *(describe(meta, found).digest for meta, found in others)}) == 4


def test_the_last_two_are_kept(tmp_path: Path, make_tensors: Make) -> None:
    digests = [write_snapshot(tmp_path, {"step": step}, make_tensors(10)).digest for step in range(4)]
    assert snapshots_in(tmp_path) == [digests[3], digests[2]]
    again = write_snapshot(tmp_path, {"step": 2}, make_tensors(10)).digest
    assert snapshots_in(tmp_path) == [again, digests[3]]
    assert {path.name for path in tmp_path.iterdir()} == set(snapshots_in(tmp_path))


@pytest.mark.parametrize("name", ["data", "pages", "descriptor.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lengthen", "remove"])
def test_damage_is_found(tmp_path: Path, make_tensors: Make, name: str, damage: str) -> None:
    digest = write_snapshot(tmp_path, {}, make_tensors(300_000)).digest
    path = tmp_path / digest / name
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": flipped, "cut": data[:-1], "lengthen": data + b"x"}[damage])
    with pytest.raises(StateTransferError):
        load_snapshot(tmp_path, digest)


def test_what_cannot_be_described_is_refused(tmp_path: Path) -> None:
    for meta, dtype, text in (
        ({}, torch.complex64, "complex64"),
        ({"x": float("nan")}, torch.float32, "meta"),
        ({"x": "y" * (1 << 20)}, torch.float32, "at most 1048576 bytes"),
    ):
        with pytest.raises(TrainerUsageError, match=text):
            write_snapshot(tmp_path, meta, {"x": torch.zeros(1, dtype=dtype)})
    assert snapshots_in(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StateTransferError, match="cannot be written"):
        write_snapshot(tmp_path / "file", {}, {"x": torch.zeros(1)})


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, make_tensors: Make, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    kept = write_snapshot(tmp_path, {}, make_tensors(10)).digest
    with file_size_limit(1 << 20), pytest.raises(StateTransferError, match="cannot be written"):
        write_snapshot(tmp_path, {}, make_tensors(1_000_000))
    assert [path.name for path in tmp_path.iterdir()] == [kept]


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_no_half_snapshot(tmp_path: Path, make_tensors: Make) -> None:
    code = (
        "import os, sys, torch\n"
        "import trainer.network.transfer.snapshot as snapshot\n"
        "snapshot.publish = lambda *_: os.kill(os.getpid(), 9)\n"
        "snapshot.write_snapshot(sys.argv[1], {}, {'x': torch.zeros(9)})\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name.startswith(".draft-") for path in tmp_path.iterdir()] == [True]
    assert snapshots_in(tmp_path) == []
    digest = write_snapshot(tmp_path, {}, make_tensors(10)).digest  # Clears up behind it.
    assert [path.name for path in tmp_path.iterdir()] == [digest]


def test_a_descriptor_is_believed_only_by_its_digest(make_tensors: Make) -> None:
    descriptor = describe({"step": 1}, make_tensors(10))
    assert parse_descriptor(descriptor.to_bytes(), descriptor.digest) == descriptor
    with pytest.raises(StateTransferError, match="found other bytes"):
        parse_descriptor(descriptor.to_bytes() + b" ", descriptor.digest)
    for spelling in (
        b"[]",
        descriptor.to_bytes().replace(b"genesis state 1", b"genesis state 2"),
        descriptor.to_bytes().replace(b'"shape":[10]', b'"shape":[-1]'),
        descriptor.to_bytes().replace(b'"shape":[10]', b'"shape":[99999999999,99999]'),
        descriptor.to_bytes().replace(b"{", b"{ ", 1),
        descriptor.to_bytes().replace(b'"aaa"', b'"zzz"'),
    ):
        with pytest.raises(StateTransferError, match="the state"):
            parse_descriptor(spelling, sha256_hex(spelling))


def test_expectations(make_tensors: Make) -> None:
    descriptor = describe({}, make_tensors(10))
    shapes = {"aaa": ("uint8", (3,)), "anchor": ("float32", (10,)), "momentum": ("float32", (10,))}
    Expectation(max_bytes=83, tensors=shapes).check(descriptor)
    Expectation(max_bytes=83).check(descriptor)
    for expectation, text in (
        (Expectation(max_bytes=82), "at most 82 bytes"),
        (Expectation(max_bytes=83, tensors={**shapes, "anchor": ("float32", (11,))}), "'anchor': expected float32"),
        (Expectation(max_bytes=83, tensors={**shapes, "anchor": ("float64", (10,))}), "another architecture"),
        (Expectation(max_bytes=83, tensors={**shapes, "more": ("float32", (1,))}), "'more' is missing"),
        (Expectation(max_bytes=83, tensors={"anchor": shapes["anchor"]}), "'aaa' is not expected"),
    ):
        with pytest.raises(StateTransferError, match=text):
            expectation.check(descriptor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found_anywhere(bad: float) -> None:
    tensor = torch.zeros((1 << 22) + 5)
    assert all_finite(tensor)
    tensor[-1] = bad
    assert not all_finite(tensor)
    assert not all_finite(tensor.to(torch.bfloat16).reshape(-1, 1))
    assert all_finite(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_values_are_finite_though_their_sum_is_not(dtype: torch.dtype) -> None:
    tensor = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(tensor)
    tensor[500] = float("inf")
    assert not all_finite(tensor)
