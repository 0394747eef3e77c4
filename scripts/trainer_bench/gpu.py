"""A GPU: model FLOPs utilisation of 125M, 350M and 1B against loops written by hand, and what an outer step stalls.

Per shape, in bf16: our `InnerLoop` and a loop of plain torch (the same model compiled as a whole, fused AdamW, batches
on the device) on random ids of a vocabulary of 32,768; then all of `python -m trainer` (loader, checkpoints every 10
steps, API, event log) on a store, and the loop by hand with that store's vocabulary. Utilisation is of what the maker
states, where the name is known, and of the best product of large bf16 matrices in the same run. FLOPs of a token are
those of `trainer.model.flops_per_token`; what is computed again does not count. Then both ways of the chunked loss, and
how long one outer step of 1B holds training up: the longest step around it over the median one, overlap off and on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from scripts.trainer_bench.crew import ROOT, progress
from scripts.trainer_bench.steps import our_command
from scripts.trainer_bench.workspace import VOCAB_ROWS as STORE_ROWS
from scripts.trainer_bench.workspace import make_store

_SHAPES = {"125m": (16, 2048), "350m": (16, 2048), "1b": (8, 2048)}
"""Rows and tokens of a batch."""
_VOCAB_ROWS = 32_768
_WARM_STEPS, _STEPS = 8, 20
_NODE_STEPS = 60
_NODE_TIMEOUT_S = 900.0
_OUTER_EVERY, _OVERLAP_STEPS = 12, 5
_ASKED_RATIO, _ASKED_MFU_1B, _ASKED_STALL_S = 0.97, 0.40, {"off": 2.0, "on": 0.05}


def bench_gpu(arguments: argparse.Namespace) -> dict[str, Any]:
    """All shapes, one after the other, then the loss and the outer step."""
    import torch

    if not torch.cuda.is_available():
        reason = "needs a CUDA GPU, found none: torch.cuda.is_available() is false"
        print(f"gpu: {reason}")
        return {"skipped": reason}
    from trainer.inner.peak import measured_flops_per_s, stated_flops_per_s

    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    report: dict[str, Any] = {
        "gpu": name,
        "stated_flops": stated_flops_per_s(name),
        "product_flops": measured_flops_per_s(device, torch.bfloat16),
        "rows": [],
    }
    store = make_store(arguments)
    for shape, (rows, seq_len) in _SHAPES.items():
        for vocab_rows in (_VOCAB_ROWS, STORE_ROWS):
            progress(f"{shape}, {vocab_rows} ids, on {name}")
            contestants: dict[str, Callable[[], dict[str, float]]] = {
                "by hand": lambda *where: steps_by_hand(*where, device)
            }
            if vocab_rows == STORE_ROWS:
                contestants["python -m trainer"] = lambda *where: steps_of_node(store, *where[:3])
            else:
                contestants["InnerLoop"] = lambda *where: steps_of_loop(*where, device)
            for contestant, measure in contestants.items():
                found = measure(shape, rows, seq_len, vocab_rows)
                report["rows"].append({"shape": shape, "vocab_rows": vocab_rows, "of": contestant, **found})
                torch.cuda.empty_cache()
    progress("the chunked loss")
    report["loss"] = losses_ms(*_SHAPES["1b"], 2048, _VOCAB_ROWS, device)
    report["stall_s"] = {}
    for overlap, overlap_steps in (("off", 0), ("on", _OVERLAP_STEPS)):
        progress(f"an outer step of 1b, overlap {overlap}")
        report["stall_s"][overlap] = outer_stall_s("1b", *_SHAPES["1b"], _VOCAB_ROWS, overlap_steps, device)
        torch.cuda.empty_cache()
    print(as_text(report))
    return report


def steps_of_loop(shape: str, rows: int, seq_len: int, vocab_rows: int, device: Any) -> dict[str, float]:
    """`InnerLoop` as a node has it."""
    from trainer.inner import InnerConfig, InnerLoop, make_optimizer
    from trainer.model import build_model, preset

    inner = InnerConfig(micro_batch_size=rows, seq_len=seq_len, precision="bf16", compile="on")
    model = build_model(preset(shape, vocab_rows), 0, device=device)
    loop = InnerLoop(model, make_optimizer(model, inner), inner, random_batches(vocab_rows, rows, seq_len), device)
    return _measured(lambda: loop.step(), shape, rows, seq_len, vocab_rows, device)


def steps_by_hand(shape: str, rows: int, seq_len: int, vocab_rows: int, device: Any) -> dict[str, float]:
    """The loop one writes oneself; its loss is read once a step, too."""
    import torch

    from trainer.model import build_model, preset

    model = build_model(preset(shape, vocab_rows), 0, device=device)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model)
    batch = {name: ids.to(device) for name, ids in next(random_batches(vocab_rows, rows, seq_len)).items()}

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compiled(batch["input_ids"], batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    return _measured(step, shape, rows, seq_len, vocab_rows, device)


def steps_of_node(store: Path, shape: str, rows: int, seq_len: int) -> dict[str, float]:
    """The whole command, from its JSON lines: the steps behind the first ones, rounds and checkpoints included."""
    arguments = argparse.Namespace(step_preset=shape, seq_len=seq_len, batch_size=rows, threads=0)
    with tempfile.TemporaryDirectory(prefix="genesis-bench-gpu-") as folder:
        command = [*our_command(store, Path(folder), arguments), "--max-steps", str(_NODE_STEPS)]
        with subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            killer = threading.Timer(_NODE_TIMEOUT_S, process.kill)
            killer.start()
            steps = (line for line in process.stdout or () if json.loads(line)["kind"] == "step")
            ended_s = [time.monotonic() for _ in steps]
            killer.cancel()
    if len(ended_s) < _NODE_STEPS:
        raise SystemExit(f"python -m trainer ended after {len(ended_s)} of {_NODE_STEPS} steps")
    counted = ended_s[_WARM_STEPS:]
    step_s = (counted[-1] - counted[0]) / (len(counted) - 1)
    return _figures(step_s, shape, rows, seq_len, STORE_ROWS)


def _measured(
    step: Callable[[], object], shape: str, rows: int, seq_len: int, vocab_rows: int, device: Any
) -> dict[str, float]:
    """The mean step behind those in which it is compiled; the device is waited for at both ends only."""
    import torch

    for _ in range(_WARM_STEPS):
        step()
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    for _ in range(_STEPS):
        step()
    if on_cuda:
        torch.cuda.synchronize(device)
    found = _figures((time.perf_counter() - began_s) / _STEPS, shape, rows, seq_len, vocab_rows)
    return found | ({"peak_bytes": torch.cuda.max_memory_allocated(device)} if on_cuda else {})


def _figures(step_s: float, shape: str, rows: int, seq_len: int, vocab_rows: int) -> dict[str, float]:
    from trainer.model import flops_per_token, preset

    tokens_per_s = rows * seq_len / step_s
    flops = tokens_per_s * flops_per_token(preset(shape, vocab_rows), seq_len)
    return {"step_s": step_s, "tokens_per_s": tokens_per_s, "flops_per_s": flops}


def random_batches(vocab_rows: int, rows: int, seq_len: int) -> Iterator[dict[str, Any]]:
    """One batch over and over; what is in it costs no more or less."""
    import torch

    ids = torch.randint(0, vocab_rows, (rows, seq_len + 1), generator=torch.Generator().manual_seed(0))
    while True:
        yield {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def losses_ms(rows: int, seq_len: int, dim: int, vocab_rows: int, device: Any) -> dict[str, float | None]:
    """Forward and backward of the last layer's loss in bf16: ours, ours compiled, and torch's own where it has it."""
    import torch

    from trainer.model import loss

    hidden = torch.randn(rows * seq_len, dim, device=device, requires_grad=True)
    weight = torch.randn(vocab_rows, dim, device=device, requires_grad=True)
    labels = torch.randint(0, vocab_rows, (rows * seq_len,), device=device)
    terms = torch.compile(loss.loss_terms)

    def ours(terms: Any) -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return loss.sum_of_losses(hidden, weight, labels, terms=terms)

    ways: dict[str, Callable[[], Any]] = {"ours": lambda: ours(loss.loss_terms), "ours, compiled": lambda: ours(terms)}
    if loss.TORCHS is not None:
        ways["torch's"] = lambda: loss.sum_by_torch(hidden, weight, labels, vocab_rows, torch.bfloat16)
    found: dict[str, float | None] = {}
    for name, way in ways.items():
        times = []
        for _ in range(10):
            began_s = time.perf_counter()
            torch.autograd.grad(way(), (hidden, weight))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began_s)
        found[name] = 1e3 * median(times[3:])
    return found


def outer_stall_s(
    shape: str, rows: int, seq_len: int, vocab_rows: int, overlap_steps: int, device: Any
) -> dict[str, float]:
    """The longest step around an outer step over the median one; a node alone, whose round costs no network."""
    from trainer.inner import InnerConfig, InnerLoop, make_optimizer
    from trainer.model import build_model, preset
    from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
    from trainer.outer.engine.collective import LocalCollective

    inner = InnerConfig(micro_batch_size=rows, seq_len=seq_len, precision="bf16", compile="on")
    model = build_model(preset(shape, vocab_rows), 0, device=device)
    loop = InnerLoop(model, make_optimizer(model, inner), inner, random_batches(vocab_rows, rows, seq_len), device)
    config = DiLoCoConfig(inner_steps=_OUTER_EVERY, overlap_steps=overlap_steps)
    diloco = DiLoCoTrainer(model, config, LocalCollective())
    seconds = []
    for _ in range(_WARM_STEPS):
        loop.step()
    for _ in range(3 * _OUTER_EVERY):
        began_s = time.perf_counter()
        loop.step()
        diloco.after_inner_step()
        seconds.append(time.perf_counter() - began_s)
    usual_s = median(seconds)
    return {"stall_s": max(seconds) - usual_s, "step_s": usual_s}


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    stated, limit = report["stated_flops"], report["product_flops"]
    head = f"{report['gpu']}: {limit / 1e12:.0f} TFLOP/s in the best bf16 product"
    lines = [head + (f", {stated / 1e12:.0f} stated" if stated else ", not known what is stated")]
    lines.append(
        f"  {'shape':6} {'ids':>7} {'':18} {'step, ms':>9} {'tokens/s':>10} {'TFLOP/s':>8} {'of product':>11} "
        f"{'MFU':>7} {'of by hand':>11}"
    )
    by_hand: dict[tuple[str, int], float] = {}
    for row in report["rows"]:
        key = row["shape"], row["vocab_rows"]
        by_hand.setdefault(key, row["tokens_per_s"])
        flops = row["flops_per_s"]
        mfu = f"{flops / stated:>7.3f}" if stated else f"{'?':>7}"
        lines.append(
            f"  {row['shape']:6} {row['vocab_rows']:>7,} {row['of']:18} {1e3 * row['step_s']:>9.1f} "
            f"{row['tokens_per_s']:>10,.0f} {flops / 1e12:>8.1f} {flops / limit:>11.3f} {mfu} "
            f"{row['tokens_per_s'] / by_hand[key]:>11.3f}"
        )
    lines.append(f"  asked: {_ASKED_RATIO} of by hand, MFU {_ASKED_MFU_1B} at 1b")
    losses = ", ".join(f"{name} {found:.1f} ms" for name, found in report["loss"].items())
    lines.append(f"  loss of a batch of 1b: {losses}")
    for overlap, found in report["stall_s"].items():
        lines.append(
            f"  an outer step of 1b stalls {1e3 * found['stall_s']:,.0f} ms with overlap {overlap} (a step takes "
            f"{1e3 * found['step_s']:.0f} ms; asked at most {1e3 * _ASKED_STALL_S[overlap]:,.0f})"
        )
    return "\n".join(lines)
