"""What others see of a node while it trains: the HTTP interface answers, and may stop it."""

from __future__ import annotations

import json
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.small_store import text_store
from tests.support.trainer_command import WAIT_S, RunningTrainer, TrainerCommand, TrainerHere
from tests.support.waiting import wait_until
from trainer.monitor import read_events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WATCHED = tuple(option for option in TrainerCommand("", Path()).common if option != "--no-api")
TOKEN = "let-me-in"


@pytest.fixture
def watched(tmp_path: Path) -> TrainerCommand:
    return TrainerCommand(text_store(), tmp_path, WATCHED)


def url_of(node: RunningTrainer) -> str:
    """Where its API is, as it says in its log, which may come after the first steps on the other stream."""
    told: list[str] = []
    wait_until(lambda: told.extend(line for line in list(node.errors) if "API at" in line) or told, "its address")
    return told[0].rsplit(" ", 1)[1].strip().removesuffix("/api/training/verify")


def asked(url: str, *, method: str = "GET", token: str = "") -> str:
    request = urllib.request.Request(url, method=method, headers={"X-Genesis-Token": token} if token else {})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        return str(answer.read(), "utf-8")


def test_status_and_metrics_while_it_trains_and_the_shutdown_and_a_restart(watched: TrainerCommand) -> None:
    options = ("--node-id", "a", "--api-port", "0", "--inner-steps", "10", "--set", "diloco.outer_lr=0.1")
    with watched.running(*options, GENESIS_TOKEN=TOKEN) as node:
        node.wait_for("round", 2)
        node.wait_for("step", 200)
        url = url_of(node)
        verify = json.loads(asked(f"{url}/api/training/verify"))
        assert verify["training_verified"], verify
        whole = json.loads(asked(f"{url}/api/training/global"))
        assert whole["total_steps"] >= 200
        assert (whole["training_nodes"], whole["data_shards"]) == (1, 10)
        assert whole["diloco"]["outer_syncs"] == whole["diloco"]["outer_step"] >= 2
        assert len(whole["nodes"][0]["state_digest"]) == 64
        assert "genesis_" in asked(f"{url}/metrics")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            asked(f"{url}/api/shutdown", method="POST", token="guess")
        assert "stopping" in asked(f"{url}/api/shutdown", method="POST", token=TOKEN)
        assert node.wait() == 0
    steps = [event["step"] for event in node.events if event["kind"] == "step"]
    assert watched.saved("a", token=TOKEN)["training_rounds"] == steps[-1] + 1
    with watched.running(*options, GENESIS_TOKEN=TOKEN) as node:
        node.wait_for("step", steps[-1] + 1)
        verify = json.loads(asked(f"{url_of(node)}/api/training/verify"))
        assert verify["training_verified"], verify


def test_a_taken_port_and_a_missing_store_are_told(here: TrainerHere, trainer: TrainerCommand) -> None:
    gone = ("--store", "http://127.0.0.1:9", "--set", "data.timeout_s=0.5")
    assert "127.0.0.1:9" in here("--node-id", "a", *gone, expect=1).splitlines()[-1]
    assert not trainer.checkpoints.exists()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = here("--node-id", "a", "--api", "--api-port", str(port), "--max-steps", "1", expect=2)
    assert "found it taken" in said.splitlines()[-1] and "choose another --api-port" in said.splitlines()[-1]


def test_a_disk_that_takes_no_checkpoint_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    """Only the last save is an error: until then there is something left to lose by stopping."""
    limited = ("prlimit", f"--fsize={10_000_000}", sys.executable, "-m", "trainer")
    trainer = TrainerCommand(text_store(), tmp_path, starter=limited)
    options = ("--node-id", "a", "--max-steps", "8", "--set", "checkpoint.every_steps=2", "--log-dir", tmp_path)
    done = trainer(*options, expect=1)
    assert done.stderr.count("expected to write the checkpoint of step") >= 2
    assert "free some space or name another folder" in done.stderr.splitlines()[-1]
    events = list(read_events(tmp_path))
    assert len([event for event in events if event.kind == "step"]) == 8
    assert {event.fields["outcome"] for event in events if event.kind == "checkpoint"} >= {"failed"}


def test_ten_steps_in_a_row_that_are_not_finite_end_the_run(here: TrainerHere, tmp_path: Path) -> None:
    """The rate throws the weights so far off that no loss is finite any more; none of those steps is applied."""
    wild = ("--lr", "1e30", "--set", "inner.warmup_steps=0", "--set", "inner.max_grad_norm=1e30")
    said = here("--node-id", "a", *wild, "--log-dir", tmp_path, expect=1)
    assert "the last of 10 such steps in a row" in said
    told = [event.fields["skipped"] for event in read_events(tmp_path) if event.kind == "step"]
    assert told[-9:] == 9 * [True]  # The tenth is the error itself.
