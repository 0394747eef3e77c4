"""What the loader's benchmarks work on, made once and kept in one folder: the store, its tokens, the peers.

store/            `genesis populate` over the corpus, with the transfer form
tokens.bin        all its ids in the order of the shards, uint16
venvs/NAME/       one virtual environment a peer, so that each has the newest release that it can be had in
data/NAME/        the tokens in that peer's format
cache/            the loader's cache, warm after the first run
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTESTANTS = ROOT / "scripts" / "baselines" / "loader"
PEERS = {"mosaicml": "mosaicml-streaming", "litdata": "litdata", "datatrove": "datatrove"}
"""The peers from PyPI: contestant and package."""

_INSTALL_TIMEOUT_S = 1800.0
_CONVERT_TIMEOUT_S = 900.0


def child_environment() -> dict[str, str]:
    """The environment of our own child processes: they import this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True, slots=True)
class Workspace:
    """The folder of the benchmarks."""

    folder: Path
    venvs: Path
    corpus: Path
    seq_len: int

    @property
    def store(self) -> Path:
        """The store."""
        return self.folder / "store"

    @property
    def cache(self) -> Path:
        """The loader's cache that stays warm."""
        return self.folder / "cache"

    @property
    def tokens(self) -> Path:
        """All ids as uint16."""
        return self.folder / "tokens.bin"

    def manifest(self) -> dict[str, int]:
        """The store's manifest."""
        found: dict[str, int] = json.loads((self.store / "manifest.json").read_bytes())
        return found

    def make_store(self) -> None:
        """Populates the store and writes its tokens, unless that was done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.tokens.exists():
            progress(f"populating {self.store} from {self.corpus}")
            command = [sys.executable, "-m", "genesis", "populate", "--source", "fineweb-edu"]
            _run([*command, "--input", str(self.corpus), "--store", str(self.store)], _CONVERT_TIMEOUT_S)
            self._write_tokens()

    def python_of(self, contestant: str) -> Path:
        """The Python that a contestant runs under; a peer's environment is made when it is first asked for.

        Torch comes from the release that constraints.txt pins, where the package index has it.
        """
        if contestant not in PEERS:
            return Path(sys.executable)
        package = PEERS[contestant]
        venv = self.venvs / package
        stamp = venv / "installed"
        if not stamp.exists():
            progress(f"installing {package} into {venv}")
            _run([sys.executable, "-m", "venv", "--clear", str(venv)], _INSTALL_TIMEOUT_S)
            install = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            try:
                _run([*install, "--constraint", str(ROOT / "constraints.txt"), "torch", package], _INSTALL_TIMEOUT_S)
            except SystemExit as failure:
                progress(f"{failure}\n… so with the torch that {package} chooses")
                _run([*install, "torch", package], _INSTALL_TIMEOUT_S)
            stamp.touch()
        return venv / "bin" / "python"

    def version_of(self, contestant: str) -> str:
        """The release of a peer's package."""
        package = PEERS[contestant]
        code = f"from importlib.metadata import version; print(version({package!r}))"
        command = [str(self.python_of(contestant)), "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    def data_of(self, contestant: str, *, one_shard: bool = False) -> Path:
        """What a contestant reads: all ids, or those of the first shard; files are written when first asked for."""
        tokens = self._first_shard() if one_shard else self.tokens
        if contestant not in PEERS:
            return tokens if contestant == "nanogpt" else self.store
        data = self.folder / "data" / f"{contestant}-{self.seq_len}{'-one-shard' * one_shard}"
        stamp = data.with_suffix(".made")
        if not stamp.exists():
            progress(f"converting the tokens for {contestant}")
            shutil.rmtree(data, ignore_errors=True)
            data.parent.mkdir(exist_ok=True)
            script = CONTESTANTS / f"{contestant}_batches.py"
            command = [str(self.python_of(contestant)), str(script), "convert", str(tokens), str(data)]
            _run([*command, str(self.seq_len)], _CONVERT_TIMEOUT_S)
            stamp.touch()
        return data

    def _first_shard(self) -> Path:
        path = self.folder / "tokens-one-shard.bin"
        size_bytes = 2 * self.manifest()["shard_tokens"]
        if not path.exists() or path.stat().st_size != size_bytes:
            with self.tokens.open("rb") as file:
                path.write_bytes(file.read(size_bytes))
        return path

    def _write_tokens(self) -> None:
        import numpy as np
        import torch

        shards = sorted(self.store.glob("shard_*.pt"), key=lambda path: int(re.sub(r"\D", "", path.stem)))
        partial = self.tokens.with_suffix(".partial")
        with partial.open("wb") as file:
            for shard in shards:
                ids = torch.load(shard, mmap=True, weights_only=True).numpy()
                file.write(ids.astype(np.uint16).tobytes())
        partial.replace(self.tokens)


def progress(line: str) -> None:
    """Says what takes its time, beside the results."""
    print(line, file=sys.stderr, flush=True)


def _run(command: list[str], timeout_s: float) -> None:
    """Runs to the end; says what a failing command said."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout_s, cwd=ROOT, env=child_environment()
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
