"""``genesis export``: a store's vocabulary in the forms other libraries read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from genesis.cli.options import StoreOption
from genesis.errors import UsageError

app = typer.Typer(help="Write what other libraries read.", no_args_is_help=True)


class Target(StrEnum):
    """Whose form."""

    HF = "hf"
    TIKTOKEN = "tiktoken"


@app.callback()
def _export() -> None:
    """Write what other libraries read."""


@app.command("tokenizer")
def tokenizer_command(
    target: Annotated[
        Target, typer.Option("--to", help="hf: tokenizer.json for transformers; tiktoken: ranks for tiktoken.")
    ],
    store: StoreOption,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder to write to. [default: ./tokenizer-hf, ./tokenizer-tiktoken]"),
    ] = None,
    publish: Annotated[
        bool, typer.Option("--publish", help="Put it into the store, under hf/ or tiktoken/, instead of a folder.")
    ] = False,
) -> int:
    """Export the store's newest vocabulary."""
    from genesis.snapshot import read_manifest, read_vocabulary
    from genesis.store import open_readable
    from genesis.tokenizer.export import export_files

    if publish and output is not None:
        raise UsageError("expected --output or --publish, found both; run it once for each")
    readable = open_readable(store)
    try:
        published = read_manifest(readable)
        files = export_files(read_vocabulary(readable, published.manifest if published else None), target.value)
    finally:
        readable.close()
    if publish:
        _publish(store, files)
    else:
        _write(output or Path(f"tokenizer-{target.value}"), files)
    return 0


def _publish(url: str, files: dict[str, bytes]) -> None:
    from genesis.store import CachePolicy, open_store

    store = open_store(url)
    try:
        for key, body in files.items():
            store.put(key, body, cache=CachePolicy.SHORT)
            typer.echo(f"{store.url}/{key}")
    finally:
        store.close()


def _write(folder: Path, files: dict[str, bytes]) -> None:
    from genesis.tokenizer.export import write_file

    for key, body in files.items():
        path = folder / Path(key).name
        write_file(path, body)
        typer.echo(str(path))
