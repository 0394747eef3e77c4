"""`RunChange`: one change of a run while it goes on, signed by the run's owner, numbered, in force from a named round.

Each change names the one before it by digest, the first one the run file: a chain that can only be continued by its
owner, and of which no link can be left out or put elsewhere. This module knows what a change looks like; which settings
there are and may change is `trainer.run.signed`'s to say. It imports no torch: DHT nodes and seeds check changes too.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, TypeAlias

from pydantic import AfterValidator, Field

from trainer.network.discovery.records import RecordKind, SignedRecord
from trainer.network.discovery.stage_report import Counted

RUN_CHANGE: Final = RecordKind("run-change", max_bytes=8192, max_count=1024, max_stored_s=600.0)
MAX_SETTINGS: Final = 64


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("expected printable characters")
    return value


_Digest: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Text: TypeAlias = Annotated[str, Field(max_length=256), AfterValidator(_printable)]
_Whole: TypeAlias = Annotated[int, Field(ge=-(2**53) + 1, lt=2**53)]
_Scalar: TypeAlias = bool | _Whole | float | _Text
SettingValue: TypeAlias = _Scalar | Annotated[tuple[_Scalar, ...], Field(max_length=64)]
SettingName: TypeAlias = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}(\.[a-z][a-z0-9_]{0,63}){0,4}$")]


class RunChange(SignedRecord):
    """One change; `signer` is the run's owner."""

    KIND: ClassVar[RecordKind] = RUN_CHANGE

    previous: _Digest  # SHA-256 of the change before (`digest`), or of the run file where this is the first.
    at_round: Counted
    """In force from this round on: the steps that lead to it, its agreement, and what members make of its result."""
    settings: Annotated[dict[SettingName, SettingValue], Field(min_length=1, max_length=MAX_SETTINGS)]
    comment: Annotated[str, Field(max_length=200), AfterValidator(_printable)] = ""
