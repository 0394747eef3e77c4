"""`python -m trainer profile`, and what a node says of its own speed as it trains."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.small_store import text_store
from tests.support.trainer_command import SMALL, TrainerCommand

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def trainer(tmp_path: Path) -> TrainerCommand:
    return TrainerCommand(text_store(), tmp_path)


def _profiled(trainer: TrainerCommand, *more: str) -> str:
    options = [option for option in SMALL if option != "--no-api"]
    place = ("--store", str(trainer.store), "--out", str(trainer.folder / "profile"))
    without_lr = options[: options.index("--lr")]
    return trainer.other("profile", *place, *without_lr, "--steps", "6", "--inner-steps", "4", *more).stdout


def test_a_profile_has_a_trace_and_a_table_and_leaves_nothing_else(trainer: TrainerCommand) -> None:
    said = _profiled(trainer)
    for text in ("6 steps: ", "MFU ", "measured (CPU, fp32)", "compute", "outer step", "aten::", "trace: "):
        assert text in said
    (trace,) = (trainer.folder / "profile").iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::scaled_dot_product_attention" for event in events) >= 6 * 4
    assert not trainer.checkpoints.exists()


def test_a_profile_draws_no_curves(trainer: TrainerCommand) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    curves = trainer.folder / "curves"
    _profiled(
        trainer, "--set", "log.to=[tensorboard]", "--set", "log.every_steps=1", "--set", f"log.curves_dir={curves}"
    )
    assert not curves.exists()


def test_for_programs_it_is_one_object_whose_shares_add_up(trainer: TrainerCommand) -> None:
    found = json.loads(_profiled(trainer, "--json", "--set", "checkpoint.every_steps=2"))
    shares = found["speed"]["time_shares"]
    assert sum(shares.values()) == pytest.approx(1.0, abs=2e-3)
    assert min(shares["data"], shares["compute"], shares["optimizer"]) > 0
    assert shares["compute"] == max(shares.values())
    assert shares["outer_step"] > 0 and shares["checkpoint"] > 0
    assert 0 < found["speed"]["mfu"] < 2
    costs = [each["milliseconds"] for each in found["operators"]]
    assert costs == sorted(costs, reverse=True)


def test_a_mistake_is_one_line(trainer: TrainerCommand) -> None:
    place = ("--store", str(trainer.store))
    done = trainer.other("profile", *place, "--steps", "0", expect=2)
    assert done.stderr.splitlines()[-1] == "trainer: --steps: expected 1 or more, found 0"
    done = trainer.other("profile", *place, "--set", "pipeline=swarm", expect=2)
    assert "expected one process with a whole model" in done.stderr.splitlines()[-1]
    done = trainer.other("profile", *place, expect=2, TORCHELASTIC_RUN_ID="x", WORLD_SIZE="2")
    assert "profile: expected one process, found 2 ranks" in done.stderr.splitlines()[-1]


def test_training_tells_its_utilisation_and_where_time_goes(trainer: TrainerCommand) -> None:
    done = trainer("--node-id", "a", "--max-steps", "12", "--set", "inner.optimizer=muon")
    last = [line for line in done.stderr.splitlines() if line.startswith("step 12  ")]
    assert len(last) == 1
    assert " tokens/s  MFU " in last[0] and "TFLOP/s measured (data " in last[0] and "compute " in last[0]
    again = trainer("--node-id", "a", "--max-steps", "14", "--set", "inner.optimizer=muon")
    assert "going on from step 12" in again.stderr
    refused = trainer("--node-id", "a", "--max-steps", "16", expect=1)
    assert "inner.optimizer" in refused.stderr.splitlines()[-1]
