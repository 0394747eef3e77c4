"""Where a stream stands, as a few numbers: what ``state_dict`` gives and ``load_state_dict`` takes.

Plain JSON; under 1 kB for a run without early rotations, and 7 bytes for each of those. It holds what identifies the
stream too, so a state that is loaded into another stream is refused and not silently misread.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loader.errors import StateMismatchError
from loader.options import StreamOptions

__all__ = ["STATE_VERSION", "LaneState", "StreamIdentity", "StreamState", "WorkerState"]

STATE_VERSION: Final = 1

_Count = Annotated[int, Field(strict=True, ge=0, le=2**62)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StreamIdentity(_Part):
    """The options that decide what the stream is."""

    node_id: str
    seq_len: _Count
    batch_size: _Count
    seed: int
    count: _Count
    assignment: str
    sources: tuple[tuple[str, float], ...]
    holdout: _Count
    split: str

    @classmethod
    def of(cls, options: StreamOptions) -> Self:
        """The identity of a stream with these options."""
        return cls(**{name: getattr(options, name) for name in cls.model_fields})


class LaneState(_Part):
    """Where a lane stands."""

    source: str | None = None
    total_shards: Annotated[int, Field(strict=True, ge=1, le=2**62)]
    shards_sha256: str
    epoch: _Count
    window: _Count
    next_total_shards: _Count | None = None
    """What the lane is pinned to from its next epoch on, if a newer manifest was taken."""

    @model_validator(mode="after")
    def _stores_only_grow(self) -> Self:
        if self.next_total_shards is not None and self.next_total_shards <= self.total_shards:
            raise ValueError(f"next_total_shards {self.next_total_shards} is not above {self.total_shards}")
        return self


class WorkerState(_Part):
    """Which of several DataLoader workers a state was taken in."""

    id: _Count
    count: _Count
    origin: _Count
    """The step the workers began with: worker ``id`` makes the batches ``origin + id + i · count``."""


class StreamState(_Part):
    """Where a stream stands."""

    version: int = STATE_VERSION
    identity: StreamIdentity
    step: _Count
    """Batches made."""
    lanes: tuple[LaneState, ...]
    rotations: tuple[_Count, ...] = ()
    """The steps before which a shard was left early."""
    losses: tuple[float, ...] = ()
    end_epoch: _Count | None = None
    """Of a pass that is under way: the epoch before which it ends."""
    worker: WorkerState | None = None

    @classmethod
    def from_dict(cls, value: object) -> Self:
        """Reads what `to_dict` gave.

        Raises:
            StateMismatchError: it is something else, or of another version.
        """
        if isinstance(value, dict) and value.get("version") != STATE_VERSION:
            raise StateMismatchError(
                f"expected a loader state of version {STATE_VERSION}, found {value.get('version')!r}; it was made by "
                "another release, or is the state of something else"
            )
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the state"
            raise StateMismatchError(
                f"expected a loader state, found a damaged one ({where}: {first['msg']})"
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return self.model_dump(mode="json", exclude_none=True)

    def check_identity(self, expected: StreamIdentity) -> None:
        """Refuses a state of another stream.

        Raises:
            StateMismatchError: an option differs; the message says which.
        """
        for name in StreamIdentity.model_fields:
            found, wanted = getattr(self.identity, name), getattr(expected, name)
            if found != wanted:
                raise StateMismatchError(
                    f"expected a state made with {name}={wanted!r}, as this loader has it, found {found!r}; use the "
                    "options the run began with"
                )
