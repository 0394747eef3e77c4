"""The numbers of both levels: a group's results stay with their reducers, a column's are kept to be fetched.

In a group a part's result travels as its digest alone (32 bytes): its reducer keeps the values in fp32, and brings them
to the column of its slice. What it brings is compared with the digests that other members of its group hold: so a
reducer cannot hold one thing in its group and bring another to the column. In a column contributions are fp32, which
costs 4 bytes for each value of a slice, a 1/√n of the model; results are encoded once, as in any round, and what they
decode to is the round's result at every member.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from blake3 import blake3

from trainer.aggregation import RuleDecision
from trainer.collective.arithmetic import Arithmetic, Payload, ReducedPart
from trainer.errors import CodecError

DIGEST_BYTES = 32


def part_digest(payload: Payload) -> bytes:
    """Returns the digest of one encoded part: BLAKE3, 32 bytes."""
    return blake3(payload).digest()


@dataclass(frozen=True, slots=True)
class GroupArithmetic(Arithmetic):
    """What a group computes with; ``result_codec`` is fp32. After the commit, all members hold the same ``digests``."""

    kept: dict[int, bytes] = field(default_factory=dict, kw_only=True)  # Results of this node's own parts, by part.
    digests: dict[int, bytes] = field(default_factory=dict, kw_only=True)  # Of the group's result, by part.

    def reduce(self, part: int, payloads: Mapping[str, Payload], decision: RuleDecision | None = None) -> ReducedPart:
        """Reduces the contributions to one part, keeps the result, and returns its digest as what travels."""
        reduced = Arithmetic.reduce(self, part, payloads, decision)
        self.kept[part] = bytes(reduced.payload)
        return replace(reduced, payload=part_digest(self.kept[part]))

    def decode_result(self, part: int, payload: Payload, out: torch.Tensor) -> None:
        """Takes the digest of a part's result; ``out`` stays as it is. CodecError if it is no digest."""
        digest = bytes(payload)
        if len(digest) != DIGEST_BYTES:
            raise CodecError(f"part {part}: expected a digest of {DIGEST_BYTES} bytes, found {len(digest)}")
        self.digests[part] = digest


@dataclass(frozen=True, slots=True)
class ColumnArithmetic(Arithmetic):
    """What a column computes with, over one slice; ``codec`` is fp32, ``result_codec`` the run's."""

    expected: Mapping[tuple[str, int], bytes] = field(default_factory=dict, kw_only=True)
    """Digests of what groups hold, by who speaks for one and part; where none is known, none is compared."""
    results: dict[int, bytes] = field(default_factory=dict, kw_only=True)  # Encoded parts of the slice's result.

    def reduce(self, part: int, payloads: Mapping[str, Payload], decision: RuleDecision | None = None) -> ReducedPart:
        """Reduces what the groups hold of a part; leaves out what its group holds differently, and says so."""
        lies = {
            sender: "brought another slice than its group holds"
            for sender, payload in payloads.items()
            if (sender, part) in self.expected and part_digest(payload) != self.expected[sender, part]
        }
        honest = {sender: payload for sender, payload in payloads.items() if sender not in lies}
        reduced = Arithmetic.reduce(self, part, honest, decision)
        return replace(reduced, dropped={**reduced.dropped, **lies})

    def decode_result(self, part: int, payload: Payload, out: torch.Tensor) -> None:
        """Writes a decoded result to its place in ``out``, and keeps the encoded one for those who fetch it."""
        Arithmetic.decode_result(self, part, payload, out)
        self.results[part] = bytes(payload)


def slice_digest(parts: Mapping[int, Payload], numbers: range) -> str:
    """Returns BLAKE3 of a slice's encoded parts in their order, as 64 hexadecimal digits; all must be there."""
    hasher = blake3()
    for number in numbers:
        hasher.update(parts[number])
    return hasher.hexdigest()
