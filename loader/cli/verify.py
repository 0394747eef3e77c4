"""``python -m loader verify``: cached shards against the manifest, or the batch a node must have trained on.

Cached shards are checked without touching them: nothing is fetched, removed or marked as used. A file is read into
memory (20 MB), not mapped, so no lock is needed and a file that is evicted meanwhile is still read to its end.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from loader.cache.settings import format_size
from loader.cli.options import CommonOptions, parse_numbers, with_common_options
from loader.cli.output import counted, printable, runs, showing_progress
from loader.cli.plan import assigned_lanes, in_reading_order, total_shards_of
from loader.errors import CorruptObjectError, HostileStoreError, LoaderUsageError
from loader.fetch.catalog import Catalog
from loader.fetch.shards import cache_name, check_digest, check_ids
from loader.options import StreamOptions
from loader.plan import Pin, parse_pins
from loader.session import Session

_SHA256_DIGITS = 64
_NAME: Final = re.compile(r"shard_([0-9]{1,18})-[0-9a-f]{16}\.pt")


@dataclass(frozen=True, slots=True)
class _Replay:
    """A batch to recompute."""

    step: int
    rotations: tuple[int, ...]
    pins: tuple[tuple[Pin, ...], ...] | None
    claim: str | None


@with_common_options("nodes_from")
def verify_command(
    common: CommonOptions,
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
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="The node's epochs, if it was given any. [default: endless]")
    ] = None,
) -> int:
    """Check a node's cached shards (sha256, shape, ids), or recompute a batch. Ends with 1 if anything is wrong."""
    store = common.store_options()
    if pins is not None and common.total_shards is not None:
        raise LoaderUsageError("expected --pins or --total-shards, found both; --total-shards N is --pins 0:N")
    asked = _parse_replay(replay, rotations, pins, claim)
    if all_cached and (common.node_id or asked):
        raise LoaderUsageError("expected --all or --node-id, found both; --replay needs one node")
    if asked is not None:
        common.only_node("--replay")
    node_ids = common.node_ids() if not all_cached else ()
    options = common.stream_options(node_ids[0] if node_ids else "", epochs=epochs)
    session = Session.open(store)
    total = total_shards_of(session.catalog, common.total_shards)
    if asked is not None:
        return _replay(session, options, asked, total, as_json=common.as_json)
    if all_cached:
        names = [entry.name for entry in session.cache.entries() if entry.complete]
        shard_ids = _shards_of_store(session.catalog, names)
    else:
        lanes = assigned_lanes(session.catalog, options, node_ids, total).values()
        shard_ids = in_reading_order([lane for found in lanes for lane in found])
    return _check(session, shard_ids, as_json=common.as_json)


def _parse_replay(
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
        parse_numbers("--rotations", rotations) if rotations else (),
        parse_pins([_parse_pins(lane) for lane in pins], len(pins)) if pins is not None else None,
        claim.lower() if claim else None,
    )


def _parse_pins(lane: str) -> list[tuple[int, ...]]:
    pairs = [parse_numbers("--pins", pair.replace(":", ",", 1)) for pair in lane.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise LoaderUsageError(f"--pins: expected EPOCH:SHARDS between commas such as 0:6,2:11, found {lane[:60]!r}")
    return pairs


def _replay(session: Session, options: StreamOptions, asked: _Replay, total_shards: int, *, as_json: bool) -> int:
    """Prints the digest of the batch, or whether a claim holds; returns the exit code."""
    from loader.replay import batch_sha256, replay_batch

    pins = parse_pins(asked.pins or [[(0, total_shards)]] * options.num_lanes, options.num_lanes)
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


def _check(session: Session, shard_ids: Sequence[int], *, as_json: bool) -> int:
    """Checks cached shards; returns the exit code."""
    began = time.monotonic()
    sizes = session.catalog.entry(shard_ids[0]).size_bytes * len(shard_ids) if shard_ids else 0
    findings: list[ShardFinding] = []
    with showing_progress("verifying", sizes) as progress:
        for position, shard_id in enumerate(shard_ids, start=1):
            findings.append(_check_shard(session, shard_id))
            progress.show(sizes * position // len(shard_ids), f"{position} of {counted(len(shard_ids), 'shard')}")
    seconds = time.monotonic() - began
    sound = all(finding.problem is None for finding in findings)
    if as_json:
        facts = {"store": session.mirrors.addresses[0], "cache_dir": str(session.cache.folder), "ok": sound}
        typer.echo(json.dumps({**facts, "shards": [asdict(each) for each in findings], "seconds": seconds}, indent=2))
    else:
        typer.echo("\n".join(_lines(findings, seconds)))
    return 0 if sound else 1


def _lines(findings: Sequence[ShardFinding], seconds: float) -> list[str]:
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


class Condition(StrEnum):
    """Condition of a cached shard."""

    SOUND = "sound"
    DAMAGED = "damaged"
    """Its bytes are not those the manifest vouches for."""
    REFUSED = "refused"
    """They are, but are not a valid shard: the store's fault."""
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class ShardFinding:
    """The condition of one shard."""

    shard_id: int
    condition: Condition
    size_bytes: int = 0
    """Bytes read."""
    problem: str | None = None


def _check_shard(session: Session, shard_id: int) -> ShardFinding:
    """Compares a cached shard with the manifest: size, sha256, shape, and every id with the vocabulary."""
    entry = session.catalog.entry(shard_id)
    name = cache_name(entry)
    if not session.cache.contains(name):
        return ShardFinding(shard_id, Condition.ABSENT)
    try:
        data = check_digest(_read(session.cache.folder / name, entry.size_bytes), entry.sha256, name)
        check_ids(memoryview(data), entry, is_frozen=session.catalog.manifest.is_frozen)
    except FileNotFoundError:
        return ShardFinding(shard_id, Condition.ABSENT)
    except CorruptObjectError as error:
        return ShardFinding(shard_id, Condition.DAMAGED, entry.size_bytes, str(error))
    except HostileStoreError as error:
        return ShardFinding(shard_id, Condition.REFUSED, entry.size_bytes, str(error))
    except OSError as error:
        return ShardFinding(shard_id, Condition.DAMAGED, 0, f"{name}: cannot be read: {error.strerror}")
    return ShardFinding(shard_id, Condition.SOUND, entry.size_bytes)


def _read(path: Path, size_bytes: int) -> bytearray:
    with path.open("rb") as file:
        found_bytes = os.fstat(file.fileno()).st_size
        if found_bytes != size_bytes:
            raise CorruptObjectError(f"{path.name}: expected {size_bytes} bytes, found {found_bytes}")
        data = bytearray(size_bytes)
        file.readinto(data)
        return data


def _shards_of_store(catalog: Catalog, names: Iterable[str]) -> list[int]:
    """The shards of a store among the files of a cache, ascending; other stores' files are left out."""
    found: list[int] = []
    for name in names:
        match = _NAME.fullmatch(name)
        shard_id = int(match[1]) if match else catalog.manifest.total_shards
        if shard_id < catalog.manifest.total_shards and cache_name(catalog.entry(shard_id)) == name:
            found.append(shard_id)
    return sorted(found)
