"""Nodes behind routers that let nothing in train together by way of a seed that relays."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.natted_network import PUBLIC_HOST, NattedNetwork, natted_network, why_no_networks
from tests.support.small_store import text_store
from tests.support.trainer_command import ROOT, SMALL, TrainerCommand
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_no_networks()), reason=why_no_networks())]

_IN_LAB = ("--set", "discovery.allow_private=true", "--set", "discovery.poll_interval_s=0.3")
_RELAY = f"{PUBLIC_HOST}:4002"


class _Seed:
    """A seed with ``--relay`` at the public host, as a user starts it."""

    def __init__(self, net: NattedNetwork, folder: Path) -> None:
        command = [sys.executable, "-m", "trainer", "seed", "--port", "4001", "--host", PUBLIC_HOST]
        command += ["--identity", str(folder / "seed.id"), "--relay", "--relay-port", "4002"]
        self.process = subprocess.Popen(
            net.inside(net.public, *command, "--relay-first-port", "42000"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(lambda: any("--relay" in line for line in self.lines), "the seed has not become ready")
        [self.address] = [
            it for line in self.lines for it in re.findall(r"--initial-peers (\S*203\.0\.113\.1\S*)", line)
        ]

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_two_nodes_behind_routers_average_with_each_other(tmp_path: Path) -> None:
    with natted_network(2) as net:
        seed = _Seed(net, tmp_path)
        try:
            nodes = []
            for index, host in enumerate(net.hosts):
                starter = (*net.inside(host), sys.executable, "-m", "trainer")
                command = TrainerCommand(text_store(), tmp_path / f"home-{index}", SMALL, starter)
                common = ("--inner-steps", "20", "--max-steps", "4000", "--relay", _RELAY, *_IN_LAB)
                nodes.append((command, (f"--node-id=home-{index}", "--initial-peers", seed.address, *common)))
            (one, of_one), (other, of_other) = nodes
            with one.running(*of_one) as first, other.running(*of_other) as second:
                for node in (first, second):
                    wait_until(
                        lambda node=node: any(it["kind"] == "round" and len(it["members"]) == 2 for it in node.events),
                        "no round of two",
                        100.0,
                    )
                log = "".join(first.errors)
                assert f"others reach this node at {PUBLIC_HOST}:420" in log, log
        finally:
            seed.end()
