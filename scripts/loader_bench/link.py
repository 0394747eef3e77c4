"""A link of a given rate between two ends of this machine, and how soon a node with an empty cache has its first batch.

As root the link is real: a network namespace for the server, joined by a veth pair, with a token bucket filter (`tbf`)
at the server's end; bytes are counted by the interface, headers and acknowledgements included. Otherwise it is a relay
of TCP streams that holds to the rate, and counts payloads only.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.loader_bench.passes import answer_of
from scripts.loader_bench.workspace import ROOT, child_environment

_BURST_BYTES = 64 << 10
_START_TIMEOUT_S = 30.0
_SERVER_ADDRESS, _CLIENT_ADDRESS = "10.203.77.1", "10.203.77.2"


@dataclass(frozen=True, slots=True)
class Link:
    """A store behind a slow link."""

    url: str
    kind: str
    received_bytes: Callable[[], int]
    """Bytes that came over it to this end since it was made."""


@contextmanager
def served_over_link(store: Path, mbit_per_s: float) -> Iterator[Link]:
    """`genesis serve` at the far end of a link of so many Mbit/s."""
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
        with _namespace(mbit_per_s) as (namespace, interface):
            prefix = ["ip", "netns", "exec", namespace]
            with served(store, _SERVER_ADDRESS, prefix=prefix) as port:
                statistics = Path(f"/sys/class/net/{interface}/statistics/rx_bytes")
                url = f"http://{_SERVER_ADDRESS}:{port}"
                yield Link(url, "veth, tbf", lambda: int(statistics.read_text()))
    else:
        with served(store) as port, _relay(port, mbit_per_s) as (near, counted):
            yield Link(f"http://127.0.0.1:{near}", "relay", lambda: counted[0])


@contextmanager
def _namespace(mbit_per_s: float) -> Iterator[tuple[str, str]]:
    """A namespace and the interface that leads to it; both go afterwards."""
    namespace, near, far = f"genbench{os.getpid()}", f"gbn{os.getpid()}", f"gbf{os.getpid()}"
    inside = ("ip", "netns", "exec", namespace)
    _run("ip", "netns", "add", namespace)
    try:
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        _run("ip", "link", "set", far, "netns", namespace)
        _run("ip", "address", "add", f"{_CLIENT_ADDRESS}/30", "dev", near)
        _run(*inside, "ip", "address", "add", f"{_SERVER_ADDRESS}/30", "dev", far)
        _run("ip", "link", "set", near, "up")
        _run(*inside, "ip", "link", "set", far, "up")
        shape = ("root", "tbf", "rate", f"{mbit_per_s:g}mbit", "burst", f"{_BURST_BYTES}", "latency", "50ms")
        _run(*inside, "tc", "qdisc", "add", "dev", far, *shape)
        yield namespace, near
    finally:
        _run("ip", "netns", "delete", namespace)
        subprocess.run(["ip", "link", "delete", near], capture_output=True, check=False, timeout=30)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def served(store: Path, host: str = "127.0.0.1", *, prefix: Sequence[str] = ()) -> Iterator[int]:
    """`genesis serve`, ended afterwards; yields its port."""
    command = [*prefix, sys.executable, "-m", "genesis", "serve", "--store", str(store), "--host", host]
    with subprocess.Popen(
        [*command, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=child_environment(),
    ) as process:
        try:
            url = answer_of(process, "genesis serve", _START_TIMEOUT_S)["url"]
            yield int(url.rsplit(":", 1)[1].rstrip("/"))
        finally:
            process.terminate()
            process.wait(_START_TIMEOUT_S)


@contextmanager
def _relay(port: int, mbit_per_s: float) -> Iterator[tuple[int, list[int]]]:
    """Relays connections to ``port``; what comes back shares one token bucket. Yields its port and a counter."""
    counted = [0]
    bucket = _Bucket(mbit_per_s * 1e6 / 8)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection(("127.0.0.1", port), timeout=_START_TIMEOUT_S)
                    threading.Thread(target=_pump, args=(client, server, None, None), daemon=True).start()
                    threading.Thread(target=_pump, args=(server, client, bucket, counted), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], counted


class _Bucket:
    """Lets through so many bytes a second, a burst aside."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Waits until so many bytes may pass."""
        with self._lock:
            burst_s = _BURST_BYTES / self._bytes_per_s
            self._free_at = max(self._free_at, time.monotonic() - burst_s) + count / self._bytes_per_s
            wait_s = self._free_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


def _pump(source: socket.socket, target: socket.socket, bucket: _Bucket | None, counted: list[int] | None) -> None:
    with suppress(OSError):
        while data := source.recv(16 << 10):
            if bucket is not None and counted is not None:
                bucket.take(len(data))
                counted[0] += len(data)
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
