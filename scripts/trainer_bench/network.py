"""Networks of this machine's own kernel: one namespace where nothing else is counted, or one a member on slow links.

A link is a veth pair from a member's namespace to a bridge, with a token bucket filter (`tbf`) at both ends, so that
it holds to its rate in both directions; no delay is added (`netem` is not in every kernel). All of it is removed at
the end, with whatever still runs inside. It needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_BURST_BYTES = 64 << 10
_LATENCY = "400ms"
_BRIDGE = "br0"


@dataclass(frozen=True, slots=True)
class PrivateLoopback:
    """A namespace with nothing but a loopback interface."""

    namespace: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Runs a command inside."""
        return _inside(self.namespace)

    def sent_bytes(self) -> int:
        """What the loopback interface has carried, headers included."""
        return int(_run(*self.prefix, "cat", "/sys/class/net/lo/statistics/tx_bytes"))


@dataclass(frozen=True, slots=True)
class Links:
    """One namespace a member, each at the end of a link of its own."""

    namespaces: tuple[str, ...]
    interface: str = "eth0"

    @property
    def prefixes(self) -> list[tuple[str, ...]]:
        """Run a command at each member's place."""
        return [_inside(namespace) for namespace in self.namespaces]

    def address(self, rank: int) -> str:
        """A member's."""
        return f"10.203.78.{rank + 1}"

    def set_rate(self, mbit_per_s: float) -> None:
        """Makes every link this fast, in both directions."""
        switch = self.namespaces[0] + "s"
        for rank, namespace in enumerate(self.namespaces):
            for place, device in ((namespace, self.interface), (switch, f"port{rank}")):
                shape = ("tbf", "rate", f"{mbit_per_s:g}mbit", "burst", f"{_BURST_BYTES}", "latency", _LATENCY)
                _run(*_inside(place), "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def sent_bytes(self, rank: int | None = None) -> int:
        """What a member, or all, have sent, headers included."""
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        prefixes = self.prefixes if rank is None else [self.prefixes[rank]]
        return sum(int(_run(*prefix, "cat", path)) for prefix in prefixes)


def can_make_networks() -> str:
    """Empty, or why not."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    return f"needs {' and '.join(missing)} (iproute2)" if missing else ""


@contextmanager
def private_loopback() -> Iterator[PrivateLoopback]:
    """Made, and removed."""
    namespace = f"genbench{os.getpid()}"
    with _namespaces([namespace]):
        yield PrivateLoopback(namespace)


@contextmanager
def slow_links(members: int) -> Iterator[Links]:
    """A bridge in a namespace of its own, and a namespace a member; rates are unlimited until they are set."""
    names = [f"genbench{os.getpid()}m{rank}" for rank in range(members)]
    switch = names[0] + "s"
    links = Links(tuple(names))
    with _namespaces([switch, *names]):
        at_switch = _inside(switch)
        _run(*at_switch, "ip", "link", "add", _BRIDGE, "type", "bridge")
        _run(*at_switch, "ip", "link", "set", _BRIDGE, "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            far_end = ("peer", "name", links.interface, "netns", name)
            _run(*at_switch, "ip", "link", "add", port, "type", "veth", *far_end)
            _run(*at_switch, "ip", "link", "set", port, "master", _BRIDGE, "up")
            _run(*_inside(name), "ip", "address", "add", f"{links.address(rank)}/24", "dev", links.interface)
            _run(*_inside(name), "ip", "link", "set", links.interface, "up")
        yield links


@contextmanager
def _namespaces(names: Sequence[str]) -> Iterator[None]:
    made = []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
            _run(*_inside(name), "ip", "link", "set", "lo", "up")
        yield
    finally:
        for name in made:
            _remove(name)


def _remove(name: str) -> None:
    inside = subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True, check=False, timeout=30)
    for pid in inside.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False, timeout=30)


def _inside(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
