"""Batches from cached shards: ours against the limit and the peers, and ours through DataLoader workers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from scripts.loader_bench.passes import Contestant, Rates, load_average, run_rounds, started
from scripts.loader_bench.workspace import PEERS, Workspace, progress

NODE_ID = "bench"
KINDS = ("first", "later", "best", "cpu")
ASKED = {"limit": 0.9, "mosaicml": 20.0, "nanogpt": 10.0, "litdata": 4.0, "datatrove": 3.0}


def bench_batches(arguments: argparse.Namespace, workspace: Workspace) -> dict[str, Any]:
    """Tokens a second of everyone, in turn."""
    contestants = {**ours(arguments, workspace), **peers(arguments, workspace)}
    check_same_batches(contestants, workspace)
    report: dict[str, Any] = {"load": [load_average()]}
    rates = run_rounds(contestants, workspace, rounds=arguments.rounds, passes=arguments.passes)
    report["load"].append(load_average())
    report["tokens_per_s"] = {name: rate.summary() for name, rate in rates.items()}
    report["ratios"] = ratios(rates)
    report["versions"] = {name: workspace.version_of(name) for name in contestants if name in PEERS}
    print(as_text(report, f"batches of {arguments.batch_size} x {arguments.seq_len}, one process, no workers"))
    return report


def bench_workers(arguments: argparse.Namespace, workspace: Workspace) -> dict[str, Any]:
    """Through torch's DataLoader with so many workers, the start of the workers not counted."""
    several = {f"{n} workers": n for n in arguments.workers}
    contestants = {"no DataLoader": Contestant("genesis", options(arguments, workspace))}
    contestants |= {
        name: Contestant("genesis", {**options(arguments, workspace), "workers": workers})
        for name, workers in several.items()
    }
    contestants |= {
        f"{name}, {workers} workers": Contestant(name, {**shape(arguments), "workers": workers})
        for name in arguments.peers
        if name in PEERS
        for workers in arguments.workers
        if workers
    }
    report: dict[str, Any] = {"load": [load_average()]}
    rates = run_rounds(contestants, workspace, rounds=arguments.rounds, passes=arguments.passes, skip=64, count=1500)
    report["load"].append(load_average())
    report["tokens_per_s"] = {name: rate.summary() for name, rate in rates.items()}
    own = rates["no DataLoader"].summary()
    print(f"through torch's DataLoader, 1,500 batches a pass   ({report['load'][0]} to {report['load'][1]})")
    print(f"  {'':22} {'M tokens/s':>11} {'best':>8}   without a DataLoader, ours is … times as fast")
    for name, rate in rates.items():
        found = rate.summary()
        speeds = f"{found['later'] / 1e6:>11.1f} {found['best'] / 1e6:>8.1f}"
        print(f"  {name:22} {speeds} {own['later'] / found['later']:>9.1f}")
    return report


def shape(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a batch is."""
    return {"seq_len": arguments.seq_len, "batch_size": arguments.batch_size}


def options(arguments: argparse.Namespace, workspace: Workspace, *, shards: int | None = None) -> dict[str, Any]:
    """Those of ours and of the limit: a node of so many shards, by default all; a pass reads all ids once."""
    manifest = workspace.manifest()
    windows = manifest["total_shards"] * ((manifest["shard_tokens"] - 1) // arguments.seq_len)
    return {
        **shape(arguments),
        "node_id": NODE_ID,
        "count": shards or manifest["total_shards"],
        "total_shards": manifest["total_shards"],
        "shard_tokens": manifest["shard_tokens"],
        "epochs": manifest["total_shards"] // (shards or manifest["total_shards"]),
        "batches": windows // arguments.batch_size,
        "cache_dir": str(workspace.cache),
    }


def ours(arguments: argparse.Namespace, workspace: Workspace) -> dict[str, Contestant]:
    """Ours and the limit over all shards, and over one shard that stays open."""
    everything = options(arguments, workspace)
    one = options(arguments, workspace, shards=1)
    return {
        "genesis": Contestant("genesis", everything),
        "limit": Contestant("limit", {**everything, "reuse": False, "keep": False}),
        "limit, outputs reused": Contestant("limit", {**everything, "reuse": True, "keep": False}),
        "limit, all kept mapped": Contestant("limit", {**everything, "reuse": False, "keep": True}),
        "genesis, one shard": Contestant("genesis", one),
        "limit, one shard": Contestant("limit", {**one, "reuse": False, "keep": True}),
        "limit, one shard, reused": Contestant("limit", {**one, "reuse": True, "keep": True}),
    }


def peers(arguments: argparse.Namespace, workspace: Workspace) -> dict[str, Contestant]:
    """The peers that were asked for; the two fastest also without the copies that make their tensors like ours."""
    windows = workspace.tokens.stat().st_size // 2 // arguments.seq_len
    batches = {"batches": windows // arguments.batch_size}
    found = {name: Contestant(name, {**shape(arguments), **batches}) for name in arguments.peers}
    of_one = {"batches": (workspace.manifest()["shard_tokens"] - 1) // arguments.seq_len // arguments.batch_size}
    for name in arguments.peers:
        one = {**shape(arguments), **of_one}
        found[f"{name}, one shard"] = Contestant(name, one, one_shard=True)
        if name in ("litdata", "datatrove"):
            found[f"{name}, views"] = Contestant(name, {**shape(arguments), "views": True})
    return found


def check_same_batches(contestants: Mapping[str, Contestant], workspace: Workspace) -> None:
    """Makes sure that ours and the limit give the same batches, across the ends of two shards."""
    for name, other in (("genesis", "limit"), ("genesis, one shard", "limit, one shard")):
        digests = set()
        for each in (name, other):
            with started(each, contestants[each], workspace) as process:
                digests.add(process.ask(digest=True, count=700)["sha256"])
        if len(digests) != 1:
            raise SystemExit(f"expected {name} and {other} to give the same batches, found others")
    progress("ours and the limit give the same batches")


def ratios(rates: Mapping[str, Rates]) -> dict[str, dict[str, float]]:
    """How many times as fast as each other ours is; what reads one shard is compared with what reads one shard."""
    found = {}
    for name, rate in rates.items():
        own = "genesis, one shard" if "one shard" in name else "genesis"
        if name != own:
            mine, theirs = rates[own].summary(), rate.summary()
            found[name] = {kind: mine[kind] / theirs[kind] for kind in mine}
    return found


def as_text(report: Mapping[str, Any], title: str) -> str:
    """The report for people."""
    lines = [f"{title}, M tokens/s   ({report['load'][0]} to {report['load'][1]})"]
    lines.append(
        "first: a process's first pass; later: the median of the others; best: of those; cpu: a processor second"
    )
    lines.append(f"  {'':26} " + " ".join(f"{kind:>8}" for kind in KINDS) + "   genesis is … times as fast")
    for name, rate in report["tokens_per_s"].items():
        label = f"{name} {report['versions'][name]}" if name in report["versions"] else name
        line = f"  {label:26} " + " ".join(f"{rate[kind] / 1e6:8.1f}" for kind in KINDS)
        if name in report["ratios"]:
            line += "   " + " ".join(f"{report['ratios'][name][kind]:8.2f}" for kind in KINDS)
            line += f"   asked {ASKED[name.split(',')[0]]:g}"
        lines.append(line)
    return "\n".join(lines)
