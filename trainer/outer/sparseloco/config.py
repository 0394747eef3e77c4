"""Options of SparseLoCo; the defaults are those of arXiv 2508.15706."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from trainer.aggregation.config import Averaging
from trainer.errors import TrainerUsageError
from trainer.outer.diloco.config import DiLoCoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLoCoConfig:
    """How often nodes synchronise, how far the outer step goes, and what becomes of what was not sent."""

    inner_steps: int = 30
    """Inner steps between two synchronisations of the same parameter; 15 to 250 were tried by its authors."""
    outer_lr: float = 1.0
    """How much of the mean the outer step takes; its authors' largest run lowered it to 0.65 later on."""
    decay: float = 0.95
    """What is kept of the error feedback from round to round, 0 to 1; less if members differ much, whose old work then
    pulls in directions that no longer matter."""
    averaging: Averaging = "replicas"
    """What sums are divided by: the weight of all ``replicas``, or of the ``senders`` of each coordinate: then one
    member's word counts in full where nobody else sent any."""
    num_fragments: int = 1
    """Parts of the model synchronised in turn, evenly spread over inner_steps; 1: all of it at once."""
    overlap_steps: int = 0
    """Inner steps that go on while a round runs in the background; 0: training waits for the round."""
    merge_alpha: float = 0.5
    """With overlap: share of the node's own parameters, trained meanwhile, in the merge; 0 to under 1."""
    round_timeout_s: float = 3600.0
    """A background round that is not back by then is given up (engines have deadlines of their own)."""

    def __post_init__(self) -> None:
        for field, is_valid, expected in (
            ("decay", math.isfinite(self.decay) and 0 <= self.decay <= 1, "0 to 1"),
            ("averaging", self.averaging in get_args(Averaging), f"one of {', '.join(get_args(Averaging))}"),
        ):
            if not is_valid:
                raise TrainerUsageError(f"sparseloco.{field}: expected {expected}, found {getattr(self, field)}")
        try:
            self.cadence()
        except TrainerUsageError as error:
            raise TrainerUsageError(str(error).replace("diloco.", "sparseloco.")) from error

    def cadence(self) -> DiLoCoConfig:
        """Returns the same cadence and outer step as DiLoCo has them: without momentum."""
        return DiLoCoConfig(
            inner_steps=self.inner_steps,
            outer_lr=self.outer_lr,
            outer_momentum=0.0,
            num_fragments=self.num_fragments,
            overlap_steps=self.overlap_steps,
            merge_alpha=self.merge_alpha,
            round_timeout_s=self.round_timeout_s,
        )
