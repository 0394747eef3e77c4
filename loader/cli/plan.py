"""``python -m loader plan``: a node's shards, how far several nodes overlap, and whether a node's claim holds.

The shards of nodes, one or thousands of them, are found without reading more of the store than that takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from loader.cache.settings import format_size
from loader.cli.options import CommonOptions, parse_numbers, with_common_options
from loader.cli.output import counted, printable, runs, table
from loader.errors import LoaderUsageError
from loader.fetch.catalog import Catalog
from loader.fetch.shards import cache_name
from loader.options import StreamOptions
from loader.plan import shard_pool, shards_of_node
from loader.session import Session
from loader.stream.assignment import Coverage, coverage


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """A shard that a node is given."""

    id: int
    source: str
    tokens: int
    size_bytes: int
    """In the cache."""
    packed_bytes: int | None
    """As it is transferred; None if the store has it in full size only."""
    cached: bool
    """Whether the cache has a file of that name; it is verified when it is opened."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross the network."""
        return self.size_bytes if self.packed_bytes is None else self.packed_bytes


@dataclass(frozen=True, slots=True)
class _Plan:
    """The shards of nodes."""

    store: str
    sequence: int
    total_shards: int
    assignment: str
    nodes: dict[str, list[int]]

    @property
    def coverage(self) -> Coverage:
        return coverage(self.nodes, self.total_shards)

    def to_object(self) -> dict[str, Any]:
        nodes = [{"node_id": node_id, "shards": shards} for node_id, shards in self.nodes.items()]
        facts = {name: getattr(self, name) for name in ("store", "sequence", "total_shards", "assignment")}
        return {**facts, "nodes": nodes, "coverage": asdict(self.coverage)}


@with_common_options("seq_len", "batch_size")
def plan_command(
    common: CommonOptions,
    claim: Annotated[
        str | None,
        typer.Option("--verify", metavar="SHARDS", help="Check a node's claim, such as 3,4,5; ends with 1 if false."),
    ] = None,
) -> int:
    """Show a node's shards; of several nodes, how many of the store's shards they cover and share."""
    store = common.store_options()
    claimed = parse_numbers("--verify", claim) if claim is not None else None
    node_ids = (common.only_node("--verify"),) if claimed is not None else common.node_ids()
    options = common.stream_options(node_ids[0])
    session = Session.open(store)
    total = total_shards_of(session.catalog, common.total_shards)
    lanes = assigned_lanes(session.catalog, options, node_ids, total)
    plan = _Plan(
        store=session.mirrors.addresses[0],
        sequence=session.catalog.manifest.sequence,
        total_shards=total,
        assignment=options.assignment,
        nodes={node_id: [shard for lane in found for shard in lane] for node_id, found in lanes.items()},
    )
    if claimed is not None:
        return _check_claim(plan, claimed, as_json=common.as_json)
    shards = planned_shards(session, plan.nodes[node_ids[0]]) if len(node_ids) == 1 else None
    if common.as_json:
        details = {"shards": [asdict(shard) for shard in shards]} if shards is not None else {}
        typer.echo(json.dumps({**plan.to_object(), **details}, indent=2))
    else:
        typer.echo("\n".join(_shard_lines(plan, shards) if shards is not None else _node_lines(plan)))
    return 0


def total_shards_of(catalog: Catalog, asked: int | None) -> int:
    """How many shards of the store count: as many as requested, or all.

    Raises:
        LoaderUsageError: the store has fewer.
    """
    found = catalog.manifest.total_shards
    if asked is not None and asked > found:
        raise LoaderUsageError(f"--total-shards: expected at most {found}, which the store has, found {asked}")
    return found if asked is None else asked


def assigned_lanes(
    catalog: Catalog, options: StreamOptions, node_ids: Iterable[str], total_shards: int
) -> dict[str, list[tuple[int, ...]]]:
    """The shards of each node, one lane per source, as `loader.plan.plan_lane` has them.

    Args:
        catalog: the store.
        options: the run's; its node id is ignored.
        node_ids: the nodes.
        total_shards: how many shards of the store count.

    Raises:
        LoaderUsageError: there is no shard to give.
        LoaderError: the index is unavailable.
    """
    names: list[str | None] = [name for name, _ in options.sources]
    pools = [shard_pool(catalog, options, name, total_shards) for name in names or [None]]
    return {node_id: [shards_of_node(options, node_id, pool) for pool in pools] for node_id in node_ids}


def in_reading_order(lanes: Sequence[Sequence[int]], most: int | None = None) -> list[int]:
    """Shards in the order in which they are read: every lane's first, every lane's second, and so on; none twice.

    At most ``most`` of each lane.
    """
    longest = max((len(lane) for lane in lanes), default=0)
    ordinals = range(longest if most is None else min(longest, most))
    return list(dict.fromkeys(lane[ordinal] for ordinal in ordinals for lane in lanes if ordinal < len(lane)))


def planned_shards(session: Session, shard_ids: Iterable[int]) -> list[PlannedShard]:
    """Describes shards from the index and the cache.

    Raises:
        LoaderError: the index is unavailable.
    """
    return [
        PlannedShard(
            id=entry.id,
            source=entry.source,
            tokens=entry.tokens,
            size_bytes=entry.size_bytes,
            packed_bytes=entry.packed.size_bytes if entry.packed is not None else None,
            cached=session.cache.contains(cache_name(entry)),
        )
        for entry in map(session.catalog.entry, shard_ids)
    ]


def _check_claim(plan: _Plan, claimed: Sequence[int], *, as_json: bool) -> int:
    """Prints whether a claim is the assignment; returns the exit code."""
    [(node_id, assigned)] = plan.nodes.items()
    holds = list(claimed) == assigned
    if as_json:
        facts = {"node_id": node_id, "total_shards": plan.total_shards, "assigned": assigned, "claimed": claimed}
        typer.echo(json.dumps({**facts, "ok": holds}, indent=2))
    elif holds:
        typer.echo(f"{printable(node_id)}: the claim holds: {runs(assigned)} of {plan.total_shards:,} shards")
    else:
        typer.echo(
            f"{printable(node_id)}: the claim does not hold: expected {runs(assigned)} of {plan.total_shards:,} "
            f"shards, found {runs(claimed)}"
        )
    return 0 if holds else 1


def _shard_lines(plan: _Plan, shards: Sequence[PlannedShard]) -> list[str]:
    [node_id] = plan.nodes
    rows = [
        (
            str(shard.id),
            shard.source,
            format_size(shard.size_bytes),
            format_size(shard.packed_bytes) if shard.packed_bytes is not None else "-",
            "yes" if shard.cached else "no",
        )
        for shard in shards
    ]
    missing = [shard for shard in shards if not shard.cached]
    wire_bytes = sum(shard.wire_bytes for shard in missing)
    return [
        f"{printable(node_id)}: {len(shards):,} of {counted(plan.total_shards, 'shard')} of {plan.store} "
        f"(commit {plan.sequence}, {plan.assignment})",
        *table(("shard", "source", "size", "packed", "cached"), rows, left=frozenset({1})),
        f"{sum(shard.tokens for shard in shards):,} tokens, {format_size(sum(shard.size_bytes for shard in shards))} "
        f"in the cache; {counted(len(missing), 'shard')} to fetch, {format_size(wire_bytes)}",
    ]


def _node_lines(plan: _Plan) -> list[str]:
    found = plan.coverage
    rows = [(printable(node_id), str(len(shards)), runs(shards)) for node_id, shards in plan.nodes.items()]
    return [
        f"{plan.store} (commit {plan.sequence}, {plan.assignment})",
        *table(("node", "shards", "which"), rows, left=frozenset({0, 2})),
        f"{counted(found.num_nodes, 'node')} cover {found.covered:,} of {counted(found.num_shards, 'shard')} "
        f"({found.covered / found.num_shards:.1%}); {found.shared:,} have more than one node; "
        f"a covered shard has {found.mean_nodes:.2f} nodes on average, {found.most_nodes:,} at most",
    ]
