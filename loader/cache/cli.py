"""``genesis cache``: lists the cached files, or removes them.

genesis may not import loader, so it finds these commands by the entry-point group ``genesis.commands``. Errors become
one line and an exit code here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from loader.cache.folder import CacheEntry
from loader.cache.settings import DEFAULT_CACHE_DIR, cache_bytes, cache_dir, format_size
from loader.cache.shard_cache import ShardCache
from loader.errors import LoaderError, LoaderUsageError
from loader.fetch.known_store import KnownStore
from manifests import MANIFEST_KEY

app = typer.Typer(
    help="Look into the cache of training nodes, or empty it.", no_args_is_help=True, rich_markup_mode=None
)

_FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir", show_default=f"$GENESIS_CACHE_DIR or {DEFAULT_CACHE_DIR}", help="The folder of the cache."
    ),
]
_JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command("ls")
def ls_command(folder: _FolderOption = None, as_json: _JsonOption = False) -> None:
    """List the files, least recently used first, and how much of the bound (GENESIS_CACHE_BYTES) they take."""
    with _one_line_errors():
        cache = ShardCache(cache_dir(folder), cache_bytes())
        entries = cache.entries()
        if not as_json:
            return typer.echo("\n".join(_listing(cache, entries)))
        facts = {
            "folder": str(cache.folder),
            "max_bytes": cache.max_bytes,
            "total_bytes": sum(entry.size_bytes for entry in entries),
            "files": [{**asdict(entry), "last_used_at": entry.last_used_at.isoformat()} for entry in entries],
        }
        typer.echo(json.dumps(facts, indent=2))


@app.command("clear")
def clear_command(folder: _FolderOption = None, as_json: _JsonOption = False) -> None:
    """Remove every file that no process has open."""
    with _one_line_errors():
        cache = ShardCache(cache_dir(folder), cache_bytes())
        report = cache.clear()
        for store in KnownStore.all(cache.folder):
            store.keep_only(frozenset({MANIFEST_KEY}))
        if as_json:
            return typer.echo(json.dumps({"folder": str(cache.folder), **asdict(report)}, indent=2))
        for name in report.kept:
            typer.echo(f"kept {name}: a process has it open")
        removed = f"{_files(len(report.removed))}, {format_size(report.freed_bytes)}"
        typer.echo(f"{cache.folder}: removed {removed}; kept {len(report.kept)}")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except LoaderError as error:
        typer.echo(f"genesis: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, LoaderUsageError) else 1) from error


def _listing(cache: ShardCache, entries: list[CacheEntry]) -> list[str]:
    width = max((len(entry.name) for entry in entries), default=0)
    lines = [
        f"{entry.name:<{width}}  {format_size(entry.size_bytes):>8}  {entry.last_used_at:%Y-%m-%d %H:%M:%S} UTC"
        f"  {_state(entry)}".rstrip()
        for entry in entries
    ]
    total = format_size(sum(entry.size_bytes for entry in entries))
    if indexes := [size for store in KnownStore.all(cache.folder) if (size := store.index_bytes())]:
        of = "a store" if len(indexes) == 1 else f"{len(indexes)} stores"
        lines.append(f"{format_size(sum(indexes))} beside them: the index of {of}")
    return [*lines, f"{cache.folder}: {_files(len(entries))}, {total} of at most {format_size(cache.max_bytes)}"]


def _files(number: int) -> str:
    return f"{number} file" if number == 1 else f"{number} files"


def _state(entry: CacheEntry) -> str:
    if entry.complete:
        return "in use" if entry.in_use else ""
    return "being made" if entry.in_use else "leftover"
