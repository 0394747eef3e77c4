"""What is called how in a run's part of a bucket: names from their parts, and the parts from a name.

    run.json                                              what all nodes of the run have in common, put by the first
    rounds/ROUND/agreement-ATTEMPT                        kept for good: some KB a round
    rounds/ROUND/contribution-MEMBER-SHA256               removed some rounds later
    rounds/ROUND/state-MEMBER                             removed with them
    rounds/ROUND/departure-MEMBER                         a member does not come to that round; removed with them
    slices/ROUND/slice-MEMBER-NUMBER-SHA256               of contributions, where slices have reducers
    slices/ROUND/result-NUMBER-SHA256                     what a slice comes to
    reduced/ROUND/NUMBER-MEMBER                           who says so
    snapshots/ROUND-DIGEST/descriptor, pages, data-PART   the state after a round, for newcomers
    wishes/MEMBER                                         a newcomer waits for a snapshot

ROUND has ten digits, ATTEMPT three, PART six; MEMBER is a key, SHA256 that of the encoded vector. Pure functions:
`place` reads and writes by them, and the run's authority decides by them what a member may do.

Guarantees: `parse_name` knows each name that is made here, and no other; a name says nothing that is to be believed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

RUN_KEY: Final = "run.json"
ROUNDS: Final = "rounds/"
SLICES: Final = "slices/"
REDUCED: Final = "reduced/"
SNAPSHOTS: Final = "snapshots/"
WISHES: Final = "wishes/"

AGREEMENT_NAME = re.compile(r"rounds/(\d{10})/agreement-(\d{3})")
_CONTRIBUTION = re.compile(r"rounds/(\d{10})/contribution-([0-9a-f]{64})-([0-9a-f]{64})")
_STATE = re.compile(r"rounds/(\d{10})/state-([0-9a-f]{64})")
_DEPARTURE = re.compile(r"rounds/(\d{10})/departure-([0-9a-f]{64})")
_SLICE = re.compile(r"slices/(\d{10})/(?:slice-([0-9a-f]{64})|result)-\d{3}-[0-9a-f]{64}")
REDUCED_NAME = re.compile(r"reduced/(\d{10})/(\d{3})-([0-9a-f]{64})")
SNAPSHOT_NAME = re.compile(r"snapshots/(\d{10})-([0-9a-f]{64})/(descriptor|pages|data-\d{6})")
WISH_NAME = re.compile(r"wishes/([0-9a-f]{64})")
_PREFIX = re.compile(
    r"rounds/(?:\d{10}/)?|(?:slices|reduced)/(?:\d{10}/)?|snapshots/(?:\d{10}-(?:[0-9a-f]{64}/)?)?|wishes/"
)


NameKind = Literal[
    "run", "agreement", "contribution", "state", "departure", "slice", "result", "reduced", "snapshot", "wish"
]
NAMES_OF_SLICES: Final[frozenset[NameKind]] = frozenset({"slice", "result", "reduced"})


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What a name in a run's part of a bucket says."""

    kind: NameKind
    round_index: int = -1
    member: str = ""  # Whose object it is by its name; empty: nobody's.
    part: str = ""  # Of a snapshot: descriptor, pages, data-PART.


def parse_name(key: str) -> ObjectName | None:
    """Returns what a name says; None: no object of a run is called so."""
    if key == RUN_KEY:
        return ObjectName("run")
    if found := AGREEMENT_NAME.fullmatch(key):
        return ObjectName("agreement", int(found[1]))
    if found := _CONTRIBUTION.fullmatch(key):
        return ObjectName("contribution", int(found[1]), found[2])
    if found := _STATE.fullmatch(key):
        return ObjectName("state", int(found[1]), found[2])
    if found := _DEPARTURE.fullmatch(key):
        return ObjectName("departure", int(found[1]), found[2])
    if found := _SLICE.fullmatch(key):
        return ObjectName("slice" if found[2] else "result", int(found[1]), found[2] or "")
    if found := REDUCED_NAME.fullmatch(key):
        return ObjectName("reduced", int(found[1]), found[3])
    if found := SNAPSHOT_NAME.fullmatch(key):
        return ObjectName("snapshot", int(found[1]), part=found[3])
    if found := WISH_NAME.fullmatch(key):
        return ObjectName("wish", member=found[1])
    return None


def is_listed_prefix(prefix: str) -> bool:
    """Returns whether a run's nodes list names that begin so."""
    return _PREFIX.fullmatch(prefix) is not None


def agreement_key(round_index: int, attempt: int) -> str:
    """Name of an agreement."""
    return f"{round_prefix(round_index)}agreement-{attempt:03d}"


def round_prefix(round_index: int) -> str:
    """What the names of a round's objects begin with."""
    return f"{ROUNDS}{round_index:010d}/"


def contribution_key(round_index: int, member: str, payload_sha256: str) -> str:
    """Name of a contribution."""
    return f"{round_prefix(round_index)}contribution-{member}-{payload_sha256}"


def state_key(round_index: int, member: str) -> str:
    """Name of a state record."""
    return f"{round_prefix(round_index)}state-{member}"


def departure_key(round_index: int, member: str) -> str:
    """Name of a departure."""
    return f"{round_prefix(round_index)}departure-{member}"


def slice_key(round_index: int, member: str, number: int, sha256: str) -> str:
    """Name of a slice of a contribution."""
    return f"{SLICES}{round_index:010d}/slice-{member}-{number:03d}-{sha256}"


def result_key(round_index: int, number: int, sha256: str) -> str:
    """Name of the encoded result of a slice."""
    return f"{SLICES}{round_index:010d}/result-{number:03d}-{sha256}"


def reduced_key(round_index: int, number: int, member: str) -> str:
    """Name of a member's word on a slice."""
    return f"{REDUCED}{round_index:010d}/{number:03d}-{member}"


def snapshot_prefix(round_index: int, digest: str) -> str:
    """What the names of a snapshot's objects begin with."""
    return f"{SNAPSHOTS}{round_index:010d}-{digest}/"


def wish_key(member: str) -> str:
    """Name of a newcomer's wish."""
    return f"{WISHES}{member}"
