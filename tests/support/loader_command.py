"""Running ``python -m loader`` as its user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class LoaderCommand:
    """``python -m loader`` with a store and a cache of its own."""

    store: str
    cache: Path

    def environment(self) -> dict[str, str]:
        return {**os.environ, "GENESIS_STORE": self.store, "GENESIS_CACHE_DIR": str(self.cache)}

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """The command in a process of its own."""
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
        done = subprocess.run(
            [sys.executable, "-m", "loader", *map(str, arguments)],
            cwd=ROOT,
            env={**self.environment(), **environment},
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=110,
            check=False,
        )
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def json(self, *arguments: str | Path, expect: int = 0, stdin: str = "") -> dict[str, Any]:
        """What the command prints with ``--json``: one object and nothing else."""
        found = json.loads(self(*arguments, "--json", expect=expect, stdin=stdin).stdout)
        assert isinstance(found, dict)
        return found

    def cached(self) -> set[int]:
        """The shards in the cache."""
        return {int(path.name.split("-")[0].removeprefix("shard_")) for path in self.cache.glob("shard_*.pt")}
