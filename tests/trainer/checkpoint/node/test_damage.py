"""Files that are damaged, foreign or hostile are passed over for the one before; nothing in them runs."""

from __future__ import annotations

import os
import pickle
import random
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_actor import NUM_VALUES, WALLET, Death, contents, newest_step, save, train
from trainer.checkpoint.files import FORMAT_KEY
from trainer.checkpoint.node import Checkpointer, checkpoint_path, load_newest
from trainer.errors import CheckpointMismatchError, CorruptCheckpointError


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """The newest of two checkpoints, of step 20; the other is of step 10."""
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        checkpointer.save(contents(10), wait=True)
        checkpointer.save(contents(20), wait=True)
    return checkpoint_path(tmp_path, WALLET)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_passed_over(newest: Path, share: float, caplog: pytest.LogCaptureFixture) -> None:
    body = newest.read_bytes()
    newest.write_bytes(body[: int(len(body) * share)])
    assert newest_step(newest.parent) == 10
    assert "expected a whole checkpoint" in caplog.text
    assert "in the place of dynamic_node_ab12.pt" in caplog.text


def test_any_flipped_bit_is_seen_or_does_not_matter(newest: Path) -> None:
    whole = newest.read_bytes()
    seeded = random.Random(1)
    # As many in the pickle, which comes first, as in all of the file.
    places = [seeded.randrange(2000) for _ in range(40)] + [seeded.randrange(len(whole)) for _ in range(40)]
    outcomes = []
    for place in places:
        body = bytearray(whole)
        body[place] ^= 1 << seeded.randrange(8)
        newest.write_bytes(body)
        outcomes.append(newest_step(newest.parent))
    assert set(outcomes) <= {10, 20}
    assert outcomes.count(10) > 40


@pytest.mark.parametrize(
    "document",
    [
        *(b"", b"\0" * 5000, b"PK\x03\x04" + b"x" * 500, b"not a checkpoint", random.Random(0).randbytes(3000)),
        *([1, 2], {"a": 1}, torch.zeros(3), {FORMAT_KEY: 3}),
    ],
)
def test_garbage_and_files_of_another_kind_are_passed_over(newest: Path, document: object) -> None:
    newest.unlink()  # The kept one of that step is another file now.
    if isinstance(document, bytes):
        newest.write_bytes(document)
    else:
        torch.save(document, newest)
    assert newest_step(newest.parent) == 20


@pytest.mark.parametrize("in_archive", [True, False])
def test_a_pickle_that_would_run_something_runs_nothing(newest: Path, tmp_path: Path, in_archive: bool) -> None:
    ran = tmp_path / "ran"
    newest.unlink()
    document = {"format": "genesis-checkpoint-1", "training_rounds": 30, "x": Hostile(ran)}
    if in_archive:
        torch.save(document, newest)
    else:
        newest.write_bytes(pickle.dumps(document))
    assert newest_step(newest.parent) == 20
    assert not ran.exists()


def test_values_changed_without_their_digest_and_endless_ones_are_passed_over(newest: Path) -> None:
    document = torch.load(newest, weights_only=True)
    document["layers"]["0"]["w"][7] += 1
    newest.unlink()
    torch.save(document, newest)
    assert newest_step(newest.parent) == 20
    endless: list[object] = []
    endless.append(endless)
    torch.save({**document, "loader": endless}, newest)
    assert newest_step(newest.parent) == 20


def test_a_checkpoint_of_a_release_to_come_is_not_passed_over_in_silence(newest: Path) -> None:
    document = {**torch.load(newest, weights_only=True), FORMAT_KEY: "genesis-checkpoint-2"}
    newest.unlink()
    torch.save(document, newest)
    with pytest.raises(CheckpointMismatchError, match="genesis-checkpoint-2"):
        load_newest(newest.parent, WALLET)


def test_if_none_is_whole_it_says_so(newest: Path) -> None:
    for path in newest.parent.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptCheckpointError, match=r"found only damaged ones \(dynamic_node_ab12.pt, .*000010.pt\)"):
        load_newest(newest.parent, WALLET)


def test_a_damaged_newest_is_replaced_by_the_next_save(newest: Path) -> None:
    newest.write_bytes(b"damaged")
    with Checkpointer(newest.parent, WALLET) as checkpointer:
        checkpointer.save(contents(30), wait=True)
    assert newest_step(newest.parent) == 30


Start = Callable[..., ForkServerProcess]
_NUM_EVENTS = 20
"""More than a save has: the last ones are saves that succeed."""


def _ended(process: ForkServerProcess) -> int:
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.slow
def test_killed_at_each_of_the_steps_of_a_save(tmp_path: Path, start: Start) -> None:
    with Checkpointer(tmp_path, WALLET, keep=2) as checkpointer:
        checkpointer.save(contents(0), wait=True)
    newest, killed, advanced = 0, 0, 0
    for event in range(1, _NUM_EVENTS):
        exitcode = _ended(start(save, str(tmp_path), event, Death(at_event=event)))
        assert exitcode in (0, -signal.SIGKILL)
        found = newest_step(tmp_path)
        assert found in (newest, event)
        assert found == event or exitcode
        killed += exitcode != 0
        advanced += exitcode != 0 and found == event
        newest = found
    assert 6 <= killed < _NUM_EVENTS - 1
    assert 1 <= advanced < killed  # Behind the rename it is the new one that counts.
    _check_tidy(tmp_path, newest + 1)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_killed_in_the_midst_of_writing(tmp_path: Path, start: Start, share: float) -> None:
    with Checkpointer(tmp_path, WALLET, keep=2) as checkpointer:
        checkpointer.save(contents(1), wait=True)
    process = start(save, str(tmp_path), 2, Death(at_bytes=int(NUM_VALUES * 4 * share)))
    assert _ended(process) == -signal.SIGXFSZ
    assert list(tmp_path.glob(".*.tmp"))
    assert newest_step(tmp_path) == 1
    _check_tidy(tmp_path, 3)


@pytest.mark.slow
def test_training_goes_on_to_the_bit_in_new_processes(tmp_path: Path, start: Start) -> None:
    whole, parted, killed = (tmp_path / name for name in ("whole", "parted", "killed"))
    running = [
        start(train, str(tmp_path / "a"), 30, str(whole)),
        start(train, str(tmp_path / "b"), 17, str(parted)),
        start(train, str(tmp_path / "c"), 17, str(killed), die=True),
    ]
    assert [_ended(process) for process in running] == [0, 0, -signal.SIGKILL]
    running = [start(train, str(tmp_path / name), 30, str(file)) for name, file in (("b", parted), ("c", killed))]
    assert [_ended(process) for process in running] == [0, 0]
    assert whole.read_bytes() == parted.read_bytes() == killed.read_bytes()


def _check_tidy(folder: Path, step: int) -> None:
    """The next save leaves nothing behind of those that were killed."""
    with Checkpointer(folder, WALLET, keep=2) as checkpointer:
        checkpointer.save(contents(step), wait=True)
        checkpointer.save(contents(step + 1), wait=True)
    assert newest_step(folder) == step + 1
    assert len(list(folder.glob("*.pt"))) == 3
    assert not list(folder.glob(".*.tmp"))
