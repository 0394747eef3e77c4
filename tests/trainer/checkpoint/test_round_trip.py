"""What is saved is what is loaded: values, types, bits. What is damaged, foreign or hostile is passed over."""

from __future__ import annotations

import math
import os
import pickle
import random
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoint_actor import WALLET, Hostile, contents, newest_step, rewritten
from trainer.checkpoint.files import FORMAT_KEY, tree_digest
from trainer.checkpoint.node import CheckpointContents, Checkpointer, checkpoint_path, load_newest
from trainer.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]

tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.slow
@given(st.lists(trees, min_size=1, max_size=3))
def test_any_tree_of_tensors_and_plain_values_comes_back(states: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, WALLET) as checkpointer:
        for step, state in enumerate(states):  # The same buffers, in other shapes.
            checkpointer.save({"training_rounds": step, "state": state}, wait=True)
            assert _same(load_newest(folder, WALLET), {"training_rounds": step, "state": state})


@pytest.mark.slow
@settings(max_examples=100)
@given(trees, trees)
def test_trees_have_one_digest_only_if_they_are_the_same(one: Any, other: Any) -> None:
    assert (tree_digest(one) == tree_digest(other)) == _same(one, other)


def test_values_that_are_easily_confused_have_other_digests() -> None:
    pairs: list[tuple[object, object]] = [(1, True), (1, 1.0), ("1", 1), (0.0, -0.0), ([], ()), (["ab"], ["a", "b"])]
    for one, other in (*pairs, ({1: 2}, {2: 1})):
        assert tree_digest(one) != tree_digest(other)
    zeros = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(0)]
    assert len({tree_digest(each) for each in zeros}) == len(zeros)


def test_what_is_like_a_plain_value_is_saved_as_one(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    state = {"current_loss": math.nan, "a": OrderedDict(x=np.float64(0.5)), "b": torch.Size([2])}
    state |= {"c": parameter, "d": parameter.t()}
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        checkpointer.save({"training_rounds": 0, **state}, wait=True)
    found = load_newest(tmp_path, WALLET)
    assert found is not None
    assert math.isnan(found["current_loss"])
    assert (found["a"], found["b"]) == ({"x": 0.5}, (2,))
    assert type(found["a"]["x"]) is float
    assert torch.equal(found["c"], parameter)
    assert torch.equal(found["d"], parameter.t())


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [Path("x")]}, r"contents\['a'\]\[0\]: .* found PosixPath"),
        ({"a": {1.5: 0}}, r"contents\['a'\]: expected keys"),
        ({"a": np.int64(3)}, "found int64"),
        ({"a": 1 << 3000}, "at most 1024 bits"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "expected dense tensors"),
        ({"sha256": "x"}, "expected no key 'sha256'"),
        ({"training_rounds": -1}, "number of steps"),
        ({"training_rounds": True}, "number of steps"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_at_once(tmp_path, state, where):
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        checkpointer.save(contents(1), wait=True)
        with pytest.raises(CheckpointError, match=where):
            checkpointer.save({"training_rounds": 2, **state}, wait=True)
        assert newest_step(tmp_path) == 1
        checkpointer.save(contents(3), wait=True)
        assert checkpointer.saved == 2


def test_the_fields_of_the_specification_lie_at_the_top_of_the_file(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {name: {} for name in ("diloco", "loader", "rng")}
    saved = CheckpointContents(
        layer_ids=(0, 1),
        architecture={"dim": 8},
        layers={"0": {"w": torch.ones(2)}},
        optimizer={"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": []},
        training_rounds=10,
        current_loss=2.5,
        timestamp=1.0,
        config={"lr": 1e-4},
        schedule={"step_index": 10},
        **nothing,
    )
    with Checkpointer(tmp_path, WALLET) as checkpointer:
        checkpointer.save(saved.to_mapping(), wait=True)
    file = torch.load(checkpoint_path(tmp_path, WALLET), weights_only=True)
    specified = {"layer_ids", "architecture", "layers", "optimizer", "diloco", "training_rounds", "current_loss"}
    assert specified | {"timestamp"} <= set(file)
    found = load_newest(tmp_path, WALLET)
    assert found is not None
    again = CheckpointContents.from_mapping(found)
    assert (again.layer_ids, again.training_rounds, again.config) == ((0, 1), 10, {"lr": 1e-4})
    assert again.inner_state()["step_index"] == 10
    for wrong in ({**found, "version": 2}, {**found, "more": 1}, {k: v for k, v in found.items() if k != "rng"}):
        with pytest.raises(CheckpointMismatchError, match="expected"):
            CheckpointContents.from_mapping(wrong)


def test_so_many_are_kept_as_asked_the_newest_under_its_own_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, WALLET, keep=3) as checkpointer:
        for step in (10, 20, 30, 30, 40):
            checkpointer.save(contents(step), wait=True)
    names = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert names == ["dynamic_node_ab12.pt", *(f"dynamic_node_ab12.step-{step:012d}.pt" for step in (20, 30, 40))]
    assert (tmp_path / names[0]).samefile(tmp_path / names[-1])
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_a_run_that_went_back_sets_later_steps_aside(tmp_path: Path) -> None:
    for steps in ((5000, 5010), (10, 20)):
        with Checkpointer(tmp_path, WALLET, keep=2) as checkpointer:
            for step in steps:
                checkpointer.save(contents(step), wait=True)
    checkpoint_path(tmp_path, WALLET).unlink()
    assert newest_step(tmp_path) == 20
    kept = [f"dynamic_node_ab12.step-{step:012d}.pt" for step in (10, 20)]
    replaced = [f"replaced-dynamic_node_ab12.step-{step:012d}.pt" for step in (5000, 5010)]
    assert sorted(path.name for path in tmp_path.glob("*step-*")) == kept + replaced


@pytest.mark.parametrize("seed", range(3))
def test_a_copied_folder_falls_back_by_step_whatever_the_times_of_its_files(tmp_path: Path, seed: int) -> None:
    with Checkpointer(tmp_path / "here", WALLET, keep=4) as checkpointer:
        for step in (9, 10, 99, 100):
            checkpointer.save(contents(step), wait=True)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    files = sorted((tmp_path / "there").glob("*.pt"))
    random.Random(seed).shuffle(files)
    for age, path in enumerate(files):
        os.utime(path, (1e9 - age, 1e9 - age))
    for expected in (100, 99, 10, 9):
        assert newest_step(tmp_path / "there") == expected
        for damaged in files:
            if damaged.name in ("dynamic_node_ab12.pt", f"dynamic_node_ab12.step-{expected:012d}.pt"):
                damaged.write_bytes(b"damaged")


def test_instances_of_a_wallet_do_not_see_each_other(tmp_path: Path) -> None:
    for step, instance in ((1, ""), (2, "rank-1")):
        with Checkpointer(tmp_path, WALLET, instance=instance) as checkpointer:
            checkpointer.save(contents(step), wait=True)
    assert [newest_step(tmp_path, instance) for instance in ("", "rank-1", "other")] == [1, 2, None]
    assert newest_step(tmp_path / "missing") is None


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


def test_garbage_hostile_and_changed_files_are_passed_over(newest: Path, tmp_path: Path) -> None:
    whole = torch.load(newest, weights_only=True)
    hostile = {**whole, "x": Hostile(tmp_path / "ran")}
    endless: list[object] = []
    endless.append(endless)
    changed = {**whole, "layers": {"0": {"w": whole["layers"]["0"]["w"] + 1}}}
    for document in (
        *(b"", b"\0" * 5000, b"PK\x03\x04" + b"x" * 500, b"not a checkpoint", random.Random(0).randbytes(3000)),
        *([1, 2], {"a": 1}, torch.zeros(3), {FORMAT_KEY: 3}, hostile, pickle.dumps(hostile)),
        *(changed, {**whole, "loader": endless}),
    ):
        rewritten(newest, document)
        assert newest_step(newest.parent) == 20
    assert not (tmp_path / "ran").exists()


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
