"""``python -m loader plan``: a node's shards, how far several nodes overlap, and whether a node's claim holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from loader.cache.sizes import format_size
from loader.cli.assigning import PlannedShard, assigned_lanes, planned_shards, total_shards_of, wire_bytes
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
    numbers_of,
    only_node,
    sources_of,
    store_options,
)
from loader.cli.tables import counted, printable, runs, table
from loader.options import StreamOptions
from loader.session import Session
from loader.stream.assignment import DEFAULT_COUNT, Coverage, coverage

__all__ = ["plan_command"]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is assigned to whom."""

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


def plan_command(
    store: StoreOption,
    node_id: NodeIdOption = None,
    nodes_from: NodesFromOption = None,
    count: CountOption = DEFAULT_COUNT,
    assignment: AssignmentOption = AssignmentRule.MODULO,
    source: SourceOption = None,
    holdout: HoldoutOption = 0,
    split: SplitOption = SplitName.TRAIN,
    seed: SeedOption = 0,
    total_shards: TotalShardsOption = None,
    claim: Annotated[
        str | None,
        typer.Option("--verify", metavar="SHARDS", help="Check a node's claim, such as 3,4,5; ends with 1 if false."),
    ] = None,
    mirror: MirrorOption = None,
    public_key: PublicKeyOption = None,
    cache_dir: CacheDirOption = None,
    cache_bytes: CacheBytesOption = None,
    max_bandwidth: BandwidthOption = None,
    timeout_s: TimeoutOption = 600.0,
    as_json: JsonOption = False,
) -> int:
    """Show a node's shards; of several nodes, how many of the store's shards they cover and share."""
    where = store_options(store, mirror, public_key, cache_dir, cache_bytes, max_bandwidth, timeout_s)
    claimed = numbers_of("--verify", claim) if claim is not None else None
    node_ids = (only_node(node_id, "--verify"),) if claimed is not None else node_ids_of(node_id, nodes_from)
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
    plan = _plan(session, options, node_ids, total_shards)
    if claimed is not None:
        return _tell_claim(plan, claimed, as_json=as_json)
    shards = planned_shards(session, plan.nodes[node_ids[0]]) if len(node_ids) == 1 else None
    if as_json:
        details = {"shards": [asdict(shard) for shard in shards]} if shards is not None else {}
        typer.echo(json.dumps({**plan.to_object(), **details}, indent=2))
    else:
        typer.echo("\n".join(_shard_lines(plan, shards) if shards is not None else _node_lines(plan)))
    return 0


def _plan(session: Session, options: StreamOptions, node_ids: Sequence[str], asked: int | None) -> _Plan:
    total = total_shards_of(session.catalog, asked)
    lanes = assigned_lanes(session.catalog, options, node_ids, total)
    return _Plan(
        store=session.mirrors.addresses[0],
        sequence=session.catalog.manifest.sequence,
        total_shards=total,
        assignment=options.assignment,
        nodes={node_id: [shard for lane in found for shard in lane] for node_id, found in lanes.items()},
    )


def _tell_claim(plan: _Plan, claimed: Sequence[int], *, as_json: bool) -> int:
    """Says whether a claim is what was assigned; returns the exit code."""
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
    return [
        f"{printable(node_id)}: {len(shards):,} of {counted(plan.total_shards, 'shard')} of {plan.store} "
        f"(commit {plan.sequence}, {plan.assignment})",
        *table(("shard", "source", "size", "packed", "cached"), rows, left=frozenset({1})),
        f"{sum(shard.tokens for shard in shards):,} tokens, {format_size(sum(shard.size_bytes for shard in shards))} "
        f"in the cache; {counted(len(missing), 'shard')} to fetch, {format_size(sum(map(wire_bytes, missing)))}",
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
