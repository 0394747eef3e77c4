"""Running ``python -m trainer`` as its user does: to its end, or watched step by step and then killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from trainer.checkpoint.node import load_newest, wallet_id
from trainer.run.cli.app import run

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 110.0  # On a machine that is busy with other tests a start takes a minute.
"""For anything that takes some seconds on an idle machine."""
SMALL = (
    *("--preset", "tiny", "--seq-len", "32", "--batch-size", "2", "--threads", "1", "--no-api"),
    *("--lr", "3e-3", "--set", "inner.warmup_steps=5", "--set", "inner.decay_end_step=1000"),
)
"""Steps of some 20 ms."""


@dataclass(frozen=True)
class TrainerCommand:
    store: Path | str
    folder: Path
    common: tuple[str, ...] = SMALL
    starter: tuple[str, ...] = (sys.executable, "-m", "trainer")

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def line(self, *arguments: str | Path) -> list[str]:
        places = ["--store", str(self.store), "--checkpoint-dir", str(self.checkpoints)]
        places += ["--set", f"state_dir={self.folder}"]
        return [*self.starter, *places, *self.common, *map(str, arguments)]

    def environment(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GENESIS_")}
        return {**inherited, "GENESIS_CACHE_DIR": str(self.folder / "cache"), "OMP_NUM_THREADS": "1", **more}

    def __call__(
        self, *arguments: str | Path, expect: int = 0, timeout_s: float = WAIT_S, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Trains to the end, which must be ``expect``; never with a traceback."""
        return finished(self.line(*arguments), self.environment(**environment), expect, timeout_s)

    def failing(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Trains until torchrun says, with a traceback of its own, that its ranks failed."""
        return finished(self.line(*arguments), self.environment(), 1, WAIT_S, ours=f"{ROOT}/trainer/")

    def other(self, *arguments: str | Path, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "trainer", *map(str, arguments)]
        return finished(line, self.environment(**environment), expect, WAIT_S)

    @contextmanager
    def running(self, *arguments: str | Path, **environment: str) -> Iterator[RunningTrainer]:
        """Trains in the background, with ``--json``; killed at the end of the ``with``, if it still lives."""
        node = RunningTrainer(_started(self.line("--json", *arguments), self.environment(**environment)))
        try:
            yield node
        finally:
            node.end()

    def saved(self, node_id: str, instance: str = "", token: str = "") -> dict[str, Any]:
        found = load_newest(self.checkpoints, wallet_id(token, node_id), instance)
        assert found is not None, f"no checkpoint of {node_id} in {self.checkpoints}"
        return found


@dataclass
class RunningTrainer:
    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._news = threading.Condition()
        streams = ((self.process.stdout, self._event), (self.process.stderr, self.errors.append))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in self._readers:
            reader.start()

    def wait_for(self, kind: str, number: int = 0) -> dict[str, Any]:
        key = {"step": "step", "round": "outer_step"}[kind]

        def found() -> list[dict[str, Any]]:
            return [event for event in self.events if event["kind"] == kind and event[key] >= number]

        self.wait_until(lambda: bool(found()), f"{kind} {number}")
        return found()[0]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Looks at each event, until the condition holds; fails if the process ends first."""
        deadline_s = time.monotonic() + WAIT_S
        with self._news:
            while not condition():
                left_s = deadline_s - time.monotonic()
                gone = self.process.poll() is not None and not any(reader.is_alive() for reader in self._readers)
                assert left_s > 0 and not gone, f"no {what}: {''.join(self.errors)}"
                self._news.wait(min(left_s, 0.2))

    def kill(self) -> None:
        """As a machine that loses power."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self, within_s: float = WAIT_S) -> int:
        code = self.process.wait(within_s)
        for reader in self._readers:
            reader.join(WAIT_S)
        assert "Traceback" not in "".join(self.errors), "".join(self.errors)
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for reader in self._readers:
            reader.join(WAIT_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read(self, stream: IO[str], take: Any) -> None:
        for line in stream:
            with self._news:
                take(line)
                self._news.notify_all()

    def _event(self, line: str) -> None:
        self.events.append(json.loads(line))


def _started(line: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, cwd=ROOT, env=environment, **pipes, encoding="utf-8", start_new_session=True)


def finished(
    line: list[str], environment: Mapping[str, str], expect: int, timeout_s: float, ours: str = ""
) -> subprocess.CompletedProcess[str]:
    """A command to its end; it and all it started are killed if that does not come in time.

    Its output must hold no traceback, or with ``ours`` none through files there.
    """
    process = _started(line, environment)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == expect, f"exit {process.returncode}\n{output}\n{errors}"
    assert "Traceback" not in errors or (ours and f'File "{ours}' not in errors), errors
    return subprocess.CompletedProcess(line, process.returncode, output, errors)


_OF_THE_CLOCK = {"timestamp", "since_s", "age_s"}
_OF_THE_COMMAND = {"config"}


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two checkpoints differ, but for the time of day and the options; none if they are equal bit for bit."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        found = [f"{where}: keys {sorted(set(one) ^ set(other), key=str)}"] if set(one) != set(other) else []
        for key in one.keys() & other.keys() - _OF_THE_CLOCK - _OF_THE_COMMAND:
            found += differences(one[key], other[key], f"{where}.{key}")
        return found
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)} items"]
        return [
            text
            for index, pair in enumerate(zip(one, other, strict=True))
            for text in differences(*pair, f"{where}[{index}]")
        ]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    else:
        same = type(one) is type(other) and one == other
    return [] if same else [f"{where}: {str(one)[:60]} and {str(other)[:60]}"]


@dataclass(frozen=True)
class TrainerHere:
    command: TrainerCommand
    capsys: pytest.CaptureFixture[str]
    caplog: pytest.LogCaptureFixture

    def __call__(self, *arguments: str | Path, expect: int = 0) -> str:
        """Trains to the end, which must be ``expect``; what it printed and logged."""
        return self.other(*self.command.line(*arguments)[3:], expect=expect)

    def other(self, *arguments: str | Path, expect: int = 0) -> str:
        self.caplog.clear()
        code = run([str(argument) for argument in arguments])
        output, errors = self.capsys.readouterr()
        said = f"{self.caplog.text}{errors}{output}"
        assert code == expect, said
        return said


@contextmanager
def trainer_here(
    command: TrainerCommand,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TrainerHere]:
    for name in ("GENESIS_TOKEN", "GENESIS_STORE", "GENESIS_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(command.folder / "cache"))
    with caplog.at_level("INFO"):
        yield TrainerHere(command, capsys, caplog)
