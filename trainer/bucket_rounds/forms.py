"""How a vector is encoded for a bucket, and how the contributions of a round become its result.

A form is a pure function of its bytes: every member decodes the same payloads, in the agreement's order, by the same
rules, and has the same bits. `DenseForm` sends all values with a codec, in parts of a fixed length, which are reduced
by themselves as slices are among peers, on several threads; validation judges each part (or, for rules over whole
vectors, all of them). `SparseForm` is for vectors in chunk order (`trainer.outer.engine.chunk_order`), in one piece:
0.17 bits a parameter, so that what everybody fetches of everybody stays small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from trainer.aggregation import (
    Moments,
    RuleConfig,
    RuleDecision,
    decide,
    effective_rule,
    finite_rows,
    moments,
    needs_decision,
    needs_moments,
    reduce_part,
    validate,
)
from trainer.aggregation.sparse import SPARSE_RULE, Averaging, SparseVector, aggregate_sparse
from trainer.compression.sparse import SPARSE
from trainer.compression.vectors import Codec
from trainer.errors import CodecError, RoundFailedError
from trainer.outer.engine.collective import MemberFinding, member_findings

Payload = bytes | bytearray | memoryview

PART_VALUES: Final = 1 << 18
"""Values reduced at once, a multiple of the int8 codec's block; part of what all members must have alike."""
_SPARSE_PART_VALUES: Final = 1 << 22
"""Encoded at once by one thread: a multiple of a chunk."""
_MOST_THREADS: Final = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Aggregated:
    """What a round's contributions have become."""

    vector: Tensor  # [P] fp32.
    rule: str
    note: str
    dropped: tuple[tuple[str, str], ...]  # Members not in it, or not in all of it, and why.
    odd: tuple[tuple[str, str], ...]  # (member, reason) of validation.
    findings: tuple[MemberFinding, ...]
    completeness: float  # Share of the members' values that are in it.


class Form(Protocol):
    """How vectors of one length travel."""

    @property
    def name(self) -> str:
        """In headers and agreements: members of a round have the same."""

    @property
    def num_values(self) -> int:
        """Length of the vectors."""

    @property
    def max_payload_bytes(self) -> int:
        """No payload is larger."""

    @property
    def is_lossless(self) -> bool:
        """Whether a payload holds all of what was encoded."""

    @property
    def keeps_what_was_odd(self) -> bool:
        """Whether what a payload leaves out is kept for the next round where validation has left the payload out."""

    def encode(self, vector: Tensor) -> Payload:
        """Encodes a vector, fp32[P]; raises CodecError if it is not finite."""

    def left_out(self, vector: Tensor, payload: Payload) -> Tensor | None:
        """Returns ``vector`` without what a payload of this node's holds, [P]; None: nothing is left.

        It may be the memory of ``vector``, which is not needed any more. Raises CodecError if it does not decode.
        """

    def aggregate(
        self, payloads: Mapping[str, Payload], weights: Mapping[str, float], rule: RuleConfig, reference: Tensor
    ) -> Aggregated:
        """Returns the result of contributions, by member; the same bits at all members.

        Raises RoundFailedError: none of them is usable.
        """


@dataclass(frozen=True, slots=True)
class _PartResult:
    sums: Moments | None
    num_included: int
    dropped: Mapping[str, str]
    odd: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DenseForm:
    """All values, with one of the codecs of `trainer.compression.vectors`; ``num_threads`` 0: by the processors."""

    codec: Codec
    num_values: int
    num_threads: int = 0

    @property
    def name(self) -> str:
        """See `Form`."""
        return f"dense-{self.codec.name}"

    @property
    def max_payload_bytes(self) -> int:
        """See `Form`; all payloads have this size."""
        whole, rest = divmod(self.num_values, PART_VALUES)
        return whole * self.codec.encoded_bytes(PART_VALUES) + self.codec.encoded_bytes(rest)

    @property
    def is_lossless(self) -> bool:
        """See `Form`."""
        return self.codec.name == "fp32"

    @property
    def keeps_what_was_odd(self) -> bool:
        """See `Form`: that is rounding."""
        return True

    def encode(self, vector: Tensor) -> Payload:
        """See `Form`."""
        payload = bytearray(self.max_payload_bytes)

        def encode(part: int) -> None:
            payload[self._bytes_of(part)] = self.codec.encode(vector[self._place(part)])

        self._for_parts(encode)
        return payload

    def left_out(self, vector: Tensor, payload: Payload) -> Tensor | None:
        """See `Form`."""
        self._check_size(payload)
        view = memoryview(payload)

        def subtract(part: int) -> bool:
            place = self._place(part)
            decoded = self.codec.decode(view[self._bytes_of(part)], self._length(part))
            left = vector[place].sub_(decoded)
            return bool(left.any())

        return vector if any(self._for_parts(subtract)) else None

    def aggregate(
        self, payloads: Mapping[str, Payload], weights: Mapping[str, float], rule: RuleConfig, reference: Tensor
    ) -> Aggregated:
        """See `Form`."""
        members = sorted(payloads)
        result = torch.zeros(self.num_values)
        decision: RuleDecision | None = None
        judged_sums: list[Moments] = []
        row_weights = [weights[member] for member in members]
        if needs_moments(rule):
            judged_sums = self._for_parts(
                lambda part: self._moments(part, self._rows(part, payloads)[0], members, reference)
            )
            decision = decide(reduce(add, judged_sums), row_weights, rule)
        parts = self._for_parts(
            lambda part: self._reduce(part, payloads, members, row_weights, rule, decision, reference, result)
        )
        if not any(part.num_included for part in parts):
            raise RoundFailedError(f"expected a usable contribution of {len(members)}, found none")
        sums = judged_sums or [part.sums for part in parts if part.sums is not None]
        findings: tuple[MemberFinding, ...] = ()
        if rule.validation != "off" and sums:
            findings = member_findings(validate(reduce(add, sums), rule, row_weights), members)
        dropped = {member: why for part in reversed(parts) for member, why in part.dropped.items()}
        odd = {member: why for part in reversed(parts) for member, why in part.odd.items()}
        if rule.validation == "log":
            odd |= {each.member: each.reason for each in findings if each.reason}
        effective = effective_rule(len(members) - len(dropped), rule)
        num_values = sum(part.num_included * self._length(number) for number, part in enumerate(parts))
        return Aggregated(
            vector=result,
            rule=effective.rule if decision is None else decision.rule_used,
            note=effective.note if decision is None else decision.note,
            dropped=tuple(sorted({**odd, **dropped}.items() if rule.validation == "enforce" else dropped.items())),
            odd=tuple(sorted(odd.items())),
            findings=findings,
            completeness=num_values / (self.num_values * len(members)) if self.num_values else 1.0,
        )

    def _reduce(
        self,
        part: int,
        payloads: Mapping[str, Payload],
        members: Sequence[str],
        weights: Sequence[float],
        rule: RuleConfig,
        decision: RuleDecision | None,
        reference: Tensor,
        result: Tensor,
    ) -> _PartResult:
        """Writes one part of the result; one without a usable contribution stays zero."""
        place = self._place(part)
        rows, dropped = self._rows(part, payloads)
        sums: Moments | None = None
        odd: Mapping[int, str] = {} if decision is None else decision.odd
        if decision is None and (needs_decision(rule) or rule.validation != "off"):
            sums = self._moments(part, rows, members, reference)
            if needs_decision(rule):
                decision = decide(sums, weights, rule)
                odd = decision.odd
        positions = [members.index(member) for member in rows]
        try:
            result[place] = reduce_part(
                [*rows.values()], [weights[at] for at in positions], rule, decision, reference[place], positions
            )
        except RoundFailedError:
            return _PartResult(sums, 0, dropped, {members[at]: why for at, why in odd.items()})
        excluded = {} if decision is None else decision.excluded
        return _PartResult(
            sums=sums,
            num_included=sum(at not in excluded for at in positions),
            dropped=dropped,
            odd={members[at]: why for at, why in odd.items()},
        )

    def _rows(self, part: int, payloads: Mapping[str, Payload]) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Finite rows of a part by member, in their order; and who has none, and why."""
        rows: dict[str, Tensor] = {}
        dropped: dict[str, str] = {}
        for member in sorted(payloads):
            try:
                self._check_size(payloads[member])
                view = memoryview(payloads[member])[self._bytes_of(part)]
                row = self.codec.decode(view, self._length(part))
            except CodecError as error:
                dropped[member] = f"malformed: {error}"[:300]
                continue
            if finite_rows([row])[0]:
                rows[member] = row
            else:
                dropped[member] = "not finite"
        return rows, dropped

    def _moments(self, part: int, rows: Mapping[str, Tensor], members: Sequence[str], reference: Tensor) -> Moments:
        place = self._place(part)
        missing = torch.full((place.stop - place.start,), torch.nan)
        return moments([rows.get(member, missing) for member in members], reference[place])

    def _check_size(self, payload: Payload) -> None:
        if len(payload) != self.max_payload_bytes:
            raise CodecError(f"expected {self.max_payload_bytes} bytes, found {len(payload)}")

    def _place(self, part: int) -> slice:
        return slice(part * PART_VALUES, min((part + 1) * PART_VALUES, self.num_values))

    def _length(self, part: int) -> int:
        return min(PART_VALUES, self.num_values - part * PART_VALUES)

    def _bytes_of(self, part: int) -> slice:
        start = part * self.codec.encoded_bytes(PART_VALUES)
        return slice(start, start + self.codec.encoded_bytes(self._length(part)))

    def _for_parts(self, work: Callable[[int], T]) -> list[T]:
        """Does the work for every part, on several threads; results in the order of the parts."""
        return in_threads(work, -(-self.num_values // PART_VALUES), self.num_threads)


@dataclass(frozen=True, slots=True)
class SparseForm:
    """The greatest 64 of every 4,096 values, two bits each (SparseLoCo); the mean clipped to the median norm."""

    num_values: int
    averaging: Averaging = "replicas"
    num_threads: int = 0

    @property
    def name(self) -> str:
        """See `Form`."""
        return f"sparse-{self.averaging}"

    @property
    def max_payload_bytes(self) -> int:
        """See `Form`; all payloads have this size."""
        return SPARSE.encoded_bytes(self.num_values)

    @property
    def is_lossless(self) -> bool:
        """See `Form`."""
        return False

    @property
    def keeps_what_was_odd(self) -> bool:
        """See `Form`: it is most of the vector, and would be sent again."""
        return False

    def encode(self, vector: Tensor) -> Payload:
        """See `Form`; chunks are encoded by themselves, so that parts of a vector make up the whole's bytes."""
        if vector.device.type != "cpu":
            return SPARSE.encode(vector)
        size = _SPARSE_PART_VALUES

        def encode(part: int) -> memoryview:
            return SPARSE.encode(vector[part * size : (part + 1) * size])

        return b"".join(in_threads(encode, -(-self.num_values // size), self.num_threads))

    def left_out(self, vector: Tensor, payload: Payload) -> Tensor | None:
        """See `Form`."""
        SPARSE.decode_sparse(payload, self.num_values).subtract_from(vector)
        return vector

    def aggregate(
        self, payloads: Mapping[str, Payload], weights: Mapping[str, float], rule: RuleConfig, reference: Tensor
    ) -> Aggregated:
        """See `Form`; the reference, which sparse vectors are not compared with, is not read."""
        members = sorted(payloads)
        dropped: dict[str, str] = {}

        def decoded(position: int) -> SparseVector | None:
            member = members[position]
            try:
                return SPARSE.decode_sparse(payloads[member], self.num_values)
            except CodecError as error:
                dropped[member] = f"malformed: {error}"[:300]
                return None

        found = in_threads(decoded, len(members), self.num_threads)
        outcome = aggregate_sparse(found, [weights[member] for member in members], rule, self.averaging)
        excluded = {members[at]: why for at, why in outcome.decision.excluded.items()}
        findings = member_findings(outcome.decision.findings, members)
        return Aggregated(
            vector=outcome.vector,
            rule=SPARSE_RULE,
            note=outcome.decision.note,
            dropped=tuple(sorted({**excluded, **dropped}.items())),
            odd=tuple(sorted((each.member, each.reason) for each in findings if each.reason)),
            findings=findings,
            completeness=1.0 - len(excluded.keys() | dropped.keys()) / len(members),
        )


def in_threads(work: Callable[[int], T], count: int, num_threads: int) -> list[T]:
    """Does the work for 0 to ``count`` - 1 on so many threads (0: by the processors); results in order."""
    most = num_threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    if min(count, most) <= 1:
        return [work(number) for number in range(count)]
    with ThreadPoolExecutor(most, thread_name_prefix="bucket-arithmetic") as pool:
        return list(pool.map(work, range(count)))
