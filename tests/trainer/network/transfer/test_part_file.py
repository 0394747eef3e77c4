"""What was fetched and verified outlives the process; what was not verified is fetched again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from trainer.errors import StateTransferError
from trainer.network.transfer.descriptor import CHUNK_BYTES, Descriptor, snapshots_in
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
        for index in (1, 3):
            assert part.is_valid(index, source.chunk(index))
            part.write(index, source.chunk(index))
        part.load()
        part.publish()
    assert snapshots_in(tmp_path) == [source.digest]
    assert {path.name for path in tmp_path.iterdir()} == {source.digest, "source"}
    load_snapshot(tmp_path, source.digest)


def test_only_a_chunk_itself_is_valid(tmp_path: Path, source: _Source) -> None:
    with opened(tmp_path, source.digest) as part:
        part.begin(source.descriptor, source.pages)
        flipped = bytearray(source.chunk(1))
        flipped[-1] ^= 1
        assert not part.is_valid(1, memoryview(flipped))
        assert not part.is_valid(1, source.chunk(0))
        assert not part.is_valid(1, source.chunk(1)[:-1])


def test_damaged_leftovers_are_fetched_again(tmp_path: Path, source: _Source) -> None:
    with opened(tmp_path, source.digest) as part:
        part.begin(source.descriptor, source.pages)
    folder = tmp_path / f".fetch-{source.digest}"
    (folder / "descriptor.json").write_bytes(b"{}")
    (folder / "pages").write_bytes(b"short")
    (folder / "data").write_bytes(b"short")
    with opened(tmp_path, source.digest) as part:
        assert part.saved_descriptor() is None
        assert part.saved_pages(source.descriptor) == [None]
        assert part.begin(source.descriptor, source.pages) == [0, 1, 2, 3]


def test_two_do_not_fetch_one_state_into_one_folder(tmp_path: Path, source: _Source) -> None:
    second = PartFile(tmp_path, source.digest)
    with opened(tmp_path, source.digest), pytest.raises(StateTransferError, match="another process fetches"):
        second.open()
    second.open()
    second.close()


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


def test_what_others_are_fetching_is_not_removed(tmp_path: Path, source: _Source) -> None:
    digests = {*(letter * 64 for letter in "abc"), source.digest}
    with ExitStack() as stack:
        for digest in sorted(digests):
            stack.enter_context(opened(tmp_path, digest))
        assert {path.name for path in tmp_path.glob(".fetch-*[!k]")} == {f".fetch-{digest}" for digest in digests}


def test_a_write_after_the_end_touches_no_other_file(tmp_path: Path, source: _Source) -> None:
    with opened(tmp_path, source.digest) as part:
        part.begin(source.descriptor, source.pages)
    with (tmp_path / "bystander").open("wb"), pytest.raises(StateTransferError, match="cannot be written"):
        part.write(0, source.chunk(0))
    assert (tmp_path / "bystander").read_bytes() == b""


def test_a_full_disk_is_reported_before_anything_is_fetched(
    tmp_path: Path, source: _Source, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    full = pytest.raises(StateTransferError, match=r"does not fit into .*; make room")
    with opened(tmp_path, source.digest) as part, file_size_limit(1 << 20), full:
        part.begin(source.descriptor, source.pages)
    with opened(tmp_path, source.digest) as part:
        assert part.begin(source.descriptor, source.pages) == [0, 1, 2, 3]
