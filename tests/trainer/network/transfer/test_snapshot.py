"""A snapshot is whole or not there, is named by what is in it, and keeps what was fetched of it and verified."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.serialisation import sha256_hex
from trainer.errors import StateTransferError, TrainerUsageError
from trainer.network.transfer.descriptor import (
    CHUNK_BYTES,
    Descriptor,
    Expectation,
    all_finite,
    parse_descriptor,
    payload_of,
)
from trainer.network.transfer.snapshot import PartFile, describe, load_snapshot, snapshots_in, write_snapshot

_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64]


def _tensors(num_values: int) -> dict[str, torch.Tensor]:
    """Two fp32 vectors of so many values, and an odd small one before them, so that chunks span tensors."""
    generator = torch.Generator().manual_seed(0)
    anchor, momentum = torch.randn(2, num_values, generator=generator)
    return {"anchor": anchor.clone(), "aaa": torch.arange(3, dtype=torch.uint8), "momentum": momentum.clone()}


@contextmanager
def _file_size_limit(num_bytes: int) -> Iterator[None]:
    """Makes files of more bytes fail, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def _contents(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    return {name: (it.dtype, it.shape, bytes(payload_of({name: it}))) for name, it in tensors.items()}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tensors_read_back(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    shapes, names = (
        st.lists(st.integers(0, 5), max_size=3),
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=5),
    )
    tensors = {
        name: torch.randint(0, 2, data.draw(shapes)).to(data.draw(st.sampled_from(_DTYPES)))
        for name in data.draw(st.sets(names, max_size=5))
    }
    folder = tmp_path_factory.mktemp("snapshots")
    digest = write_snapshot(folder, {}, tensors).digest
    found = load_snapshot(folder, digest).tensors
    assert _contents(found) == _contents(tensors)
    assert describe({}, tensors).digest == digest
    for tensor in found.values():
        tensor.zero_()  # Its own memory, to be changed.


def test_equal_content_has_an_equal_digest_and_other_content_another() -> None:
    tensors = _tensors(1000)
    digest = describe({"step": 1}, tensors).digest
    assert describe({"step": 1}, dict(reversed(tensors.items()))).digest == digest
    strided = {**tensors, "anchor": torch.stack([tensors["anchor"]] * 2, dim=1)[:, 0]}
    assert describe({"step": 1}, strided).digest == digest
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["momentum"][-1] += 1
    others = [({"step": 2}, tensors), ({"step": 1}, changed), ({"step": 1}, {"x": tensors["anchor"]})]
    assert len({digest, *(describe(meta, found).digest for meta, found in others)}) == 4


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    digests = [write_snapshot(tmp_path, {"step": step}, _tensors(10)).digest for step in range(4)]
    assert snapshots_in(tmp_path) == [digests[3], digests[2]]
    again = write_snapshot(tmp_path, {"step": 2}, _tensors(10)).digest
    assert snapshots_in(tmp_path) == [again, digests[3]]
    assert {path.name for path in tmp_path.iterdir()} == set(snapshots_in(tmp_path))


@pytest.mark.parametrize("name", ["data", "pages", "descriptor.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lengthen", "remove"])
def test_damage_is_found(tmp_path: Path, name: str, damage: str) -> None:
    digest = write_snapshot(tmp_path, {}, _tensors(300_000)).digest
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


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    kept = write_snapshot(tmp_path, {}, _tensors(10)).digest
    with _file_size_limit(1 << 20), pytest.raises(StateTransferError, match="cannot be written"):
        write_snapshot(tmp_path, {}, _tensors(1_000_000))
    assert [path.name for path in tmp_path.iterdir()] == [kept]
    with pytest.raises(StateTransferError, match="cannot be written"):
        write_snapshot(tmp_path / kept / "data", {}, _tensors(10))  # No folder.


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_no_half_snapshot(tmp_path: Path) -> None:
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
    digest = write_snapshot(tmp_path, {}, _tensors(10)).digest  # Clears up behind it.
    assert [path.name for path in tmp_path.iterdir()] == [digest]


def test_a_descriptor_is_believed_only_by_its_digest() -> None:
    descriptor = describe({"step": 1}, _tensors(10))
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


def test_expectations() -> None:
    descriptor = describe({}, _tensors(10))
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_value_is_found_anywhere_and_large_ones_are_finite_though_their_sum_is_not(dtype, bad) -> None:
    large, many = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype), torch.zeros((1 << 22) + 5, dtype=dtype)
    assert all(map(all_finite, (large, many, torch.ones(3, dtype=torch.int64))))
    large[500] = many[-1] = bad
    assert not any(map(all_finite, (large, many, many.reshape(-1, 1))))


class _Source:
    """A snapshot elsewhere, to copy chunks from."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.descriptor: Descriptor = write_snapshot(folder, {}, tensors)
        self.digest = self.descriptor.digest
        self.pages = [(folder / self.digest / "pages").read_bytes()] if self.descriptor.pages else []
        self._data = (folder / self.digest / "data").read_bytes()

    def chunk(self, index: int) -> memoryview:
        return memoryview(self._data)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


@pytest.fixture
def source(tmp_path: Path) -> _Source:
    return _Source(tmp_path / "source", _tensors(400_000))


@contextmanager
def opened(directory: Path, digest: str) -> Iterator[PartFile]:
    part = PartFile(directory, digest)
    part.open()
    try:
        yield part
    finally:
        part.close()


def test_it_resumes_where_it_stopped(tmp_path: Path, source: _Source) -> None:
    with opened(tmp_path, source.digest) as part:
        assert part.saved_descriptor() is None
        assert part.begin(source.descriptor, source.pages) == [0, 1, 2, 3]
        for index in (0, 2):
            part.write(index, source.chunk(index))
        part.write(3, source.chunk(0)[: source.descriptor.chunk_bytes(3)])  # As if torn by a crash.
    with opened(tmp_path, source.digest) as part:
        assert part.saved_descriptor() == source.descriptor
        assert part.saved_pages(source.descriptor) == source.pages
        assert part.begin(source.descriptor, source.pages) == [1, 3]
        with pytest.raises(StateTransferError, match="damaged in chunk 1"):
            part.load()
        flipped = bytearray(source.chunk(1))
        flipped[-1] ^= 1
        assert not any(part.is_valid(1, it) for it in (memoryview(flipped), source.chunk(0), source.chunk(1)[:-1]))
        for index in (1, 3):
            assert part.is_valid(index, source.chunk(index))
            part.write(index, source.chunk(index))
        part.load()
        part.publish()
    assert snapshots_in(tmp_path) == [source.digest]
    assert {path.name for path in tmp_path.iterdir()} == {source.digest, "source"}
    load_snapshot(tmp_path, source.digest)


def test_damaged_leftovers_are_fetched_again(tmp_path: Path, source: _Source) -> None:
    with opened(tmp_path, source.digest) as part:
        part.begin(source.descriptor, source.pages)
    for name in ("descriptor.json", "pages", "data"):
        (tmp_path / f".fetch-{source.digest}" / name).write_bytes(b"{}")
    with opened(tmp_path, source.digest) as part:
        assert part.saved_descriptor() is None
        assert part.saved_pages(source.descriptor) == [None]
        assert part.begin(source.descriptor, source.pages) == [0, 1, 2, 3]


def test_the_newest_interrupted_fetch_is_kept_and_no_other(tmp_path: Path, source: _Source) -> None:
    """Space is reserved whole: without this each state that was not fetched to its end would stay for good."""
    directory = tmp_path / "states"
    for age_s, digest in ((20.0, "b" * 64), (30.0, "c" * 64), (10.0, "a" * 64)):
        with opened(directory, digest) as part:
            part.begin(source.descriptor, source.pages)
        folder = directory / f".fetch-{digest}"
        begun_s = folder.stat().st_mtime - age_s
        os.utime(folder, (begun_s, begun_s))
    with opened(directory, source.digest) as part:
        part.begin(source.descriptor, source.pages)
        left = {path.name.removeprefix(".fetch-") for path in directory.iterdir()}
        assert left == {digest + end for digest in ("a" * 64, source.digest) for end in ("", ".lock")}


def test_what_others_are_fetching_is_neither_removed_nor_fetched_beside_them(tmp_path: Path, source: _Source) -> None:
    digests = {*(letter * 64 for letter in "abc"), source.digest}
    with ExitStack() as stack:
        for digest in sorted(digests):
            stack.enter_context(opened(tmp_path, digest))
        assert {path.name for path in tmp_path.glob(".fetch-*[!k]")} == {f".fetch-{digest}" for digest in digests}
        second = PartFile(tmp_path, source.digest)
        with pytest.raises(StateTransferError, match="another process fetches"):
            second.open()
    second.open()
    second.close()


def test_a_write_after_the_end_touches_no_other_file(tmp_path: Path, source: _Source) -> None:
    with opened(tmp_path, source.digest) as part:
        part.begin(source.descriptor, source.pages)
    with (tmp_path / "bystander").open("wb"), pytest.raises(StateTransferError, match="cannot be written"):
        part.write(0, source.chunk(0))
    assert (tmp_path / "bystander").read_bytes() == b""


def test_a_full_disk_is_reported_before_anything_is_fetched(tmp_path: Path, source: _Source) -> None:
    full = pytest.raises(StateTransferError, match=r"does not fit into .*; make room")
    with opened(tmp_path, source.digest) as part, _file_size_limit(1 << 20), full:
        part.begin(source.descriptor, source.pages)
    with opened(tmp_path, source.digest) as part:
        assert part.begin(source.descriptor, source.pages) == [0, 1, 2, 3]
