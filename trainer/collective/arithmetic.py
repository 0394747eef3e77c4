"""The numbers of a round: from encoded contributions of a part to its encoded result. Pure, and safe in any thread.

A reducer is not trusted with more than it needs, and trusts nobody: whatever does not decode, or holds a NaN, is left
out and named; the rest goes through the rule. The result is encoded once, and everybody, the reducer included, takes
what those bytes decode to: that is why members end bit for bit alike under any codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from trainer.codec import Codec
from trainer.collective.messages import Agreement
from trainer.errors import CodecError
from trainer.robust import Decision, Moments, RuleConfig, finite_rows, moments, reduce_part

__all__ = ["Arithmetic", "Payload", "ReducedPart"]

Payload: TypeAlias = bytes | memoryview
"""An encoded part, as made here or as it came."""


@dataclass(frozen=True, slots=True)
class ReducedPart:
    """A part's result, as it travels."""

    payload: bytes
    num_included: int
    dropped: Mapping[str, str]
    """Members left out, and why."""
    sums: Moments | None = None


@dataclass(frozen=True, slots=True)
class _Decoded:
    rows: torch.Tensor
    """fp32[m, values of the part]; the senders in the order of their ids."""
    senders: tuple[str, ...]
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What one round computes with: its agreement, codec, rule, this node's vector and the common reference."""

    agreement: Agreement
    codec: Codec
    rule: RuleConfig
    vector: torch.Tensor
    reference: torch.Tensor

    def encode_own(self, part: int) -> bytes:
        """This node's contribution to a part."""
        start, stop = self.agreement.part_bounds(part)
        return bytes(self.codec.encode(self.vector[start:stop]))

    def decode_result(self, part: int, payload: Payload) -> torch.Tensor:
        """A result as everybody takes it.

        Raises:
            CodecError: it does not decode, or is not finite.
        """
        start, stop = self.agreement.part_bounds(part)
        values = self.codec.decode(payload, stop - start)
        if not bool(torch.isfinite(values).all()):
            raise CodecError(f"part {part}: expected finite results, found NaN or infinity")
        return values

    def measure(self, part: int, payloads: Mapping[str, Payload]) -> Moments:
        """Sums over a part for the rules that look at whole vectors; who is missing counts as not finite."""
        decoded = self._decode(part, payloads)
        start, stop = self.agreement.part_bounds(part)
        rows = torch.full((len(self.agreement.members), stop - start), torch.nan)
        for row, sender in zip(decoded.rows, decoded.senders, strict=True):
            rows[self.agreement.peer_ids.index(sender)] = row
        return moments(rows, self.reference[start:stop])

    def reduce(
        self, part: int, payloads: Mapping[str, Payload], decision: Decision | None, *, measured: bool
    ) -> ReducedPart:
        """One part from all that came for it.

        Args:
            part: its number.
            payloads: what came, by sender; members of the round only.
            decision: what was decided over the whole vectors, for the rules that need it.
            measured: also sum what the report says about the contributions.
        """
        start, stop = self.agreement.part_bounds(part)
        decoded = self._decode(part, payloads)
        reference = self.reference[start:stop]
        everyone = self.agreement.peer_ids
        positions = [everyone.index(sender) for sender in decoded.senders]
        if decision is not None:
            kept = [i for i, position in enumerate(positions) if position not in decision.excluded]
            decoded = _Decoded(decoded.rows[kept], tuple(decoded.senders[i] for i in kept), decoded.dropped)
            positions = [positions[i] for i in kept]
        weights = np.array([self.agreement.members[position].weight for position in positions], dtype=np.float64)
        if not positions:
            result = torch.zeros(stop - start)
        else:
            result = reduce_part(decoded.rows, weights, self.rule, decision, reference, positions)
        return ReducedPart(
            payload=bytes(self.codec.encode(result)),
            num_included=len(positions),
            dropped=decoded.dropped,
            sums=self.measure(part, payloads) if measured else None,
        )

    def _decode(self, part: int, payloads: Mapping[str, Payload]) -> _Decoded:
        start, stop = self.agreement.part_bounds(part)
        dropped: dict[str, str] = {}
        senders: list[str] = []
        rows: list[torch.Tensor] = []
        for sender in sorted(payloads):
            try:
                rows.append(self.codec.decode(payloads[sender], stop - start))
                senders.append(sender)
            except CodecError as error:
                dropped[sender] = f"malformed: {error}"[:300]
        stacked = torch.stack(rows) if rows else torch.zeros(0, stop - start)
        finite = finite_rows(stacked)
        for position, is_finite in enumerate(finite):
            if not is_finite:
                dropped[senders[position]] = "not finite"
        kept = [position for position, is_finite in enumerate(finite) if is_finite]
        if len(kept) < len(senders):
            stacked = stacked[kept]
        return _Decoded(stacked, tuple(senders[position] for position in kept), dropped)
