"""``genesis export shards``: a store's ids as Megatron, MosaicML Streaming, datatrove or numpy read them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from genesis.cli.common import JsonOption, StoreOption, count, stop_on_signals
from genesis.cli.verify import read_public_key
from genesis.export import ExportFormat, ExportOptions, ExportResult, export_shards
from genesis.export.options import parse_shard_range
from genesis.populate.progress import counted, format_duration, format_size
from genesis.store import open_readable
from manifests import canonical_json

logger = logging.getLogger("genesis")

_LINE_EVERY_S = 10.0


def shards_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to.")],
    target: Annotated[
        ExportFormat,
        typer.Option(
            "--to",
            help="megatron: .bin and .idx; mds: mosaicml-streaming; datatrove: .ds; npy: two numpy arrays.",
        ),
    ],
    store: StoreOption,
    source: Annotated[
        str | None, typer.Option("--source", help="Only this source. [default: one after the other]")
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option("--shards", metavar="FIRST:END", help="Only the documents that begin in these shards."),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", help="Name of the files, before their endings (not for mds).")
    ] = "tokens",
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="mds: windows of so many ids instead of a document a sample.")
    ] = None,
    size_limit: Annotated[int, typer.Option("--size-limit", help="mds: bytes of a shard file.")] = 1 << 26,
    compression: Annotated[
        str | None, typer.Option("--compression", help="mds: compress shard files, zstd or zstd:LEVEL.")
    ] = None,
    hashes: Annotated[
        list[str] | None, typer.Option("--hash", help="mds: digest for index.json, sha256 say; may be repeated.")
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option("--public-key", help="Ed25519 public key that must have signed the manifest.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="Shards read at once.")] = 2,
    as_json: JsonOption = False,
) -> int:
    """Export token shards for other libraries, every id verified; the same command goes on where it was stopped."""
    first_shard, end_shard = (0, None) if shards is None else parse_shard_range(shards)
    options = ExportOptions(
        target=target,
        source=source,
        first_shard=first_shard,
        end_shard=end_shard,
        name=name,
        seq_len=seq_len,
        size_limit_bytes=size_limit,
        compression=compression,
        hashes=tuple(sorted(hashes or ())),
        threads=threads,
    )
    key = read_public_key(public_key)
    with closing(open_readable(store)) as readable, stop_on_signals() as stop, _progress() as progress:
        result = export_shards(readable, folder.expanduser(), options, public_key=key, stop=stop, on_progress=progress)
    typer.echo(canonical_json(asdict(result)).decode() if as_json else "\n".join(_lines(result)))
    return stop.exit_code if result.interrupted else 0


class _LineNowAndThen:
    """Logs how far an export is, at most every ten seconds."""

    def __init__(self) -> None:
        self._shown_at_s = time.monotonic()

    def show(self, done: int, total: int) -> None:
        """Takes the number of shards that are done, of ``total``."""
        if time.monotonic() - self._shown_at_s >= _LINE_EVERY_S:
            self._shown_at_s = time.monotonic()
            logger.info("%s of %s shards", count(done), count(max(total, done)))


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """What to tell of progress: a bar if standard error is a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _LineNowAndThen().show
        return
    with tqdm(unit=" shards", leave=False, mininterval=0.5) as bar:

        def show(done: int, total: int) -> None:
            bar.total = max(total, done)
            bar.update(done - bar.n)

        yield show


def _lines(result: ExportResult) -> list[str]:
    documents = f"{count(result.documents)} documents, {count(result.tokens)} ids ({result.dtype})"
    done = f"{documents} of {counted(result.shards, 'shard')}"
    if result.interrupted:
        return [f"{result.folder}: stopped as asked after {done}; the same command goes on from here"]
    if result.was_complete:
        return [f"{result.folder}: complete already: {done}"]
    rate = format_size(result.id_bytes / max(result.seconds, 1e-9))
    names = ", ".join(result.files) if len(result.files) <= 4 else f"{result.files[0]} and {len(result.files) - 1} more"
    lines = [f"{result.folder}: {names}: {done}; {format_duration(result.seconds)} ({rate}/s of ids)"]
    if result.skipped_tokens:
        lines.append(f"left out: {count(result.skipped_tokens)} ids of documents that begin in earlier shards")
    if result.cut_tokens:
        lines.append(f"left out: {count(result.cut_tokens)} ids behind the last whole document or window of a source")
    return lines
