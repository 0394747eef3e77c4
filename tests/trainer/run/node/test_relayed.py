"""Nodes behind routers that let nothing in train together by way of a seed that relays."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from genesis.doctor import DoctorReport
from tests.support.natted_network import PUBLIC_HOST, NattedNetwork, natted_network, why_no_networks
from tests.support.small_store import text_store
from tests.support.trainer_command import ROOT, SMALL, RunningTrainer, TrainerCommand
from tests.support.waiting import wait_until
from trainer.network.rpc.identity import load_or_create_identity
from trainer.run.config import RunConfig

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_no_networks()), reason=why_no_networks())]

_IN_LAB = ("--set", "discovery.allow_private=true", "--set", "discovery.poll_interval_s=0.3")
_RELAY = f"{PUBLIC_HOST}:4002"
_RUN = RunConfig().run_id


class _Process:
    """A command of the trainer at the public host, as a user starts it."""

    def __init__(self, net: NattedNetwork, ready: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            net.inside(net.public, sys.executable, "-m", "trainer", *arguments),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_until(lambda: any(ready in line for line in self.lines), f"{arguments[0]} has not become ready")

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


class _Seed(_Process):
    """A seed with ``--relay``."""

    def __init__(self, net: NattedNetwork, folder: Path, *more: str) -> None:
        where = ("--port", "4001", "--host", PUBLIC_HOST, "--identity", str(folder / "seed.id"))
        super().__init__(net, "add:", "seed", *where, "--relay", "--relay-first-port", "42000", *more)
        wait_until(lambda: any("--relay" in line for line in self.lines), "the seed names no relay")
        [self.address] = [
            it for line in self.lines for it in re.findall(r"--initial-peers (\S*203\.0\.113\.1\S*)", line)
        ]


def _homes(net: NattedNetwork, folder: Path, *options: str) -> list[tuple[TrainerCommand, tuple[str, ...]]]:
    homes = []
    for index, host in enumerate(net.hosts):
        starter = (*net.inside(host), sys.executable, "-m", "trainer")
        command = TrainerCommand(text_store(), folder / f"home-{index}", SMALL, starter)
        common = (f"--node-id=home-{index}", "--inner-steps", "20", "--max-steps", "40000", *_IN_LAB)
        homes.append((command, (*common, *options)))
    return homes


def _wait_for_a_round_of_two(*nodes: RunningTrainer) -> None:
    for node in nodes:
        wait_until(
            lambda node=node: any(it["kind"] == "round" and len(it["members"]) == 2 for it in node.events),
            "no round of two",
            180.0,
        )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("is_named", [True, pytest.param(False, marks=pytest.mark.long)], ids=["named", "found"])
def test_two_nodes_behind_routers_average_with_each_other(tmp_path: Path, is_named: bool) -> None:
    with natted_network(2) as net:
        seed = _Seed(net, tmp_path)
        try:
            relay = ("--relay", _RELAY) if is_named else ()
            homes = _homes(net, tmp_path, "--initial-peers", seed.address, *relay)
            (one, of_one), (other, of_other) = homes
            with one.running(*of_one) as first, other.running(*of_other) as second:
                _wait_for_a_round_of_two(first, second)
                log = "".join(first.errors)
                assert f"others reach this node at {PUBLIC_HOST}:420" in log, log
        finally:
            seed.end()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_members_behind_routers_join_and_train_by_a_relay_that_strangers_cannot_use(tmp_path: Path) -> None:
    with natted_network(3) as net, ExitStack() as stack:
        key = load_or_create_identity(tmp_path / "authority.key").peer_id
        database = str(tmp_path / "authority.sqlite")
        options = ("--run-name", _RUN, "--key", str(tmp_path / "authority.key"), "--db", database)
        authority = _Process(net, "authority of run", "authority", *options, "--host", PUBLIC_HOST)
        stack.callback(authority.end)
        seed = _Seed(net, tmp_path, "--run-name", _RUN, "--authority-key", key)
        stack.callback(seed.end)
        invite = ["authority", "--db", database, "invite", "--db", database, "--role", "node", "--uses", "2"]
        token = subprocess.run(
            [sys.executable, "-m", "trainer", *invite], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        joining = ("--authority", f"http://{PUBLIC_HOST}:4500", "--set", f"admission.authorities=[{key}]")
        homes = _homes(net, tmp_path, "--initial-peers", seed.address)
        nodes = [
            stack.enter_context(command.running(*options, *joining, "--token", token)) for command, options in homes[:2]
        ]
        _wait_for_a_round_of_two(*nodes)
        assert "it joins by way of a relay" in "".join(nodes[0].errors)
        # Whoever was not invited is told so by the relay.
        command, options = homes[2]
        stranger = stack.enter_context(command.running(*options, "--relay", _RELAY))
        wait_until(lambda: f"members of run '{_RUN}' only" in "".join(stranger.errors), "not refused", 60.0)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_doctor_names_the_relay_that_takes_a_node_behind_a_router(tmp_path: Path) -> None:
    """A node at the public host serves; the doctor behind the router sees that it does, and tries it."""
    with natted_network(1) as net:
        starter = (*net.inside(net.public), sys.executable, "-m", "trainer")
        command = TrainerCommand(text_store(), tmp_path / "public", SMALL, starter)
        serving = ("--set", "relay.serve=true", "--set", "relay.first_port=42000", "--set", "rpc.host=0.0.0.0")
        public = (
            "--node-id=public",
            "--inner-steps",
            "20",
            "--port",
            "4100",
            "--public-address",
            f"{PUBLIC_HOST}:4100",
        )
        with command.running(*public, "--max-steps", "40000", *serving, *_IN_LAB) as node:
            wait_until(lambda: "relays for nodes that cannot be reached" in "".join(node.errors), "", 90.0)
            [(home, options)] = _homes(net, tmp_path, "--initial-peers", f"{PUBLIC_HOST}:4100", "--port", "4100")
            examined = replace(home, starter=(*home.starter, "doctor"))
            report = DoctorReport.model_validate_json(examined(*options, "--json", timeout_s=200.0).stdout)
            found = {each.check: each for each in report.findings}
            assert found["reachable"].status == "warning"
            assert f"give --relay {_RELAY}" in found["reachable"].cure
            assert f"{_RELAY} accepts a reservation" in found["relay"].found
