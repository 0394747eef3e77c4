"""``genesis import``: documents that are ids already, from Megatron's or datatrove's files into a store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from genesis.cli.common import JsonOption, StoreOption, count, stop_on_signals
from genesis.cli.populate import end_lines, invalidating, read_sign_key, store_shard_tokens
from genesis.errors import InterruptedRunError, UsageError
from genesis.populate.commit_log import CommitLog
from genesis.populate.lease import LEASE_S
from genesis.populate.options import PopulateOptions, TokenOptions, available_cpus
from genesis.populate.pipeline import PopulateResult, populate
from genesis.populate.progress import counted, format_duration
from genesis.sources.naming import RESERVED_NAMES
from genesis.store import open_store
from genesis.token_formats import TokenFormat
from manifests import SourceSpec, VocabularyFile, canonical_json


def import_command(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Files of ids (.bin, .ds), Megatron's prefixes, or folders of them."),
    ],
    token_format: Annotated[TokenFormat, typer.Option("--from", help="Whose form the files have.")],
    source: Annotated[str, typer.Option("--source", help="Name that the source is to have in the store.")],
    store: StoreOption,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="The tokenizer.json (of Genesis) the ids are of. [default: the store's]"),
    ] = None,
    append_eos: Annotated[bool, typer.Option("--append-eos", help="End with EOS the documents that do not.")] = False,
    workers: Annotated[int | None, typer.Option("--workers", help="Worker processes. [default: all cores]")] = None,
    max_shards: Annotated[
        int | None, typer.Option("--max-shards", help="Stop when the source has this many shards.")
    ] = None,
    max_documents: Annotated[
        int | None, typer.Option("--max-documents", help="Read no further than this many documents of the source.")
    ] = None,
    shard_tokens: Annotated[
        int | None,
        typer.Option("--shard-tokens", help="Token ids a shard. [default: the store's, 2,500,000 for a new one]"),
    ] = None,
    packed: Annotated[
        bool,
        typer.Option("--packed/--no-packed", envvar="GENESIS_PACKED", help="Write each shard's transfer form too."),
    ] = True,
    sign_key: Annotated[
        Path | None, typer.Option("--sign-key", help="Ed25519 private key ('genesis keygen') to sign manifests with.")
    ] = None,
    cloudfront_distribution: Annotated[
        str | None,
        typer.Option("--cloudfront-distribution", help="CloudFront distribution to invalidate after a publish."),
    ] = None,
    lease_s: Annotated[
        float, typer.Option("--lease-s", help="Seconds without a sign of life after which others may take the store.")
    ] = LEASE_S,
    mended_input: Annotated[
        bool,
        typer.Option("--mended-input", help="Go on in an input file that was damaged and has been mended."),
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Take ids that were made with the same vocabulary into a store as they are, going on where it stands."""
    opened = open_store(store)
    options = PopulateOptions(
        spec=_spec(source),
        store_url=store,
        inputs=tuple(paths),
        num_workers=available_cpus() if workers is None else workers,
        shard_tokens=store_shard_tokens(opened, shard_tokens),
        max_shards=max_shards,
        max_documents=max_documents,
        packed=packed,
        mended_input=mended_input,
        lease_s=lease_s,
        tokens=TokenOptions(token_format=token_format, vocabulary=_vocabulary(tokenizer), append_eos=append_eos),
    )
    key = read_sign_key(sign_key)
    with stop_on_signals() as stop, invalidating(cloudfront_distribution, store) as on_publish:
        commit_log = CommitLog(opened, options.shard_tokens, sign_key=key, on_publish=on_publish, lease_s=lease_s)
        try:
            result = populate(options, opened, stop=stop, commit_log=commit_log)
        except InterruptedRunError as error:
            typer.echo(f"genesis: {error}", err=True)
            return stop.exit_code
        opened.close()
    if as_json:
        typer.echo(canonical_json({"store": opened.url, **asdict(result)}).decode())
    else:
        typer.echo("\n".join(_lines(result, opened.url)))
    return stop.exit_code


def _spec(name: str) -> SourceSpec:
    if name in RESERVED_NAMES:
        raise UsageError(f"--source {name}: the name has another meaning; give another")
    try:
        return SourceSpec(name=name)
    except ValidationError:
        raise UsageError(f"--source: expected a name such as 'my-texts', found {name!r}") from None


def _vocabulary(path: Path | None) -> VocabularyFile | None:
    if path is None:
        return None
    try:
        return VocabularyFile.from_json(path.expanduser().read_bytes(), name=str(path))
    except OSError as error:
        raise UsageError(f"--tokenizer {path}: {error.strerror}") from None


def _lines(result: PopulateResult, url: str) -> list[str]:
    name = result.source
    lines = [
        f"{name}: {counted(result.shards_added, 'shard')} added, {count(result.total_shards)} in {url}; "
        f"{counted(result.documents, 'document')} in its shards, {format_duration(result.seconds)}"
    ]
    if result.rows_skipped:
        lines.append(f"{name}: {counted(result.rows_skipped, 'document')} of no id left out")
    return [*lines, *end_lines(result)]
