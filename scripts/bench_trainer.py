#!/usr/bin/env python
"""The trainer against its peers and the limits, in one run, on the same model and data.

    python scripts/bench_trainer.py                # everything
    python scripts/bench_trainer.py bytes          # bytes on the wire for 500 steps: DiLoCo, DDP over gloo
    python scripts/bench_trainer.py round          # a round of 16 MB among 2 to 4: ours, hivemind, gloo
    python scripts/bench_trainer.py links          # tokens/s over 10 and 100 Mbit/s: ours, DDP, hivemind.Optimizer
    python scripts/bench_trainer.py utilisation    # training time over wall time at 100 Mbit/s with the shape of 125M
    python scripts/bench_trainer.py step           # a step of `python -m trainer` against a loop written by hand
    python scripts/bench_trainer.py ranks          # the same for a node of two ranks, with DDP and with FSDP2
    python scripts/bench_trainer.py liars          # held-out loss with liars, and without, under some rules
    python scripts/bench_trainer.py powersgd       # bytes and processor time of a factored round; torch's hook; loss
    python scripts/bench_trainer.py sparse         # SparseLoCo: codec speed, bits a parameter on the wire, loss
    python scripts/bench_trainer.py outer          # what an outer step stalls training, overlap off and on, in copies
    python scripts/bench_trainer.py bucket         # the same for a round through a bucket, and what links make of it
    python scripts/bench_trainer.py quorum         # rounds closed by a quorum: simulated, and three nodes 1 : 2 : 4
    python scripts/bench_trainer.py bucket-liars   # held-out loss with liars in rounds through a bucket
    python scripts/bench_trainer.py gpu            # MFU of 125M, 350M, 1B; what an outer step stalls

Every figure is a ratio to something measured in the same run. Members are processes of their own, in network namespaces
where links matter (that needs root); all of them end with this one. Figures go to docs/performance.md.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # As `python -m trainer` does.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench_parts import parts_parser, run_parts
from scripts.trainer_bench.bucket import add_options as add_bucket_options
from scripts.trainer_bench.bucket import bench_bucket
from scripts.trainer_bench.bucket_liars import add_options as add_liar_options
from scripts.trainer_bench.bucket_liars import bench_bucket_liars
from scripts.trainer_bench.gpu import bench_gpu
from scripts.trainer_bench.liars import RULES, bench_liars
from scripts.trainer_bench.links import bench_links
from scripts.trainer_bench.outer import bench_outer
from scripts.trainer_bench.powersgd import bench_powersgd
from scripts.trainer_bench.quorum import add_options as add_quorum_options
from scripts.trainer_bench.quorum import bench_quorum
from scripts.trainer_bench.ranks import bench_ranks
from scripts.trainer_bench.rounds import bench_round
from scripts.trainer_bench.sparse import bench_sparse
from scripts.trainer_bench.steps import bench_step
from scripts.trainer_bench.utilisation import bench_utilisation
from scripts.trainer_bench.wire_bytes import bench_bytes

BENCHES = {
    "bytes": bench_bytes,
    "round": bench_round,
    "links": bench_links,
    "utilisation": bench_utilisation,
    "step": bench_step,
    "ranks": bench_ranks,
    "liars": bench_liars,
    "powersgd": bench_powersgd,
    "sparse": bench_sparse,
    "outer": bench_outer,
    "bucket": bench_bucket,
    "quorum": bench_quorum,
    "bucket-liars": bench_bucket_liars,
    "gpu": bench_gpu,
}


def main() -> None:
    """Runs the parts named, or all."""
    parser = parts_parser(__doc__, BENCHES, "genesis-bench-trainer")
    parser.add_argument("--store", type=Path, help="a store with a vocabulary of 1,024 to use instead")
    parser.add_argument("--members", type=int, default=4, help="of bytes and links")
    parser.add_argument("--bytes-preset", default="15m", help="model of bytes")
    parser.add_argument("--round-mb", type=float, default=16.0, help="size of a vector, for round")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each contestant, for round")
    parser.add_argument("--mbit", type=float, nargs="+", default=[10.0, 100.0], help="of the links, for links")
    parser.add_argument("--link-tokens", type=int, default=32, help="of a batch, for links")
    parser.add_argument("--utilisation-mbit", type=float, default=100.0, help="of the links, for utilisation")
    parser.add_argument(
        "--tokens-per-step", type=int, default=524_288, help="assumed, for utilisation (DiLoCo's paper)"
    )
    parser.add_argument(
        "--gpu-tflops", type=float, default=312.0, help="assumed peak, for utilisation; an A100 in bf16"
    )
    parser.add_argument("--gpu-share", type=float, default=0.4, help="of the peak, assumed to be reached")
    parser.add_argument("--step-preset", default="tiny", help="model of step and ranks")
    parser.add_argument("--outer-preset", "--preset", default="125m", help="model of outer")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a row, for step")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a batch, for step")
    parser.add_argument("--threads", type=int, default=1, help="torch's in each process, for step")
    parser.add_argument("--turn-steps", type=int, default=10, help="steps of a turn, for step: a checkpoint each ten")
    parser.add_argument("--step-s", type=float, default=120.0, help="how long step measures, and ranks each kind")
    parser.add_argument("--kept-batches", type=int, default=512, help="that the loop written by hand goes through")
    parser.add_argument("--liar-rounds", type=int, default=10, help="outer steps of a run, for liars")
    parser.add_argument("--liar-rules", nargs="+", choices=RULES, help="rules to try, for liars; all by default")
    parser.add_argument("--powersgd-preset", default="125m", help="whose shape is sent, for powersgd")
    parser.add_argument("--powersgd-rank", type=int, default=64, help="for powersgd")
    parser.add_argument("--powersgd-rounds", type=int, default=2, help="counted of each, for powersgd")
    parser.add_argument("--powersgd-train-preset", default="15m", help="model that is trained, for powersgd")
    parser.add_argument("--powersgd-train-ranks", type=int, nargs="+", default=[64, 8], help="for powersgd")
    parser.add_argument("--powersgd-steps", type=int, default=200, help="of each training; 0: none, for powersgd")
    add_bucket_options(parser)
    add_quorum_options(parser)
    add_liar_options(parser)
    parser.add_argument("--sparse-repeats", type=int, default=5, help="of each timed call, for sparse")
    parser.add_argument("--sparse-wire-values", type=int, default=8 << 20, help="of a vector; 0: no rounds, for sparse")
    parser.add_argument("--sparse-preset", default="tiny", help="model that is trained, for sparse")
    parser.add_argument("--sparse-steps", type=int, default=600, help="inner steps; 0: no training, for sparse")
    parser.add_argument("--sparse-inner-steps", type=int, nargs="+", default=[30, 100], help="H, for sparse")
    parser.add_argument("--sparse-seeds", type=int, default=3, help="for sparse")
    parser.add_argument("--sparse-contestants", nargs="+", help="such as 'diloco int8'; all by default, for sparse")
    parser.add_argument("--sparse-rows", type=int, default=4, help="of 64 tokens a member and step, for sparse")
    parser.add_argument("--sparse-lr", type=float, default=3e-3, help="greatest of the inner steps, for sparse")
    run_parts(parser, BENCHES)


if __name__ == "__main__":
    main()
