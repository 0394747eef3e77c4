"""The doctor behind a router and a firewall: real networks of Linux, with public addresses that lead nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from genesis.doctor import DoctorReport, Finding
from tests.support.doctored_node import options
from tests.support.natted_network import iptables
from tests.support.small_store import text_store

ROOT = Path(__file__).resolve().parents[4]
PEER, ROUTER, INSIDE, NODE = "8.8.8.2", "8.8.8.1", "10.9.9.1", "10.9.9.2"
PORT, PEER_PORT = 4100, 4200
WAIT_S = 240.0

PEER_PROGRAM = """
import sys, threading
from pathlib import Path
from tests.support.doctored_node import peer
rpc = {"rpc__host": "0.0.0.0", "rpc__public_address": sys.argv[2], "rpc__port": int(sys.argv[3])}
with peer(Path(sys.argv[1]), data__store=sys.argv[4], **rpc):
    print("ready", flush=True)
    sys.stdin.read()
"""


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        pytest.skip(f"networks cannot be made here: {done.stderr.strip()}")


def within(network: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", network, *command]


@contextmanager
def network(name: str) -> Iterator[str]:
    full = f"doctor-{os.getpid()}-{name}"
    ip("netns", "add", full)
    try:
        ip("-n", full, "link", "set", "lo", "up")
        yield full
    finally:
        subprocess.run(["ip", "netns", "del", full], check=False, timeout=20)


def joined(one: str, one_address: str, other: str, other_address: str, name: str) -> None:
    ends = (f"{name}0-{os.getpid() % 10000}", f"{name}1-{os.getpid() % 10000}")
    ip("link", "add", ends[0], "netns", one, "type", "veth", "peer", "name", ends[1], "netns", other)
    for where, end, address in ((one, ends[0], one_address), (other, ends[1], other_address)):
        ip("-n", where, "addr", "add", f"{address}/24", "dev", end)
        ip("-n", where, "link", "set", end, "up")


class Internet:
    """A peer with a public address, a router that translates, and a node behind it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.peer = stack.enter_context(network("peer"))
        self.router = stack.enter_context(network("router"))
        self.node = stack.enter_context(network("node"))
        joined(self.peer, PEER, self.router, ROUTER, "p")
        joined(self.router, INSIDE, self.node, NODE, "n")
        ip("-n", self.node, "route", "add", "default", "via", INSIDE)
        subprocess.run(within(self.router, "sysctl", "-qw", "net.ipv4.ip_forward=1"), check=True, timeout=20)
        iptables(self.router, "-t", "nat", "-A", "POSTROUTING", "-s", f"{NODE}/24", "-j", "MASQUERADE")
        line = within(
            self.peer, sys.executable, "-c", PEER_PROGRAM, str(folder), PEER, str(PEER_PORT), str(text_store())
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._peer = subprocess.Popen(line, cwd=ROOT, encoding="utf-8", **pipes)  # type: ignore[call-overload]
        stack.callback(self._end)
        assert self._peer.stdout.readline() == "ready\n"

    def _end(self) -> None:
        self._peer.communicate("", timeout=WAIT_S)

    def diagnosed(self, where: str, public_address: str = "", peer: str = f"{PEER}:{PEER_PORT}") -> dict[str, Finding]:
        rpc = {"rpc__host": "0.0.0.0", "rpc__public_address": public_address, "rpc__port": PORT}
        file = self.folder / "options.json"
        file.write_text(json.dumps(options(self.folder, discovery__initial_peers=[peer], **rpc)))
        line = within(where, sys.executable, "-m", "trainer", "doctor", "--config", str(file), "--json")
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
        report = DoctorReport.model_validate_json(done.stdout)
        assert done.returncode == (0 if report.ok else 1), done.stderr
        return {each.check: each for each in report.findings}


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    with ExitStack() as stack:
        yield Internet(tmp_path_factory.mktemp("internet"), stack)


pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_private_address_behind_a_router_is_found(internet: Internet) -> None:
    found = internet.diagnosed(internet.node)
    assert found["address"].status == "failed"
    assert f"--public-address {ROUTER}:{PORT}" in found["address"].cure
    assert f"forward that port of the router to {NODE}" in found["address"].cure
    assert found["reachable"].status == "failed"
    assert f"forward TCP port {PORT} of {ROUTER} to {NODE}:{PORT}" in found["reachable"].cure
    assert found["clock"].status == found["terms"].status == "ok"


def test_a_port_that_the_router_forwards_is_reached(internet: Internet) -> None:
    forward = ("PREROUTING", "-d", ROUTER, "-p", "tcp", "--dport", str(PORT), "-j", "DNAT", "--to", f"{NODE}:{PORT}")
    iptables(internet.router, "-t", "nat", "-A", *forward)
    try:
        found = internet.diagnosed(internet.node, f"{ROUTER}:{PORT}")
        assert found["address"].status == "ok"
        assert found["reachable"].found == f"reachable as {ROUTER}:{PORT}, says {PEER}:{PEER_PORT}"
        # Open, and yet nobody would find it.
        found = internet.diagnosed(internet.node, "8.8.9.9")
        assert f"--public-address {ROUTER}:{PORT}" in found["reachable"].cure
    finally:
        iptables(internet.router, "-t", "nat", "-D", *forward)


def test_a_firewall_that_drops_is_found(internet: Internet) -> None:
    drop = ("INPUT", "-p", "tcp", "--dport", str(PORT), "-j", "DROP")
    iptables(internet.router, "-A", *drop)
    try:
        found = internet.diagnosed(internet.router, ROUTER)
    finally:
        iptables(internet.router, "-D", *drop)
    assert found["reachable"].status == "failed"
    assert found["reachable"].cure.startswith("the firewall drops it")


def test_a_peer_behind_a_firewall_and_one_without_a_route_are_told_apart(internet: Internet) -> None:
    drop = ("INPUT", "-p", "tcp", "--dport", str(PEER_PORT), "-j", "DROP")
    iptables(internet.peer, "-A", *drop)
    try:
        assert "open the port in the firewall there" in internet.diagnosed(internet.node)["peers"].cure
    finally:
        iptables(internet.peer, "-D", *drop)
    assert "no way from here" in internet.diagnosed(internet.router, peer="9.9.9.9:4100")["peers"].cure
