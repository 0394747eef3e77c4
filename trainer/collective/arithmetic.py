"""The numbers of a round: from encoded contributions of a part to its encoded result. Pure, and safe in any thread.

A reducer is not trusted with more than it needs, and trusts nobody: whatever does not decode, or holds a NaN, is left
out and named, as is whoever fails enforced validation in a part; the rest goes through the rule. The result is encoded
once, and everybody, the reducer included, takes what those bytes decode to: that is why members end bit for bit alike
under any codec.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from trainer.aggregation import (
    Decision,
    Moments,
    RuleConfig,
    decide,
    finite_rows,
    moments,
    needs_decision,
    needs_moments,
    reduce_part,
)
from trainer.collective.messages import Agreement
from trainer.compression.vectors import Codec
from trainer.errors import CodecError, MalformedAnswerError, RoundFailedError
from trainer.network.rpc.boundary import peer_boundary

__all__ = ["Arithmetic", "Payload", "ReducedPart"]

logger = logging.getLogger(__name__)

Payload: TypeAlias = bytes | memoryview
"""An encoded part, as made here or as it came."""


@dataclass(frozen=True, slots=True)
class ReducedPart:
    """A part's result, as it travels."""

    payload: Payload
    num_included: int
    dropped: Mapping[str, str]
    """Members whose part is no vector, and why: the rest of what they send is not looked at."""
    odd: Mapping[str, str]
    """Members left out of this part by validation, and why."""
    sums: Moments | None = None


@dataclass(frozen=True, slots=True)
class _Decoded:
    rows: dict[str, torch.Tensor]
    """fp32[values of the part], finite, by sender in the order of their ids."""
    dropped: dict[str, str]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What one round computes with: its agreement, codec, rule, this node's vector and the common reference."""

    agreement: Agreement
    codec: Codec
    rule: RuleConfig
    vector: torch.Tensor
    reference: torch.Tensor
    residual: torch.Tensor | None = None
    """What encoding leaves out of ``vector``, for the next round; begins as all of it. None: nothing is left out."""

    def encoded_bytes(self, part: int) -> int:
        """What a contribution to a part, or its result, has to take."""
        start, stop = self.agreement.part_bounds(part)
        return self.codec.encoded_bytes(stop - start)

    def encode_own(self, part: int) -> Payload:
        """This node's contribution to a part; of fp32 a view, of which nothing is copied."""
        start, stop = self.agreement.part_bounds(part)
        payload = self.codec.encode(self.vector[start:stop])
        if self.residual is not None:
            said = self.codec.decode(payload, stop - start, out=self.residual[start:stop])
            torch.sub(self.vector[start:stop], said, out=said)
        return payload

    def decode_result(self, part: int, payload: Payload, out: torch.Tensor) -> None:
        """A result as everybody takes it, written to its place in ``out``, fp32[num_values].

        Raises:
            CodecError: it does not decode, or is not finite.
        """
        start, stop = self.agreement.part_bounds(part)
        values = self.codec.decode(payload, stop - start, out=out[start:stop])
        if not finite_rows([values])[0]:
            raise CodecError(f"part {part}: expected finite results, found NaN or infinity")

    def measure(self, part: int, payloads: Mapping[str, Payload]) -> Moments:
        """Sums over a part for the rules that look at whole vectors; who is missing counts as not finite."""
        return self._moments(part, self._decode(part, payloads))

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
        decoded = self._decode(part, payloads)
        everyone = self.agreement.peer_ids
        positions = [everyone.index(sender) for sender in decoded.rows]
        judges = needs_decision(self.rule) and not needs_moments(self.rule)
        sums = self._moments(part, decoded) if measured or judges else None
        if judges and sums is not None:
            decision = decide(sums, [member.weight for member in self.agreement.members], self.rule)
        odd = decision.odd if judges and decision is not None else {}
        return ReducedPart(
            payload=self._encoded(part, decoded, positions, decision),
            num_included=sum(decision is None or position not in decision.excluded for position in positions),
            dropped=decoded.dropped,
            odd={everyone[member]: reason for member, reason in odd.items()},
            sums=sums,
        )

    def _encoded(self, part: int, decoded: _Decoded, positions: list[int], decision: Decision | None) -> Payload:
        """The result of a part; zeros where nothing usable came, or what came is beyond what travels."""
        start, stop = self.agreement.part_bounds(part)
        weights = [self.agreement.members[position].weight for position in positions]
        reference = self.reference[start:stop]
        try:
            result = reduce_part([*decoded.rows.values()], weights, self.rule, decision, reference, positions)
            return self.codec.encode(result)
        except (RoundFailedError, CodecError) as error:
            logger.warning("part %d: %s; it stays as it was", part, error)
            return self.codec.encode(torch.zeros(stop - start))

    def _moments(self, part: int, decoded: _Decoded) -> Moments:
        start, stop = self.agreement.part_bounds(part)
        missing = torch.full((stop - start,), torch.nan)
        rows = [decoded.rows.get(peer_id, missing) for peer_id in self.agreement.peer_ids]
        return moments(rows, self.reference[start:stop])

    def _decode(self, part: int, payloads: Mapping[str, Payload]) -> _Decoded:
        start, stop = self.agreement.part_bounds(part)
        decoded = _Decoded({}, {})
        for sender in sorted(payloads):
            try:
                with peer_boundary(f"member {sender[:8]}"):
                    row = self.codec.decode(payloads[sender], stop - start)
            except (CodecError, MalformedAnswerError) as error:
                decoded.dropped[sender] = f"malformed: {error}"[:300]
                continue
            if finite_rows([row])[0]:
                decoded.rows[sender] = row
            else:
                decoded.dropped[sender] = "not finite"
        return decoded
