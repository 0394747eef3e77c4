"""Nodes of a signed run: a change that is made while two of six are stopped is in force in one round at all of them.

The nodes are whole ones, with sockets, keys, checkpoints and folders of their own, each in a thread: six processes
would take a minute of two cores to begin.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_store import text_store
from tests.support.trainer_command import TrainerCommand, TrainerHere
from tests.support.training_swarm import free_port
from tests.support.waiting import wait_until
from trainer.monitor import Event, read_events
from trainer.run.cli.displays import NoLines
from trainer.run.cli.train import config_of
from trainer.run.config import merged
from trainer.run.node.cluster import Ranks
from trainer.run.node.starting import _build
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import Node

SHARED: dict[str, Any] = {
    "inner": {"lr": 3e-3, "warmup_steps": 5, "decay_end_step": 100_000, "seq_len": 32, "micro_batch_size": 1},
    "diloco": {"inner_steps": 8},
    "data": {"plateau": "off", "holdout": 1},
    "collective": {"stall_timeout_s": 8.0, "invite_after_s": 2.0, "gather_timeout_s": 60.0, "round_timeout_s": 120.0},
}
OWN = (
    *("rpc.host=127.0.0.1", "rpc.public_address=127.0.0.1", "rpc.heartbeat_s=0.5", "rpc.stall_timeout_s=8.0"),
    *("discovery.announce_interval_s=1.0", "discovery.announcement_lifetime_s=30.0", "discovery.poll_interval_s=0.3"),
    *("discovery.max_retry_interval_s=1.0", "device=cpu", "api.enabled=false", "eval.after_rounds=false"),
)
WAIT_S = 240.0


def _settings(options: dict[str, Any], where: str = "") -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{where}{name}.")
        else:
            yield from ("--set", f"{where}{name}={json.dumps(value)}")


class SignedNode:
    """A node by a run file, which finds the others at ``peers``; it can be stopped and started again."""

    def __init__(self, name: str, run: str, folder: Path, port: int, peers: list[str]) -> None:
        self.name = name
        self.folder = folder / name
        places = {"state_dir": "home", "checkpoint.directory": "checkpoints", "log.directory": "log"}
        own = [*OWN, *(f"{option}={self.folder / place}" for option, place in places.items())]
        given = {"node_id": name, "port": port, "initial_peers": peers}
        self._config: Callable[[], Any] = lambda: config_of(run, own, given)
        self._stop = StopRequest()
        self._thread = threading.Thread()
        self.node: Node | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        self._stop, self.node, self.error = StopRequest(), None, None
        self._thread = threading.Thread(target=self._train, name=self.name)
        self._thread.start()

    def _train(self) -> None:
        try:
            with ExitStack() as stack:
                node = _build(self._config(), Ranks(), NoLines(), self._stop, stack)
                node.begin()
                self.node = node
                node.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test's own thread has to tell
            self.error = error

    def stop(self) -> None:
        self._stop.ask()
        if self._thread.ident is not None:
            self._thread.join(WAIT_S)

    @property
    def round_index(self) -> int:
        """The round it trains towards; -1 before it has begun."""
        if self.error is not None:
            raise AssertionError(self.name) from self.error
        node = self.node
        return -1 if node is None or node.replica.diloco is None else node.replica.diloco.round_index

    def events(self, kind: str) -> list[Event]:
        path = self.folder / "log" / f"events-{self.name}.jsonl"
        return [event for event in read_events(path) if event.kind == kind] if path.exists() else []

    def changes(self) -> list[tuple[int, int, int]]:
        """Of each change it went over to: number, from which round it is in force, in which round the node was."""
        names = ("number", "at_round", "round_index")
        return [tuple(int(event.number(name)) for name in names) for event in self.events("run_change")]  # type: ignore[misc]


def _reach(nodes: list[SignedNode], round_index: int) -> None:
    wait_until(
        lambda: all(node.round_index >= round_index for node in nodes), f"round {round_index} at all nodes", WAIT_S, 0.1
    )


@pytest.fixture
def run_file(here: TrainerHere, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run of the texts that all tests read, its rounds in the background for so many steps as the parameter says."""
    shared = merged(SHARED, {"diloco": {"overlap_steps": getattr(request, "param", 0)}})
    options = ("--preset", "tiny", "--store", str(text_store()), "--key", tmp_path / "run.key", *_settings(shared))
    printed = here.other("run", "init", "corpus-8", *options)
    path = tmp_path / "corpus.yaml"
    path.write_text(printed[printed.index("# The run") :], encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run_file", [0, 3], indirect=True, ids=["waits", "overlaps"])
def test_a_change_is_in_force_in_one_round_at_all_nodes_also_those_that_were_away(
    run_file: Path, here: TrainerHere, tmp_path: Path
) -> None:
    ports = [free_port() for _ in range(6)]
    peers = [f"127.0.0.1:{port}" for port in ports[:2]]
    nodes = [SignedNode(f"n{number}", str(run_file), tmp_path, port, peers) for number, port in enumerate(ports)]
    stayed, away = nodes[:4], nodes[4:]
    ask = ("--run", run_file, "--initial-peers", peers[0], "--initial-peers", peers[1])
    try:
        for node in nodes:
            node.start()
        _reach(nodes, 2)
        for node in away:
            node.stop()
            assert node.error is None, node.error

        settings = ("inner.lr=1e-3", *("diloco.inner_steps=6", "diloco.outer_lr=0.5", "diloco.merge_alpha=0.25"))
        settings = (*settings, "rule.rule=median")
        made = here.other("run", "set", *settings, "--key", tmp_path / "run.key", *ask)
        assert "told 4 of 4 nodes" in made, made
        assert "inner.lr: 0.001 (was 0.003)" in made
        at_round = int(made.partition("in force from round ")[2].partition(":")[0])
        _reach(stayed, at_round + 1)
        (tmp_path / "corpus.changes.jsonl").unlink()  # Those that come back hear of it from the others alone.
        for node in away:
            node.start()
        _reach(nodes, at_round + 2)
        _reach(nodes, max(node.round_index for node in nodes) + 2)
        shown, ends_s = {"nodes": []}, time.monotonic() + WAIT_S
        while len(shown["nodes"]) < len(nodes) and time.monotonic() < ends_s:  # A busy node may answer too late.
            shown = json.loads(here.other("run", "show", "--json", *ask).splitlines()[-1])
    finally:
        for node in nodes:
            node._stop.ask()
        for node in nodes:
            node.stop()
    assert [node.error for node in nodes] == [None] * 6

    for node in stayed:
        assert node.changes() == [(1, at_round, at_round)], node.name
    for node in away:
        [(number, effective, round_index)] = node.changes()
        assert (number, effective) == (1, at_round)
        assert (
            round_index <= at_round + 3
        )  # It has gone by the change before it trained on, or took it up with a state.
    for node in nodes:
        for event in node.events("round"):
            if len(event.fields["members"]) >= 4:  # Fewer have no trimmed mean.
                expected = "median" if event.number("round_index") >= at_round else "trimmed_mean"
                assert event.fields["rule"] == expected, event
        rates = [event.number("lr") for event in node.events("step")]
        assert max(rates[-5:]) <= 1e-3
    assert max(event.number("lr") for event in nodes[0].events("step")) > 2e-3
    states: dict[int, set[str]] = {}
    for node in nodes:
        for event in node.events("state"):
            states.setdefault(int(event.number("outer_step")), set()).add(str(event.fields["digest"]))
    assert all(len(digests) == 1 for digests in states.values()), "replicas differ"
    assert max(states) >= at_round + 2

    assert shown["in_force"] == 1
    assert shown["changes"][0]["settings"] == {
        **{"inner.lr": 1e-3, "diloco.inner_steps": 6, "diloco.outer_lr": 0.5, "diloco.merge_alpha": 0.25},
        **{"rule.rule": "median"},
    }
    assert sorted(it["node_id"] for it in shown["nodes"]) == [node.name for node in nodes]
    assert all(it["newest_change"] == 1 for it in shown["nodes"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_needs_the_run_file_of_a_peer_and_a_name_and_no_more(run_file: Path, tmp_path: Path) -> None:
    owner = next(line for line in run_file.read_text().splitlines() if line.startswith("owner: ")).split()[1]
    port = free_port()
    first = SignedNode("n0", str(run_file), tmp_path, port, [])
    run = f"peer://127.0.0.1:{port}/corpus-8#{owner}"
    second = SignedNode("n1", run, tmp_path, free_port(), [f"127.0.0.1:{port}"])
    try:
        first.start()
        _reach([first], 1)
        second.start()
        _reach([second], 1)

        def have_met() -> bool:
            assert (first.error, second.error) == (None, None)
            return any(len(event.fields["members"]) == 2 for event in second.events("round"))

        wait_until(have_met, "a round of both", WAIT_S, 0.1)
    finally:
        for node in (first, second):
            node._stop.ask()
        for node in (first, second):
            node.stop()
    assert (first.error, second.error) == (None, None)
    assert (second.folder / "checkpoints" / "runs" / "corpus-8" / "run.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lr", "1.0"), "inner.lr: the run file of corpus-8 says 0.003, this node's options 1.0"),
        (("--run-id", "another"), "run_id: the run file of corpus-8 says corpus-8"),
        (("--seed", "4"), "seed: the run file of corpus-8 says 0"),
    ],
)
def test_options_that_contradict_the_file_end_the_command_with_a_line(
    run_file: Path, trainer: TrainerCommand, here: TrainerHere, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    places = ("--checkpoint-dir", trainer.checkpoints, "--set", f"state_dir={tmp_path}")
    found = here.other("--run", run_file, "--node-id", "n", *places, *options, expect=2)
    assert said in found
    assert not trainer.checkpoints.exists()
