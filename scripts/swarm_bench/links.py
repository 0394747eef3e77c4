"""Tokens a second over slow links, with the subspace codec and without.

Three workers and a driver, each in a network namespace at the end of its own link. By hub all activations and gradients
pass through the driver's link, twice over: that one limits. Compared are ``fp32`` without a subspace and ``subspace``;
the compression ratio is that of the bytes the driver's link carried for a token, headers, heartbeats and ids included.

Where the link is the limit, tokens a second must grow as the bytes shrink; where it is not any more, because two cores
compute what three machines would, the share of the ratio says nothing of the codec. So the driver's link is looked at
too: how much of what it can carry it carried. What 80 Mbit/s is to machines with accelerators, 3 is to two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from scripts.swarm_bench.swarm_processes import SwarmSetting, running_swarm
from scripts.trainer_bench.crew import load_average, progress
from scripts.trainer_bench.network import Links, can_make_networks, slow_links
from scripts.trainer_bench.workspace import make_store

ASKED = 0.8
_STAGES = 3
_DRIVER = _STAGES
_FREE_MBIT = 10_000.0
_SETTLING_STEPS = 2
"""What was on its way over the free link is done with by then."""
_LIMITED = 0.8
"""Share of its rate from which a link counts as the limit."""


def bench_links(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both codecs at all rates, a swarm of its own each."""
    reason = can_make_networks()
    if reason:
        print(f"links: {reason}")
        return {"skipped": reason}
    store = make_store(arguments)
    report: dict[str, Any] = {"load": [load_average()], "rank": arguments.links_rank, "rows": []}
    for mbit in arguments.links_mbit:
        with slow_links(_STAGES + 1) as links:
            pair = {codec: _measured(links, store, codec, mbit, arguments) for codec in ("fp32", "subspace")}
        report["rows"].append(_compared(mbit, pair["fp32"], pair["subspace"]))
    report["load"].append(load_average())
    print(as_text(report))
    return report


def _measured(links: Links, store: Path, codec: str, mbit: float, arguments: argparse.Namespace) -> dict[str, float]:
    setting = _setting(links, store, codec, arguments)
    links.set_rate(_FREE_MBIT)
    with running_swarm(setting) as swarm:
        swarm.next_step()
        links.set_rate(mbit)
        for _ in range(_SETTLING_STEPS):
            swarm.next_step()
        sent_bytes = links.sent_bytes(_DRIVER)
        found = swarm.rate(arguments.links_s)
        sent_bytes = links.sent_bytes(_DRIVER) - sent_bytes
    rate = found["tokens_per_s"]
    progress(f"{mbit:g} Mbit/s, {codec}: {rate:.0f} tokens/s")
    return {
        "tokens_per_s": rate,
        "bytes_per_token": sent_bytes / found["tokens"],
        "used": sent_bytes * 8 / (found["seconds"] * mbit * 1e6),
        "loss": found["loss"],
    }


def _setting(links: Links, store: Path, codec: str, arguments: argparse.Namespace) -> SwarmSetting:
    rows, seq_len = arguments.links_micro_batch, arguments.links_seq_len
    options = {
        "model": {"preset": arguments.links_preset},
        "inner": {"seq_len": seq_len, "micro_batch_size": rows},
        "rpc": {"stall_timeout_s": 60.0},
        "swarm": {
            "num_stages": _STAGES,
            "activation_codec": codec,
            "subspace": {"rank": arguments.links_rank if codec == "subspace" else 0},
            "stage": {"target_tokens": 2 * rows * seq_len},
            "driver": {"routing": "hub", "max_in_flight": 12, "max_in_flight_per_worker": 12},
        },
    }
    hosts = [links.address(rank) for rank in range(_STAGES + 1)]
    return SwarmSetting(store=store, options=options, hosts=hosts, prefixes=links.prefixes)


def _compared(mbit: float, plain: dict[str, float], packed: dict[str, float]) -> dict[str, Any]:
    ratio = plain["bytes_per_token"] / packed["bytes_per_token"]
    times = packed["tokens_per_s"] / plain["tokens_per_s"]
    return {"mbit": mbit, "fp32": plain, "subspace": packed, "ratio": ratio, "times": times, "share": times / ratio}


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"tokens/s over slow links, hub, rank {report['rank']}   ({' to '.join(report['load'])})"]
    for row in report["rows"]:
        lines.append(f"  {row['mbit']:g} Mbit/s {'tokens/s':>12} {'bytes a token':>14} {'of the link':>12}")
        for codec in ("fp32", "subspace"):
            each = row[codec]
            figures = f"{each['tokens_per_s']:>12.0f} {each['bytes_per_token']:>14.0f} {each['used']:>12.2f}"
            lines.append(f"    {codec:10} {figures}")
        limit = "the link" if row["subspace"]["used"] >= _LIMITED else "not the link (see “of the link”)"
        share = f"{row['times']:.2f} × as fast with {row['ratio']:.2f} × fewer bytes: {row['share']:.2f} of the ratio"
        lines.append(f"    {share}   asked {ASKED:g}; the limit is {limit}")
    return "\n".join(lines)
