"""Real caching CDNs before a store, each a process of its own on a free port of 127.0.0.1.

- `nginx_cdn`: nginx with the configuration that docs/serve.md shows, ``proxy_cache`` on a folder of its own.
- `varnish_cdn`: varnish with its built-in rules, in memory.

Both tell in ``X-Cache-Status`` what the cache did: ``HIT`` or ``MISS``, nginx also ``EXPIRED`` or ``REVALIDATED``. They
are Debian's, unpacked at the first use by `debian_packages`; where that is not possible a test fails with the reason.

`CdnClock` moves the wall clock that an nginx sees, so that what is cached for 60 s expires without waiting.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.debian_packages import PackagesError, Tree, unpacked
from tests.support.s3_servers import serving

_DOCUMENT = Path(__file__).parents[2] / "docs" / "serve.md"
_CACHE_ZONE_PATH = "/var/cache/nginx/genesis"
_LISTEN = "listen 80;"
_ORIGIN = "http://127.0.0.1:8080"

_VCL = """
vcl 4.1;
backend origin {{ .host = "{host}"; .port = "{port}"; }}
sub vcl_hash {{
    hash_data(regsub(req.url, "\\?.*$", ""));
    return (lookup);
}}
sub vcl_backend_response {{
    if (beresp.http.Cache-Control ~ "must-revalidate") {{ set beresp.grace = 0s; }}
    set beresp.keep = 1h;
}}
sub vcl_deliver {{
    if (obj.hits > 0) {{ set resp.http.X-Cache-Status = "HIT"; }} else {{ set resp.http.X-Cache-Status = "MISS"; }}
}}
"""

_STDINT = """
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;
typedef unsigned long uint64_t; typedef long intptr_t; typedef unsigned long uintptr_t;
"""
"""All that the C code that varnish makes of its rules wants of the system's headers."""


class CdnClock:
    """The wall clock of a CDN: the real one, plus what `advance` has added."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "cdn-clock"
        self._ahead_s = 0
        self._write()

    def advance(self, seconds: int) -> None:
        """Lets ``seconds`` pass; the CDN sees it at once."""
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
            return [*_with(environment), str(tree.program("nginx")), *flags]

        with serving(command) as server:
            yield server.endpoint


@contextmanager
def varnish_cdn(origin_url: str) -> Iterator[str]:
    """varnish as a cache before ``origin_url``; yields its address."""
    tree = unpacked("varnish", "tcc")
    origin = urlsplit(origin_url)
    with tempfile.TemporaryDirectory(prefix="varnish-cdn-") as name:
        folder = Path(name)
        rules = folder / "rules.vcl"
        rules.write_text(_VCL.format(host=origin.hostname, port=origin.port or 80))
        (folder / "stdint.h").write_text(_STDINT)

        def command(port: int) -> list[str]:
            work = folder / f"work-{port}"
            flags = ["-F", "-a", f"127.0.0.1:{port}", "-T", "none", "-j", "none", "-n", str(work), "-f", str(rules)]
            parameters = [f"cc_command={_compiler(tree, folder)}", f"vmod_path={_only(tree, '**/vmods')}"]
            return [
                *_with(tree.environment()),
                str(tree.program("varnishd")),
                *flags,
                *("-s", "malloc,256m"),
                *(part for parameter in parameters for part in ("-p", parameter)),
            ]

        with serving(command) as server:
            yield server.endpoint


def _with(environment: dict[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in environment.items())]


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
    """The configuration that docs/serve.md shows."""
    found = re.search(r"```nginx\n(.*?)```", _DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        raise AssertionError(f"expected an example marked nginx in {_DOCUMENT}")
    return found[1]


def _compiler(tree: Tree, headers: Path) -> str:
    """varnish compiles its rules; tcc is 0.3 MB where gcc is 100 and may be missing."""
    own = _only(tree, "usr/lib/*/tcc")
    return f"{tree.program('tcc')} -B{own} -nostdinc -I{own}/include -I{headers} -nostdlib -shared -o %o %s"


def _only(tree: Tree, pattern: str) -> Path:
    found = list(tree.root.glob(pattern))
    if len(found) != 1:
        raise PackagesError(f"expected one {pattern} below {tree.root}, found {found}")
    return found[0]
