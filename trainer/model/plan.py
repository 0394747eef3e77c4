"""How a model is cut: which layers each stage has, evenly or so that the heaviest stage is as light as possible.

Even shares suit many layers. With few, the head's embedding and the tail's output matrix weigh as much as several
layers, and a cut by memory gives the bodies more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from trainer.errors import TrainerUsageError
from trainer.model.config import ModelConfig, stage_names
from trainer.model.sizing import layer_parameters

CutRule = Literal["even", "memory"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The stages of a run and their layers, in order; the same at all its nodes."""

    config: ModelConfig
    names: tuple[str, ...]
    ranges: tuple[range, ...]

    @classmethod
    def of(cls, config: ModelConfig, num_stages: int, layers: Sequence[int] = (), cut: CutRule = "even") -> StagePlan:
        """Cuts a model into stages of ``layers``, or else by ``cut``. Raises `TrainerUsageError`: they do not fit."""
        names = stage_names(num_stages)
        if layers:
            if len(layers) != num_stages or sum(layers) != config.num_layers or min(layers) < 0:
                raise TrainerUsageError(
                    f"swarm.layers: expected {num_stages} numbers that add up to {config.num_layers}, "
                    f"found {list(layers)}"
                )
        elif cut == "memory":
            layers = cut_by_memory(config, num_stages)
        return cls(config, names, _ranges(layers) if layers else stage_ranges(config.num_layers, num_stages))

    @property
    def num_stages(self) -> int:
        """How many there are."""
        return len(self.names)

    def num_parameters(self, name: str) -> int:
        """Counts the trained parameters of a stage. Raises `TrainerUsageError`: the run has none of that name."""
        index, config = self.index(name), self.config
        layers = self.ranges[index]
        constant = 2 * config.dim * sum(map(config.is_constrained, layers)) if config.reorder_norm else 0
        table = config.vocab_size * config.dim
        ends = (table if index == 0 else 0) + (table + config.dim if index == self.num_stages - 1 else 0)
        return len(layers) * layer_parameters(config) - constant + ends

    def around(self, name: str) -> tuple[str, ...]:
        """Returns a stage and those next to it, head first. Raises `TrainerUsageError`: the run has no such stage."""
        index = self.index(name)
        return self.names[max(0, index - 1) : index + 2]

    def index(self, name: str) -> int:
        """Returns the place of a stage. Raises `TrainerUsageError`: the run has none of that name."""
        if name not in self.names:
            raise TrainerUsageError(f"stage: expected one of {', '.join(self.names)}, found {name!r}")
        return self.names.index(name)


def stage_ranges(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Deals out layers evenly, more to the first. Raises `TrainerUsageError`: fewer layers than stages, or no stage."""
    if not 1 <= num_stages <= num_layers:
        raise TrainerUsageError(f"expected at most a stage for each of {num_layers} layers, found {num_stages} stages")
    each, larger = divmod(num_layers, num_stages)
    return _ranges([each + (stage < larger) for stage in range(num_stages)])


def cut_by_memory(config: ModelConfig, num_stages: int) -> tuple[int, ...]:
    """Returns the layers of each stage that make the largest smallest. Raises `TrainerUsageError`: too many bodies."""
    if num_stages - 2 > config.num_layers:
        raise TrainerUsageError(f"expected at most {config.num_layers} bodies, found {num_stages - 2} to cut")
    layer = layer_parameters(config)
    vocabulary = config.vocab_size * config.dim
    fixed = [vocabulary, *[0] * (num_stages - 2), vocabulary + config.dim]
    counts = [0, *[1] * (num_stages - 2), 0]
    for _ in range(config.num_layers - sum(counts)):
        lightest = min(range(num_stages), key=lambda stage: (fixed[stage] + (counts[stage] + 1) * layer, -stage))
        counts[lightest] += 1
    return tuple(counts)


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))
