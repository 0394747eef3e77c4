"""``python -m loader fetch``: a node's shards into the cache, ahead of training.

Several shards are opened at once in daemon threads, so that the process ends at once when it is stopped; the cache
copes with what they leave, as after a kill -9. A shard that fails costs the others nothing. One that was
fetched and could not be kept ends the whole, since later ones could not be kept either.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from loader.cache.settings import format_size
from loader.cli.options import CommonOptions, with_common_options
from loader.cli.output import DownloadProgress, counted, showing_progress
from loader.cli.plan import PlannedShard, assigned_lanes, in_reading_order, planned_shards, total_shards_of
from loader.errors import LoaderError
from loader.session import Session

_TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class _Failure:
    shard_id: int
    message: str


@dataclass(slots=True)
class _Report:
    """The object that ``--json`` prints."""

    store: str
    cache_dir: str
    asked: int
    there_already: list[int] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    failed: list[_Failure] = field(default_factory=list)
    not_begun: list[int] = field(default_factory=list)
    """The cache takes no more."""
    tokens_fetched: int = 0
    received_bytes: int = 0
    """Over the network, manifest and index included; a folder sends none."""
    bytes_per_token: float | None = None
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        return not self.failed and not self.not_begun


@with_common_options("seq_len", "batch_size")
def fetch_command(
    common: CommonOptions,
    shards: Annotated[
        int | None, typer.Option("--shards", min=1, help="Only the first so many of each node and source.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=64, help="Shards fetched at once.")] = 4,
) -> int:
    """Fetch a node's shards into the cache, verified. Run again, it goes on; ends with 1 if any is missing."""
    began = time.monotonic()
    store = common.store_options()
    node_ids = common.node_ids()
    options = common.stream_options(node_ids[0])
    session = Session.open(store)
    lanes = assigned_lanes(session.catalog, options, node_ids, total_shards_of(session.catalog, common.total_shards))
    wanted = in_reading_order([lane for found in lanes.values() for lane in found], shards)
    report = _fetch(session, planned_shards(session, wanted), jobs)
    report.received_bytes = session.mirrors.received_bytes
    report.bytes_per_token = report.received_bytes / report.tokens_fetched if report.tokens_fetched else None
    report.seconds = time.monotonic() - began
    typer.echo(json.dumps(asdict(report), indent=2) if common.as_json else "\n".join(_lines(report)))
    return 0 if report.is_complete else 1


def _fetch(session: Session, planned: Sequence[PlannedShard], jobs: int) -> _Report:
    report = _Report(session.mirrors.addresses[0], str(session.cache.folder), len(planned))
    fitting = list(planned[: session.cache.max_bytes // planned[0].size_bytes])
    by_id = {shard.id: shard for shard in planned}
    done_bytes, before_bytes = 0, session.mirrors.received_bytes
    total_bytes = sum(shard.wire_bytes for shard in fitting if not shard.cached)
    with showing_progress("fetching", total_bytes) as progress:
        if len(fitting) < len(planned):
            progress.complain(_too_small(session, len(fitting), len(planned)))
        for result in _open_shards(session, [shard.id for shard in fitting], jobs):
            if result is not None:
                shard = by_id[result.shard_id]
                done_bytes += 0 if shard.cached or result.error else shard.wire_bytes
                _note(report, shard, result, progress)
            ended = len(report.there_already) + len(report.fetched) + len(report.failed)
            received_bytes = session.mirrors.received_bytes - before_bytes
            progress.show(max(done_bytes, received_bytes), f"{ended} of {counted(len(fitting), 'shard')}")
    begun = {*report.there_already, *report.fetched, *(failure.shard_id for failure in report.failed)}
    report.not_begun = [shard.id for shard in planned if shard.id not in begun]
    return report


def _note(report: _Report, shard: PlannedShard, result: DownloadResult, progress: DownloadProgress) -> None:
    message = result.error
    if message is None and not result.cached:
        message = "expected the cache to keep it, found no way to; see the warning above, and run the command again"
    if message is not None:
        progress.complain(f"shard {shard.id}: {message}")
        report.failed.append(_Failure(shard.id, message))
    elif result.from_cache:
        report.there_already.append(shard.id)
    else:
        report.fetched.append(shard.id)
        report.tokens_fetched += shard.tokens


def _too_small(session: Session, fitting: int, wanted: int) -> str:
    bound = format_size(session.cache.max_bytes)
    return (
        f"expected a cache that holds {counted(wanted, 'shard')}, found one of {bound}, which holds {fitting}: "
        f"fetching those; raise --cache-bytes"
    )


def _lines(report: _Report) -> list[str]:
    wire = "nothing over a network"
    if report.received_bytes:
        wire = f"{format_size(report.received_bytes)} received"
        if report.bytes_per_token is not None:
            wire += f" ({report.bytes_per_token:.2f} bytes a token)"
    lines = [
        f"{len(report.fetched):,} of {counted(report.asked, 'shard')} fetched, {len(report.there_already):,} there "
        f"already; {wire} in {report.seconds:.1f} s"
    ]
    if not report.is_complete:
        missing = sorted([*(failure.shard_id for failure in report.failed), *report.not_begun])
        lines.append(
            f"missing: {', '.join(map(str, missing))}; once that is mended, the same command goes on from here"
        )
    return lines


@dataclass(frozen=True, slots=True)
class DownloadResult:
    """The result of opening one shard."""

    shard_id: int
    from_cache: bool = False
    """It was cached already, and sound."""
    cached: bool = False
    """It is in the cache now."""
    error: str | None = None


def _open_shards(session: Session, shard_ids: Sequence[int], jobs: int) -> Iterator[DownloadResult | None]:
    """Opens shards, ``jobs`` at once, the first ones first.

    Yields:
        Results as they come, and None every 0.2 s while there is none; fewer than shards if one could not be kept.
    """
    waiting = deque(shard_ids)
    results: queue.SimpleQueue[DownloadResult | Exception | None] = queue.SimpleQueue()
    running = min(jobs, len(waiting))
    for number in range(running):
        threading.Thread(target=_work, args=(session, waiting, results), name=f"fetch-{number}", daemon=True).start()
    try:
        while running:
            try:
                result = results.get(timeout=_TICK_S)
            except queue.Empty:
                yield None
                continue
            if isinstance(result, Exception):
                raise result
            if result is None:
                running -= 1
            else:
                yield result
    finally:
        waiting.clear()


def _work(session: Session, waiting: deque[int], results: queue.SimpleQueue[DownloadResult | Exception | None]) -> None:
    """Opens waiting shards until there are none; puts a result for each, and None at the end."""
    while True:
        try:
            shard_id = waiting.popleft()
        except IndexError:
            results.put(None)
            return
        try:
            result = _opened(session, shard_id)
        except Exception as error:  # noqa: BLE001  raised in the thread that waits
            results.put(error)
            return
        if result.error is None and not result.cached:
            waiting.clear()
        results.put(result)


def _opened(session: Session, shard_id: int) -> DownloadResult:
    """Opens and releases a shard: while it is open it may not leave the cache."""
    try:
        shard = session.open_shard(shard_id)
    except LoaderError as error:
        return DownloadResult(shard_id, error=str(error))
    return DownloadResult(shard_id, from_cache=shard.from_cache, cached=shard.cached)
