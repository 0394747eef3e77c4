"""Nodes of one run as a user starts them, ``python -m trainer``, on this machine: started, stopped, killed, read.

Everything of a node lies in the swarm's folder. All waiting fails at once when a node that is waited for has ended. No
process is left when the ``with`` ends; nodes end by themselves at ``MAX_STEPS`` should the tests themselves be killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support.small_store import text_store
from tests.support.waiting import wait_until
from trainer.checkpoint.node import load_newest, wallet_id
from trainer.monitor import Event, read_events
from trainer.run.swarm.running import free_ports

_ROOT = Path(__file__).resolve().parents[2]

WAIT_S = 180.0
"""For anything that takes some seconds on an idle machine."""
MAX_STEPS = 20_000
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a node that was asked to stop and did."""

SETTINGS: dict[str, Any] = {
    "seed": 11,
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny"},
    "inner": {"lr": 3e-3, "warmup_steps": 20, "decay_end_step": 100_000, "seq_len": 32, "micro_batch_size": 2},
    "diloco": {"inner_steps": 20},
    "data": {"plateau": "off", "holdout": 1},
    "rpc": {"host": "127.0.0.1", "public_address": "127.0.0.1", "heartbeat_s": 0.5, "stall_timeout_s": 6.0},
    "collective": {"stall_timeout_s": 6.0, "invite_after_s": 2.0, "gather_timeout_s": 40.0, "round_timeout_s": 80.0},
    "discovery": {
        "announce_interval_s": 1.0,
        "announcement_lifetime_s": 20.0,
        "poll_interval_s": 0.3,
        "request_timeout_s": 5.0,
        "max_retry_interval_s": 1.0,
    },
    "checkpoint": {"every_steps": 1000},
    "eval": {"tokens": 1024},
    "api": {"port": 0},
}
"""What all nodes have in common: a small model on short rows, deadlines that a busy machine meets."""


_DEALT_PORTS: set[int] = set()
"""What a node was given is not given to another, which may start before the first listens."""


def free_port() -> int:
    """A port nobody listens on nor was dealt, below those the kernel hands out to whoever connects."""
    port = next(port for port in free_ports(len(_DEALT_PORTS) + 1) if port not in _DEALT_PORTS)
    _DEALT_PORTS.add(port)
    return port


def check_agreement(nodes: Iterable[TrainingNode], first_step: int, last_step: int) -> None:
    """All nodes held one state after each of these outer steps, and the rounds that led there were all of theirs."""
    watched = list(nodes)
    states = [node.states() for node in watched]
    for step in range(first_step, last_step + 1):
        held = {node.name: known.get(step) for node, known in zip(watched, states, strict=True)}
        assert len(set(held.values())) == 1, f"outer step {step}: {held}"
        assert None not in held.values(), f"outer step {step}: {held}"
    for node in watched:
        members = {int(event.number("outer_step")): event.fields["members"] for event in node.events("round")}
        for step in range(first_step + 1, last_step + 1):
            assert {other.peer_id for other in watched} <= set(members[step]), f"{node.name}, outer step {step}"


class TrainingNode:
    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self.command = list(command)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GENESIS_")}
        environment |= {"OMP_NUM_THREADS": "1", "GENESIS_CACHE_DIR": str(self._folder / "cache")}
        with self._output_path.open("ab") as output:
            self._process = subprocess.Popen(
                self.command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )

    @property
    def _output_path(self) -> Path:
        return self._folder / f"{self.name}.out"

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was never started"
        return self._process

    def output(self) -> str:
        return self._output_path.read_text(encoding="utf-8", errors="replace")

    def has_output(self) -> bool:
        return self._output_path.exists()

    def has_ended(self) -> bool:
        return self._running.poll() is not None

    def send(self, number: signal.Signals) -> None:
        self._running.send_signal(number)

    def kill(self) -> None:
        """As a machine that loses power; also a stopped one. Returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def exit_code(self, timeout_s: float = WAIT_S) -> int:
        try:
            return self._running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"expected {self.name} to end within {timeout_s:.0f} s\n{self.tail()}") from None

    def tail(self, num_lines: int = 25) -> str:
        if not self._output_path.exists():
            return f"--- {self.name}: nothing printed"
        return f"--- {self.name}\n" + "\n".join(self.output().splitlines()[-num_lines:])

    @property
    def peer_id(self) -> str:
        found = re.search(r"node ([0-9a-f]{64}) answers at", self.output())
        assert found is not None, f"expected {self.name} to have started\n{self.tail()}"
        return found[1]

    def events(self, kind: str) -> list[Event]:
        path = self._folder / "log" / f"events-{self.name.replace('.', '%2E')}.jsonl"
        return [event for event in read_events(path) if event.kind == kind] if path.exists() else []

    def states(self) -> dict[int, str]:
        return {int(event.number("outer_step")): str(event.fields["digest"]) for event in self.events("state")}

    @property
    def outer_step(self) -> int:
        """Of its newest state, as far as others can fetch it; -1 before the first."""
        states = self.events("state")
        return int(states[-1].number("outer_step")) if states else -1

    def num_steps(self) -> int:
        return len(self.events("step"))

    def checkpoint(self) -> dict[str, Any]:
        found = load_newest(self._folder / "checkpoints", wallet_id("", self.name))
        assert found is not None, f"expected a checkpoint of {self.name}"
        return dict(found)

    def api(self, path: str) -> dict[str, Any]:
        found = re.findall(r"API at (http://127\.0\.0\.1:\d+)/", self.output())
        assert found, f"expected {self.name} to serve figures\n{self.tail()}"
        with urllib.request.urlopen(found[-1] + path, timeout=20) as answer:
            return dict(json.load(answer))


class TrainingSwarm:
    """The nodes of one run, with ``options`` over `SETTINGS`; a context manager that leaves no process behind."""

    def __init__(self, folder: Path, store: Path | None = None, **options: Any) -> None:
        self.folder = folder
        self.nodes: dict[str, TrainingNode] = {}
        self._store = store or text_store()
        self._ports: dict[str, int] = {}
        self._config = folder / "run.yaml"
        self._settings = merged(SETTINGS, options)
        self._settings |= {"max_steps": self._settings.get("max_steps", MAX_STEPS)}

    def __enter__(self) -> Self:
        written = {
            **self._settings,
            "state_dir": str(self.folder / "home"),
            "data": {**self._settings["data"], "store": str(self._store)},
            "checkpoint": {**self._settings["checkpoint"], "directory": str(self.folder / "checkpoints")},
            "log": {"directory": str(self.folder / "log")},
        }
        self._config.write_text(yaml.safe_dump(written), encoding="utf-8")
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with ExitStack() as killed:
            for node in self.nodes.values():
                killed.callback(node.kill)
        if isinstance(error, Exception):
            error.add_note("\n".join(node.tail() for node in self.nodes.values()))

    def begin(
        self,
        *names: str,
        options: Sequence[str] = (),
        initial_peers: Sequence[str] | None = None,
        program: Sequence[str] = ("-m", "trainer"),
    ) -> None:
        """Starts new nodes, all at once; by default they begin to look for others at the first two of the swarm."""
        for name in names:
            self._ports[name] = free_port()
        for name in names:
            begin_at = initial_peers
            if begin_at is None:
                begin_at = [f"127.0.0.1:{port}" for node, port in list(self._ports.items())[:2] if node != name]
            command = [sys.executable, *program, "--config", str(self._config), "--node-id", name]
            command += ["--port", str(self._ports[name]), *options]
            command += [part for address in begin_at for part in ("--initial-peers", address)]
            self.nodes[name] = TrainingNode(name, command, self.folder)
            self.nodes[name].start()

    def __getitem__(self, name: str) -> TrainingNode:
        return self.nodes[name]

    def wait(
        self,
        holds: Callable[[], bool],
        what: str,
        timeout_s: float = WAIT_S,
        alive: Iterable[TrainingNode] | None = None,
    ) -> None:
        """Waits, and fails at once when one of the nodes that should be alive (all, by default) is not."""
        watched = list(self.nodes.values() if alive is None else alive)

        def looked() -> bool:
            if holds():
                return True
            ended = [node.name for node in watched if node.has_ended()]
            assert not ended, f"expected {what}, found that {', '.join(ended)} has ended"
            return False

        wait_until(looked, f"expected {what} within {timeout_s:.0f} s", timeout_s, 0.1)

    def wait_for_step(self, outer_step: int, *names: str, timeout_s: float = WAIT_S) -> None:
        nodes = [self.nodes[name] for name in names or self.nodes]
        self.wait(
            lambda: all(node.outer_step >= outer_step for node in nodes),
            f"outer step {outer_step} at {', '.join(node.name for node in nodes)}",
            timeout_s,
            nodes,
        )

    def stop(self, *names: str) -> list[int]:
        nodes = [self.nodes[name] for name in names or self.nodes]
        for node in nodes:
            node.send(signal.SIGTERM)
        return [node.exit_code() for node in nodes]


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(settings)
    for name, value in changes.items():
        known = result.get(name)
        result[name] = merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return result
