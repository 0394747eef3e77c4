"""A node that is killed, or stopped, and started again goes on as if nothing had been: bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.text_store import text_store
from tests.support.trainer_command import TrainerCommand, differences
from tests.support.trainer_here import TrainerHere
from trainer.run.node import StopRequest

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


def test_stopped_by_either_signal_and_resumed(trainer: TrainerCommand, undisturbed: TrainerCommand) -> None:
    """The step in hand is ended, everything saved, and the exit code says which signal it was."""
    options = (*ROUNDS, "--max-steps", str(STEPS))
    for step, number in ((4, signal.SIGTERM), (9, signal.SIGINT)):
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
@pytest.mark.parametrize(
    "more",
    [(), ("--set", "diloco.num_fragments=2", "--set", "diloco.overlap_steps=2", "--set", "data.plateau=relative")],
    ids=["plain", "streamed"],
)
def test_killed_again_and_again(tmp_path: Path, seed: int, more: tuple[str, ...]) -> None:
    options = (*ROUNDS, *more, "--max-steps", "40")
    whole = TrainerCommand(text_store(), tmp_path / "whole")
    whole(*options)
    killed = TrainerCommand(text_store(), tmp_path / "killed")
    train_with_kills(killed, sorted(random.Random(seed).sample(range(1, 38), 5)), *options)
    assert not differences(killed.saved("a"), whole.saved("a"))


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # Lets the interpreter run the handler.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_and_is_remembered(number: int) -> None:
    before = signal.getsignal(number)
    stop = StopRequest()
    with stop.on_signals():
        assert not stop()
        send(number)
        assert (stop(), stop.signal) == (True, number)
        send(signal.SIGTERM)  # Again, as an init system may: what is being saved is not given up for it.
        assert stop.signal == number
    assert signal.getsignal(number) is before


def test_an_impatient_second_interrupt_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stop = StopRequest()
    with stop.on_signals():
        send(signal.SIGINT)
        now_s = 100.5
        send(signal.SIGINT)  # torchrun's copy of the first.
        now_s = 102.0
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_call_asks_without_a_signal() -> None:
    stop = StopRequest()
    stop.ask()
    assert (stop(), stop.signal) == (True, None)
