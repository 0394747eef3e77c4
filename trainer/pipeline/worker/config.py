"""Options of a worker's service; the defaults fit stages of 0.1 to 10 s a micro-batch.

They bound what drivers can make a worker hold: ``max_received_bytes`` on behalf of requests under way (of these
``max_queue_bytes`` wait to be computed), ``reply_cache_bytes`` of answers, ``reply_cache_ids`` names of some 150 bytes
(39 MB), and twice that many refusals for a while. The stage's graphs have a bound of their own
(`StageConfig.max_cached_bytes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from trainer.errors import TrainerUsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """How a worker serves its stage. Raises TrainerUsageError if a value is out of range."""

    max_batch_size: int = 8
    """Rows of forward requests computed together; a request of more is computed alone. 1: none are put together."""
    max_request_tokens: int = 65_536
    """Rows times positions of one request: bounds its tensors before and after decoding."""
    max_received_bytes: int = 4 << 30
    """Held on behalf of requests until they are answered, of all drivers; one driver gets half of it. Of a request that
    is its tensors as they came and decoded, and an output or gradient in fp32; of a chain that goes on, three."""
    max_queue_bytes: int = 1 << 30
    """Inputs and gradients that wait to be computed with, of all drivers; forward requests may take three quarters."""
    max_queue_per_driver: int = 32
    """Requests of one driver that wait; more are refused as ``busy``."""
    max_compute_lead_s: float = 2.0
    """Seconds of compute by which a driver may be ahead of other waiting drivers before its jobs go after theirs;
    within it a backward pass goes before any driver's forward pass."""
    reply_cache_bytes: int = 256 << 20
    """Tensors of answers kept for repetitions of a request."""
    reply_cache_ids: int = 262_144
    """Micro-batches remembered as counted; of these the oldest are forgotten, long after any lease on them ran out."""
    refuse_s: float = 20.0
    """Seconds a micro-batch is refused for after the ledger server has given it to another driver: longer than a
    request may be under way."""
    progress_interval_s: float = 1.0
    """Seconds between two exchanges of progress with the stage's other workers."""
    auto_step_s: float = 10.0
    """Seconds without anything to count after which a stage steps with less than its target, if it has anything."""

    def __post_init__(self) -> None:
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if name.endswith("_s"):
                if not (math.isfinite(value) and value > 0):
                    raise TrainerUsageError(f"worker.{name}: expected a positive number of seconds, found {value}")
            elif value < 1:
                raise TrainerUsageError(f"worker.{name}: expected 1 or more, found {value}")
