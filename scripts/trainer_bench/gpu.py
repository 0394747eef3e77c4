"""Model FLOPs utilisation of 125M and 1B on a GPU: bf16, compiled, our inner loop.

Two ratios: to what this GPU reaches with a plain product of large bf16 matrices, measured in the same run, and to what
its maker states, where the name is known. FLOPs of a token are those of `trainer.model.flops_per_token` (forward and
backward; what activation checkpointing computes again does not count).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from scripts.trainer_bench.crew import progress

_SHAPES = {"125m": (16, 2048), "1b": (8, 2048)}
"""Rows and tokens of a batch."""
_VOCAB_ROWS = 32_768
_MATRIX = 8192
_WARM_STEPS, _STEPS = 8, 20
_STATED_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "4090": 165.0, "3090": 71.0}
"""Dense bf16 with fp32 sums."""


def bench_gpu(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both shapes, one after the other."""
    import torch

    if not torch.cuda.is_available():
        reason = "needs a CUDA GPU, found none: torch.cuda.is_available() is false"
        print(f"gpu: {reason}")
        return {"skipped": reason}
    name = torch.cuda.get_device_name()
    stated = next((tflops for part, tflops in _STATED_TFLOPS.items() if part in name), None)
    report: dict[str, Any] = {"gpu": name, "stated_tflops": stated, "matmul_tflops": matmul_tflops("cuda")}
    report["shapes"] = {}
    for shape, (rows, seq_len) in _SHAPES.items():
        progress(f"{shape} on {name}")
        report["shapes"][shape] = step_of(shape, rows, seq_len, "cuda")
        torch.cuda.empty_cache()
    print(as_text(report))
    return report


def matmul_tflops(device: str, size: int = _MATRIX) -> float:
    """The best of some products of square matrices."""
    import torch

    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best_s = float("inf")
    for _ in range(20):
        began_s = _now(device)
        left @ right
        best_s = min(best_s, _now(device) - began_s)
    return 2 * size**3 / best_s / 1e12


def step_of(shape: str, rows: int, seq_len: int, device_name: str, vocab_rows: int = _VOCAB_ROWS) -> dict[str, float]:
    """The median step, behind those in which it is compiled."""
    import torch

    from trainer.inner import InnerConfig, InnerLoop, make_optimizer
    from trainer.model import build_model, flops_per_token, preset

    device = torch.device(device_name)
    config = preset(shape, vocab_rows)
    inner = InnerConfig(micro_batch_size=rows, seq_len=seq_len, precision="bf16", compile="on")
    model = build_model(config, 0, device=device)
    loop = InnerLoop(model, make_optimizer(model, inner), inner, random_batches(vocab_rows, rows, seq_len), device)
    seconds = []
    for _ in range(_WARM_STEPS + _STEPS):
        began_s = _now(device_name)
        loop.step()
        seconds.append(_now(device_name) - began_s)
    step_s = median(seconds[_WARM_STEPS:])
    tokens_per_s = rows * seq_len / step_s
    flops = flops_per_token(config, seq_len)
    return {"step_s": step_s, "tokens_per_s": tokens_per_s, "tflops": tokens_per_s * flops / 1e12, "rows": rows}


def random_batches(vocab_rows: int, rows: int, seq_len: int) -> Iterator[dict[str, Any]]:
    """One batch over and over; what is in it costs no more or less."""
    import torch

    ids = torch.randint(0, vocab_rows, (rows, seq_len + 1), generator=torch.Generator().manual_seed(0))
    while True:
        yield {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def _now(device: str) -> float:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    stated, limit = report["stated_tflops"], report["matmul_tflops"]
    head = f"{report['gpu']}: {limit:.0f} TFLOP/s in a bf16 product of {_MATRIX} x {_MATRIX}"
    lines = [head + (f", {stated:.0f} stated" if stated else ", not known what is stated")]
    lines.append(f"  {'':6} {'step, ms':>9} {'tokens/s':>10} {'TFLOP/s':>8} {'of product':>11} {'of stated (MFU)':>16}")
    for shape, found in report["shapes"].items():
        of_stated = f"{found['tflops'] / stated:>16.3f}" if stated else f"{'?':>16}"
        line = f"  {shape:6} {1e3 * found['step_s']:>9.1f} {found['tokens_per_s']:>10.0f} {found['tflops']:>8.1f}"
        lines.append(f"{line} {found['tflops'] / limit:>11.3f} {of_stated}")
    return "\n".join(lines)
