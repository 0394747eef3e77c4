"""A node that measures itself trains as one that does not; `trainer eval` tells what its log did; budgets in tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.small_store import text_store
from tests.support.trainer_command import TrainerCommand, TrainerHere, differences
from trainer.__main__ import main
from trainer.monitor import read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RUN = ("--node-id", "a", "--inner-steps", "7", "--holdout", "2", "--set", "eval.tokens=2048")
MEASURED = (*RUN, "--eval-every", "4", "--sample-every", "5", "--set", "eval.sample_tokens=8")
UNMEASURED = (*RUN, "--eval-every", "0", "--set", "eval.after_rounds=false")


def lines(output: str, kind: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in output.splitlines()]
    return [line for line in found if line["kind"] == kind]


def test_batches_losses_generators_and_weights_are_the_same_with_evaluation_on_and_off(tmp_path: Path) -> None:
    on, off = (TrainerCommand(text_store(), tmp_path / name) for name in ("on", "off"))
    steps = ("--max-steps", "16", "--json")
    measured = on(*MEASURED, *steps, "--log-dir", tmp_path / "logs").stdout
    plain = off(*UNMEASURED, *steps).stdout
    spelt = ("step", "loss", "grad_norm", "lr", "num_tokens")
    assert [[line[name] for name in spelt] for line in lines(measured, "step")] == [
        [line[name] for name in spelt] for line in lines(plain, "step")
    ]
    assert not differences(on.saved("a"), off.saved("a"))
    assert [line["step"] for line in lines(measured, "held_out")] == [4, 7, 8, 12, 14, 16], "and after both rounds"
    assert [line["step"] for line in lines(measured, "sample")] == [5, 10, 15]
    assert not lines(plain, "held_out")
    logged = {event.fields["step"]: event for event in read_events(tmp_path / "logs") if event.kind == "held_out"}
    last = lines(measured, "held_out")[-1]
    assert logged[16].number("loss") == pytest.approx(last["loss"], rel=1e-6)
    assert logged[16].number("bits_per_byte") == pytest.approx(last["bits_per_byte"], rel=1e-6)

    told = json.loads(on.other("eval", "--node-id", "a", "--checkpoint-dir", on.checkpoints, "--json").stdout)
    assert (told["node_id"], told["step"], told["tasks"]) == ("a", 16, {})
    assert told["held_out"]["num_tokens"] == last["num_tokens"] == 2048
    assert told["held_out"]["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert set(told["held_out"]["by_source"]) == {"english"}


def test_eval_keeps_attention_within_documents_where_training_did(trainer: TrainerCommand) -> None:
    masked = ("--seq-len", "512", "--set", "inner.document_mask=true", "--max-steps", "20", "--eval-every", "20")
    last = lines(trainer(*RUN, *masked, "--json").stdout, "held_out")[-1]
    told = json.loads(trainer.other("eval", "--node-id", "a", "--checkpoint-dir", trainer.checkpoints, "--json").stdout)
    assert told["held_out"]["loss"] == pytest.approx(last["loss"], rel=1e-6)


def test_what_eval_cannot_do_is_one_line(
    trainer: TrainerCommand, here: TrainerHere, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here("--node-id", "a", "--max-steps", "2")
    places = ("--checkpoint-dir", str(trainer.checkpoints))
    assert "--node-id: expected whose checkpoint" in here.other("eval", expect=2)
    assert "found none; check --node-id" in here.other("eval", "--node-id", "b", *places, expect=1)
    said = here.other("eval", "--node-id", "a", *places, expect=2)
    assert "data.holdout 0" in said.splitlines()[-1]
    said = here.other("eval", "--node-id", "a", *places, "--holdout", "1", "--tokens", "500")
    assert "bits a byte (512 tokens" in said
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(sys, "argv", ["trainer", "eval", "--node-id", "a", *places, "--tasks", "hellaswag"])
    assert main() == 1
    assert "pip install 'genesis-training[eval]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(sys, "argv", ["trainer", *trainer.line("--node-id", "a", "--log-to", "wandb")[3:]])
    assert main() == 1
    assert "pip install 'genesis-training[wandb]'" in capsys.readouterr().err


def test_a_budget_of_tokens_ends_the_run_and_is_kept_over_a_kill(tmp_path: Path) -> None:
    """64 tokens a step; the schedule is in tokens too, and goes on where it was."""
    budget = ("--node-id", "a", "--max-tokens", "1000", "--inner-steps", "50", "--set", "checkpoint.every_steps=3")
    budget += (
        "--set",
        "inner.schedule=wsd",
        "--set",
        "inner.decay_end_tokens=1000",
        "--set",
        "inner.warmup_tokens=200",
    )
    whole, killed = (TrainerCommand(text_store(), tmp_path / name) for name in ("whole", "killed"))
    done = whole(*budget, "--json").stdout
    rates = [line["lr"] for line in lines(done, "step")]
    assert len(rates) == 16, "the first step that reaches 1,000 tokens is the last"
    assert (rates[0], max(rates)) == (0.0, 3e-3)
    assert rates[-1] == pytest.approx(3e-3 * (0.1 + 0.9 * (1000 - 960) / 160))
    with killed.running(*budget) as node:
        node.wait_for("step", 8)
        node.kill()
    killed(*budget)
    assert not differences(killed.saved("a"), whole.saved("a"))
    assert whole.saved("a")["schedule"]["num_tokens"] == 1024
    assert whole(*budget, "--json").stdout == "", "nothing is left of it"
