"""``genesis learn --all``: one vocabulary from every source, each giving its share, before anything is populated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from genesis.cli.options import SourcesOption, StoreOption, load_sources
from genesis.errors import UsageError

logger = logging.getLogger("genesis")


def learn_command(
    store: StoreOption,
    all_sources: Annotated[bool, typer.Option("--all", help="Learn from every enabled source.")] = False,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="Learn from this source; may be repeated.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="NAME=PATTERN: read the source NAME from these files instead of the Hub."),
    ] = None,
    learn_documents: Annotated[
        int, typer.Option("--learn-documents", help="Documents of each source to learn from.")
    ] = 10_000,
    workers: Annotated[int | None, typer.Option("--workers", help="Worker processes. [default: all cores]")] = None,
    shard_tokens: Annotated[
        int | None, typer.Option("--shard-tokens", help="Token ids a shard, for a new store.")
    ] = None,
    sign_key: Annotated[
        Path | None, typer.Option("--sign-key", help="Ed25519 private key to sign the manifest with.")
    ] = None,
    cloudfront_distribution: Annotated[
        str | None, typer.Option("--cloudfront-distribution", help="CloudFront distribution to invalidate afterwards.")
    ] = None,
    sources_file: SourcesOption = None,
) -> int:
    """Learn the vocabulary from several sources, each adding its share of merges."""
    from genesis.cli.running import invalidating, read_sign_key, store_shard_tokens
    from genesis.populate.commit_log import CommitLog
    from genesis.populate.keeper import LeaseKeeper, held
    from genesis.populate.options import LearnOptions, available_cpus
    from genesis.populate.vocabulary import learn_all
    from genesis.sources import find_source, resolve
    from genesis.store import open_store

    sources = load_sources(sources_file)
    if all_sources == bool(source):
        raise UsageError("give either --all or --source NAME")
    specs = sources.enabled() if all_sources else [find_source(name, sources) for name in source or ()]
    files = _by_source(inputs or [])
    unknown = sorted(set(files) - {spec.name for spec in specs})
    if unknown:
        raise UsageError(f"--input {unknown[0]}=…: that source is not among {', '.join(spec.name for spec in specs)}")
    plans = [(spec, resolve(spec, files.get(spec.name, ()))) for spec in specs]
    opened = open_store(store)
    commit_log = CommitLog(opened, store_shard_tokens(opened, shard_tokens), sign_key=read_sign_key(sign_key))
    with (
        invalidating(cloudfront_distribution, store) as commit_log.on_publish,
        held(commit_log),
        LeaseKeeper(commit_log, on_lost=lambda: None),
    ):
        options = LearnOptions(documents=learn_documents)
        tokenizer = learn_all(commit_log, plans, options, available_cpus() if workers is None else workers)
    typer.echo(f"vocabulary of {opened.url}: {tokenizer.current_vocab_size:,} ids")
    for name, merges in tokenizer.sources_contributed.items():
        typer.echo(f"  {name:<14} {merges:>9,} merges")
    return 0


def _by_source(inputs: list[str]) -> dict[str, tuple[str, ...]]:
    files: dict[str, tuple[str, ...]] = {}
    for item in inputs:
        name, separator, pattern = item.partition("=")
        if not separator:
            raise UsageError(f"--input: expected NAME=PATTERN such as 'c4=dir/*.json.gz', found {item!r}")
        files[name] = (*files.get(name, ()), pattern)
    return files
