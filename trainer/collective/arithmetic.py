"""The numbers of a round: from encoded contributions of a part to its encoded result, and what a member holds of it.

A reducer trusts no member: what does not decode, or holds a NaN, is left out and named, and so is a member that fails
enforced validation in a part; the rest goes through the rule. The result is encoded once, and every member, the reducer
included, takes what those bytes decode to: so members end bit for bit alike under any codec. Rules that look at whole
vectors need sums over all slices; every member adds those in one order, so all decide alike. Safe in any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from typing import TypeAlias

import torch
from blake3 import blake3

from trainer.aggregation import (
    Moments,
    RuleConfig,
    RuleDecision,
    decide,
    finite_rows,
    moments,
    needs_decision,
    needs_moments,
    reduce_part,
    validate,
)
from trainer.collective.messages import Agreement, MomentsReply, Task
from trainer.compression.vectors import Codec
from trainer.errors import CodecError, MalformedAnswerError, RoundFailedError
from trainer.network.rpc.envelope import peer_boundary
from trainer.outer.engine.collective import MemberFinding, member_findings

logger = logging.getLogger(__name__)

Payload: TypeAlias = bytes | memoryview  # An encoded part, as made here or as received.


@dataclass(frozen=True, slots=True)
class ReducedPart:
    """A part's result, as it travels."""

    payload: Payload
    num_included: int  # Contributions in it.
    dropped: Mapping[str, str]  # Members whose part is not a vector, and why: the rest of what they send is ignored.
    odd: Mapping[str, str]  # Members left out of this part by validation, and why.
    sums: Moments | None = None


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
    result_codec: Codec | None = None  # Of results; None: that of contributions.

    def encoded_bytes(self, part: int) -> int:
        """Returns the size of a contribution to a part."""
        return self.codec.encoded_bytes(self._num_values(part))

    def encode_own(self, part: int) -> Payload:
        """Returns this node's contribution to a part; in fp32 a view, without a copy."""
        place = self._place(part)
        payload = self.codec.encode(self.vector[place])
        if self.residual is not None:
            decoded = self.codec.decode(payload, self._num_values(part), out=self.residual[place])
            torch.sub(self.vector[place], decoded, out=decoded)
        return payload

    def decode_result(self, part: int, payload: Payload, out: torch.Tensor) -> None:
        """Writes a decoded result to its place in ``out``, fp32[num_values]; CodecError if it is no finite one."""
        codec = self.result_codec or self.codec
        values = codec.decode(payload, self._num_values(part), out=out[self._place(part)])
        if not finite_rows([values])[0]:
            raise CodecError(f"part {part}: expected finite results, found NaN or infinity")

    def measure(self, part: int, payloads: Mapping[str, Payload]) -> Moments:
        """Returns sums over a part for the rules that look at whole vectors; a missing member counts as not finite."""
        return self._moments(part, self._decode(part, payloads)[0])

    def reduce(self, part: int, payloads: Mapping[str, Payload], decision: RuleDecision | None = None) -> ReducedPart:
        """Reduces the contributions to one part, by sender; rules over whole vectors need a decision on those."""
        rows, dropped = self._decode(part, payloads)
        everyone, weights = self.agreement.peer_ids, self.agreement.weights
        positions = [everyone.index(sender) for sender in rows]
        judges = needs_decision(self.rule) and not needs_moments(self.rule)
        is_measured = self.rule.validation != "off" and not needs_moments(self.rule)
        sums = self._moments(part, rows) if is_measured or judges else None
        odd: Mapping[int, str] = {}
        if judges and sums is not None:
            decision = decide(sums, weights, self.rule)
            odd = decision.odd
        row_weights, reference = [weights[position] for position in positions], self.reference[self._place(part)]
        codec = self.result_codec or self.codec
        try:
            result = reduce_part([*rows.values()], row_weights, self.rule, decision, reference, positions)
            payload = codec.encode(result)
        except (RoundFailedError, CodecError) as error:
            logger.warning("part %d: %s; it stays as it was", part, error)
            payload = codec.encode(torch.zeros(self._num_values(part)))
        return ReducedPart(
            payload=payload,
            num_included=sum(decision is None or position not in decision.excluded for position in positions),
            dropped=dropped,
            odd={everyone[member]: reason for member, reason in odd.items()},
            sums=sums,
        )

    def _place(self, part: int) -> slice:
        return slice(*self.agreement.part_bounds(part))

    def _num_values(self, part: int) -> int:
        start, stop = self.agreement.part_bounds(part)
        return stop - start

    def _moments(self, part: int, rows: Mapping[str, torch.Tensor]) -> Moments:
        missing = torch.full((self._num_values(part),), torch.nan)
        everyone = [rows.get(peer_id, missing) for peer_id in self.agreement.peer_ids]
        return moments(everyone, self.reference[self._place(part)])

    def _decode(self, part: int, payloads: Mapping[str, Payload]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Finite rows, fp32[values of the part], by sender in the order of their ids; and who has none, and why."""
        rows: dict[str, torch.Tensor] = {}
        dropped: dict[str, str] = {}
        for sender in sorted(payloads):
            try:
                with peer_boundary(f"member {sender[:8]}"):
                    row = self.codec.decode(payloads[sender], self._num_values(part))
            except (CodecError, MalformedAnswerError) as error:
                dropped[sender] = f"malformed: {error}"[:300]
                continue
            if finite_rows([row])[0]:
                rows[sender] = row
            else:
                dropped[sender] = "not finite"
        return rows, dropped


class TaskResult:
    """The parts of one task, received in order, and written to their places in ``values``, fp32[num_values]."""

    def __init__(self, task: Task, arithmetic: Arithmetic, values: torch.Tensor) -> None:
        self._task = task
        self._arithmetic = arithmetic
        self._values = values
        self._next_part = task.first_part
        self._blake3 = blake3()

    @property
    def complete(self) -> bool:
        """Whether all parts are there."""
        return self._next_part == self._task.last_part

    @property
    def digest(self) -> str | None:
        """BLAKE3 of the concatenated encoded parts; None while one is missing."""
        return self._blake3.hexdigest() if self.complete else None

    def add(self, part: int, payload: Payload) -> None:
        """Takes the next part; raises CodecError if it is another, does not decode, or is not finite."""
        if part != self._next_part or self.complete:
            raise CodecError(f"expected part {self._next_part} of task {self._task.key}, found {part}")
        self._arithmetic.decode_result(part, payload, self._values)
        self._blake3.update(payload)
        self._next_part += 1


def add_sums(sums: Sequence[Moments]) -> Moments:
    """Adds sums in the given order: the same numbers wherever the same sums are added."""
    return reduce(add, sums)


def measured_of(agreement: Agreement, sums: Sequence[Moments], rule: RuleConfig) -> tuple[MemberFinding, ...]:
    """Validates the contributions (spec T-20) from some sums; returns nothing without sums, or if validation is off."""
    if rule.validation == "off" or not sums:
        return ()
    return member_findings(validate(add_sums(sums), rule, agreement.weights), agreement.peer_ids)


def split_sums(reply: MomentsReply, payload: bytes) -> list[bytes]:
    """Returns the sums of several reducers in message and payload; raises ValueError if the sizes do not add up."""
    if sum(reply.sizes_bytes) != len(payload):
        raise ValueError(f"expected {sum(reply.sizes_bytes)} bytes of sums, found {len(payload)}")
    ends = list(accumulate(reply.sizes_bytes))
    return [payload[end - size : end] for end, size in zip(ends, reply.sizes_bytes, strict=True)]
