"""Files that are damaged, foreign or hostile are passed over for the one before; nothing in them runs."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_actor import WALLET, Hostile, contents, newest_step, rewritten
from trainer.checkpoint.files import FORMAT_KEY
from trainer.checkpoint.node import Checkpointer, checkpoint_path, load_newest
from trainer.errors import CheckpointMismatchError, CorruptCheckpointError


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
    rewritten(newest, document)
    assert newest_step(newest.parent) == 20


def test_a_pickle_that_would_run_something_runs_nothing(newest: Path, tmp_path: Path) -> None:
    document = {"format": "genesis-checkpoint-1", "training_rounds": 30, "x": Hostile(tmp_path / "ran")}
    for body in (document, pickle.dumps(document)):
        rewritten(newest, body)
        assert newest_step(newest.parent) == 20
    assert not (tmp_path / "ran").exists()


def test_values_changed_without_their_digest_and_endless_ones_are_passed_over(newest: Path) -> None:
    document = torch.load(newest, weights_only=True)
    document["layers"]["0"]["w"][7] += 1
    rewritten(newest, document)
    assert newest_step(newest.parent) == 20
    endless: list[object] = []
    endless.append(endless)
    rewritten(newest, {**document, "loader": endless})
    assert newest_step(newest.parent) == 20


def test_a_checkpoint_of_a_release_to_come_is_not_passed_over_in_silence(newest: Path) -> None:
    rewritten(newest, {**torch.load(newest, weights_only=True), FORMAT_KEY: "genesis-checkpoint-2"})
    with pytest.raises(CheckpointMismatchError, match="genesis-checkpoint-2"):
        load_newest(newest.parent, WALLET)


def test_if_none_is_whole_it_says_so_and_the_next_save_replaces_it(newest: Path) -> None:
    for path in newest.parent.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorruptCheckpointError, match=r"found only damaged ones \(dynamic_node_ab12.pt, .*000010.pt\)"):
        load_newest(newest.parent, WALLET)
    with Checkpointer(newest.parent, WALLET) as checkpointer:
        checkpointer.save(contents(30), wait=True)
    assert newest_step(newest.parent) == 30
