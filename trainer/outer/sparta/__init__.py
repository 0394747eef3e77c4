"""Async SPARTA (spec P-33): replicas take optimizer steps of their own and average a slice of parameters now and then.

    trainer = SpartaTrainer(model, SpartaConfig(), collective, optimizer=optimizer)
    loop.step(); outcome = trainer.after_inner_step(num_batches)

Every 20 steps a twentieth of the parameters is averaged among the replicas of a stage while training goes on, so that
all of them are averaged once in 400 steps. That sends 0.25 % of what averaging gradients every step sends; in return
replicas are never bit-identical while they train, only close.

Guarantees: ``num_slices`` rounds in a row touch each parameter exactly once, whatever ``every_steps``; a round changes
parameters only when its result is whole, and keeps the steps taken meanwhile; moments are never averaged; a round that
fails or is given up changes no bit.

``slices`` says which values a round averages and what they become; ``rounds`` counts rounds and failures, and what is
known of the others' rounds; ``moments`` and ``state`` are what a joiner gets and a checkpoint has; ``trainer`` brings
it together.
"""

from __future__ import annotations

from trainer.outer.sparta.config import SpartaConfig
from trainer.outer.sparta.rounds import NOBODY, OtherRounds, choose_recent_state, frontier_of
from trainer.outer.sparta.slices import ParameterSlice, schedule_digest, slice_index, slice_of
from trainer.outer.sparta.state import SpartaFit, SpartaState
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
