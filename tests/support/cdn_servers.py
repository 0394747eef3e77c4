"""A real caching CDN before a store: nginx with the configuration that docs/serve.md shows, a process of its own.

It tells in ``X-Cache-Status`` what the cache did. It is Debian's: `unpacked` downloads the package, and the libraries
that this machine lacks, with ``apt-get download``, and unpacks them with ``dpkg -x`` below a cache folder, once a
machine: nothing is installed, nobody has to be root. Where that is not possible a test fails with the reason.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from genesis.file_lock import FileLock
from tests.support.s3_servers import serving

_DOCUMENT = Path(__file__).parents[2] / "docs" / "serve.md"
_CACHE_ZONE_PATH = "/var/cache/nginx/genesis"
_LISTEN = "listen 80;"
_ORIGIN = "http://127.0.0.1:8080"


class CdnClock:
    """The wall clock of a CDN: the real one, plus what `advance` has added."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "cdn-clock"
        self._ahead_s = 0
        self._write()

    def advance(self, seconds: int) -> None:
        self._ahead_s += seconds
        self._write()

    def environment(self) -> dict[str, str]:
        """What makes a process see this clock; time-outs and waits go on in real time."""
        libraries = list(unpacked("libfaketime").root.glob("usr/lib/*/faketime/libfaketimeMT.so.1"))
        if len(libraries) != 1:
            raise PackagesError(f"expected one libfaketimeMT.so.1 in the package libfaketime, found {libraries}")
        return {
            "LD_PRELOAD": str(libraries[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(f"+{self._ahead_s}\n")
        new.replace(self._path)


@contextmanager
def nginx_cdn(origin_url: str, *, clock: CdnClock | None = None) -> Iterator[str]:
    """nginx as a cache before ``origin_url``; yields its address."""
    tree = unpacked("nginx")
    clock_environment = clock.environment() if clock else {}
    environment = {**tree.environment(), **clock_environment}
    with tempfile.TemporaryDirectory(prefix="nginx-cdn-") as name:
        folder = Path(name)

        def command(port: int) -> list[str]:
            configuration = folder / f"nginx-{port}.conf"
            configuration.write_text(_nginx_configuration(folder, port, origin_url, [*clock_environment]))
            flags = ["-p", str(folder), "-c", str(configuration), "-e", "stderr"]
            kept = [f"{name}={value}" for name, value in environment.items()]
            return ["env", *kept, str(tree.program("nginx")), *flags]

        with serving(command) as server:
            yield server.endpoint


def _nginx_configuration(folder: Path, port: int, origin_url: str, kept_variables: list[str]) -> str:
    """The documented configuration at other places, in the frame that a process of its own needs."""
    shown = nginx_example()
    for documented, here in (
        (_CACHE_ZONE_PATH, str(folder / "cache")),
        (_LISTEN, f"listen 127.0.0.1:{port};"),
        (_ORIGIN, origin_url.rstrip("/")),
    ):
        if documented not in shown:
            raise AssertionError(f"expected {documented!r} in the nginx example of {_DOCUMENT}")
        shown = shown.replace(documented, here)
    temporary = "\n".join(
        f"    {kind}_temp_path {folder / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    # As root the workers would become 'nobody', who may not enter a temporary folder.
    user = "user root;" if os.geteuid() == 0 else ""
    # nginx clears its environment, and the clock is looked up again at every call.
    kept = "\n".join(f"env {name};" for name in kept_variables)
    return f"""{user}
{kept}
daemon off;
worker_processes 1;
pid {folder / f"nginx-{port}.pid"};
events {{ worker_connections 512; }}
http {{
    access_log off;
{temporary}
{shown}
}}
"""


def nginx_example() -> str:
    found = re.search(r"```nginx\n(.*?)```", _DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise AssertionError(f"expected an example marked nginx in {_DOCUMENT}")
    return found[1]


_LAYOUT = 1
"""Part of the folder's name; raised when what is in it changes its form."""
_LOCK_WITHIN_S = 300.0
_COMMAND_WITHIN_S = 240.0
_ALWAYS_THERE = {"libc6", "libgcc-s1", "libcrypt1"}


class PackagesError(RuntimeError):
    """The packages cannot be had; the message says what was tried."""


@dataclass(frozen=True, slots=True)
class Tree:
    root: Path

    def program(self, name: str) -> Path:
        for folder in ("usr/sbin", "usr/bin"):
            if (path := self.root / folder / name).is_file():
                return path
        raise PackagesError(f"expected the program {name} below {self.root}, found none; remove that folder")

    def environment(self) -> dict[str, str]:
        """What a program needs to find its libraries."""
        folders = sorted({path.parent for path in self.root.glob("**/lib*.so*")})
        return {"LD_LIBRARY_PATH": ":".join(map(str, folders))}


def unpacked(*packages: str, with_dependencies: bool = False) -> Tree:
    """Packages and the libraries they depend on; ``with_dependencies``: also what those depend on, and so on."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise PackagesError(
            f"expected apt-get and dpkg to get {', '.join(packages)} with; this test needs Debian or kin"
        )
    name = hashlib.sha256(" ".join(sorted(packages)).encode()).hexdigest()[:12]
    target = _cache_folder() / f"{_LAYOUT}-{name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(f"{target}.lock"))
    lock.acquire(_LOCK_WITHIN_S)
    with lock:
        if not target.is_dir():
            work = Path(f"{target}.tmp")
            shutil.rmtree(work, ignore_errors=True)
            _fetch(packages, work, with_dependencies=with_dependencies)
            (work / "tree").rename(target)
            shutil.rmtree(work)
    return Tree(target)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "genesis-tests" / "debian"


def _fetch(packages: tuple[str, ...], work: Path, *, with_dependencies: bool) -> None:
    (work / "debs").mkdir(parents=True)
    (work / "tree").mkdir()
    failures = []
    for options in _ways(work):
        try:
            libraries = _libraries(packages, options, with_dependencies=with_dependencies)
            _run(["apt-get", *options, "download", *packages, *libraries], work / "debs")
            break
        except PackagesError as error:
            failures.append(str(error))
    else:
        raise PackagesError(f"cannot get {', '.join(packages)}: {' | then, with new lists: '.join(failures)}")
    for archive in sorted((work / "debs").glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(work / "tree")], work)


def _ways(work: Path) -> Iterator[list[str]]:
    """apt's options: with the machine's own lists of packages, then with fresh ones of our own."""
    yield ["-q"]
    folders = {"Dir::State::lists": work / "lists", "Dir::Cache": work / "apt-cache"}
    for folder in folders.values():
        (folder / "partial").mkdir(parents=True)
        (folder / "archives" / "partial").mkdir(parents=True)
    # Without a sandbox user: that one cannot write below a home folder.
    settings = ["APT::Sandbox::User=", *(f"{key}={folder}" for key, folder in folders.items())]
    options = ["-q", *(part for setting in settings for part in ("-o", setting))]
    _run(["apt-get", *options, "update"], work)
    yield options


def _libraries(packages: tuple[str, ...], options: list[str], *, with_dependencies: bool) -> list[str]:
    """The libraries that the packages depend on and this machine has not got."""
    which = ["--important", *(["--recurse"] if with_dependencies else [])]
    listed = _run(["apt-cache", *options, "depends", *which, *packages], Path("/"))
    names = {line.split()[-1] for line in listed.splitlines() if line.strip().startswith("Depends: lib")}
    wanted = {name for name in names if not name.endswith("-dev")} - _ALWAYS_THERE - set(packages)
    return sorted(name for name in wanted if not _is_installed(name))


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}", package]
    found = subprocess.run(query, capture_output=True, text=True, timeout=_COMMAND_WITHIN_S, check=False)
    return found.stdout.startswith("ii")


def _run(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_COMMAND_WITHIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PackagesError(f"{command[0]} {command[-1]} took more than {_COMMAND_WITHIN_S:.0f} s") from None
    if done.returncode:
        raise PackagesError(f"'{' '.join(command)}' ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
