"""What was fetched and verified outlives the process; what was not verified is fetched again."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.errors import StateTransferError
from trainer.network.transfer.descriptor import CHUNK_BYTES, Descriptor
from trainer.network.transfer.layout import snapshots_in
from trainer.network.transfer.part_file import PartFile
from trainer.network.transfer.snapshot import load_snapshot, write_snapshot


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
def source(tmp_path: Path, make_tensors: Callable[..., dict[str, torch.Tensor]]) -> _Source:
    return _Source(tmp_path / "source", make_tensors(400_000))


def test_it_goes_on_where_it_stopped(tmp_path: Path, source: _Source) -> None:
    part = PartFile(tmp_path, source.digest)
    part.open()
    assert part.saved_descriptor() is None
    assert part.begin(source.descriptor, source.pages) == [0, 1, 2, 3]
    for index in (0, 2):
        part.write(index, source.chunk(index))
    part.write(3, source.chunk(0)[: source.descriptor.chunk_bytes(3)])  # As if torn by a crash.
    part.close()

    part = PartFile(tmp_path, source.digest)
    part.open()
    assert part.saved_descriptor() == source.descriptor
    assert part.saved_pages(source.descriptor) == source.pages
    assert part.begin(source.descriptor, source.pages) == [1, 3]
    for index in (1, 3):
        assert part.is_valid(index, source.chunk(index))
        part.write(index, source.chunk(index))
    part.load()
    part.publish()
    part.close()
    assert snapshots_in(tmp_path) == [source.digest]
    assert {path.name for path in tmp_path.iterdir()} == {source.digest, "source"}
    load_snapshot(tmp_path, source.digest)


def test_only_a_chunk_itself_is_valid(tmp_path: Path, source: _Source) -> None:
    part = PartFile(tmp_path, source.digest)
    part.open()
    part.begin(source.descriptor, source.pages)
    flipped = bytearray(source.chunk(1))
    flipped[-1] ^= 1
    assert not part.is_valid(1, memoryview(flipped))
    assert not part.is_valid(1, source.chunk(0))
    assert not part.is_valid(1, source.chunk(1)[:-1])
    part.close()


def test_an_incomplete_one_cannot_be_loaded(tmp_path: Path, source: _Source) -> None:
    part = PartFile(tmp_path, source.digest)
    part.open()
    part.begin(source.descriptor, source.pages)
    part.write(0, source.chunk(0))
    with pytest.raises(StateTransferError, match="damaged in chunk 1"):
        part.load()
    part.close()


def test_damaged_leftovers_are_fetched_again(tmp_path: Path, source: _Source) -> None:
    part = PartFile(tmp_path, source.digest)
    part.open()
    part.begin(source.descriptor, source.pages)
    part.close()
    folder = tmp_path / f".fetch-{source.digest}"
    (folder / "descriptor.json").write_bytes(b"{}")
    (folder / "pages").write_bytes(b"short")
    (folder / "data").write_bytes(b"short")
    part = PartFile(tmp_path, source.digest)
    part.open()
    assert part.saved_descriptor() is None
    assert part.saved_pages(source.descriptor) == [None]
    assert part.begin(source.descriptor, source.pages) == [0, 1, 2, 3]
    part.close()


def test_two_do_not_fetch_one_state_into_one_folder(tmp_path: Path, source: _Source) -> None:
    first, second = PartFile(tmp_path, source.digest), PartFile(tmp_path, source.digest)
    first.open()
    with pytest.raises(StateTransferError, match="another process fetches"):
        second.open()
    first.close()
    second.open()
    second.close()


def broken_off(directory: Path, source: _Source, digest: str, age_s: float) -> Path:
    """A fetch of another state that was begun some time ago and not ended."""
    part = PartFile(directory, digest)
    part.open()
    part.begin(source.descriptor, source.pages)
    part.close()
    folder = directory / f".fetch-{digest}"
    begun_s = folder.stat().st_mtime - age_s
    os.utime(folder, (begun_s, begun_s))
    return folder


def test_of_fetches_that_were_broken_off_the_newest_is_kept(tmp_path: Path, source: _Source) -> None:
    """Space is reserved whole: without this each state that was not fetched to its end would stay for good."""
    directory = tmp_path / "states"
    for age, digest in ((20.0, "b" * 64), (30.0, "c" * 64), (10.0, "a" * 64)):
        broken_off(directory, source, digest, age)
    part = PartFile(directory, source.digest)
    part.open()
    part.begin(source.descriptor, source.pages)
    left = {path.name.removeprefix(".fetch-") for path in directory.iterdir()}
    assert left == {digest + end for digest in ("a" * 64, source.digest) for end in ("", ".lock")}
    part.close()


def test_what_others_are_fetching_is_not_removed(tmp_path: Path, source: _Source) -> None:
    others = [PartFile(tmp_path, digit * 64) for digit in "abc"]
    for other in others:
        other.open()
    part = PartFile(tmp_path, source.digest)
    part.open()
    assert {path.name for path in tmp_path.glob(".fetch-*[!k]")} == {
        f".fetch-{digest}" for digest in ("a" * 64, "b" * 64, "c" * 64, source.digest)
    }
    for each in (part, *others):
        each.close()


def test_a_write_after_the_end_touches_no_other_file(tmp_path: Path, source: _Source) -> None:
    part = PartFile(tmp_path, source.digest)
    part.open()
    part.begin(source.descriptor, source.pages)
    part.close()
    with (tmp_path / "bystander").open("wb"), pytest.raises(StateTransferError, match="cannot be written"):
        part.write(0, source.chunk(0))
    assert (tmp_path / "bystander").read_bytes() == b""


def test_a_full_disk_is_told_before_anything_is_fetched(tmp_path: Path, source: _Source) -> None:
    part = PartFile(tmp_path, source.digest)
    part.open()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StateTransferError, match=r"does not fit into .*; make room"):
            part.begin(source.descriptor, source.pages)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    part.close()
    part.open()
    assert part.begin(source.descriptor, source.pages) == [0, 1, 2, 3]
    part.close()
