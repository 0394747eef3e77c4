"""How fast this machine's link is, and what a round of its model then takes: by the strategy's bytes.

A member of N sends its part of the vector to the others' reducers and its reduced slice to all: 2 (N - 1) / N vectors
out, and as many in. What it takes beside that, agreement and arithmetic, is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from genesis.doctor import Finding
from genesis.doctor.machine import size_text
from trainer.compression.powersgd import low_rank_plan
from trainer.model.stages import Transformer, build_stage
from trainer.network.reachability import Bandwidth
from trainer.network.rpc.config import MAX_PAYLOAD_BYTES
from trainer.run.config import RunConfig
from trainer.run.doctor.subject import Share

_VALUE_BYTES: Final = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0 + 4.0 / 1024}
_LONG_S: Final = 60.0
_SPARE: Final = 2.0  # How much longer than measured alone a frame may take while a round has its other streams.


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """What a round moves at one member, each way."""

    size_bytes: float
    what: str


def round_bytes(config: RunConfig, share: Share, num_members: int) -> RoundBytes:
    """Returns what a round of the run's strategy moves among so many members."""
    values = float(share.num_parameters)
    if config.powersgd_rank:
        plan = low_rank_plan(_shapes(share), config.powersgd_rank)
        values = float(plan.num_p + plan.num_q)
    what = "an averaged gradient"
    if config.strategy == "diloco":
        values, what = values / config.diloco.num_fragments, "an outer step"
    elif config.strategy == "async_sparta":
        values, what = values / config.swarm.sparta.num_slices, "a slice of SPARTA"
    size_bytes = values * _VALUE_BYTES[config.collective.compression]
    return RoundBytes(2.0 * (num_members - 1) / num_members * size_bytes, what)


def _shapes(share: Share) -> tuple[tuple[int, ...], ...]:
    with torch.device("meta"):
        if share.plan is None:
            part: torch.nn.Module = Transformer(share.model)
        else:
            names = share.plan.names
            stage = share.stage or max(names, key=share.plan.num_parameters)
            part = build_stage(share.model, share.plan.ranges, names.index(stage), 0, device="meta")
    return tuple(tuple(parameter.shape) for parameter in part.parameters())


def bandwidth_finding(found: Bandwidth, who: str, stall_timeout_s: float) -> Finding:
    """Whether a frame passes before a peer is given up as silent."""
    slower = min(found.up_bytes_per_s, found.down_bytes_per_s)
    text = (
        f"{_mbit(found.up_bytes_per_s)} up, {_mbit(found.down_bytes_per_s)} down, "
        f"{1000 * found.round_trip_s:.0f} ms there and back, to {who}"
    )
    figures = {
        "up_bytes_per_s": found.up_bytes_per_s,
        "down_bytes_per_s": found.down_bytes_per_s,
        "round_trip_s": found.round_trip_s,
    }
    if _SPARE * MAX_PAYLOAD_BYTES / slower > stall_timeout_s:
        least = _SPARE * MAX_PAYLOAD_BYTES / stall_timeout_s
        return Finding.failed(
            "network",
            "bandwidth",
            f"expected {_mbit(least)} or more, found {text}",
            "take a faster link: a message of 1 MiB takes longer than a silent peer is borne (rpc.stall_timeout_s)",
            **figures,
        )
    return Finding.ok("network", "bandwidth", text, **figures)


def round_finding(config: RunConfig, moved: RoundBytes, found: Bandwidth, num_members: int) -> Finding:
    """How long a round's bytes take by this link."""
    seconds = moved.size_bytes / min(found.up_bytes_per_s, found.down_bytes_per_s)
    limit_s = config.diloco.round_timeout_s if config.strategy == "diloco" else config.collective.round_timeout_s
    text = (
        f"{moved.what} among {num_members} moves {size_text(moved.size_bytes)} each way: {seconds:.1f} s by this link"
    )
    figures = {"round_s": seconds, "round_bytes": moved.size_bytes}
    cure = (
        "take a faster link, --compression int8 (a quarter of the bytes), more --inner-steps between rounds, or "
        "diloco.overlap_steps to train meanwhile; in a signed run its owner says these"
    )
    if seconds > limit_s:
        text = f"expected a round within {limit_s:.0f} s, found that {text}"
        return Finding.failed("network", "round", text, cure, **figures)
    if seconds > _LONG_S:
        return Finding.warning("network", "round", text, cure, **figures)
    return Finding.ok("network", "round", text, **figures)


def _mbit(bytes_per_s: float) -> str:
    mbit = 8e-6 * bytes_per_s
    return f"{mbit:,.0f} Mbit/s" if mbit >= 10 else f"{mbit:.2f} Mbit/s"
