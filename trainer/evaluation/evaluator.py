"""`Evaluator`: when a node in training measures its model, and what it then measures.

The steps decide, and they are in the checkpoint: a node that was killed measures at the places where it would have,
and perhaps after one outer step more. A store whose held-out shards cannot be read costs a warning and the measurement,
never the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from genesis.tokenizer import StoreTokenizer, tokenizer_of
from loader import LoaderError
from manifests import Vocabulary
from trainer.evaluation.config import EvalConfig
from trainer.evaluation.held_out import Autocast, HeldOut, HeldOutLoss
from trainer.evaluation.sampling import Sample, sample_text
from trainer.model import Transformer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured of the model that so many steps made."""

    step: int
    held_out: HeldOutLoss | None
    samples: tuple[Sample, ...] = ()


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Measures one node's model; for the training thread. It keeps no state that a checkpoint would need."""

    config: EvalConfig
    read: Callable[[], HeldOut] | None
    """Reads the held-out tokens, at the first measurement; None: none are held out."""
    vocabulary: Callable[[], Vocabulary]
    """The store's newest."""
    device: torch.device
    rows: int
    """Windows that go through the model at once."""
    round_steps: int
    """Inner steps of a planned round: outer steps are measured that come half as many steps or more apart."""
    autocast: Autocast
    seed: int
    _held_out: HeldOut | None = field(default=None, init=False)
    _tokenizer: tuple[Vocabulary, StoreTokenizer] | None = field(default=None, init=False)
    _round_measured_at: int = field(default=0, init=False)

    def prepare(self) -> None:
        """Reads the held-out tokens now, so that ranks which must measure together all can. Raises `LoaderError`."""
        if self._held_out is None and self.read is not None:
            self._held_out = self.read()

    def after_step(self, model: Transformer, step: int, *, after_round: bool) -> Evaluation | None:
        """Returns what is due after so many steps, or after an outer step that has just been applied; None: nothing."""
        config = self.config
        # Others ask a node that is slow for rounds before it has done its part: measuring each would make it slower.
        of_round = after_round and config.after_rounds and 2 * (step - self._round_measured_at) >= self.round_steps
        if of_round:
            self._round_measured_at = step
        held_out = self._measured(model) if of_round or _is_multiple(step, config.every_steps) else None
        samples = self._samples(model, step) if _is_multiple(step, config.sample_every_steps) else ()
        return Evaluation(step, held_out, samples) if held_out is not None or samples else None

    def _measured(self, model: Transformer) -> HeldOutLoss | None:
        try:
            self.prepare()
        except LoaderError as error:
            logger.warning("the held-out loss is not measured this time: %s", error)
        if self._held_out is None:
            return None
        return self._held_out.measure(model, self.device, rows=self.rows, autocast=self.autocast)

    def _samples(self, model: Transformer, step: int) -> tuple[Sample, ...]:
        vocabulary = self.vocabulary()
        if self._tokenizer is None or self._tokenizer[0] is not vocabulary:
            self._tokenizer = vocabulary, tokenizer_of(vocabulary)
        return sample_text(
            model,
            self._tokenizer[1],
            self.config.sample_prompts,
            self.device,
            eos_id=vocabulary.eos_id,
            num_tokens=self.config.sample_tokens,
            temperature=self.config.temperature,
            seed=f"{self.seed}:{step}",
            autocast=self.autocast,
        )


def _is_multiple(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step > 0 and step % every_steps == 0
