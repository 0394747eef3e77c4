"""`trainer profile`: what the steps of a node cost, as training takes them, and where the time goes.

A node is built as for training, with its data, outer steps and checkpoints, but alone and with folders that are removed
afterwards: nothing of it stays but the trace. Speed and shares are measured first, over as many steps as are profiled
afterwards, since the profiler itself costs time (of a step of `tiny` on a CPU about a third).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.errors import TrainerError, TrainerUsageError
from trainer.monitor.status import SpeedStatus
from trainer.run.config import RunConfig
from trainer.run.node.cluster import num_processes
from trainer.run.node.starting import run_node
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import Node, TrainingDisplay

logger = logging.getLogger(__name__)

TRACE_NAME = "trace.json.gz"
_WARM_STEPS = 3  # In which kernels are compiled and memory is allocated.


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One operator of torch, or kernel: its own time, without what it calls."""

    name: str
    calls: int  # A step.
    milliseconds: float  # A step; the device's where there is a GPU.


@dataclass(frozen=True, slots=True)
class Profile:
    """What was found over ``num_steps`` steps."""

    num_steps: int
    speed: SpeedStatus
    operators: tuple[OperatorCost, ...]  # The most expensive first.
    trace: Path


def profile_training(config: RunConfig, num_steps: int, folder: Path, display: TrainingDisplay) -> Profile:
    """Builds a node, lets it train for a while, and writes the trace of its steps into a folder.

    Raises:
        TrainerUsageError: fewer than one step, or a run of several processes.
    """
    if num_steps < 1:
        raise TrainerUsageError(f"--steps: expected 1 or more, found {num_steps}")
    if config.engine == "torch" or config.pipeline == "swarm":
        raise TrainerUsageError("profile: expected one process with a whole model, found engine torch or a pipeline")
    if num_processes() > 1:
        raise TrainerUsageError(
            f"profile: expected one process, found {num_processes()} ranks; start it without torchrun"
        )
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Profile] = []
    with tempfile.TemporaryDirectory(prefix="genesis-profile-") as scratch:
        alone = replace(
            config,
            max_steps=0,
            state_dir=scratch,
            discovery=replace(config.discovery, initial_peers=()),
            rpc=replace(config.rpc, port=0),
            checkpoint=replace(config.checkpoint, directory=scratch, token=""),
            api=replace(config.api, enabled=False),
            log=replace(config.log, directory="", to=()),
        )
        run_node(alone, display, StopRequest(), lambda node: found.append(_profiled(node, num_steps, folder)))
    return found[0]


def _profiled(node: Node, num_steps: int, folder: Path) -> Profile:
    node.take_steps(_WARM_STEPS)
    node.watch.restart_speed()
    node.take_steps(num_steps)
    speed = node.watch.tracker.speed
    if speed is None:
        raise TrainerError("expected steps that take time, found none")
    on_cuda = node.replica.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        node.take_steps(num_steps)
        if on_cuda:
            torch.cuda.synchronize()
    trace = folder / TRACE_NAME
    profiler.export_chrome_trace(str(trace))
    operators = []
    for event in profiler.key_averages():
        own_us = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        operators.append(OperatorCost(event.key, round(event.count / num_steps), own_us / 1e3 / num_steps))
    operators.sort(key=lambda each: -each.milliseconds)
    return Profile(num_steps, speed, tuple(operators), trace)


def profile_table(found: Profile, num_operators: int = 15) -> Sequence[str]:
    """Returns lines for people: speed, the shares of time, the most expensive operators."""
    speed = found.speed
    lines = [
        f"{found.num_steps} steps: {speed.tokens_per_s:,.0f} tokens/s, MFU {100 * speed.mfu:.1f} % of "
        f"{speed.peak_flops_per_s / 1e12:.3g} TFLOP/s, {speed.peak_kind} ({speed.peak_device})",
        f"{'phase':<14}{'of time':>9}",
        *(f"{name.replace('_', ' '):<14}{100 * share:>7.1f} %" for name, share in speed.time_shares.items()),
        "",
        f"{'operator':<56}{'calls':>7}{'ms a step':>11}{'of all':>8}",
    ]
    total_ms = sum(each.milliseconds for each in found.operators) or 1.0
    for each in found.operators[:num_operators]:
        share = 100 * each.milliseconds / total_ms
        lines.append(f"{each.name[:55]:<56}{each.calls:>7}{each.milliseconds:>11.3f}{share:>6.1f} %")
    return [*lines, "", f"trace: {found.trace} (chrome://tracing, or https://ui.perfetto.dev)"]
