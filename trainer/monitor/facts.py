"""The results, reports and announcements that are monitored, by the fields that are read here.

These are protocols, so that monitoring imports none of the packages that make them. All are values that do not change
once they are passed on; the log writes them in another thread.
"""

# ruff: noqa: D102  (each protocol tells its fields)

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class StepFacts(Protocol):
    """One inner step: loss in nats a token, gradient norm (L2) before clipping, tokens of all its micro-batches.

    It is ``skipped`` where nothing was applied, since loss or gradient were not finite.
    """

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def seconds(self) -> float: ...


class RoundFacts(Protocol):
    """One round that ended with a result.

    ``members`` contributed, this node included; ``dropped`` are others, and why: a word or two, then a colon and text.
    ``completeness`` is the share of the contributions agreed upon that are in the result, 0 to 1; ``num_passes`` is 1,
    and one more for each time a reducer died. ``bits_per_value`` are those sent and received for each parameter of the
    result; None: not known. ``phases`` are the seconds until all agreed, of the tensors, of the vote.
    """

    @property
    def round_index(self) -> int: ...
    @property
    def members(self) -> tuple[str, ...]: ...
    @property
    def dropped(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def completeness(self) -> float: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def received_bytes(self) -> int: ...
    @property
    def bits_per_value(self) -> tuple[float, float] | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def rule(self) -> str: ...
    @property
    def num_passes(self) -> int: ...
    @property
    def weights(self) -> Sequence[float]: ...
    @property
    def validation(self) -> Sequence[object]: ...
    @property
    def note(self) -> str: ...
    @property
    def phases(self) -> tuple[float, float, float]: ...


class LossFacts(Protocol):
    """The loss on some tokens that are not trained on; NaN where there are none."""

    @property
    def nats_per_token(self) -> float: ...
    @property
    def bits_per_byte(self) -> float: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class HeldOutFacts(Protocol):
    """One measurement of the loss on held-out shards, of all and by source."""

    @property
    def whole(self) -> LossFacts: ...
    @property
    def by_source(self) -> Mapping[str, LossFacts]: ...
    @property
    def seconds(self) -> float: ...


class SampleFacts(Protocol):
    """What a model wrote behind a prompt."""

    @property
    def prompt(self) -> str: ...
    @property
    def text(self) -> str: ...


class EvaluationFacts(Protocol):
    """What was measured of the model that ``step`` steps made."""

    @property
    def step(self) -> int: ...
    @property
    def held_out(self) -> HeldOutFacts | None: ...
    @property
    def samples(self) -> Sequence[SampleFacts]: ...


class AnnouncedNode(Protocol):
    """What another node announces of itself: signed, but possibly untrue.

    ``peer_id`` is its key, 64 hexadecimal digits; ``state_digest`` the sha256 of its shared state, or empty; ``loss``
    its `TrainingTracker.smoothed_loss` in nats a token; ``expires_at`` in seconds since the epoch. ``stage_name`` is
    that of a worker, else empty; ``part_states`` are stage, outer step and digest of each part of a node that holds all
    stages of a model that others have in stages.
    """

    @property
    def peer_id(self) -> str: ...
    @property
    def node_id(self) -> str: ...
    @property
    def outer_step(self) -> int: ...
    @property
    def state_digest(self) -> str: ...
    @property
    def inner_step(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def shards(self) -> Collection[int]: ...
    @property
    def stage_name(self) -> str: ...
    @property
    def part_states(self) -> Sequence[tuple[str, int, str]]: ...
    @property
    def expires_at(self) -> float: ...
