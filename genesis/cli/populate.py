"""``genesis populate``: text into a store, going on where it stands. ``genesis learn``: its vocabulary beforehand."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast
from urllib.parse import urlsplit

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from genesis.cli.common import (
    JsonOption,
    SourcesOption,
    StoreOption,
    complete_source,
    load_sources,
    stop_on_signals,
)
from genesis.cli.sources import (
    ExcludeOption,
    HubNameOption,
    IncludeOption,
    NameOption,
    TextFieldOption,
    source_options,
)
from genesis.errors import InterruptedRunError, ObjectNotFoundError, UsageError
from genesis.populate.commit_log import CommitLog
from genesis.populate.lease import LEASE_S, LeaseKeeper, held
from genesis.populate.options import EngineName, LearnOptions, PopulateOptions, available_cpus
from genesis.populate.pipeline import PopulateResult, populate
from genesis.populate.planning import learn_all, plan_run
from genesis.populate.progress import counted, format_duration, format_size
from genesis.sources import SourceOptions, find_source, resolve
from genesis.store import Store, open_store
from genesis.store.cloudfront import Invalidator
from genesis.tokenizer import import_vocabulary
from manifests import (
    CHECKPOINTS_KEY,
    SHARD_TOKENS,
    Checkpoints,
    FrozenVocabularyFile,
    SourcesFile,
    SourceSpec,
    canonical_json,
    load_private_key,
)

logger = logging.getLogger("genesis")


def populate_command(
    source: Annotated[
        str,
        typer.Option(
            "--source",
            autocompletion=complete_source,
            help="A source of 'genesis sources', 'python-docs', 'all', hf://owner/name[/pattern][@revision], or a new "
            "name with --input.",
        ),
    ],
    store: StoreOption,
    more_inputs: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help="More input, as --input.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="Files, folders or patterns to read instead of the Hub, s3://bucket/pattern or https://host/file; may "
            "be repeated.",
        ),
    ] = None,
    name: NameOption = None,
    text_field: TextFieldOption = None,
    hf_name: HubNameOption = None,
    include: IncludeOption = None,
    exclude: ExcludeOption = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Worker processes. [default: all cores]")] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="What does the work: 'local', or 'ray' for a cluster (docs/cluster.md).")
    ] = "local",
    address: Annotated[
        str,
        typer.Option(
            "--address",
            envvar="RAY_ADDRESS",
            help="With --engine ray: ray://HOST:PORT, 'auto', or 'local' for one here.",
        ),
    ] = "local",
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
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="A vocabulary made elsewhere instead of learning one: a tokenizer.json, its folder, or tiktoken:NAME.",
        ),
    ] = None,
    eos: Annotated[
        str | None,
        typer.Option("--eos", help="With --tokenizer: the token that ends a document. [default: its maker's]"),
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
    ] = LEASE_S,
    sources_file: SourcesOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be read, learned and written; write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Turn a source's text into token shards in a store, going on from where it stands."""
    sources = load_sources(sources_file)
    files = (*(inputs or ()), *(more_inputs or ()))  # A pattern the shell expanded leaves all but the first behind.
    wishes = source_options(name, text_field, hf_name, include, exclude)
    specs = _chosen(source, sources, files, wishes)
    key = None if dry_run else read_sign_key(sign_key)
    vocabulary = _vocabulary_made_elsewhere(tokenizer, eos)
    opened = open_store(store)
    runs = (  # One by one: the first run gives a new store its shard size.
        PopulateOptions(
            spec=spec,
            store_url=store,
            inputs=files,
            num_workers=available_cpus() if workers is None else workers,
            engine=cast("EngineName", engine),
            ray_address=address,
            max_encoding=workers,
            shard_tokens=store_shard_tokens(opened, shard_tokens),
            max_shards=max_shards,
            max_documents=max_documents,
            packed=packed,
            mended_input=mended_input,
            lease_s=lease_s,
            learn=LearnOptions(documents=learn_documents, merges=merges),
            tokenizer=vocabulary,
        )
        for spec in specs
    )
    if dry_run:
        for options in runs:
            planned = plan_run(options, opened)
            typer.echo(canonical_json(asdict(planned)).decode() if as_json else "\n".join(planned.lines()))
        return 0
    with stop_on_signals() as stop:
        try:
            for options in runs:
                with invalidating(cloudfront_distribution, store) as on_publish:
                    result = _populate(options, opened, stop, key, on_publish)
                _report(result, opened, as_json=as_json)
                if stop.is_set():
                    break
            opened.close()
        except InterruptedRunError as error:
            typer.echo(f"genesis: {error}", err=True)
    return stop.exit_code


def _vocabulary_made_elsewhere(tokenizer: str | None, eos: str | None) -> FrozenVocabularyFile | None:
    if tokenizer is not None:
        return import_vocabulary(tokenizer, eos)
    if eos is not None:
        raise UsageError("--eos: expected --tokenizer with it, since a vocabulary of our own has its EOS")
    return None


def _populate(
    options: PopulateOptions,
    store: Store,
    stop: threading.Event,
    key: Ed25519PrivateKey | None,
    on_publish: Callable[[], None],
) -> PopulateResult:
    workers = counted(options.num_workers, "worker") if options.engine == "local" else f"Ray at {options.ray_address}"
    logger.info("populating %s from %s with %s", store.url, options.spec.name, workers)
    commit_log = CommitLog(store, options.shard_tokens, sign_key=key, on_publish=on_publish, lease_s=options.lease_s)
    return populate(options, store, stop=stop, commit_log=commit_log)


def _report(result: PopulateResult, store: Store, *, as_json: bool) -> None:
    if as_json:
        typer.echo(canonical_json({"store": store.url, **asdict(result)}).decode())
        return
    for line in _lines(result, store.url):
        typer.echo(line)


def _chosen(name: str, sources: SourcesFile, inputs: tuple[str, ...], options: SourceOptions) -> list[SourceSpec]:
    if name != "all":
        return [find_source(name, sources, options, inputs=inputs)]
    if inputs:
        raise UsageError("--source all reads every enabled source from the Hub; --input goes with one --source")
    if options != SourceOptions():
        raise UsageError(
            "--source all takes every source as sources.json has it; --name, --text-field, --hf-name, --include and "
            "--exclude go with one --source"
        )
    return sources.enabled()


def learn_command(
    store: StoreOption,
    all_sources: Annotated[bool, typer.Option("--all", help="Learn from every enabled source.")] = False,
    source: Annotated[
        list[str] | None,
        typer.Option("--source", autocompletion=complete_source, help="Learn from this source; may be repeated."),
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
    sources = load_sources(sources_file)
    if all_sources == bool(source):
        raise UsageError("give either --all or --source NAME")
    files = _by_source(inputs or [])
    named = [find_source(name, sources, inputs=files.get(name, ())) for name in source or ()]
    specs = sources.enabled() if all_sources else named
    unknown = sorted(set(files) - {spec.name for spec in specs})
    if unknown:
        raise UsageError(f"--input {unknown[0]}=…: that source is not among {', '.join(spec.name for spec in specs)}")
    plans = [(spec, resolve(spec, files.get(spec.name, ()))) for spec in specs]
    opened = open_store(store)
    commit_log = CommitLog(opened, store_shard_tokens(opened, shard_tokens), sign_key=read_sign_key(sign_key))
    with stop_on_signals() as stop:
        try:
            with (
                invalidating(cloudfront_distribution, store) as commit_log.on_publish,
                held(commit_log),
                LeaseKeeper(commit_log, on_lost=lambda: None),
            ):
                options = LearnOptions(documents=learn_documents)
                tokenizer = learn_all(
                    commit_log, plans, options, available_cpus() if workers is None else workers, stop
                )
            typer.echo(f"vocabulary of {opened.url}: {tokenizer.current_vocab_size:,} ids")
            for name, merges in tokenizer.sources_contributed.items():
                typer.echo(f"  {name:<14} {merges:>9,} merges")
        except InterruptedRunError as error:
            typer.echo(f"genesis: {error}", err=True)
    return stop.exit_code


def _by_source(inputs: list[str]) -> dict[str, tuple[str, ...]]:
    files: dict[str, tuple[str, ...]] = {}
    for item in inputs:
        name, separator, pattern = item.partition("=")
        if not separator:
            raise UsageError(f"--input: expected NAME=PATTERN such as 'c4=dir/*.json.gz', found {item!r}")
        files[name] = (*files.get(name, ()), pattern)
    return files


def read_sign_key(path: Path | None) -> Ed25519PrivateKey | None:
    """The key in ``path``.

    Raises:
        UsageError: it cannot be read.
        SignatureError: it holds no such key.
    """
    if path is None:
        return None
    try:
        return load_private_key(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--sign-key {path}: {error.strerror}; make one with 'genesis keygen'") from None


def store_shard_tokens(store: Store, asked: int | None) -> int:
    """Ids a shard: what was asked for, else what the store has, else 2,500,000."""
    if asked is not None:
        return asked
    try:
        manifest = Checkpoints.from_json(store.get(CHECKPOINTS_KEY).body).manifest
    except ObjectNotFoundError:
        return SHARD_TOKENS
    return manifest.shard_tokens if manifest else SHARD_TOKENS


@contextmanager
def invalidating(distribution: str | None, store_url: str) -> Iterator[Callable[[], None]]:
    """What to call after each publication; at the end, one that was held back is sent."""
    if distribution is None:
        yield lambda: None
        return
    invalidator = Invalidator(distribution, prefix=urlsplit(store_url).path)
    try:
        yield invalidator.published
    finally:
        invalidator.flush()


def _lines(result: PopulateResult, url: str) -> list[str]:
    name = result.source
    added = f"{counted(result.shards_added, 'shard')} added, {result.total_shards:,} in {url}"
    if result.text_bytes:
        rate = format_size(result.text_bytes / max(result.seconds, 1e-9))
        added += f"; {format_size(result.text_bytes)} of text in {format_duration(result.seconds)} ({rate}/s)"
    lines = [f"{name}: {added}"]
    if result.rows_skipped:
        lines.append(f"{name}: {counted(result.rows_skipped, 'row')} skipped (null, empty, or not valid text)")
    return [*lines, *end_lines(result)]


def end_lines(result: PopulateResult) -> list[str]:
    """How a run ended, for people."""
    name, lines = result.source, []
    if result.ended and result.unsharded_tokens:
        lines.append(
            f"{name}: read to its end; {counted(result.unsharded_tokens, 'token')} of "
            f"{counted(result.unsharded_documents, 'document')} fill no shard and stay behind the checkpoint until "
            "there is more text"
        )
    elif result.ended:
        lines.append(f"{name}: read to its end")
    if result.interrupted:
        lines.append(f"{name}: stopped as asked; the same command goes on from here")
    return lines
