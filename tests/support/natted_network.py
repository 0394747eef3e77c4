"""A small internet in network namespaces: one public host, and hosts behind routers that masquerade and let nothing in.

    h0 (192.168.7.2) ── r0 ──┐
    h1 (192.168.7.2) ── r1 ──┼── switch ── public (203.0.113.1)

The networks behind the routers have the same addresses, as those of households do. Needs root; iptables is Debian's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.support.cdn_servers import unpacked

PUBLIC_HOST = "203.0.113.1"
_INNER = "192.168.7"


@dataclass(frozen=True, slots=True)
class NattedNetwork:
    """Names of namespaces."""

    public: str
    hosts: tuple[str, ...]

    @staticmethod
    def inside(namespace: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", namespace, *command]


def why_no_networks() -> str:
    """Empty, or why none can be made here."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    return "" if shutil.which("ip") else "needs ip (iproute2)"


@contextmanager
def natted_network(num_hosts: int) -> Iterator[NattedNetwork]:
    base = f"genat{os.getpid()}"
    switch, public = f"{base}s", f"{base}p"
    routers = [f"{base}r{index}" for index in range(num_hosts)]
    hosts = [f"{base}h{index}" for index in range(num_hosts)]
    made = []
    try:
        for name in (switch, public, *routers, *hosts):
            _run("ip", "netns", "add", name)
            made.append(name)
            _run(*_in(name), "ip", "link", "set", "lo", "up")
        _run(*_in(switch), "ip", "link", "add", "bridge0", "type", "bridge")
        _run(*_in(switch), "ip", "link", "set", "bridge0", "up")
        for index, name in enumerate((public, *routers)):
            _run(*_in(switch), "ip", "link", "add", f"port{index}", "type", "veth", *_far("wan0", name))
            _run(*_in(switch), "ip", "link", "set", f"port{index}", "master", "bridge0", "up")
            address = PUBLIC_HOST if name == public else f"203.0.113.{10 + index}"
            _run(*_in(name), "ip", "address", "add", f"{address}/24", "dev", "wan0")
            _run(*_in(name), "ip", "link", "set", "wan0", "up")
        for router, host in zip(routers, hosts, strict=True):
            _run(*_in(router), "ip", "link", "add", "lan0", "type", "veth", *_far("eth0", host))
            _run(*_in(router), "ip", "address", "add", f"{_INNER}.1/24", "dev", "lan0")
            _run(*_in(router), "ip", "link", "set", "lan0", "up")
            _run(*_in(host), "ip", "address", "add", f"{_INNER}.2/24", "dev", "eth0")
            _run(*_in(host), "ip", "link", "set", "eth0", "up")
            _run(*_in(host), "ip", "route", "add", "default", "via", f"{_INNER}.1")
            _run(*_in(router), "sysctl", "-qw", "net.ipv4.ip_forward=1")
            iptables(router, "-t", "nat", "-A", "POSTROUTING", "-o", "wan0", "-j", "MASQUERADE")
            iptables(router, "-P", "FORWARD", "DROP")
            iptables(router, "-A", "FORWARD", "-i", "lan0", "-j", "ACCEPT")
            replies = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED")
            iptables(router, "-A", "FORWARD", "-i", "wan0", *replies, "-j", "ACCEPT")
        yield NattedNetwork(public, tuple(hosts))
    finally:
        for name in made:
            _remove(name)


def iptables(namespace: str, *arguments: str) -> None:
    """Runs Debian's iptables in a namespace: the installed one, or else one that is unpacked for the tests."""
    program = shutil.which("iptables-legacy") or shutil.which("iptables-legacy", path="/usr/sbin:/sbin")
    environment = dict(os.environ)
    if program is None:
        tree = unpacked("iptables")
        program = str(tree.program("xtables-legacy-multi"))
        [modules] = tree.root.glob("**/xtables")
        environment |= tree.environment() | {"XTABLES_LIBDIR": str(modules)}
        arguments = ("iptables", *arguments)
    _run(*_in(namespace), program, *arguments, environment=environment)


def _far(device: str, namespace: str) -> tuple[str, ...]:
    return ("peer", "name", device, "netns", namespace)


def _in(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def _remove(name: str) -> None:
    inside = subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True, check=False, timeout=30)
    for pid in inside.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False, timeout=30)


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
