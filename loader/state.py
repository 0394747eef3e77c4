"""The position of a stream as a few numbers: what ``state_dict`` gives and ``load_state_dict`` takes.

Plain JSON; under 1 kB for a run without rotations, 7 bytes for each of those, and some 10 for each time that a grown
store was taken. It holds the identity of the stream too, so a state of another stream is refused, not misread.

Version 2 has what version 1 could not say: a mixture in the exact order, a stream of several ranks. Every other
state is still written as version 1, which older releases read; a version 1 of a mixture is of the older order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Final, Self

from annotated_types import Ge, Le

from loader.errors import StateMismatchError
from loader.options import StreamOptions
from loader.plan import Pin, check_pins
from loader.stream.mixture import Mixture

STATE_VERSION: Final = 2
_OLDEST_VERSION: Final = 1

_Count = Annotated[int, Ge(0), Le(2**62)]
_CONFIG: Final = {"extra": "forbid", "strict": True}
"""For pydantic, which is imported only when a state is read."""


@dataclass(frozen=True, slots=True)
class StreamIdentity:
    """The options that decide what the stream is."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    node_id: str
    seq_len: _Count
    batch_size: _Count
    seed: int
    count: _Count | None
    assignment: str
    sources: tuple[tuple[str, float], ...]
    holdout: _Count
    split: str

    @classmethod
    def of(cls, options: StreamOptions) -> Self:
        """The identity of a stream with these options."""
        return cls(**{name: getattr(options, name) for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class LaneState:
    """The position of a lane."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    total_shards: Annotated[int, Ge(1), Le(2**62)]
    shards_sha256: str
    epoch: _Count
    window: _Count
    source: str | None = None
    next_total_shards: _Count | None = None
    """The pin of the next epoch, if a newer manifest was taken."""
    pins: tuple[Pin, ...] | None = None
    """All pins so far, this epoch's last; None if there was only one."""

    def __post_init__(self) -> None:
        if self.pins is not None:
            check_pins(self.pins)
            if self.pins[-1].epoch > self.epoch or self.pins[-1].total_shards != self.total_shards:
                raise ValueError(f"pins {self.pins} do not end with {self.total_shards} shards in epoch {self.epoch}")
        if self.next_total_shards is not None and self.next_total_shards <= self.total_shards:
            raise ValueError(f"next_total_shards {self.next_total_shards} is not above {self.total_shards}")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Which of several DataLoader workers a state was taken in."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    id: _Count
    count: _Count
    origin: _Count
    """The step the workers began with: worker ``id`` makes the batches ``origin + id + i · count``."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The position of a stream."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    identity: StreamIdentity
    step: _Count
    """Batches made."""
    lanes: tuple[LaneState, ...]
    version: Annotated[int, Ge(_OLDEST_VERSION), Le(STATE_VERSION)] = _OLDEST_VERSION
    rotations: tuple[_Count, ...] = ()
    """The steps before which a shard was left early."""
    losses: tuple[float, ...] = ()
    end_epoch: _Count | None = None
    """The epoch before which the current pass ends; None between passes."""
    worker: WorkerState | None = None
    mixture: Mixture | None = None
    """In which order several lanes take turns; None in a state of version 1: `weyl`."""
    row: _Count | None = None
    """Rows taken of an `exact` mixture, by all ranks."""
    world_size: Annotated[int, Ge(1), Le(2**31)] | None = None
    """Ranks that dealt the rows out; None for one."""

    @property
    def total_shards(self) -> int:
        """How many shards a store must have for the lanes to be found again."""
        return max((lane.next_total_shards or lane.total_shards for lane in self.lanes), default=0)

    @classmethod
    def from_dict(cls, value: object) -> Self:
        """Parses the result of `to_dict`.

        Raises:
            StateMismatchError: it is something else, or of another version.
        """
        from pydantic import TypeAdapter, ValidationError

        if isinstance(value, Mapping) and value.get("version") not in range(_OLDEST_VERSION, STATE_VERSION + 1):
            raise StateMismatchError(
                f"expected a loader state of version {_OLDEST_VERSION} to {STATE_VERSION}, found "
                f"{value.get('version')!r}; it was made by another release, or is the state of something else"
            )
        try:
            # Through JSON, in which strict validation accepts a list for a tuple.
            return TypeAdapter(cls).validate_json(json.dumps(value, default=dict))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the state"
            raise StateMismatchError(
                f"expected a loader state, found a damaged one ({where}: {first['msg']})"
            ) from None
        except (TypeError, ValueError) as error:
            raise StateMismatchError(f"expected a loader state of plain JSON values, found {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {
            **_without_none(plain),
            "identity": plain["identity"],
            "lanes": [_without_none(lane) for lane in plain["lanes"]],
        }

    def check_identity(self, expected: StreamIdentity, *, is_resized: bool = False) -> None:
        """Checks that the state belongs to a stream of these options.

        Args:
            expected: of the options.
            is_resized: they have another number of ranks, so that the batch size may be another too.

        Raises:
            StateMismatchError: an option differs; the message names it.
        """
        for name in StreamIdentity.__slots__:
            if name == "batch_size" and is_resized:
                continue
            found, wanted = getattr(self.identity, name), getattr(expected, name)
            if found != wanted:
                raise StateMismatchError(
                    f"expected a state made with {name}={wanted!r}, as this loader has it, found {found!r}; use the "
                    "options the run began with"
                )


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in value.items() if each is not None}
