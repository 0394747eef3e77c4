"""``genesis serve`` as a process of its own, and a client that sends exactly the bytes it is told to."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.waiting import wait_until

_WITHIN_S = 30.0
_STARTS_WITHIN_S = 180.0
"""Much longer than it takes: imports wait for a core while nodes train on the same machine."""


def request(method: str, url: str, **headers: str) -> httpx.Response:
    """One request on a connection of its own; ``if_range="x"`` is the header If-Range."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    # Without TLS' certificates, which take 80 ms to load and are not needed here.
    with httpx.Client(verify=False, trust_env=False, timeout=_WITHIN_S) as client:
        return client.request(method, url, headers=named)


@dataclass
class ServeProcess:
    process: subprocess.Popen[str]
    announcement: str
    url: str
    """Without a slash at the end."""
    errors: list[str] = field(default_factory=list)
    """Lines of its standard error so far; all of them after `stop`."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.request("GET", path, **headers)

    def request(self, method: str, path: str, **headers: str) -> httpx.Response:
        return request(method, f"{self.url}{path}", **headers)

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics().get((name, frozenset(labels.items())), 0.0)

    def wait_for_metric(self, name: str, value: float, **labels: str) -> None:
        what = f"expected {name}{labels} to reach {value}"
        wait_until(lambda: self.metric(name, **labels) >= value, what, _WITHIN_S)

    def connect(self, *, receive_buffer_bytes: int | None = None) -> RawClient:
        connection = socket.socket()
        if receive_buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        connection.settimeout(_WITHIN_S)
        try:
            connection.connect(("127.0.0.1", self.port))
        except OSError:
            connection.close()
            raise
        return RawClient(connection)

    def wait_until_closed(self) -> None:
        """Until nobody listens any more: the server has seen that it is to stop."""

        def refuses() -> bool:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=_WITHIN_S).close()
            except ConnectionRefusedError:
                return True
            return False

        wait_until(refuses, "expected the server to stop listening", _WITHIN_S)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        return self.process.wait(_WITHIN_S)


class RawClient:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, text: bytes) -> None:
        self.socket.sendall(text)

    def ask(self, target: bytes, *headers: bytes, method: bytes = b"GET") -> RawClient:
        """Sends a whole request for ``target``, as it is spelt; returns itself."""
        lines = [method + b" " + target + b" HTTP/1.1", b"Host: localhost", *headers, b"", b""]
        self.send(b"\r\n".join(lines))
        return self

    def head(self) -> tuple[int, dict[str, str]]:
        while b"\r\n\r\n" not in self._rest:
            part = self.socket.recv(65536)
            if not part:
                raise ConnectionError(f"closed after {self._rest!r}")
            self._rest += part
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split()[1]), headers

    def read(self, size_bytes: int) -> bytes:
        """Up to ``size_bytes`` of body; fewer only if the server ends the connection."""
        parts, left = [self._rest[:size_bytes]], size_bytes - len(self._rest[:size_bytes])
        self._rest = self._rest[size_bytes:]
        while left > 0:
            try:
                part = self.socket.recv(min(left, 1 << 20))
            except ConnectionResetError:
                break
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = self.head()
        return status, headers, self.read(int(headers.get("content-length", 0)))

    def is_closed(self) -> bool:
        """Waits for the server to end the connection, whatever it still sends."""
        try:
            while self.socket.recv(1 << 20):
                """What was under way."""
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True


@contextmanager
def genesis_serve(
    folder: Path, *options: str, log_level: str = "INFO", open_files: int | None = None
) -> Iterator[ServeProcess]:
    """``genesis serve`` over ``folder`` on a free port; stopped at the end if the test has not done so."""
    command = [sys.executable, "-m", "genesis", "serve", "--store", str(folder), "--port", "0", *options]
    if open_files is not None:
        command = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh", *command]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GENESIS_LOG": log_level},
        cwd=Path(__file__).parents[2],
    )
    errors: list[str] = []
    lines: queue.Queue[str] = queue.Queue()
    threads = [
        threading.Thread(target=_read, args=(process.stdout, lines.put), daemon=True),
        threading.Thread(target=_read, args=(process.stderr, errors.append), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield _announced(process, lines, errors)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            for thread in threads:
                thread.join(_WITHIN_S)


def _announced(process: subprocess.Popen[str], lines: queue.Queue[str], errors: list[str]) -> ServeProcess:
    try:
        line = lines.get(timeout=_STARTS_WITHIN_S)
    except queue.Empty:
        text = f"expected an address from genesis serve within {_STARTS_WITHIN_S:.0f} s: {''.join(errors)}"
        raise TimeoutError(text) from None
    if not line:
        raise RuntimeError(f"genesis serve ended with {process.wait(_WITHIN_S)}: {''.join(errors)}")
    address = next(part.strip('",') for part in line.split() if part.strip('",').startswith("http://"))
    return ServeProcess(process, line, address.rstrip("/"), errors)


def _read(stream: object, put: object) -> None:
    """Hands every line on, and an empty one at the end."""
    with stream:  # type: ignore[attr-defined]
        for line in stream:  # type: ignore[attr-defined]
            put(line)  # type: ignore[operator]
    put("")  # type: ignore[operator]
