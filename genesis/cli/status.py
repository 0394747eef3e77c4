"""``genesis status``: what a store holds and how it is coming along."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.cli.common import JsonOption, SourcesOption, StoreOption, compact, count, load_sources, shorten, table
from genesis.errors import GenesisError
from genesis.progress import format_duration, format_percent, format_size
from genesis.store import open_readable
from manifests import PATTERN, ContractError, SourcesFile

if TYPE_CHECKING:
    from genesis.status import SourceStatus, StoreStatus, VocabularyStatus
    from genesis.store import ReadableStore

_NAME_WIDTH = 14
"""Keeps the table within 100 columns whatever the figures."""

_HOME = "\x1b[H"
_CLEAR_TO_LINE_END = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
_CLEAR_ALL = "\x1b[H\x1b[2J"


def status_command(
    store: StoreOption,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval-s", min=0.1, help="Seconds between two looks of --watch.")
    ] = 5.0,
    sources_file: SourcesOption = None,
) -> int:
    """Show what a store holds and how it is coming along. Only reads; any store address will do."""
    from genesis.status import read_status

    sources = load_sources(sources_file)
    readable = open_readable(store)
    try:
        status = read_status(readable, sources)
        if watch:
            _watch(readable, sources, status, interval_s, as_json=as_json)
        else:
            typer.echo(status.model_dump_json(indent=2) if as_json else "\n".join(render(status)))
    except KeyboardInterrupt:
        if not watch:
            raise
    finally:
        readable.close()
    return 0


def _watch(store: ReadableStore, sources: SourcesFile, first: StoreStatus, interval_s: float, *, as_json: bool) -> None:
    """Shows the status until Ctrl-C; a store that cannot be read for a while does not end it."""
    from genesis.status import read_status

    status, failure = first, ""
    redraw = not as_json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if redraw:
        typer.echo(_CLEAR_ALL, nl=False)
    while True:
        _show(status, failure, as_json=as_json, redraw=redraw)
        time.sleep(interval_s)
        try:
            status, failure = read_status(store, sources, previous=status), ""
        except (GenesisError, ContractError) as error:
            failure = str(error)


def _show(status: StoreStatus, failure: str, *, as_json: bool, redraw: bool) -> None:
    if failure and not redraw:
        typer.echo(f"genesis: {failure}", err=True)
    elif as_json:
        typer.echo(status.model_dump_json())
    elif redraw:
        lines = [*render(status), *([f"genesis: {failure}"] if failure else [])]
        body = "".join(f"{line}{_CLEAR_TO_LINE_END}\n" for line in lines)
        typer.echo(_HOME + body + _CLEAR_BELOW, nl=False)
    else:
        typer.echo("\n".join([*render(status), ""]))
    sys.stdout.flush()


def render(status: StoreStatus) -> list[str]:
    """The status as text of at most 100 columns (longer only for a long address or note)."""
    lines = [status.url, *_overview(status)]
    if status.sources:
        lines += ["", *_table(status.sources), *_remarks(status.sources)]
    if status.pending:
        lines.append(f"not begun: {', '.join(status.pending)}")
    if status.vocabulary:
        lines += ["", *_vocabulary(status.vocabulary)]
    return [*lines, *(f"note: {note}" for note in status.notes)]


def _overview(status: StoreStatus) -> list[str]:
    totals = status.totals
    text = f", {format_size(totals.text_bytes)} of text" if totals.text_bytes is not None else ""
    signed = f", signed by {status.signed_by}" if status.signed_by else ", unsigned"
    commit = f"commit {status.sequence} of {status.updated_at}{signed}" if status.updated_at else "no commit yet"
    return [
        f"{count(totals.shards)} shards, {count(totals.tokens)} tokens, {count(totals.documents)} documents, "
        f"{format_size(totals.shard_bytes)}{text}",
        commit,
        _lease(status),
    ]


def _lease(status: StoreStatus) -> str:
    writer = status.writer
    if writer is None:
        return "writer: unknown"
    if writer.state == "released":
        return "writer: none"
    if writer.state == "stale":
        return f"writer: none; the lease of {writer.description} is stale"
    return f"writer: {writer.description}"


def _table(sources: tuple[SourceStatus, ...]) -> list[str]:
    header = ("source", "shards", "target", "tokens", "documents", "text", "tokens/s", "ETA", "last commit")
    rows = [
        (
            shorten(source.name, _NAME_WIDTH),
            compact(source.shards),
            compact(source.target_shards),
            compact(source.tokens),
            compact(source.documents),
            format_size(source.text_bytes) if source.text_bytes is not None else "-",
            compact(source.tokens_per_s),
            _time_left(source),
            format_duration(source.last_commit_age_s) if source.last_commit_age_s is not None else "-",
        )
        for source in sources
    ]
    return table(header, rows)


def _time_left(source: SourceStatus) -> str:
    if source.ended:
        return "ended"
    return "-" if source.eta_s is None else format_duration(source.eta_s)


def _remarks(sources: tuple[SourceStatus, ...]) -> list[str]:
    lines = []
    for source in sources:
        remarks = []
        if source.input_bytes_read is not None and source.input_bytes:
            share = format_percent(source.input_bytes_read / source.input_bytes)
            sizes = f"{format_size(source.input_bytes_read)} of {format_size(source.input_bytes)}"
            remarks.append(f"{share} of the input read ({sizes})")
        if source.unsharded_tokens:
            documents = f"{count(source.unsharded_documents)} documents"
            remarks.append(f"{count(source.unsharded_tokens)} tokens of {documents} fill no shard yet")
        elif source.leftover_tokens:
            remarks.append(f"{count(source.leftover_tokens)} tokens left over for the next shard")
        if source.rows_skipped:
            remarks.append(f"{count(source.rows_skipped)} rows skipped")
        if remarks:
            lines.append(f"{source.name}: {', '.join(remarks)}")
    return lines


def _vocabulary(vocabulary: VocabularyStatus) -> list[str]:
    if vocabulary.merges is None:
        return _vocabulary_made_elsewhere(vocabulary)
    lines = [f"vocabulary: {count(vocabulary.ids)} ids, {count(vocabulary.merges)} merges ({vocabulary.sha256[:16]})"]
    if vocabulary.sources_contributed:
        parts = [f"{name} {count(merges)}" for name, merges in vocabulary.sources_contributed.items()]
        lines += _wrapped("merges by source: ", parts)
    if vocabulary.pattern:
        lines.append(f"pattern: {_known_pattern(vocabulary.pattern)}")
    return lines


def _vocabulary_made_elsewhere(vocabulary: VocabularyStatus) -> list[str]:
    eos = f", EOS {vocabulary.eos_token}" if vocabulary.eos_token else ", EOS"
    encoder = f", encoded by {vocabulary.encoder}" if vocabulary.encoder else ""
    lines = [
        f"vocabulary: {count(vocabulary.ids)} ids of {vocabulary.origin or 'another maker'} "
        f"({vocabulary.sha256[:16]}){eos} ({vocabulary.eos_id}){encoder}"
    ]
    if vocabulary.pattern:
        lines.append(f"pattern: {_known_pattern(vocabulary.pattern)}")
    return lines


def _known_pattern(pattern: str) -> str:
    return "GPT-4 (cl100k)" if pattern == PATTERN else pattern


def _wrapped(title: str, parts: list[str], width: int = 100) -> list[str]:
    lines = [title]
    for number, part in enumerate(parts):
        piece = part + ("," if number < len(parts) - 1 else "")
        if lines[-1] != title and len(lines[-1]) + 1 + len(piece) > width:
            lines.append(" " * len(title))
        lines[-1] += piece if lines[-1].endswith(" ") else f" {piece}"
    return lines
