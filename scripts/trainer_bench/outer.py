"""How long an outer step holds training up, as a ratio to one copy of the model's vector in the same memory.

A node alone, whose round costs no network: what is left is the arithmetic and the copies. The model has a preset's
parameters and does not train. Overlap off: all that `DiLoCoTrainer` does at the step at which a round is due. Overlap
on: the sum of what it does at all steps of a round, with pauses between them that stand for the steps, long enough for
the round's thread. On a GPU the device's stream is waited for, too. The state's digest, which nobody waits for in a
run, is not counted. The copy is of fp32 values between two vectors that have been touched before: the least that a
snapshot can cost.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from scripts.trainer_bench.crew import load_average, progress

_ROUNDS, _COPIES = 5, 9
_OVERLAP_STEPS = 20
_VOCAB_ROWS = 32_768
ASKED_S = {"off": 2.0, "on": 0.05}


def bench_outer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Off and on, on the GPU if there is one."""
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    report = outer_stalls(arguments.outer_preset, device)
    print(as_text(report), flush=True)
    return report


def outer_stalls(preset_name: str, device: Any) -> dict[str, Any]:
    """The stalls of some rounds of each kind, and the copy's seconds before and behind them."""
    import torch

    from trainer.model import Transformer, preset

    progress(f"an outer step of {preset_name} on {device}")
    with torch.device("meta"):
        model = Transformer(preset(preset_name, _VOCAB_ROWS))
    model.to_empty(device=device)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    num_values = sum(parameter.numel() for parameter in model.parameters())
    report: dict[str, Any] = {"preset": preset_name, "device": str(device), "num_values": num_values}
    report |= {"threads": torch.get_num_threads(), "load": [load_average()], "copy_s": copies_s(num_values)}
    report["off_s"] = _stalls_s(model, device, overlap_steps=0, pause_s=0.0)
    pause_s = 3.0 * median(report["off_s"]) / _OVERLAP_STEPS + 0.01
    report["on_s"] = _stalls_s(model, device, overlap_steps=_OVERLAP_STEPS, pause_s=pause_s)
    report["copy_s"] += copies_s(num_values)
    report["load"].append(load_average())
    return report


def copies_s(num_values: int) -> list[float]:
    """Returns the seconds of some copies of a vector of so many values, in host memory."""
    import torch

    source, target = torch.ones(num_values), torch.zeros(num_values)
    return [seconds_of(lambda: target.copy_(source)) for _ in range(_COPIES)]


def _stalls_s(model: Any, device: Any, *, overlap_steps: int, pause_s: float) -> list[float]:
    """The seconds that each round costs the training thread; of the first, which touches new memory, none."""
    from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
    from trainer.outer.engine.collective import LocalCollective

    config = DiLoCoConfig(inner_steps=overlap_steps + 1, overlap_steps=overlap_steps)
    trainer = DiLoCoTrainer(model, config, LocalCollective())
    trainer.state_digest()
    found, stall_s = [], 0.0
    while len(found) <= _ROUNDS:
        time.sleep(pause_s)
        before = trainer.round_index
        stall_s += seconds_of(trainer.after_inner_step, device)
        if trainer.round_index > before:
            found.append(stall_s)
            trainer.state_digest()
            stall_s = 0.0
    return found[1:]


def seconds_of(call: Callable[[], object], device: Any = None) -> float:
    """Returns the seconds of a call, with what it has queued on a GPU."""
    import torch

    on_cuda = device is not None and device.type == "cuda"
    began_s = time.perf_counter()
    call()
    if on_cuda:
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - began_s


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    copy_s, size = median(report["copy_s"]), 4 * report["num_values"]
    lines = [
        f"{report['preset']}: {report['num_values']:,} values on {report['device']}, {report['threads']} threads; one "
        f"copy of {size / 1e9:.2f} GB takes {1e3 * copy_s:.1f} ms ({size / copy_s / 1e9:.1f} GB/s); "
        f"{' to '.join(report['load'])}"
    ]
    for overlap in ("off", "on"):
        stall_s = median(report[f"{overlap}_s"])
        lines.append(
            f"  an outer step stalls training {1e3 * stall_s:,.1f} ms with overlap {overlap}: {stall_s / copy_s:.2f} "
            f"copies (asked of 1b on a GPU: at most {1e3 * ASKED_S[overlap]:,.0f} ms)"
        )
    return "\n".join(lines)
