"""Checks of this machine by what the node's model and options need: GPU, memory, disks, shared memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import torch

from genesis.doctor import Finding
from genesis.doctor.machine import size_text
from loader.cache import settings as cache_settings
from manifests import Manifest, shard_file_bytes
from trainer.errors import TrainerUsageError
from trainer.inner.machine import choose_device
from trainer.inner.memory import largest_preset, peak_bytes, shortage
from trainer.inner.peak import measured_flops_per_s
from trainer.model.sizing import (
    PRESETS,
    SHARED_BYTES_PER_PARAMETER,
    TRAINING_BYTES_PER_PARAMETER,
    available_memory_bytes,
    choose_architecture,
    num_parameters,
    preset,
)
from trainer.run.config import RunConfig
from trainer.run.doctor.subject import Share
from trainer.run.node.cluster import num_processes

_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")
_CHECKPOINT_BYTES_PER_PARAMETER: Final = 24
"""Weights, two moments, anchor, momentum and residual, fp32 each."""
_STATE_BYTES_PER_PARAMETER: Final = 12
_LEAST_BYTES_PER_PARAMETER: Final = 24  # On a CPU: without activations, copies of a round or a checkpoint.
_ROWS: Final = 32_768  # Of a vocabulary that is not known.
_LEAST_SHARED_BYTES: Final = 64 << 20
_RANKS_SHARED_BYTES: Final = 1 << 30
"""What NCCL's manual asks for; with a container's 64 MB it fails at its first exchange."""


def device_finding(name: str) -> Finding:
    """Whether the device is there, and how fast it multiplies."""
    has_driver = _DRIVER_FILE.exists() or os.environ.get("CUDA_VISIBLE_DEVICES", "") not in ("", "-1")
    try:
        device = choose_device(name)
    except TrainerUsageError as error:
        return Finding.failed("machine", "device", str(error), _gpu_cure(has_driver))
    if device.type == "cpu":
        flops_per_s = measured_flops_per_s(device, torch.float32)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        found = f"torch {torch.__version__}, CPU of {cores} cores, {flops_per_s / 1e9:.0f} GFLOP/s in fp32 products"
        figures = {"flops_per_s": flops_per_s}
        if has_driver and name == "auto":
            text = f"expected the GPU that there is, found that torch sees none: {found}"
            return Finding.warning("machine", "device", text, _gpu_cure(has_driver), **figures)
        return Finding.ok("machine", "device", found, **figures)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    flops_per_s = measured_flops_per_s(device, dtype)
    found = (
        f"torch {torch.__version__}, driver {_driver_version()}, {torch.cuda.get_device_name(device)}, "
        f"{size_text(free_bytes)} of {size_text(total_bytes)} free, {flops_per_s / 1e12:.1f} TFLOP/s in {dtype}"
    )
    return Finding.ok("machine", "device", found, flops_per_s=flops_per_s, free_bytes=float(free_bytes))


def _driver_version() -> str:
    """Returns what the kernel's module says, such as 550.54.15."""
    try:
        found = re.search(r"Kernel Module\D*([0-9][0-9.]+)", _DRIVER_FILE.read_text())
    except OSError:
        found = None
    return found[1] if found is not None else "unknown"


def _gpu_cure(has_driver: bool) -> str:
    if not has_driver:
        return (
            "install NVIDIA's driver (nvidia-smi shows the GPU), in a container also --gpus all; or give --device cpu"
        )
    if torch.version.cuda is None:
        return "install a torch built for CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu126"
    return f"update the driver for CUDA {torch.version.cuda}, unset CUDA_VISIBLE_DEVICES, or give --device cpu"


def memory_finding(config: RunConfig, share: Share, device_type: str) -> Finding:
    """Whether a node's share of the model can be trained here, and which preset or stage could."""
    try:
        free_bytes = config.model.memory_bytes or available_memory_bytes(device_type)
    except TrainerUsageError as error:
        return Finding.skipped("machine", "memory", str(error))
    parameters = share.num_parameters
    wanted_bytes, least_bytes = _memory_needs(config, share, device_type)
    fitting = fitting_text(config, share, free_bytes, device_type)
    what = f"{share.name} of {parameters:,} parameters"
    figures = {"free_bytes": float(free_bytes), "needed_bytes": float(wanted_bytes)}
    if free_bytes < least_bytes:
        text = f"expected {size_text(least_bytes)} at least to train {what}, found {size_text(free_bytes)} free"
        return Finding.failed("machine", "memory", text, f"{fitting}; or take a larger machine", **figures)
    beside = (SHARED_BYTES_PER_PARAMETER - TRAINING_BYTES_PER_PARAMETER) * parameters if device_type == "cpu" else 0
    is_whole = share.plan is None and config.inner.micro_batch_size
    short = shortage(share.model, config.inner, free_bytes, beside) if is_whole else ""
    if free_bytes < wanted_bytes or short:
        text = short.partition(";")[0] or f"expected {size_text(wanted_bytes)}, found {size_text(free_bytes)} free"
        cure = f"take a smaller --batch-size or inner.activation_checkpointing=full, if it runs out ({fitting})"
        return Finding.warning("machine", "memory", f"{what}: {text}", cure, **figures)
    return Finding.ok("machine", "memory", f"{size_text(free_bytes)} free for {what}; {fitting}", **figures)


def _memory_needs(config: RunConfig, share: Share, device_type: str) -> tuple[int, int]:
    """Returns the bytes a node takes in all, and those without which it cannot hold its state."""
    parameters = share.num_parameters
    if device_type == "cpu":
        return SHARED_BYTES_PER_PARAMETER * parameters, _LEAST_BYTES_PER_PARAMETER * parameters
    state = TRAINING_BYTES_PER_PARAMETER * parameters
    if share.plan is not None:
        return state, state
    return peak_bytes(share.model, config.inner, max(1, config.inner.micro_batch_size)), state


def fitting_text(config: RunConfig, share: Share, free_bytes: int, device_type: str) -> str:
    """Returns which stages of the run, or which preset, this machine has room for."""
    each = SHARED_BYTES_PER_PARAMETER if device_type == "cpu" else TRAINING_BYTES_PER_PARAMETER
    if share.plan is not None:
        plan = share.plan
        fitting = [name for name in plan.names if each * plan.num_parameters(name) <= free_bytes]
        if len(fitting) == len(plan.names):
            return "every stage of the run fits"
        return f"of the run's stages {', '.join(fitting)} fit (--stage)" if fitting else "no stage of the run fits"
    if device_type == "cpu":
        largest = choose_architecture(free_bytes, share.model.vocab_size, bytes_per_parameter=each)
    else:
        largest = largest_preset(free_bytes, share.model.vocab_size, config.inner)
    name = next(name for name in PRESETS if preset(name, share.model.vocab_size) == largest)
    if device_type == "cpu" and each * num_parameters(largest) > free_bytes:
        return "not even preset tiny fits"
    return f"the largest preset that fits is {name} (--preset {name})"


def disk_needs(config: RunConfig, share: Share, manifest: Manifest | None) -> list[tuple[str, Path, int, int]]:
    """Returns what a node will write: what it is, where, its bytes, and those without which it cannot begin."""
    cache = cache_settings.cache_dir(config.data.cache_dir or None)
    shard_bytes = shard_file_bytes(manifest.shard_tokens) if manifest is not None else 20_000_000
    num_sources = len(config.data.sources) or (len(manifest.sources) if manifest is not None else 1)
    num_shards = config.data.shards_per_node * max(1, num_sources)
    if manifest is not None:
        num_shards = min(num_shards, manifest.total_shards)
    shards = min(num_shards * shard_bytes, cache_settings.cache_bytes(config.data.cache_bytes or None))
    each = _CHECKPOINT_BYTES_PER_PARAMETER * share.num_parameters
    is_worker = share.plan is not None
    section = config.swarm.checkpoint if is_worker else config.checkpoint
    state = _STATE_BYTES_PER_PARAMETER * share.num_parameters
    return [
        ("shards", cache, shards + shard_bytes, 2 * shard_bytes),
        ("checkpoints", Path(section.directory).expanduser(), (section.keep + 1) * each, 2 * each),
        ("states", Path(config.state_dir).expanduser(), (config.state.keep_snapshots + 1) * state, state),
    ]


def shared_memory_finding(folder: Path = Path("/dev/shm")) -> Finding:
    """Whether ranks and DataLoader workers have shared memory; what a node lends its ranks itself needs none of it."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return Finding.skipped("machine", "shared-memory", f"{folder}: {error.strerror}")
    free_bytes = status.f_bavail * status.f_frsize
    num_ranks = max(num_processes(), torch.cuda.device_count() if torch.cuda.is_available() else 1)
    cure = "docker run --shm-size=1g (or --ipc=host); else mount -o remount,size=1G /dev/shm"
    figures = {"free_bytes": float(free_bytes)}
    found = f"{size_text(free_bytes)} free in {folder}"
    if num_ranks > 1 and free_bytes < _LEAST_SHARED_BYTES:
        text = f"expected {size_text(_RANKS_SHARED_BYTES)} for {num_ranks} ranks, found {found}"
        return Finding.failed("machine", "shared-memory", text, cure, **figures)
    wanted_bytes = _RANKS_SHARED_BYTES if num_ranks > 1 else _LEAST_SHARED_BYTES
    if free_bytes < wanted_bytes:
        text = f"expected {size_text(wanted_bytes)}, which ranks under torchrun need, found {found}"
        return Finding.warning("machine", "shared-memory", text, cure, **figures)
    return Finding.ok("machine", "shared-memory", found, **figures)


def unknown_share(config: RunConfig) -> Share:
    """Returns the share of a node whose store cannot be read: the rows of its vocabulary are a guess."""
    shape = config.model.shape(_ROWS)
    return Share(shape if shape is not None else preset("tiny", _ROWS))
