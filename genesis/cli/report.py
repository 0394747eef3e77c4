"""``genesis report``: a store as one file to mail, to keep, or to put on the CDN beside the store."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from genesis.cli.common import SourcesOption, count, default_store, load_sources
from genesis.errors import UsageError
from genesis.progress import CountProgress, format_size, showing_progress
from genesis.store import folder_of, open_readable

logger = logging.getLogger("genesis")


def report_command(
    store: Annotated[
        str,
        typer.Argument(
            default_factory=default_store,
            show_default="$GENESIS_STORE or ~/.neuroshard/genesis-store",
            help="The store: a folder, s3://bucket/prefix or http(s)://host/path.",
        ),
    ],
    html: Annotated[Path | None, typer.Option("--html", help="Write one HTML file with its data inside.")] = None,
    pdf: Annotated[Path | None, typer.Option("--pdf", help="Print it to a PDF; needs chromium or chrome.")] = None,
    documents: Annotated[int, typer.Option("--documents", help="Documents to show, drawn at random.")] = 12,
    tokens: Annotated[int, typer.Option("--tokens", help="Ids of each document to show at most.")] = 800,
    seed: Annotated[int, typer.Option("--seed", help="Of the documents that are drawn.")] = 0,
    verify_report: Annotated[
        Path | None, typer.Option("--verify-report", help="What 'genesis verify --json' printed, to show it too.")
    ] = None,
    sources_file: SourcesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report's data as one JSON object.")] = False,
) -> int:
    """Write a store's page as one file: sources, shards, vocabulary, documents with their tokens."""
    from genesis.pages import find_browser, print_pdf
    from genesis.store_page import ReportOptions, read_verify_report, store_report

    if html is None and pdf is None and not as_json:
        raise UsageError("expected --html FILE, --pdf FILE or --json, found none of them; such as --html store.html")
    if pdf is not None:
        find_browser()  # Rather now than after the store was read.
    options = ReportOptions(documents=documents, tokens=tokens, seed=seed)
    verified = read_verify_report(verify_report) if verify_report is not None else None
    with closing(open_readable(store)) as readable, _progress() as progress:
        report = store_report(
            readable,
            load_sources(sources_file),
            options,
            name=local.absolute().name if (local := folder_of(store)) is not None else None,
            verify_report=verified,
            on_progress=progress,
        )
    page = report.html() if html is not None or pdf is not None else ""
    if html is not None:
        _write(html, page)
    if pdf is not None:
        with tempfile.TemporaryDirectory(prefix="genesis-report-") as folder:
            printed = Path(folder, "store.html")
            _write(printed, page)
            print_pdf(printed, pdf)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
        return 0
    for path in (html, pdf):
        if path is not None:
            shards = f"{count(report.store.totals.shards if report.store.totals else 0)} shards"
            shown = f"{len(report.documents)} documents"
            typer.echo(f"{path}: {shards}, {shown}, {format_size(path.stat().st_size)}")
    return 0


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """What to tell of progress: (shards of the index read, all shards)."""
    progress = CountProgress(None, lambda done: f"index of {done:,} of {count(progress.total)} shards")

    def show(done: int, total: int) -> None:
        progress.total = total
        progress.update(done)

    with showing_progress("reading", progress.state, logger):
        yield show
