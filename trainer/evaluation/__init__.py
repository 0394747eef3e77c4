"""A node's own measure of what it trains: loss on shards that nobody trains on, sampled text, published tasks.

`HeldOut` has the tokens and measures a model on them; `Evaluator` says when, during training; `harness` hands an export
to EleutherAI's lm-evaluation-harness, which is optional.
"""

from __future__ import annotations

from trainer.evaluation.config import EvalConfig
from trainer.evaluation.evaluator import Evaluation, Evaluator
from trainer.evaluation.held_out import HeldOut, HeldOutLoss, SourceLoss
from trainer.evaluation.sampling import Sample, sample_text

__all__ = ["EvalConfig", "Evaluation", "Evaluator", "HeldOut", "HeldOutLoss", "Sample", "SourceLoss", "sample_text"]
