"""``python -m loader bench``: how fast this machine reads this store, and what of that is the network's doing."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from loader.cache.settings import format_size
from loader.cli.options import CommonOptions, with_common_options

if TYPE_CHECKING:
    from loader.cli.measuring import ReadingSpeed, StreamSpeed


@with_common_options("nodes_from", "split", "total_shards")
def bench_command(
    common: CommonOptions,
    batches: Annotated[
        int, typer.Option("--batches", min=2, help="Batches to read: 3,000 of 8 x 1024 are ten shards.")
    ] = 3_000,
) -> int:
    """Read a node's batches as fast as they come, and say how fast that was."""
    store, options = common.store_options(), common.stream_options(common.only_node("bench"))
    began = time.perf_counter()
    from loader.cli.measuring import measure

    imported_s = time.perf_counter() - began
    stream, reading = measure(store, options, batches)
    if common.as_json:
        ratios = {"of_slicing": reading.of_slicing, "of_copying": reading.of_copying}
        facts = {"imported_s": imported_s, **asdict(stream), **asdict(reading), **ratios}
        typer.echo(json.dumps(facts, indent=2))
    else:
        typer.echo("\n".join(_lines(stream, reading, imported_s)))
    return 0


def _lines(stream: StreamSpeed, reading: ReadingSpeed, imported_s: float) -> list[str]:
    fetched = stream.shards_opened - stream.shards_from_cache
    wire = format_size(stream.received_bytes) + " received" if stream.received_bytes else "nothing over a network"
    return [
        f"first batch    {stream.opened_s + stream.first_batch_s:.3f} s (store {stream.opened_s:.3f} s, shard "
        f"{stream.first_batch_s:.3f} s), after {imported_s:.1f} s of imports",
        f"stream         {_rate(stream.tokens_per_s)} over {stream.batches:,} batches"
        f" in {stream.seconds:.2f} s, {stream.stalled_s:.2f} s of it waiting for shards",
        f"shards         {stream.shards_opened} opened, {stream.shards_from_cache} of them from the cache; {fetched} "
        f"fetched, {wire}",
        f"reading alone  {_rate(reading.loader_tokens_per_s)} from a mapped shard: {reading.of_slicing:.2f} of slicing "
        f"tensors by hand ({_rate(reading.slicing_tokens_per_s)}),",
        f"               {reading.of_copying:.2f} of a bare copy ({_rate(reading.copying_tokens_per_s)})",
    ]


def _rate(tokens_per_s: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens_per_s >= size:
            return f"{tokens_per_s / size:.1f} {unit} tokens/s"
    return f"{tokens_per_s:.0f} tokens/s"
