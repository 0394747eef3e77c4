"""``python -m loader fetch``: a node's shards into the cache, ahead of training."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from loader.cache.sizes import format_size
from loader.cli.assigning import (
    PlannedShard,
    assigned_lanes,
    in_reading_order,
    planned_shards,
    total_shards_of,
    wire_bytes,
)
from loader.cli.downloads import Outcome, open_shards
from loader.cli.options import (
    AssignmentOption,
    AssignmentRule,
    BandwidthOption,
    CacheBytesOption,
    CacheDirOption,
    CountOption,
    HoldoutOption,
    JsonOption,
    MirrorOption,
    NodeIdOption,
    NodesFromOption,
    PublicKeyOption,
    SeedOption,
    SourceOption,
    SplitName,
    SplitOption,
    StoreOption,
    TimeoutOption,
    TotalShardsOption,
    node_ids_of,
    sources_of,
    store_options,
)
from loader.cli.progress import Progress, showing_progress
from loader.cli.tables import counted
from loader.options import StreamOptions
from loader.session import Session
from loader.stream.assignment import DEFAULT_COUNT

__all__ = ["fetch_command"]


@dataclass(frozen=True, slots=True)
class _Failure:
    shard_id: int
    message: str


@dataclass(slots=True)
class _Report:
    """What came of it, as ``--json`` prints it."""

    store: str
    cache_dir: str
    asked: int
    """Shards."""
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


def fetch_command(
    store: StoreOption,
    node_id: NodeIdOption = None,
    nodes_from: NodesFromOption = None,
    shards: Annotated[
        int | None, typer.Option("--shards", min=1, help="Only the first so many of each node and source.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=64, help="Shards fetched at once.")] = 4,
    count: CountOption = DEFAULT_COUNT,
    assignment: AssignmentOption = AssignmentRule.MODULO,
    source: SourceOption = None,
    holdout: HoldoutOption = 0,
    split: SplitOption = SplitName.TRAIN,
    seed: SeedOption = 0,
    total_shards: TotalShardsOption = None,
    mirror: MirrorOption = None,
    public_key: PublicKeyOption = None,
    cache_dir: CacheDirOption = None,
    cache_bytes: CacheBytesOption = None,
    max_bandwidth: BandwidthOption = None,
    timeout_s: TimeoutOption = 600.0,
    as_json: JsonOption = False,
) -> int:
    """Fetch a node's shards into the cache, verified. Run again, it goes on; ends with 1 if any is missing."""
    began = time.monotonic()
    where = store_options(store, mirror, public_key, cache_dir, cache_bytes, max_bandwidth, timeout_s)
    node_ids = node_ids_of(node_id, nodes_from)
    options = StreamOptions(
        node_id=node_ids[0],
        seed=seed,
        count=count,
        assignment=assignment.value,
        sources=sources_of(source),
        holdout=holdout,
        split=split.value,
    )
    session = Session.open(where)
    lanes = assigned_lanes(session.catalog, options, node_ids, total_shards_of(session.catalog, total_shards))
    wanted = in_reading_order([lane for found in lanes.values() for lane in found], shards)
    report = _fetch(session, planned_shards(session, wanted), jobs)
    report.received_bytes = session.mirrors.received_bytes
    report.bytes_per_token = report.received_bytes / report.tokens_fetched if report.tokens_fetched else None
    report.seconds = time.monotonic() - began
    typer.echo(json.dumps(asdict(report), indent=2) if as_json else "\n".join(_lines(report)))
    return 0 if report.is_complete else 1


def _fetch(session: Session, planned: Sequence[PlannedShard], jobs: int) -> _Report:
    report = _Report(session.mirrors.addresses[0], str(session.cache.folder), len(planned))
    fitting = list(planned[: session.cache.max_bytes // planned[0].size_bytes])
    by_id = {shard.id: shard for shard in planned}
    done_bytes, before_bytes = 0, session.mirrors.received_bytes
    total_bytes = sum(wire_bytes(shard) for shard in fitting if not shard.cached)
    with showing_progress("fetching", total_bytes) as progress:
        if len(fitting) < len(planned):
            progress.complain(_too_small(session, len(fitting), len(planned)))
        for outcome in open_shards(session, [shard.id for shard in fitting], jobs):
            if outcome is not None:
                shard = by_id[outcome.shard_id]
                done_bytes += 0 if shard.cached or outcome.error else wire_bytes(shard)
                _note(report, shard, outcome, progress)
            ended = len(report.there_already) + len(report.fetched) + len(report.failed)
            received_bytes = session.mirrors.received_bytes - before_bytes
            progress.show(max(done_bytes, received_bytes), f"{ended} of {counted(len(fitting), 'shard')}")
    begun = {*report.there_already, *report.fetched, *(failure.shard_id for failure in report.failed)}
    report.not_begun = [shard.id for shard in planned if shard.id not in begun]
    return report


def _note(report: _Report, shard: PlannedShard, outcome: Outcome, progress: Progress) -> None:
    message = outcome.error
    if message is None and not outcome.cached:
        message = "expected the cache to keep it, found no way to; see the warning above, and run the command again"
    if message is not None:
        progress.complain(f"shard {shard.id}: {message}")
        report.failed.append(_Failure(shard.id, message))
    elif outcome.from_cache:
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
