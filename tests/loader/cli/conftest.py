"""A store of 23 small shards and two sources, as a folder or over HTTP, and the command with a cache of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loader.cli.app import run
from tests.support.populating import genesis
from tests.support.serve_process import ServeProcess, genesis_serve
from tests.support.small_store import copy_small_store

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class LoaderCommand:
    """``python -m loader`` with a store and a cache of its own."""

    store: str
    cache: Path

    def environment(self) -> dict[str, str]:
        return {**os.environ, "GENESIS_STORE": self.store, "GENESIS_CACHE_DIR": str(self.cache)}

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "loader", *map(str, arguments)],
            cwd=ROOT,
            env=self.environment(),
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def __call__(
        self, *arguments: str | Path, expect: int = 0, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """The command to its end, which must be ``expect``; never with a traceback."""
        places = {"GENESIS_STORE": self.store, "GENESIS_CACHE_DIR": str(self.cache)}
        return genesis(*arguments, expect=expect, module="loader", stdin=stdin, **{**places, **environment})

    def json(self, *arguments: str | Path, expect: int = 0, stdin: str = "") -> dict[str, Any]:
        """What the command prints with ``--json``: one object and nothing else."""
        return dict(json.loads(self(*arguments, "--json", expect=expect, stdin=stdin).stdout))

    def cached(self) -> set[int]:
        """The shards in the cache."""
        return {int(path.name.split("-")[0].removeprefix("shard_")) for path in self.cache.glob("shard_*.pt")}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("stores") / "small"
    copy_small_store(folder)
    return folder


@pytest.fixture(scope="session")
def served(store: Path) -> Iterator[ServeProcess]:
    with genesis_serve(store, log_level="WARNING") as server:
        yield server


@pytest.fixture
def loader(store: Path, tmp_path: Path) -> LoaderCommand:
    return LoaderCommand(str(store), tmp_path / "cache")


@dataclass(frozen=True)
class Here:
    """``python -m loader`` without the process around it: half a second less a command."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str | Path, expect: int = 0) -> tuple[str, str]:
        """What it prints to standard output and error."""
        self.capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, errors = self.capsys.readouterr()
        assert code == expect, f"exit {code}\n{out}\n{errors}"
        return out, errors

    def json(self, *arguments: str | Path, expect: int = 0) -> dict[str, Any]:
        """What it prints with ``--json``."""
        return dict(json.loads(self(*arguments, "--json", expect=expect)[0]))


@pytest.fixture
def here(loader: LoaderCommand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The command in this process, with the store and the cache of ``loader``."""
    monkeypatch.setenv("GENESIS_STORE", loader.store)
    monkeypatch.setenv("GENESIS_CACHE_DIR", str(loader.cache))
    return Here(capsys)


@pytest.fixture
def http_loader(served: ServeProcess, tmp_path: Path) -> LoaderCommand:
    return LoaderCommand(served.url, tmp_path / "cache")
