"""A swarm as its users start it, for a benchmark: a worker a stage and one driver, each a process of its own.

    with running_swarm(setting) as swarm:
        swarm.next_step()
        rate = swarm.rate(seconds=20)

The driver prints its steps as JSON lines; a rate is the tokens of the steps that were done in a while over that while.
All processes end with the block, whatever happens, and each is the leader of a session of its own.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.trainer_bench.crew import ROOT

_LOCAL = "127.0.0.1"
_STEP_S = 90.0
_END_S = 3.0
_LOG_TAIL = 1500
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_FOR_A_BENCHMARK: dict[str, Any] = {
    "strategy": "async_sparta",
    "data": {"plateau": "off", "holdout": 0},
    "inner": {"precision": "fp32", "compile": "off", "warmup_steps": 0, "schedule": "constant"},
    "swarm": {
        "checkpoint": {"interval_s": 3600.0},
        "join": {"first_peers_s": 1.5},
    },
}
"""Nothing of this is compute or traffic of the steps; it only lets a swarm start sooner."""


def stage_names(count: int) -> tuple[str, ...]:
    """Of so many stages."""
    return ("head", *(f"body-{number}" for number in range(1, count - 1)), "tail")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with what ``over`` says, however deep."""
    found = dict(base)
    for name, value in over.items():
        below = found.get(name)
        found[name] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return found


@dataclass(frozen=True, kw_only=True)
class SwarmSetting:
    """What is started."""

    store: Path
    options: Mapping[str, Any]
    """Of the run file."""
    stages: Sequence[str] = ("head", "body-1", "tail")
    """Of the workers, a process each."""
    prefixes: Sequence[Sequence[str]] = ()
    """Of the workers and, last, the driver: a command that runs a process somewhere else."""
    hosts: Sequence[str] = ()
    """Where each listens; empty: all on 127.0.0.1."""
    threads: int = 1
    """Of each worker."""


@dataclass
class RunningSwarm:
    """Workers and a driver that is being read."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _pending: bytes = b""

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        """The last to be started."""
        return self.processes[-1]

    def rate(self, seconds: float) -> dict[str, Any]:
        """Measures from the end of the last step that was read, for a while.

        Returns:
            ``tokens``, ``seconds``, ``tokens_per_s``, ``tokens_per_cpu_s`` (processor time of all), ``steps``
            and the last ``loss``.
        """
        began_s, began_cpu_s, tokens, steps = time.monotonic(), self._cpu_s(), 0, 0
        while (passed_s := time.monotonic() - began_s) < seconds:
            last = self.next_step()
            tokens, steps = tokens + int(last["num_tokens"]), steps + 1
        return {
            "tokens": tokens,
            "seconds": passed_s,
            "tokens_per_s": tokens / passed_s,
            "tokens_per_cpu_s": tokens / (self._cpu_s() - began_cpu_s),
            "steps": steps,
            "loss": last["loss"],
        }

    def _cpu_s(self) -> float:
        ticks = 0
        for process in self.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICKS_PER_S

    def next_step(self) -> dict[str, Any]:
        """Waits for the driver to have done one."""
        deadline_s = time.monotonic() + _STEP_S
        while True:
            line, newline, rest = self._pending.partition(b"\n")
            if not newline:
                self._pending += self._read(deadline_s)
                continue
            self._pending = rest
            found: dict[str, Any] = json.loads(line)
            if found["kind"] == "step":
                return found

    def _read(self, deadline_s: float) -> bytes:
        chunk = b""
        if self.driver.stdout is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(self.driver.stdout, selectors.EVENT_READ)
                if selector.select(max(0.0, deadline_s - time.monotonic())):
                    chunk = os.read(self.driver.stdout.fileno(), 1 << 16)
        if not chunk:
            tails = [f"{log.name}: {log.read_text()[-_LOG_TAIL:]}" for log in sorted(self.folder.glob("*.log"))]
            raise SystemExit("the swarm's driver printed no step in time:\n" + "\n".join(tails))
        return chunk


@contextmanager
def running_swarm(setting: SwarmSetting) -> Iterator[RunningSwarm]:
    """Started, and killed at the end."""
    with tempfile.TemporaryDirectory(prefix="genesis-bench-swarm-") as name:
        folder = Path(name)
        run = folder / "run.yaml"
        run.write_text(yaml.safe_dump(_run_of(setting, folder)))
        swarm = RunningSwarm(folder)
        try:
            _start_all(swarm, setting, run)
            yield swarm
        finally:
            _end(swarm.processes)


def _run_of(setting: SwarmSetting, folder: Path) -> dict[str, Any]:
    places = {
        "run_id": f"bench-{os.getpid()}",
        "seed": 7,
        "state_dir": str(folder),
        "data": {"store": str(setting.store)},
        "swarm": {"checkpoint": {"directory": str(folder / "stages")}},
    }
    return merged(merged(_FOR_A_BENCHMARK, places), setting.options)


def _start_all(swarm: RunningSwarm, setting: SwarmSetting, run: Path) -> None:
    count = len(setting.stages) + 1
    hosts = list(setting.hosts) or [_LOCAL] * count
    ports = _free_ports(count)
    first = f"{hosts[-1]}:{ports[-1]}"
    for rank in range(count):
        place = ["--run", str(run), "--port", str(ports[rank]), "--no-api", "--initial-peers", first]
        place += ["--set", f"rpc.host={hosts[rank]}", "--set", f"rpc.public_address={hosts[rank]}"]
        if rank < count - 1:
            words = ["worker", "--stage", setting.stages[rank], "--node-id", f"worker-{rank}"]
            words += [*place, "--threads", str(setting.threads)]
        else:
            words = ["--node-id", "driver-1", "--pipeline", "swarm", "--json", *place, "--threads", "1"]
        prefix = setting.prefixes[rank] if setting.prefixes else ()
        with (swarm.folder / f"{rank}-{words[0].strip('-')}.log").open("wb") as log:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "trainer", *words],
                stdin=subprocess.DEVNULL,
                stdout=log if rank < count - 1 else subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
            )
        swarm.processes.append(process)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait(_END_S)
        if process.stdout is not None:
            process.stdout.close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((_LOCAL, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
