"""A seed keeps its address over a restart and ends cleanly when told to."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.dht_processes import descendants, wait_until_gone
from trainer.errors import TrainerUsageError
from trainer.network.discovery.seeding import SeedConfig

_ROOT = Path(__file__).parents[4]
_SEED = """
import sys
from trainer.network.discovery import SeedConfig, seed

config = SeedConfig(host="127.0.0.1", port=int(sys.argv[1]), identity_path=sys.argv[2])
seed(config, lambda found: print(*found, flush=True))
print("ended", flush=True)
"""


def _run(port: int, identity: Path, number: int) -> str:
    process = subprocess.Popen(
        [sys.executable, "-c", _SEED, str(port), str(identity)], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        family = descendants(process.pid)
        assert len(family) == 2
        process.send_signal(number)
        assert process.stdout.readline().strip() == "ended"
        assert process.wait(20) == 0
        wait_until_gone(family)
        return address
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


@pytest.mark.slow
def test_its_address_survives_a_restart(tmp_path: Path) -> None:
    identity = tmp_path / "new folder" / "seed.id"
    address = _run(0, identity, signal.SIGTERM)
    assert address.startswith("/ip4/127.0.0.1/tcp/") and "/p2p/" in address
    assert identity.stat().st_mode & 0o077 == 0
    assert [path.name for path in identity.parent.iterdir()] == ["seed.id"]
    port = int(address.split("/")[4])
    assert _run(port, identity, signal.SIGINT) == address


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(TrainerUsageError, match="port"):
        SeedConfig(port=70_000)
    with pytest.raises(TrainerUsageError, match="public_host"):
        SeedConfig(port=0, public_host="203.0.113.1")
