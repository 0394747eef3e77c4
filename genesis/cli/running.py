"""What ``genesis populate`` and ``genesis learn`` do between reading their options and printing the result."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from genesis.errors import ObjectNotFoundError, UsageError
from genesis.populate.commit_log import CommitLog
from genesis.populate.dry_run import plan_run
from genesis.populate.lease import LEASE_S
from genesis.populate.options import LearnOptions, PopulateOptions, available_cpus
from genesis.populate.pipeline import PopulateResult, populate
from genesis.populate.progress import counted, format_duration, format_size
from genesis.store import Store, open_store
from genesis.store.cloudfront import Invalidator
from manifests import (
    CHECKPOINTS_KEY,
    SHARD_TOKENS,
    Checkpoints,
    SourceSpec,
    canonical_json,
    load_private_key,
)

logger = logging.getLogger("genesis")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PopulateCommand:
    """The options of one ``genesis populate``."""

    specs: list[SourceSpec]
    store_url: str
    inputs: tuple[str, ...] = ()
    workers: int | None = None
    max_shards: int | None = None
    max_documents: int | None = None
    learn_documents: int = 10_000
    merges: int | None = None
    shard_tokens: int | None = None
    packed: bool = True
    sign_key: Path | None = None
    cloudfront_distribution: str | None = None
    mended_input: bool = False
    lease_s: float = LEASE_S
    as_json: bool = False

    def populate(self, stop: threading.Event) -> None:
        """Populates from each source in turn and prints what came of it."""
        key = read_sign_key(self.sign_key)
        store = open_store(self.store_url)
        for spec in self.specs:
            options = self._options(spec, store_shard_tokens(store, self.shard_tokens))
            logger.info("populating %s from %s with %s", store.url, spec.name, counted(options.num_workers, "worker"))
            with invalidating(self.cloudfront_distribution, self.store_url) as on_publish:
                commit_log = CommitLog(
                    store, options.shard_tokens, sign_key=key, on_publish=on_publish, lease_s=options.lease_s
                )
                result = populate(options, store, stop=stop, commit_log=commit_log)
            self._report(result, store)
            if stop.is_set():
                break
        store.close()

    def print_plan(self) -> None:
        """Prints what `populate` would do."""
        store = open_store(self.store_url)
        for spec in self.specs:
            planned = plan_run(self._options(spec, store_shard_tokens(store, self.shard_tokens)), store)
            typer.echo(canonical_json(asdict(planned)).decode() if self.as_json else "\n".join(planned.lines()))

    def _options(self, spec: SourceSpec, shard_tokens: int) -> PopulateOptions:
        return PopulateOptions(
            spec=spec,
            store_url=self.store_url,
            inputs=self.inputs,
            num_workers=available_cpus() if self.workers is None else self.workers,
            shard_tokens=shard_tokens,
            max_shards=self.max_shards,
            max_documents=self.max_documents,
            packed=self.packed,
            mended_input=self.mended_input,
            lease_s=self.lease_s,
            learn=LearnOptions(documents=self.learn_documents, merges=self.merges),
        )

    def _report(self, result: PopulateResult, store: Store) -> None:
        if self.as_json:
            typer.echo(canonical_json({"store": store.url, **asdict(result)}).decode())
            return
        for line in _lines(result, store.url):
            typer.echo(line)


def _lines(result: PopulateResult, url: str) -> list[str]:
    name = result.source
    added = f"{counted(result.shards_added, 'shard')} added, {result.total_shards:,} in {url}"
    if result.text_bytes:
        rate = format_size(result.text_bytes / max(result.seconds, 1e-9))
        added += f"; {format_size(result.text_bytes)} of text in {format_duration(result.seconds)} ({rate}/s)"
    lines = [f"{name}: {added}"]
    if result.rows_skipped:
        lines.append(f"{name}: {counted(result.rows_skipped, 'row')} skipped (null, empty, or not valid text)")
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


class StopSignal(threading.Event):
    """Set by the first signal; remembers which."""

    signal_number: int = 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell expects; 0 if none came."""
        return 128 + self.signal_number if self.signal_number else 0


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Within it, the first SIGINT or SIGTERM sets the request and the second raises KeyboardInterrupt."""
    request = StopSignal()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.is_set():
            raise KeyboardInterrupt
        request.signal_number = number
        request.set()
        logger.warning("stopping: finishing the commit in hand (once more to stop at once)")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
