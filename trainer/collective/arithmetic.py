"""The numbers of a round: from encoded contributions of a part to its encoded result, and what a member holds of it.

A reducer trusts no member: what does not decode, or holds a NaN, is left out and named, and so is a member that fails
enforced validation in a part; the rest goes through the rule. The result is encoded once, and every member, the reducer
included, takes what those bytes decode to: so members end bit for bit alike under any codec. All of it is safe in any
thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

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
)
from trainer.collective.messages import Agreement, Task, TaskDigest
from trainer.compression.vectors import Codec
from trainer.errors import CodecError, MalformedAnswerError, RoundFailedError
from trainer.network.rpc.boundary import peer_boundary

__all__ = ["Arithmetic", "HeldResults", "Payload", "ReducedPart", "TaskResult"]

logger = logging.getLogger(__name__)

Payload: TypeAlias = bytes | memoryview
"""An encoded part, as made here or as received."""


@dataclass(frozen=True, slots=True)
class ReducedPart:
    """A part's result, as it travels."""

    payload: Payload
    num_included: int
    """Contributions in it."""
    dropped: Mapping[str, str]
    """Members whose part is not a vector, and why: the rest of what they send is ignored."""
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
        """Returns the size of a contribution to a part, and of its result."""
        start, stop = self.agreement.part_bounds(part)
        return self.codec.encoded_bytes(stop - start)

    def encode_own(self, part: int) -> Payload:
        """Returns this node's contribution to a part; in fp32 a view, without a copy."""
        start, stop = self.agreement.part_bounds(part)
        payload = self.codec.encode(self.vector[start:stop])
        if self.residual is not None:
            decoded = self.codec.decode(payload, stop - start, out=self.residual[start:stop])
            torch.sub(self.vector[start:stop], decoded, out=decoded)
        return payload

    def decode_result(self, part: int, payload: Payload, out: torch.Tensor) -> None:
        """Writes a decoded result to its place in ``out``, fp32[num_values].

        Raises:
            CodecError: it does not decode, or is not finite.
        """
        start, stop = self.agreement.part_bounds(part)
        values = self.codec.decode(payload, stop - start, out=out[start:stop])
        if not finite_rows([values])[0]:
            raise CodecError(f"part {part}: expected finite results, found NaN or infinity")

    def measure(self, part: int, payloads: Mapping[str, Payload]) -> Moments:
        """Returns sums over a part for the rules that look at whole vectors; a missing member counts as not finite."""
        return self._moments(part, self._decode(part, payloads))

    def reduce(
        self, part: int, payloads: Mapping[str, Payload], decision: RuleDecision | None, *, measured: bool
    ) -> ReducedPart:
        """Reduces all contributions to one part.

        Args:
            part: its number.
            payloads: contributions by sender; members of the round only.
            decision: over the whole vectors, for the rules that need one.
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

    def _encoded(self, part: int, decoded: _Decoded, positions: list[int], decision: RuleDecision | None) -> Payload:
        """The result of a part; zeros if no contribution is usable, or the result cannot be encoded."""
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


class TaskResult:
    """The parts of one task, received in order."""

    def __init__(self, task: Task, arithmetic: Arithmetic, values: torch.Tensor) -> None:
        self._task = task
        self._arithmetic = arithmetic
        self._values = values
        self._next_part = task.first_part
        self._sha256 = hashlib.sha256()

    @property
    def complete(self) -> bool:
        """Whether all parts are there."""
        return self._next_part == self._task.last_part

    @property
    def digest(self) -> str | None:
        """SHA-256 of the concatenated encoded parts; None while one is missing."""
        return self._sha256.hexdigest() if self.complete else None

    def add(self, part: int, payload: Payload) -> None:
        """Takes the next part.

        Raises:
            CodecError: it is not the next part, does not decode, or is not finite.
        """
        if part != self._next_part or self.complete:
            raise CodecError(f"expected part {self._next_part} of task {self._task.key}, found {part}")
        self._arithmetic.decode_result(part, payload, self._values)
        self._sha256.update(payload)
        self._next_part += 1


class HeldResults:
    """What a member holds of a round's result: decoded values, and the digests it votes with."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.values = torch.zeros(arithmetic.agreement.num_values)
        self._arithmetic = arithmetic
        self._tasks: dict[str, TaskResult] = {}

    def begin(self, task: Task) -> TaskResult:
        """Returns an empty place for a task's parts."""
        self._tasks[task.key] = TaskResult(task, self._arithmetic, self.values)
        return self._tasks[task.key]

    def digest(self, key: str) -> str | None:
        """Returns the digest of a task's result, or None if it is not whole."""
        return self._tasks[key].digest if key in self._tasks else None

    def holds(self, digests: Iterable[TaskDigest]) -> bool:
        """Returns whether these committed results are held here."""
        return all(entry.digest is not None and self.digest(entry.key) == entry.digest for entry in digests)
