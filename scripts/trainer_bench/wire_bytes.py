"""Bytes on the wire for 500 inner steps among four: one round of DiLoCo against 500 steps of DDP over gloo.

All members run in one network namespace, whose loopback interface carries nothing else; its counter sees every header,
handshake, heartbeat and acknowledgement, and the connections of a first round too. DDP's bytes are the same in every
step, so some tens of steps are measured, the first of which (it sends the weights) is not, and scaled to 500.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from scripts.trainer_bench.crew import Crew, crew, load_average
from scripts.trainer_bench.network import PrivateLoopback, can_make_networks, private_loopback
from scripts.trainer_bench.workspace import make_store, workload_of

ASKED = {"fp32": 500.0, "int8": 1900.0}
_LOCAL = "127.0.0.1"
_STEPS = 500
_REAL_STEPS = 3
_DDP_STEPS = 20
_CODECS = ("fp32", "fp16", "int8")


def bench_bytes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ours with TLS and without, and DDP, one after the other in one namespace."""
    reason = can_make_networks()
    if reason:
        print(f"bytes: {reason}")
        return {"skipped": reason}
    workload = workload_of(make_store(arguments), preset=arguments.bytes_preset, batch_size=1, seq_len=64)
    members = arguments.members
    report: dict[str, Any] = {"load": [load_average()], "members": members}
    with private_loopback() as loopback:
        prefixes = [loopback.prefix] * members
        with crew("gloo", members, prefixes) as gloo:
            ddp = ddp_bytes(gloo, loopback, workload)
        with crew("genesis", members, prefixes) as genesis:
            ours = {
                f"{compression}{', TLS' if tls else ''}": round_bytes(genesis, loopback, workload, compression, tls)
                for compression in _CODECS
                for tls in (False, True)
            }
    vector_bytes = 4 * ours["fp32"]["values"]
    report |= {"vector_bytes": vector_bytes, "ddp_bytes_per_step": ddp, "load": [*report["load"], load_average()]}
    report["ours"] = {name: {**found, "ratio": _STEPS * ddp / found["bytes"]} for name, found in ours.items()}
    print(as_text(report))
    return report


def ddp_bytes(gloo: Crew, loopback: PrivateLoopback, workload: dict[str, Any]) -> float:
    """Bytes of a step of all members: the median of some groups of five steps, behind the first steps."""
    members = len(gloo)
    with tempfile.TemporaryDirectory() as folder:
        place = {"members": members, "store": f"file://{Path(folder) / 'rendezvous'}", "interface": "lo"}
        gloo.each("open", [{"rank": rank, **place} for rank in range(members)])
        train = [{"workload": workload, "rank": rank, "members": members} for rank in range(members)]
        gloo.each("train", [{**each, "steps": 5} for each in train])
        counted = []
        for _ in range(_DDP_STEPS // 5):
            before = loopback.sent_bytes()
            gloo.each("train", [{**each, "steps": 5} for each in train])
            counted.append((loopback.sent_bytes() - before) / 5)
    return median(counted)


def round_bytes(
    genesis: Crew, loopback: PrivateLoopback, workload: dict[str, Any], compression: str, tls: bool
) -> dict[str, Any]:
    """Bytes of the first round of all members, new connections included."""
    members = len(genesis)
    opened = genesis.all("open", name="node", host=_LOCAL, tls=tls, compression=compression)
    genesis.all("meet", name="node", peers=[each["peer"] for each in opened])
    before = loopback.sent_bytes()
    trained = genesis.each(
        "train",
        [
            {
                "name": "node",
                "workload": workload,
                "rank": rank,
                "members": members,
                "steps": _REAL_STEPS,
                "diloco": {"inner_steps": _REAL_STEPS},
            }
            for rank in range(members)
        ],
    )
    sent = loopback.sent_bytes() - before
    genesis.all("close", name="node")
    if any(each["members"] != [members] for each in trained) or len({each["state_digest"] for each in trained}) != 1:
        raise SystemExit(f"expected one round of {members} members with one result, found {trained}")
    values = trained[0]["values"]
    return {
        "bytes": sent,
        "values": values,
        "passes": trained[0]["passes"][0],
        "frame_bytes": sum(each["sent_bytes"] for each in trained),
    }


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    members, vector_bytes, ddp = report["members"], report["vector_bytes"], report["ddp_bytes_per_step"]
    least = 2 * (members - 1) * vector_bytes
    lines = [
        f"bytes on the wire for {_STEPS} inner steps, {members} members, {vector_bytes / 1e6:.1f} MB of parameters"
        f"   ({' to '.join(report['load'])})",
        f"  {'':14} {'MB':>12} {'of 2(n-1)P':>11} {'times fewer':>12}",
        f"  {'DDP, gloo':14} {_STEPS * ddp / 1e6:>12.1f} {ddp / least:>11.4f}   ({_DDP_STEPS} steps counted, scaled)",
    ]
    for name, found in report["ours"].items():
        asked = ASKED.get(name.split(",")[0])
        line = f"  {name:14} {found['bytes'] / 1e6:>12.1f} {found['bytes'] / least:>11.4f} {found['ratio']:>12.1f}"
        lines.append(line + (f"   asked {asked:g}" if asked else ""))
    return "\n".join(lines)
