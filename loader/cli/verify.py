"""``python -m loader verify``: cached shards against the manifest, or the batch a node must have trained on."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from loader.cache.sizes import format_size
from loader.cli.assigning import assigned_lanes, in_reading_order, total_shards_of
from loader.cli.checking import Condition, Finding, check_shard, shards_of_store
from loader.cli.options import (
    AssignmentOption,
    AssignmentRule,
    BandwidthOption,
    BatchSizeOption,
    CacheBytesOption,
    CacheDirOption,
    CountOption,
    HoldoutOption,
    JsonOption,
    MirrorOption,
    NodeIdOption,
    PublicKeyOption,
    SeedOption,
    SeqLenOption,
    SourceOption,
    SplitName,
    SplitOption,
    StoreOption,
    TimeoutOption,
    TotalShardsOption,
    node_ids_of,
    numbers_of,
    only_node,
    sources_of,
    store_options,
)
from loader.cli.progress import showing_progress
from loader.cli.tables import counted, printable, runs
from loader.errors import LoaderUsageError
from loader.options import StreamOptions
from loader.pins import Pin, pins_of
from loader.session import Session
from loader.stream.assignment import DEFAULT_COUNT

__all__ = ["verify_command"]

_SHA256_DIGITS = 64


@dataclass(frozen=True, slots=True)
class _Replay:
    """A batch that is asked for."""

    step: int
    rotations: tuple[int, ...]
    pins: tuple[tuple[Pin, ...], ...] | None
    claim: str | None


def verify_command(
    store: StoreOption,
    node_id: NodeIdOption = None,
    all_cached: Annotated[bool, typer.Option("--all", help="Every shard of the store that the cache has.")] = False,
    replay: Annotated[
        int | None,
        typer.Option("--replay", metavar="STEP", min=0, help="Print the sha256 of the node's batch of that step."),
    ] = None,
    rotations: Annotated[
        str | None, typer.Option("--rotations", metavar="STEPS", help="Where the node left a shard early: 100,200.")
    ] = None,
    pins: Annotated[
        list[str] | None,
        typer.Option(
            "--pins",
            metavar="EPOCH:SHARDS,...",
            help="From which epoch on it knew how many shards: 0:6,2:11; once for each --source.",
        ),
    ] = None,
    claim: Annotated[
        str | None, typer.Option("--claim", metavar="SHA256", help="Compare the batch's; ends with 1 if it differs.")
    ] = None,
    seq_len: SeqLenOption = 1024,
    batch_size: BatchSizeOption = 8,
    seed: SeedOption = 0,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="The node's epochs, if it was given any. [default: endless]")
    ] = None,
    count: CountOption = DEFAULT_COUNT,
    assignment: AssignmentOption = AssignmentRule.MODULO,
    source: SourceOption = None,
    holdout: HoldoutOption = 0,
    split: SplitOption = SplitName.TRAIN,
    total_shards: TotalShardsOption = None,
    mirror: MirrorOption = None,
    public_key: PublicKeyOption = None,
    cache_dir: CacheDirOption = None,
    cache_bytes: CacheBytesOption = None,
    max_bandwidth: BandwidthOption = None,
    timeout_s: TimeoutOption = 600.0,
    as_json: JsonOption = False,
) -> int:
    """Check a node's cached shards (sha256, shape, ids), or recompute a batch. Ends with 1 if anything is wrong."""
    where = store_options(store, mirror, public_key, cache_dir, cache_bytes, max_bandwidth, timeout_s)
    if pins is not None and total_shards is not None:
        raise LoaderUsageError("expected --pins or --total-shards, found both; --total-shards N is --pins 0:N")
    asked = _replay_of(replay, rotations, pins, claim)
    if all_cached and (node_id or asked):
        raise LoaderUsageError("expected --all or --node-id, found both; --replay needs one node")
    if asked is not None:
        only_node(node_id, "--replay")
    node_ids = node_ids_of(node_id) if not all_cached else ()
    options = StreamOptions(
        node_id=node_ids[0] if node_ids else "",
        seq_len=seq_len,
        batch_size=batch_size,
        seed=seed,
        epochs=epochs,
        count=count,
        assignment=assignment.value,
        sources=sources_of(source),
        holdout=holdout,
        split=split.value,
    )
    session = Session.open(where)
    total = total_shards_of(session.catalog, total_shards)
    if asked is not None:
        return _tell_replay(session, options, asked, total, as_json=as_json)
    shard_ids = _shards_in_cache(session) if all_cached else _shards_of(session, options, node_ids, total)
    return _check(session, shard_ids, as_json=as_json)


def _replay_of(
    step: int | None, rotations: str | None, pins: Sequence[str] | None, claim: str | None
) -> _Replay | None:
    if step is None:
        if (rotations, pins, claim) != (None, None, None):
            raise LoaderUsageError("--rotations, --pins and --claim: expected --replay STEP beside them, found none")
        return None
    if claim is not None and not (len(claim) == _SHA256_DIGITS and set(claim.lower()) <= set("0123456789abcdef")):
        raise LoaderUsageError(f"--claim: expected {_SHA256_DIGITS} hexadecimal digits, found {claim[:80]!r}")
    return _Replay(
        step,
        numbers_of("--rotations", rotations) if rotations else (),
        pins_of([_pairs_of(lane) for lane in pins], len(pins)) if pins is not None else None,
        claim.lower() if claim else None,
    )


def _pairs_of(lane: str) -> list[tuple[int, ...]]:
    pairs = [numbers_of("--pins", pair.replace(":", ",", 1)) for pair in lane.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise LoaderUsageError(f"--pins: expected EPOCH:SHARDS between commas such as 0:6,2:11, found {lane[:60]!r}")
    return pairs


def _tell_replay(session: Session, options: StreamOptions, asked: _Replay, total_shards: int, *, as_json: bool) -> int:
    """Prints the digest of the batch, or whether a claim holds; returns the exit code."""
    from loader.replay import batch_sha256, replay_batch

    pins = pins_of(asked.pins or [[(0, total_shards)]] * options.num_lanes, options.num_lanes)
    found = batch_sha256(replay_batch(session, options, asked.step, asked.rotations, pins))
    holds = asked.claim in (None, found)
    who = f"{printable(options.node_id)}, step {asked.step}"
    if as_json:
        facts = {"node_id": options.node_id, **asdict(asked), "pins": pins, "sha256": found}
        typer.echo(json.dumps({**facts, "ok": holds}, indent=2))
    elif asked.claim is None:
        typer.echo(found)
    elif holds:
        typer.echo(f"{who}: the claim holds: {found}")
    else:
        typer.echo(f"{who}: the claim does not hold: expected {found}, found {asked.claim}")
    return 0 if holds else 1


def _shards_in_cache(session: Session) -> list[int]:
    return shards_of_store(session.catalog, [entry.name for entry in session.cache.entries() if entry.complete])


def _shards_of(session: Session, options: StreamOptions, node_ids: Sequence[str], total_shards: int) -> list[int]:
    lanes = assigned_lanes(session.catalog, options, node_ids, total_shards).values()
    return in_reading_order([lane for found in lanes for lane in found])


def _check(session: Session, shard_ids: Sequence[int], *, as_json: bool) -> int:
    """Checks cached shards; returns the exit code."""
    began = time.monotonic()
    sizes = session.catalog.entry(shard_ids[0]).size_bytes * len(shard_ids) if shard_ids else 0
    findings: list[Finding] = []
    with showing_progress("verifying", sizes) as progress:
        for position, shard_id in enumerate(shard_ids, start=1):
            findings.append(check_shard(session, shard_id))
            progress.show(sizes * position // len(shard_ids), f"{position} of {counted(len(shard_ids), 'shard')}")
    seconds = time.monotonic() - began
    sound = all(finding.problem is None for finding in findings)
    if as_json:
        facts = {"store": session.mirrors.addresses[0], "cache_dir": str(session.cache.folder), "ok": sound}
        typer.echo(json.dumps({**facts, "shards": [asdict(each) for each in findings], "seconds": seconds}, indent=2))
    else:
        typer.echo("\n".join(_lines(findings, seconds)))
    return 0 if sound else 1


def _lines(findings: Sequence[Finding], seconds: float) -> list[str]:
    ids = {condition: [each.shard_id for each in findings if each.condition is condition] for condition in Condition}
    cached = len(findings) - len(ids[Condition.ABSENT])
    read = format_size(sum(finding.size_bytes for finding in findings))
    lines = [f"problem: shard {each.shard_id}: {each.problem}" for each in findings if each.problem is not None]
    lines.append(
        f"{len(ids[Condition.SOUND]):,} of {counted(cached, 'cached shard')} sound; {read} read in {seconds:.1f} s"
    )
    if ids[Condition.ABSENT]:
        lines.append(f"not in the cache: {runs(ids[Condition.ABSENT])}")
    if ids[Condition.DAMAGED]:
        lines.append(
            f"damaged: {runs(ids[Condition.DAMAGED])}; the loader fetches them anew when it opens them, "
            "'python -m loader fetch' does so now"
        )
    return lines
