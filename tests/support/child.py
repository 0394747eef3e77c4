"""Processes that a test starts, tells and hears by lines of JSON, stops and kills; and their own side of it."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

_ROOT = Path(__file__).resolve().parents[2]
_END_S = 60.0


class Child:
    """``python -m tests.support.MODULE ARGUMENTS``, killed at the end of the ``with``; ``log`` has its errors."""

    def __init__(self, module: str, *arguments: str | Path, log: Path | None = None) -> None:
        self._log = None if log is None else log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.support.{module}", *map(str, arguments)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(_END_S)
        self._reading.join(_END_S)
        for pipe in (self.process.stdin, self.process.stdout, self._log):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def say(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def hear(self, timeout_s: float = _END_S) -> Any:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"{self.process.args} says nothing within {timeout_s:.0f} s") from None
        return json.loads(line) if line else None

    def stop(self) -> None:
        """As a machine that hangs: connections stay open, nothing is said."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def input_ended() -> None:
    """Until the test closes the standard input, at its end at the latest."""
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
