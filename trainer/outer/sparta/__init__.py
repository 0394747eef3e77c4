"""Async SPARTA (spec P-33): replicas take optimizer steps of their own and average a slice of parameters now and then.

    trainer = SpartaTrainer(model, SpartaConfig(), collective, optimizer=optimizer)
    loop.step(); outcome = trainer.after_inner_step(num_batches)

Every 20 steps a twentieth of the parameters is averaged among the replicas of a stage while training goes on, so that
all of them have been averaged once in 400 steps. Sent are 5 % of the parameters every 20 steps: 0.25 % of what
averaging gradients every step sends; in return replicas are never bit-identical while they train, only close.

What is guaranteed: ``num_slices`` rounds in a row touch each parameter exactly once, whatever ``every_steps``; a round
changes parameters only when its result is whole, and then adds what the average differs by, so that steps taken
meanwhile are kept; moments are never averaged; a round that fails or is given up changes not a bit.

``slices`` says which values are a round's; ``averaging`` is a round's arithmetic; ``standing`` counts rounds, failures
and how far a node is behind; ``rounds`` is what it must know of the others' rounds; ``moments``, ``state``,
``snapshot`` and ``fitting`` are what a joiner gets and a checkpoint has; ``trainer`` brings it together.
"""

from __future__ import annotations

from trainer.outer.sparta.config import SpartaConfig
from trainer.outer.sparta.fitting import SpartaFit
from trainer.outer.sparta.rounds import NOBODY, OtherRounds, choose_recent_state, frontier_of
from trainer.outer.sparta.slices import ParameterSlice, schedule_digest, slice_index, slice_of
from trainer.outer.sparta.state import SpartaState
from trainer.outer.sparta.trainer import SpartaTrainer

__all__ = [
    "NOBODY",
    "OtherRounds",
    "ParameterSlice",
    "SpartaConfig",
    "SpartaFit",
    "SpartaState",
    "SpartaTrainer",
    "choose_recent_state",
    "frontier_of",
    "schedule_digest",
    "slice_index",
    "slice_of",
]
