"""Saving beside training: what is copied when, what is left out, what a failing disk does, who else is kept out."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoint_actor import WALLET, check, contents, newest_step
from trainer.checkpoint import node as module
from trainer.checkpoint.node import Checkpointer, checkpoint_path, load_newest
from trainer.checkpoint.saver import HostBuffers, HostCopy
from trainer.errors import CheckpointError, TrainerUsageError


class Gate:
    """Stands before the real writing: a disk that is as slow as the test wants."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self._write = module.write_file

    def write(self, *arguments: Any, **options: Any) -> None:
        self.reached.set()
        assert self.open.wait(60)
        self._write(*arguments, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(module, "write_file", gate.write)
    yield gate
    gate.open.set()


@contextmanager
def full_disk(size_bytes: int = 50_000) -> Iterator[None]:
    """Files of this process cannot grow beyond a size: a write fails half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_changes_after_save_has_returned_is_not_in_the_file(tmp_path: Path, gate: Gate) -> None:
    state = contents(10)
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        checkpointer.save(state)
        assert gate.reached.wait(60)
        state["layers"]["0"]["w"].zero_()
        state["loader"]["position"] = 99
        gate.open.set()
    assert newest_step(tmp_path) == 10


def test_what_never_changes_is_not_copied_and_what_is_not_there_yet_is_waited_for_by_the_writer(tmp_path: Path) -> None:
    lasting, later = torch.arange(4.0), Future[object]()
    state = contents(10) | {"lasting": [HostCopy(lasting)], "flight": later}
    staged = HostBuffers().stage(state)
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        assert checkpointer.save(state) and checkpointer.busy, "it has returned, and the writer waits"
        later.set_result({"vector": torch.ones(3), "steps_left": 2})
        checkpointer.flush()
    assert staged()["lasting"][0].data_ptr() == lasting.data_ptr()  # type: ignore[index]
    found = load_newest(tmp_path, WALLET)
    assert found is not None
    assert torch.equal(found["lasting"][0], lasting) and found["flight"]["steps_left"] == 2
    assert torch.equal(found["flight"]["vector"], torch.ones(3))


def test_a_part_of_the_state_that_never_comes_is_an_error_of_the_save(tmp_path: Path) -> None:
    broken: Future[object] = Future()
    broken.set_exception(MemoryError("no room for a contribution"))
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        checkpointer.save(contents(10))
        checkpointer.flush()
        checkpointer.save(contents(20) | {"flight": broken})
        with pytest.raises(CheckpointError, match="no room for a contribution"):
            checkpointer.flush()
    assert newest_step(tmp_path) == 10


def test_a_periodic_save_is_left_out_while_one_is_being_written(tmp_path: Path, gate: Gate) -> None:
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        assert checkpointer.save(contents(10))
        assert not checkpointer.save(contents(20))
        assert not checkpointer.save(contents(30))
        assert (checkpointer.saved, checkpointer.skipped) == (0, 2)
        gate.open.set()
        checkpointer.flush()
        assert checkpointer.saved == 1
        assert newest_step(tmp_path) == 10
        assert checkpointer.save(contents(40))
    assert newest_step(tmp_path) == 40


def test_a_save_that_waits_is_not_left_out_and_waiting_has_an_end(tmp_path: Path, gate: Gate) -> None:
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        checkpointer.save(contents(10))
        assert gate.reached.wait(60)
        with pytest.raises(CheckpointError, match=r"within 0\.05 s"):
            checkpointer.flush(0.05)
        with pytest.raises(CheckpointError, match=r"within 0\.05 s"):
            checkpointer.save(contents(20), wait=True, timeout_s=0.05)
        threading.Timer(0.1, gate.open.set).start()
        assert checkpointer.save(contents(30), wait=True)
        assert (checkpointer.saved, checkpointer.skipped) == (2, 0)
        assert newest_step(tmp_path) == 30


def test_a_disk_that_is_full_is_told_by_the_next_save_with_everything_as_it_was(tmp_path, caplog):
    def save_on_full_disk(state: dict[str, Any]) -> None:
        assert checkpointer.save(state)
        while checkpointer.busy:
            threading.Event().wait(0.01)

    state = contents(20)
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        checkpointer.save(contents(10), wait=True)
        with full_disk():
            save_on_full_disk(state)
            with pytest.raises(CheckpointError, match=r"checkpoint of step 20, found: .*File too large"):
                checkpointer.save(contents(30))
        assert check(state) == 20
        assert newest_step(tmp_path) == 10
        assert not list(tmp_path.glob(".*.tmp"))
        assert checkpointer.save(contents(40))  # Told once: the disk has room again.
        checkpointer.flush()
        assert newest_step(tmp_path) == 40
        with full_disk():
            save_on_full_disk(contents(50))
        checkpointer.save(contents(60), wait=True)  # The last one is tried although the one before failed.
    assert "step 50" in caplog.text
    assert newest_step(tmp_path) == 60


def test_a_disk_that_is_full_is_told_by_flush_by_close_and_by_a_save_that_waits(tmp_path: Path) -> None:
    with full_disk():
        with Checkpointer(tmp_path, WALLET) as checkpointer:
            checkpointer.save(contents(10))
            with pytest.raises(CheckpointError, match="step 10"):
                checkpointer.flush()
            checkpointer.flush()
            with pytest.raises(CheckpointError, match="step 20"):
                checkpointer.save(contents(20), wait=True)
        with pytest.raises(CheckpointError, match="step 30"), Checkpointer(tmp_path, WALLET) as checkpointer:
            checkpointer.save(contents(30))
        with pytest.raises(KeyError, match="training"), Checkpointer(tmp_path, WALLET) as checkpointer:
            checkpointer.save(contents(40))
            raise KeyError("training")  # What went wrong first is told.
    assert newest_step(tmp_path) is None


def test_what_cannot_be_had_is_refused_before_training_and_folders_are_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with Checkpointer(folder, WALLET) as checkpointer:
        checkpointer.save(contents(1), wait=True)
        assert checkpointer.path == checkpoint_path(folder, WALLET)
        with pytest.raises(CheckpointError, match=r"same wallet .*dynamic_node_ab12\.lock"):
            Checkpointer(folder, WALLET).save(contents(2))
    with Checkpointer(folder, WALLET):
        assert newest_step(folder) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a folder"):
        Checkpointer(tmp_path / "file" / "checkpoints", WALLET).open()
    with pytest.raises(TrainerUsageError, match="keep"):
        Checkpointer(tmp_path, WALLET, keep=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_from_a_gpu_the_values_are_those_at_the_time_of_the_save(tmp_path: Path) -> None:
    values = torch.arange(1 << 24, dtype=torch.float32, device="cuda")
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        for step in range(3):
            values += 1
            checkpointer.save({"training_rounds": step, "values": values})
            values.mul_(2)  # Queued behind the copy.
            checkpointer.flush()
            values.div_(2)
            found = load_newest(tmp_path, WALLET)
            assert found is not None
            assert torch.equal(found["values"], torch.arange(1 << 24, dtype=torch.float32) + step + 1)
