"""`python -m trainer report`: a run's logs as one file to mail or keep."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from genesis.errors import UsageError
from genesis.progress import format_size
from trainer.errors import TrainerUsageError


def report_command(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOGDIR...", help="Folders of --log-dir or of swarm up, single logs, a monitor's history (.sqlite)."
        ),
    ],
    html: Annotated[Path | None, typer.Option("--html", help="Write one HTML file with its data inside.")] = None,
    pdf: Annotated[Path | None, typer.Option("--pdf", help="Print it to a PDF; needs chromium or chrome.")] = None,
    title: Annotated[str, typer.Option(help="Of the report; else the run's name.")] = "",
    json: Annotated[bool, typer.Option("--json", help="The report's data as one JSON object.")] = False,
) -> None:
    """Writes a report on a run: what was run, on what, curves, rounds, incidents, how it was measured."""
    from trainer.monitor.report import run_report
    from trainer.monitor.report.page import report_html

    if html is None and pdf is None and not json:
        raise TrainerUsageError(
            "expected --html FILE, --pdf FILE or --json, found none of them; such as --html run.html"
        )
    try:
        if pdf is not None:
            from genesis.pages import find_browser

            find_browser()  # Rather now than after the logs were read.
        report = run_report(logs, title=title)
        if html is not None or pdf is not None:
            _write(report_html(report), html, pdf)
    except UsageError as error:
        raise TrainerUsageError(str(error)) from error
    if json:
        typer.echo(report.model_dump_json())
        return
    for path in (html, pdf):
        if path is not None:
            said = f"{len(report.nodes)} nodes, {len(report.rounds)} rounds, {len(report.incidents)} incidents"
            typer.echo(f"{path}: {said}, {format_size(path.stat().st_size)}")


def _write(page: str, html: Path | None, pdf: Path | None) -> None:
    from genesis.pages import print_pdf

    with tempfile.TemporaryDirectory(prefix="trainer-report-") as folder:
        for path in [Path(folder, "run.html")] if html is None else [html]:
            try:
                # Beside it first, so that a full disk leaves no half of a report in the place of a whole one.
                made = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                try:
                    made.write_text(page, encoding="utf-8")
                    made.replace(path)
                finally:
                    made.unlink(missing_ok=True)
            except OSError as error:
                raise TrainerUsageError(f"--html {path}: {error.strerror}; name another file") from None
            if pdf is not None:
                print_pdf(path, pdf)
