"""``genesis serve``: a store's folder over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.cli.common import SourcesOption, StopSignal, StoreOption, count, load_sources
from genesis.errors import UsageError
from genesis.hangup import drop_closed_terminals, stop_signals

if TYPE_CHECKING:
    from genesis.serve import StoreServer, StoreSummary
    from genesis.store_page import StorePageHandler

logger = logging.getLogger("genesis")


def serve_command(
    store: StoreOption,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8080,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; 0.0.0.0 for every machine that can reach this one.")
    ] = "127.0.0.1",
    max_connections: Annotated[
        int, typer.Option("--max-connections", min=1, help="Clients at once; further ones are told 503.")
    ] = 512,
    idle_timeout_s: Annotated[
        float, typer.Option("--idle-timeout-s", min=0.1, help="Seconds a client may take to send a request.")
    ] = 30.0,
    stall_timeout_s: Annotated[
        float, typer.Option("--stall-timeout-s", min=0.1, help="Seconds a client may take to read 256 KiB.")
    ] = 60.0,
    grace_s: Annotated[
        float, typer.Option("--grace-s", min=0.0, help="Seconds that answers under way have to end when stopped.")
    ] = 10.0,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Show the store to browsers at / (docs/store-page.md).")
    ] = True,
    verify_report: Annotated[
        Path | None,
        typer.Option("--verify-report", help="What 'genesis verify --json' printed, for the page to show."),
    ] = None,
    sources_file: SourcesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what is served where as one JSON object.")] = False,
) -> int:
    """Serve a store's folder over HTTP, read-only, with its page, /healthz and /metrics (docs/serve.md)."""
    from genesis.serve import ManifestReader, ServeLimits, StoreServer, address_of, check_folder, listen
    from genesis.store import folder_of

    folder = folder_of(store)
    if folder is None:
        raise UsageError(f"expected a store in a folder, found {store}; only folders are served")
    limits = ServeLimits(
        max_connections=max_connections,
        idle_timeout_s=idle_timeout_s,
        stall_timeout_s=stall_timeout_s,
        grace_s=grace_s,
    )
    folder = check_folder(folder)
    handler = _page(folder, verify_report, sources_file) if page else None
    if verify_report is not None and handler is None:
        raise UsageError("expected --verify-report with the page that shows it, found --no-page too")
    listener = listen(host, port)
    announcement = _announcement(folder, address_of(listener, host), ManifestReader(folder).read(), as_json=as_json)
    stop = StopSignal()
    asyncio.run(_run(StoreServer(folder, listener, limits, handler), stop, announcement))
    return stop.exit_code


def _page(folder: Path, verify_report: Path | None, sources_file: Path | None) -> StorePageHandler:
    from genesis.store_page import read_verify_report, store_page

    report = read_verify_report(verify_report) if verify_report is not None else None
    return store_page(folder, load_sources(sources_file), report)


async def _run(server: StoreServer, stop: StopSignal, announcement: str) -> None:
    """Serves until the first SIGINT, SIGTERM or SIGHUP; a second SIGINT or SIGTERM cuts what is still being sent."""

    def handle(number: int) -> None:
        if number == signal.SIGHUP:
            drop_closed_terminals()
            if stop.is_set():
                return
        if stop.is_set():
            server.stop(at_once=True)
            return
        stop.signal_number = number
        stop.set()
        logger.info("stopping: finishing the answers under way (once more to stop at once)")
        server.stop()

    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, handle, number)
    typer.echo(announcement)  # Only now: a process that waits for this line may connect, and may send a signal.
    sys.stdout.flush()
    await server.run()


def _announcement(folder: Path, address: str, summary: StoreSummary | None, *, as_json: bool) -> str:
    if as_json:
        served = {
            "folder": str(folder),
            "url": address,
            "sequence": summary.sequence if summary else None,
            "total_shards": summary.total_shards if summary else None,
            "total_tokens": summary.total_tokens if summary else None,
        }
        return json.dumps(served)
    shards = f"{count(summary.total_shards)} shards" if summary else "nothing published yet"
    return f"serving {folder} at {address} ({shards})"
