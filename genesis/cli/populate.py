"""``genesis populate``: text into a store, resuming where the store stands."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from genesis.cli.options import JsonOption, SourcesOption, StoreOption, load_sources
from genesis.cli.running import stop_on_signals
from genesis.errors import InterruptedRunError, UsageError
from manifests import SourcesFile, SourceSpec

logger = logging.getLogger("genesis")


def populate_command(
    source: Annotated[str, typer.Option("--source", help="A source of 'genesis sources', 'python-docs', or 'all'.")],
    store: StoreOption,
    more_inputs: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help="More input, as --input.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="Files, folders or patterns to read instead of the Hub; may be repeated."),
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Worker processes. [default: all cores]")] = None,
    max_shards: Annotated[
        int | None,
        typer.Option("--max-shards", help="Stop when the source has this many shards. [default: its target]"),
    ] = None,
    max_documents: Annotated[
        int | None, typer.Option("--max-documents", help="Read no further than this many documents of the source.")
    ] = None,
    learn_documents: Annotated[
        int, typer.Option("--learn-documents", help="Documents the vocabulary is learned from.")
    ] = 10_000,
    merges: Annotated[
        int | None,
        typer.Option("--merges", help="Merges to learn. [default: 31,734 in an empty store, else the source's share]"),
    ] = None,
    shard_tokens: Annotated[
        int | None,
        typer.Option("--shard-tokens", help="Token ids a shard. [default: the store's, 2,500,000 for a new one]"),
    ] = None,
    packed: Annotated[
        bool,
        typer.Option(
            "--packed/--no-packed",
            envvar="GENESIS_PACKED",
            help="Write each shard's transfer form too, a sixth of its size, for readers over a network.",
        ),
    ] = True,
    sign_key: Annotated[
        Path | None, typer.Option("--sign-key", help="Ed25519 private key ('genesis keygen') to sign manifests with.")
    ] = None,
    cloudfront_distribution: Annotated[
        str | None,
        typer.Option("--cloudfront-distribution", help="CloudFront distribution to invalidate after a publish."),
    ] = None,
    mended_input: Annotated[
        bool,
        typer.Option("--mended-input", help="Go on in an input file that was damaged and has been mended."),
    ] = False,
    lease_s: Annotated[
        float, typer.Option("--lease-s", help="Seconds without a sign of life after which others may take the store.")
    ] = 60.0,
    sources_file: SourcesOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be read, learned and written; write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Turn a source's text into token shards in a store, going on from where it stands."""
    from genesis.cli.running import PopulateCommand

    sources = load_sources(sources_file)
    files = (*(inputs or ()), *(more_inputs or ()))  # A pattern the shell expanded leaves all but the first behind.
    run = PopulateCommand(
        specs=_chosen(source, sources, files),
        store_url=store,
        inputs=files,
        workers=workers,
        max_shards=max_shards,
        max_documents=max_documents,
        learn_documents=learn_documents,
        merges=merges,
        shard_tokens=shard_tokens,
        packed=packed,
        sign_key=sign_key,
        cloudfront_distribution=cloudfront_distribution,
        mended_input=mended_input,
        lease_s=lease_s,
        as_json=as_json,
    )
    if dry_run:
        run.print_plan()
        return 0
    with stop_on_signals() as stop:
        try:
            run.populate(stop)
        except InterruptedRunError as error:
            typer.echo(f"genesis: {error}", err=True)
    return stop.exit_code


def _chosen(name: str, sources: SourcesFile, inputs: tuple[str, ...]) -> list[SourceSpec]:
    from genesis.sources import find_source

    if name != "all":
        return [find_source(name, sources)]
    if inputs:
        raise UsageError("--source all reads every enabled source from the Hub; --input goes with one --source")
    return sources.enabled()
