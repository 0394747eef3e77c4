"""A node that is killed, or stopped, and started again goes on as if nothing had been: bit for bit."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.node_ranks import beside_a_round, end_of_steps, first_weights, weights_under_a_cap
from tests.support.rank_scenarios import run_ranks
from tests.support.small_store import text_store
from tests.support.trainer_command import TrainerCommand, TrainerHere, differences
from trainer.checkpoint.node import checkpoint_path, wallet_id
from trainer.run.config import RunConfig
from trainer.run.node.resolving import resolve
from trainer.run.node.stopping import StopRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 24
ROUNDS = ("--node-id", "a", "--inner-steps", "7", "--accumulation", "2", "--set", "checkpoint.every_steps=3")
"""So that checkpoints, outer steps and the end fall together nowhere but at step 21."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> TrainerCommand:
    """The same run in one go."""
    command = TrainerCommand(text_store(), tmp_path_factory.mktemp("undisturbed"))
    command(*ROUNDS, "--max-steps", str(STEPS))
    return command


def train_with_kills(trainer: TrainerCommand, kills: list[int], *options: str) -> None:
    """Trains to the end, killed once it has told of each of these steps."""
    for step in kills:
        with trainer.running(*options) as node:
            node.wait_for("step", step)
            node.kill()
    trainer(*options)


def test_killed_twice_at_random_steps(trainer: TrainerCommand, undisturbed: TrainerCommand) -> None:
    kills = sorted(random.Random(4).sample(range(4, STEPS - 3), 2))
    train_with_kills(trainer, kills, *ROUNDS, "--max-steps", str(STEPS))
    assert not differences(trainer.saved("a"), undisturbed.saved("a"))


def test_stopped_by_any_signal_and_resumed(trainer: TrainerCommand, undisturbed: TrainerCommand) -> None:
    """The step in hand is ended, everything saved, and the exit code says which signal it was."""
    options = (*ROUNDS, "--max-steps", str(STEPS))
    for step, number in ((4, signal.SIGTERM), (7, signal.SIGHUP), (9, signal.SIGINT)):
        with trainer.running(*options) as node:
            node.wait_for("step", step)
            assert node.stop(number) == 128 + number
        steps = [event["step"] for event in node.events if event["kind"] == "step"]
        assert trainer.saved("a")["training_rounds"] == steps[-1] + 1
    trainer(*options)
    assert not differences(trainer.saved("a"), undisturbed.saved("a"))


def test_a_second_node_of_the_same_wallet_is_refused(trainer: TrainerCommand, here: TrainerHere) -> None:
    with trainer.running("--node-id", "a", "--token", "the same") as node:
        node.wait_for("step", 1)
        node.process.send_signal(signal.SIGSTOP)  # It cannot end before the other one has begun.
        said = here("--node-id", "b", "--token", "the same", "--max-steps", "1", expect=1)
        assert "another one training with the same wallet" in said
        node.process.send_signal(signal.SIGCONT)
        assert node.stop() == 143


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_again_and_again_with_streamed_fragments(tmp_path: Path, seed: int) -> None:
    more = ("--set", "diloco.num_fragments=2", "--set", "diloco.overlap_steps=2", "--set", "data.plateau=relative")
    options = (*ROUNDS, *more, "--max-steps", "40")
    whole = TrainerCommand(text_store(), tmp_path / "whole")
    whole(*options)
    killed = TrainerCommand(text_store(), tmp_path / "killed")
    train_with_kills(killed, sorted(random.Random(seed).sample(range(1, 38), 5)), *options)
    assert not differences(killed.saved("a"), whole.saved("a"))


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # Lets the interpreter run the handler.


def test_an_impatient_second_interrupt_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, before = 100.0, signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stop = StopRequest()
    with stop.on_signals():
        send(signal.SIGINT)
        now_s = 100.5
        send(signal.SIGINT)  # torchrun's copy of the first.
        now_s = 102.0
        send(signal.SIGTERM)  # As an init system may: what is being saved is not given up for it.
        assert (stop(), stop.signal) == (True, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_is_answered_with_what_is_done_before_the_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("trainer.run.node.stopping"), "level", logging.INFO)
    for notice in ("the step is finished and saved", ""):
        stop = StopRequest(notice)
        with stop.on_signals():
            send(signal.SIGTERM)
            send(signal.SIGTERM)
        said = capfd.readouterr().err
        assert said.count("\n") == bool(notice) and (f"INFO SIGTERM: {notice}" in said) == bool(notice)


@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_closed_terminal_asks_once_and_not_at_all_under_nohup(is_ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        stop = StopRequest()
        with stop.on_signals():
            if not is_ignored:
                send(signal.SIGHUP)
            send(signal.SIGHUP)
            assert (stop(), stop.signal) == ((False, None) if is_ignored else (True, signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)


AUTO = ("--node-id", "a", "--preset", "auto", "--batch-size", "0", "--max-steps")


def dim(trainer: TrainerCommand) -> int:
    found = trainer.saved("a")["architecture"]["dim"]
    assert isinstance(found, int)
    return found


def newest(trainer: TrainerCommand) -> Path:
    return checkpoint_path(trainer.checkpoints, wallet_id("", "a"))


def test_on_a_cpu_outer_steps_take_memory_too() -> None:
    """2,000 MB, 70 % of them for the state: 43.75 million parameters of 32 bytes; on a GPU 90 % are for a step."""
    config = RunConfig(node_id="a")
    for shared, preset, dim in ((False, "60m", 512), (True, "30m", 320)):
        resolved, shape = resolve(config, None, 32_768, lambda: 2_000_000_000, shared_memory=shared)
        assert (resolved.model.preset, shape.dim, shape.vocab_size) == (preset, dim, 32_768)


def test_memory_decides_at_first_and_then_the_checkpoint(trainer: TrainerCommand, here: TrainerHere) -> None:
    """Below the first tier of 500 MB there is only the smallest."""
    here(*AUTO, "1", "--set", "model.memory_bytes=100_000_000")
    assert dim(trainer) == 128
    chosen = trainer.saved("a")["config"]["inner"]["micro_batch_size"]
    assert 1 <= chosen <= 8
    assert yaml.safe_load(newest(trainer).with_suffix(".yaml").read_text())["model"]["preset"] == "tiny"
    here(*AUTO, "2", "--set", "model.memory_bytes=64_000_000_000")
    assert dim(trainer) == 128
    after = trainer.saved("a")
    assert (after["training_rounds"], after["config"]["inner"]["micro_batch_size"]) == (2, chosen)


def test_a_checkpoint_of_another_preset_than_was_named_is_put_aside(trainer: TrainerCommand, here: TrainerHere) -> None:
    for steps in ("1", "2"):
        here("--node-id", "a", "--preset", "tiny", "--max-steps", steps)
    before = trainer.saved("a")
    assert before["training_rounds"] == 2 and not list(trainer.checkpoints.glob("replaced-*")), "the same preset"
    said = here("--node-id", "a", "--preset", "15m", "--max-steps", "1")
    assert dim(trainer) == 192
    assert trainer.saved("a")["training_rounds"] == 1
    aside = f"replaced-{int(before['timestamp'])}-{newest(trainer).name}"
    assert aside in said
    (trainer.checkpoints / aside).rename(newest(trainer))  # As a user would who wants it back.
    assert not differences(trainer.saved("a"), before)


def test_what_does_not_fit_the_checkpoint_is_refused(trainer: TrainerCommand, here: TrainerHere) -> None:
    here("--node-id", "a", "--max-steps", "1")
    before = trainer.saved("a")
    for options, said in (
        (("--run-id", "another"), "found one of genesis"),
        (("--seq-len", "16"), "seq_len"),
        (("--batch-size", "3"), "batch_size"),
        (("--set", "diloco.num_fragments=2"), "diloco.num_fragments"),
        (("--seq-len", "2048"), "expected at most the 1024 tokens"),
        (("--store", text_store("other")), "expected"),
    ):
        code = 2 if "2048" in options else 1
        assert said in here("--node-id", "a", "--max-steps", "2", *options, expect=code).splitlines()[-1]
        assert not differences(trainer.saved("a"), before)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (end_of_steps, {"drained": [True, False, False]}),  # One that waited alone would wait until the deadline.
        (beside_a_round, {"least": 7, "gathered": 200}),
        (weights_under_a_cap, [2.0, 2.0]),
        (first_weights, {"refused": [False, False, True, True, True, True]}),
    ],
)
def test_what_ranks_decide_together(task: Callable[[int, int], object], expected: object, tmp_path: Path) -> None:
    assert run_ranks(task, 2, tmp_path) == [expected, expected]
