"""``genesis inspect``: what is inside a store. ``genesis export``: its vocabulary in the forms other libraries read."""

from __future__ import annotations

import json
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from genesis.cli.common import StoreOption, count, printable
from genesis.errors import ObjectNotFoundError, UsageError
from genesis.populate.progress import format_size
from genesis.snapshot import read_checkpoints_if_there, read_manifest, read_vocabulary, require_manifest
from genesis.store import CachePolicy, open_readable, open_store
from manifests import CHECKPOINTS_KEY, Checkpoints, Manifest, ShardEntry, canonical_json

if TYPE_CHECKING:
    from genesis.inspection import DocumentView, ShardInspection, Token, VocabularyInspection

app = typer.Typer(help="Look inside a store.", no_args_is_help=True)

_JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command("shard")
def shard_command(
    shard_id: Annotated[int, typer.Argument(metavar="N", help="Which shard.")],
    store: StoreOption,
    documents: Annotated[int, typer.Option("--documents", min=0, help="Decode so many documents.")] = 1,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, help="Decode so many ids of each document; 0 for all.")
    ] = 500,
    tokens: Annotated[bool, typer.Option("--tokens", help="List the ids one by one.")] = False,
    as_json: _JsonOption = False,
) -> int:
    """Show a shard's facts and its first documents."""
    from genesis.inspection import inspect_shard

    with closing(open_readable(store)) as readable:
        found = inspect_shard(
            readable,
            require_manifest(readable).manifest,
            shard_id,
            num_documents=documents,
            max_tokens=max_tokens or None,
            with_tokens=tokens,
        )
    typer.echo(found.model_dump_json(indent=2) if as_json else "\n".join(_shard_lines(found)))
    return 0


@app.command("manifest")
def manifest_command(store: StoreOption, as_json: _JsonOption = False) -> int:
    """Show what readers trust."""
    with closing(open_readable(store)) as readable:
        published = require_manifest(readable)
    typer.echo(_indented(published.manifest) if as_json else "\n".join(_manifest_lines(published.manifest)))
    return 0


@app.command("checkpoint")
def checkpoint_command(store: StoreOption, as_json: _JsonOption = False) -> int:
    """Show what the populator resumes from."""
    with closing(open_readable(store)) as readable:
        found = read_checkpoints_if_there(readable)
    if found is None:
        raise ObjectNotFoundError(
            f"{readable.url}: expected {CHECKPOINTS_KEY}, found none; check --store, or fill it with 'genesis populate'"
        )
    typer.echo(_indented(found) if as_json else "\n".join(_checkpoint_lines(found)))
    return 0


@app.command("vocabulary")
def vocabulary_command(
    store: StoreOption,
    encode: Annotated[str | None, typer.Option("--encode", metavar="TEXT", help="Show the ids of a text.")] = None,
    as_json: _JsonOption = False,
) -> int:
    """Show the vocabulary in numbers, or the ids of a text."""
    from genesis.inspection import encode_text, inspect_vocabulary

    with closing(open_readable(store)) as readable:
        published = read_manifest(readable)
        manifest = published.manifest if published else None
        if encode is not None:
            encoded = encode_text(read_vocabulary(readable, manifest), encode)
            typer.echo(encoded.model_dump_json(indent=2) if as_json else _token_line(encoded.tokens))
            return 0
        found = inspect_vocabulary(readable, manifest)
    typer.echo(found.model_dump_json(indent=2) if as_json else "\n".join(_vocabulary_lines(found)))
    return 0


def _indented(document: Manifest | Checkpoints) -> str:
    return json.dumps(document.to_object(), ensure_ascii=False, sort_keys=True, indent=2)


def _shard_lines(found: ShardInspection) -> list[str]:
    entry = found.entry
    lines = [
        f"{found.url}/{found.key}",
        f"source {entry.source}, documents {count(entry.first_document)} to {count(entry.last_document)}, "
        f"{count(found.num_eos)} of them end here",
        f"{count(entry.tokens)} ids below {count(entry.next_merge_id)}, {count(entry.size_bytes)} bytes",
        f"sha256 {entry.sha256}"
        + ("" if found.sha256_matches else ", WHICH THE FILE DOES NOT HAVE: run genesis verify"),
        *_packed_lines(entry),
        f"in {found.segment}",
    ]
    for document in found.documents:
        lines += ["", *_document_lines(document)]
    return lines


def _packed_lines(entry: ShardEntry) -> list[str]:
    if entry.packed is None:
        return []
    per_token = entry.packed.size_bytes / entry.tokens
    return [f"packed {count(entry.packed.size_bytes)} bytes, {per_token:.2f} a token, in {entry.packed.key}"]


def _document_lines(document: DocumentView) -> list[str]:
    remarks = [f"{count(document.num_tokens)} ids here"]
    if document.begins_before:
        remarks.append("begins in an earlier shard")
    if document.continues_after:
        remarks.append("goes on in a later shard")
    lines = [f"--- document {count(document.ordinal)} ({', '.join(remarks)})", printable(document.text)]
    if document.is_cut:
        lines.append("--- … (--max-tokens 0 shows all of it)")
    if document.tokens is not None:
        lines.append(_token_line(document.tokens))
    return lines


def _token_line(tokens: tuple[Token, ...]) -> str:
    return " ".join(f"{token.id}:{token.text!r}" for token in tokens)


def _manifest_lines(manifest: Manifest) -> list[str]:
    lines = [
        f"sequence {manifest.sequence}, created {manifest.created_at}, updated {manifest.updated_at}",
        f"signed by {manifest.signature.key_id}" if manifest.signature else "unsigned",
        f"{count(manifest.total_shards)} shards of {count(manifest.shard_tokens)} {manifest.dtype} ids, "
        f"{count(manifest.total_tokens)} tokens, {format_size(manifest.total_size_bytes)}",
    ]
    if manifest.tokenizer:
        lines.append(f"vocabulary {manifest.tokenizer.key}, {count(manifest.tokenizer.next_merge_id)} ids")
    lines += [f"{name}: {canonical_json(totals.model_dump()).decode()}" for name, totals in manifest.sources.items()]
    lines += [f"{ref.key}: shards {ref.first_shard} to {ref.first_shard + ref.shards - 1}" for ref in manifest.index]
    return lines


def _checkpoint_lines(checkpoints: Checkpoints) -> list[str]:
    lines = []
    if checkpoints.writer:
        lines.append(f"writer: {canonical_json(checkpoints.writer.model_dump(exclude_none=True)).decode()}")
    if checkpoints.manifest:
        lines.append(f"stands for manifest {checkpoints.manifest.sequence}")
    for name, source in checkpoints.sources.items():
        facts = source.model_dump(exclude_none=True)
        facts["leftover_tokens"] = len(source.leftover_tokens)
        lines.append(f"{name}: {canonical_json(facts).decode()}")
    return lines


def _vocabulary_lines(found: VocabularyInspection) -> list[str]:
    if found.origin is not None:
        return _frozen_lines(found)
    sources = ", ".join(f"{name} {count(merges)}" for name, merges in found.sources_contributed.items())
    return [
        f"{found.url}/{found.key or 'tokenizer.json'}",
        f"{count(found.ids)} ids of at most {count(found.limit)}; {count(found.merges)} merges"
        + (f" ({sources})" if sources else ""),
        f"merges spell {found.mean_token_bytes} bytes on average; the longest:",
        *(f"{token.id:>10}  {token.text!r}" for token in found.longest),
    ]


def _frozen_lines(found: VocabularyInspection) -> list[str]:
    specials = [f"{name} {token.text} ({token.id})" for name, token in (found.special_tokens or {}).items()]
    lossless = "gives the very text back" if found.is_lossless else "gives normalized text back, not the very bytes"
    return [
        f"{found.url}/{found.key or 'tokenizer.json'}",
        f"{count(found.ids)} ids of {found.origin}, which neither learns nor grows; {count(found.merges)} merges",
        f"{', '.join(specials)}; decoding {lossless}",
        f"pattern: {found.pattern}",
        f"tokens of two bytes and more spell {found.mean_token_bytes} on average; the longest:",
        *(f"{token.id:>10}  {token.text!r}" for token in found.longest),
    ]


export_app = typer.Typer(help="Write what other libraries read.", no_args_is_help=True)


class Target(StrEnum):
    """Whose form."""

    HF = "hf"
    TIKTOKEN = "tiktoken"


@export_app.callback()
def _export() -> None:
    """Write what other libraries read."""


@export_app.command("tokenizer")
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
    from genesis.tokenizer.export import export_files

    if publish and output is not None:
        raise UsageError("expected --output or --publish, found both; run it once for each")
    with closing(open_readable(store)) as readable:
        published = read_manifest(readable)
        files = export_files(read_vocabulary(readable, published.manifest if published else None), target.value)
    if publish:
        _publish(store, files)
    else:
        _write(output or Path(f"tokenizer-{target.value}"), files)
    return 0


def _publish(url: str, files: dict[str, bytes]) -> None:

    with closing(open_store(url)) as store:
        for key, body in files.items():
            store.put(key, body, cache=CachePolicy.SHORT)
            typer.echo(f"{store.url}/{key}")


def _write(folder: Path, files: dict[str, bytes]) -> None:
    from genesis.tokenizer.export import write_file

    for key, body in files.items():
        path = folder / Path(key).name
        write_file(path, body)
        typer.echo(str(path))
