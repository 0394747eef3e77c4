"""A keeper of an account as a process of its own that tests can kill -9 and start again on the same journal.

Run as ``python -m tests.support.ledger_keeper STORE CACHE JOURNAL``: waits for a line, opens the journal, prints where
it is reached, and serves until it is killed or its standard input ends. Its journal is compacted every few records, so
that kills meet that too.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.ledger_run import CONFIG, Run, run_of
from trainer.network.rpc import Peer
from trainer.pipeline.ledger import LedgerConfig

KEEPER_CONFIG: LedgerConfig = replace(CONFIG, compact_bytes=1 << 12, epochs=4)


@dataclass(frozen=True, slots=True)
class KeeperProcess:
    """One that is started, and keeps nothing yet: the second it takes to import everything can be another's last."""

    process: subprocess.Popen[str]

    async def begin(self) -> Peer:
        """Opens the journal; where it is reached."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        said = json.loads(await asyncio.to_thread(self.process.stdout.readline))
        return Peer(said["peer_id"], said["address"])

    def kill(self) -> None:
        """As a power cut."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def keeper_process(run: Run) -> Iterator[KeeperProcess]:
    """Starts one, and kills it at the end."""
    arguments: Sequence[str] = [str(run.store), str(run.session.options.cache_dir), str(run.path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ledger_keeper", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield KeeperProcess(process)
    finally:
        process.kill()
        process.communicate()


async def _serve(store: str, cache: str, journal: str) -> None:
    await asyncio.to_thread(sys.stdin.readline)
    run = run_of(Path(store), Path(cache), Path(journal))
    async with run.keeper(KEEPER_CONFIG) as (_, endpoint):
        sys.stdout.write(json.dumps({"peer_id": endpoint.peer_id, "address": endpoint.address}) + "\n")
        sys.stdout.flush()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
