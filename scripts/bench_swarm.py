#!/usr/bin/env python
"""The swarm pipeline against its peers and the limits, in one run, on the same model and data.

    python scripts/bench_swarm.py                # everything
    python scripts/bench_swarm.py call           # a stage call of 1, 4 and 16 MB: ours, hivemind's RemoteExpert
    python scripts/bench_swarm.py pipeline       # tokens/s of three stages: ours, one process, pipelining over gloo
    python scripts/bench_swarm.py links          # tokens/s over 80 Mbit/s: the subspace codec over none
    python scripts/bench_swarm.py churn          # workers that come and go: who gets work, who moves; SWARM's rules too
    python scripts/bench_swarm.py goodput        # what a swarm gets done while workers are killed, stopped and slowed
    python scripts/bench_swarm.py ledger         # micro-batches/s of the account: a folder, S3, three drivers; local
    python scripts/bench_swarm.py grad           # a step of 16 MB of gradients among four: ours, hivemind's, gloo's
    python scripts/bench_swarm.py groups         # rounds of 64 to 1,000 nodes in groups, simulated with churn
    python scripts/bench_swarm.py liars          # workers that lie: how soon they are found, and what they cost
    python scripts/bench_swarm.py credentials    # processor time and bytes of admission: with credentials over without
    python scripts/bench_swarm.py monitor        # what reporting and being watched cost a node

Every figure is a ratio to something measured in the same run. Members are processes of their own, in network namespaces
where links matter (that needs root); all of them end with this one. Figures go to docs/performance.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_parts import parts_parser, run_parts
from scripts.swarm_bench.call import bench_call
from scripts.swarm_bench.churn_bench import bench_churn
from scripts.swarm_bench.credentials import bench_credentials
from scripts.swarm_bench.goodput import bench_goodput
from scripts.swarm_bench.grad_rounds import CODECS, VALIDATIONS, bench_grad
from scripts.swarm_bench.groups import bench_groups
from scripts.swarm_bench.ledger import bench_ledger
from scripts.swarm_bench.liars import bench_liars
from scripts.swarm_bench.links import bench_links
from scripts.swarm_bench.monitoring import bench_monitor
from scripts.swarm_bench.pipeline import bench_pipeline

BENCHES = {
    "call": bench_call,
    "pipeline": bench_pipeline,
    "links": bench_links,
    "churn": bench_churn,
    "goodput": bench_goodput,
    "ledger": bench_ledger,
    "grad": bench_grad,
    "groups": bench_groups,
    "liars": bench_liars,
    "credentials": bench_credentials,
    "monitor": bench_monitor,
}


def main() -> None:
    """Runs the parts named, or all."""
    parser = parts_parser(__doc__, BENCHES, "genesis-bench-trainer")
    parser.add_argument("--store", type=Path, help="a store with a vocabulary of 1,024 to use instead")
    parser.add_argument("--call-mb", type=int, nargs="+", default=[1, 4, 16], help="MiB of a tensor, for call")
    parser.add_argument("--call-turns", type=int, default=5, help="counted turns of each contestant, for call")
    parser.add_argument("--call-turn-mb", type=int, default=48, help="MiB of a turn, for call")
    parser.add_argument("--goodput-s", type=float, default=180.0, help="seconds of a phase, for goodput")
    parser.add_argument("--goodput-seed", type=int, default=0, help="of its schedule, for goodput")
    parser.add_argument("--goodput-strategy", default="async_sparta", help="or diloco, or grad, for goodput")
    parser.add_argument("--grad-mb", type=float, default=16.0, help="MB of gradients, for grad")
    parser.add_argument("--grad-rounds", type=int, default=7, help="counted rounds of each contestant, for grad")
    parser.add_argument("--grad-codecs", nargs="+", choices=CODECS, default=CODECS, help="of them, for grad")
    parser.add_argument("--grad-validations", nargs="+", choices=VALIDATIONS, default=VALIDATIONS, help="for grad")
    parser.add_argument("--goodput-routing", default="hub", help="or chain, for goodput")
    parser.add_argument("--goodput-longest-s", type=float, default=4.0, help="of a stop or a slowing, for goodput")
    parser.add_argument("--goodput-turns", type=int, default=1, help="disturbed phases, for goodput")
    parser.add_argument("--pipeline-preset", default="15m", help="model of pipeline")
    parser.add_argument("--pipeline-seq-len", type=int, default=256, help="tokens of a row, for pipeline")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows of a micro-batch, for pipeline")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step, for pipeline")
    parser.add_argument("--pipeline-s", type=float, default=12.0, help="of each contestant's turn, for pipeline")
    parser.add_argument("--pipeline-turns", type=int, default=1, help="of each contestant, for pipeline")
    parser.add_argument("--links-mbit", type=float, nargs="+", default=[80.0, 3.0], help="of the links, for links")
    parser.add_argument("--links-rank", type=int, default=8, help="values a position has in the subspace, for links")
    parser.add_argument("--links-preset", default="tiny", help="model of links")
    parser.add_argument("--links-seq-len", type=int, default=128, help="tokens of a row, for links")
    parser.add_argument("--links-micro-batch", type=int, default=4, help="rows of a micro-batch, for links")
    parser.add_argument("--links-s", type=float, default=15.0, help="how long each is measured, for links")
    parser.add_argument("--churn-seeds", type=int, default=5, help="simulations of each, for churn")
    parser.add_argument("--churn-s", type=float, default=600.0, help="simulated seconds of each, for churn")
    parser.add_argument("--churn-live-s", type=float, default=30.0, help="of each rule with real workers; 0: none")
    parser.add_argument("--ledger-s", type=float, default=8.0, help="seconds of each journal's turn, for ledger")
    parser.add_argument("--ledger-turns", type=int, default=3, help="of each journal, for ledger")
    parser.add_argument("--ledger-drivers", type=int, default=8, help="that ask at once, for ledger")
    parser.add_argument("--ledger-bundle", type=int, default=32, help="settlements of a report, for ledger")
    parser.add_argument("--groups-nodes", type=int, nargs="+", default=[64, 250, 1000], help="sizes, for groups")
    parser.add_argument("--groups-deaths", type=float, default=0.02, help="share that dies in a round, for groups")
    parser.add_argument("--groups-seeds", type=int, default=3, help="rounds of each size, for groups")
    parser.add_argument("--groups-tries", type=int, default=300, help="plans with liars of each size, for groups")
    parser.add_argument("--liars-seeds", type=int, default=2, help="runs of each cell, for liars")
    parser.add_argument("--liars-micro-batches", type=int, default=256, help="of each run, for liars")
    parser.add_argument("--liars-inner-steps", type=int, default=10, help="between two averages, for liars")
    parser.add_argument("--liars-lr", type=float, default=1e-2, help="of AdamW, for liars")
    parser.add_argument("--liars-codec", default="fp16", help="of the links, for liars")
    parser.add_argument("--liars-lies", nargs="+", help="some of the lies, for liars")
    parser.add_argument("--monitor-nodes", type=int, default=8, help="in one process, for monitor")
    parser.add_argument("--monitor-s", type=float, default=20.0, help="of each phase, for monitor")
    parser.add_argument("--liars-log", default="CRITICAL", help="level of what the swarm's parts log, for liars")
    parser.add_argument("--credentials-turns", type=int, default=7, help="with and without in turn, for credentials")
    parser.add_argument("--credentials-calls", type=int, default=300, help="of a turn, for credentials")
    parser.add_argument("--credentials-connections", type=int, default=20, help="of a turn, for credentials")
    run_parts(parser, BENCHES)


if __name__ == "__main__":
    main()
