"""A process that uses a cache folder as it is told, for tests that race several, stop one, or kill one.

As a module, the handle (`CacheActor`) and the files that all agree on; run as a script, the process. It is told over
its standard input, a line of JSON a command, and says what happened on its standard output:

    open NAME [OPTION…]        "opened FROM_CACHE CACHED INTACT" or "failed"
        hold                   when it makes the file it says "producing", and waits for "go", for "fail" or for
                               "fork": it forks a child that may outlive it and says its pid, and waits again
        die=N                  SIGKILL before the N-th thing that it asks of the operating system, counted from 0
        die=write              SIGKILL half-way through writing
    drop                       lets go of every file opened so far: "dropped"
    loop SEED ROUNDS NUMBERS   says "looping", opens files 0 … NUMBERS-1 at random, holding up to two: "done", "corrupt"
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from loader.cache import CachedFile, ShardCache
from loader.errors import CorruptObjectError
from tests.support.child import Child, say

SIZE_BYTES = 40_000
_DEADLINE_S = 60
_CALLS = {"open", "fcntl.flock", "mmap.__new__"} | {
    f"os.{call}" for call in ("mkdir", "truncate", "scandir", "remove", "rename", "utime")
}
"""Audit events of Python: places to die."""


def name_of(number: int) -> str:
    return f"shard_{number}-{number:016x}.pt"


def content(name: str, size_bytes: int = SIZE_BYTES) -> bytes:
    return random.Random(name).randbytes(size_bytes)


def check(name: str):
    def verify(view: memoryview) -> None:
        if view != content(name, len(view)):
            raise CorruptObjectError(f"{name}: not its content")

    return verify


def produced_by(log: Path) -> list[str]:
    """The names that actors made, one for each time that one began to."""
    return log.read_text().split() if log.exists() else []


@dataclass(frozen=True, slots=True)
class Opened:
    from_cache: bool
    cached: bool
    intact: bool


class CacheActor(Child):
    def __init__(self, folder: Path, log: Path, *, max_bytes: int, wait_timeout_s: float = 30.0) -> None:
        super().__init__("cache_actor", folder, log, str(max_bytes), str(wait_timeout_s))

    def tell(self, line: str, *, answer: str | None = None) -> None:
        """Tells it a line, and holds what it says next against ``answer``."""
        self.say(line)
        if answer is not None:
            assert self.hear() == answer

    def hears(self) -> str:
        return self.hear() or ""

    def opened(self) -> Opened:
        line = self.hears()
        word, *flags = line.split()
        assert word == "opened", line
        return Opened(*(flag == "True" for flag in flags))

    def killed(self) -> None:
        assert self.process.wait(_DEADLINE_S) == -signal.SIGKILL


_write = os.pwrite


def _write_half(descriptor: int, data: memoryview, offset: int) -> int:
    _write(descriptor, data[: len(data) // 2], offset)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


class _Script:
    def __init__(self, folder: str, log: str, max_bytes: str, wait_timeout_s: str) -> None:
        self._cache = ShardCache(Path(folder), int(max_bytes), wait_timeout_s=float(wait_timeout_s))
        self._log = Path(log)
        self._held: list[CachedFile] = []
        self._calls_left: int | None = None

    def run(self) -> None:
        sys.addaudithook(self._on_call)
        for line in sys.stdin:
            command, *arguments = json.loads(line).split()
            {"open": self._open, "drop": self._drop, "loop": self._loop}[command](*arguments)

    def _open(self, name: str, *options: str) -> None:
        for option in options:
            if option == "die=write":
                os.pwrite = _write_half
            elif option.startswith("die="):
                self._calls_left = int(option.removeprefix("die="))
        try:
            found = self._cache.open(name, SIZE_BYTES, lambda: self._produce(name, *options), check(name))
        except RuntimeError:
            say("failed")
            return
        finally:
            self._calls_left = None
        self._held.append(found)
        say(f"opened {found.from_cache} {found.cached} {found.buffer == content(name)}")

    def _drop(self) -> None:
        self._held.clear()
        say("dropped")

    def _loop(self, seed: str, rounds: str, numbers: str) -> None:
        choice = random.Random(seed)
        say("looping")
        for _ in range(int(rounds)):
            name = name_of(choice.randrange(int(numbers)))
            found = self._cache.open(name, SIZE_BYTES, lambda name=name: self._produce(name), check(name))
            if found.buffer != content(name):
                say("corrupt")
                return
            self._held.append(found)
            del found
            while len(self._held) > choice.randrange(3):
                self._held.pop(0)
            time.sleep(choice.random() * 0.004)
        self._held.clear()
        say("done")

    def _produce(self, name: str, *options: str) -> bytes:
        with self._log.open("a") as log:
            log.write(name + "\n")
        if "hold" in options:
            say("producing")
            order = json.loads(sys.stdin.readline())
            if order == "fail":
                raise RuntimeError("told to fail")
            if order == "fork":
                self._fork_child()
        return content(name)

    def _fork_child(self) -> None:
        if os.fork() == 0:
            signal.alarm(_DEADLINE_S)
            say(str(os.getpid()))
            while True:
                signal.pause()
        sys.stdin.readline()

    def _on_call(self, event: str, _arguments: tuple[object, ...]) -> None:
        if self._calls_left is None or event not in _CALLS:
            return
        if self._calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._calls_left -= 1


if __name__ == "__main__":
    _Script(*sys.argv[1:]).run()
