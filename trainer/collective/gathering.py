"""Rounds of sparse contributions: a reducer gathers the members' encodings of its parts, and everybody aggregates.

What a reducer sends back for a part is what the members sent it, side by side. Every member decodes all of it, and
computes the result by itself (`trainer.aggregation.sparse`), from the same bytes in the same order: so all end bit for
bit alike, the rule sees whole vectors without a barrier, and nobody takes a reducer's word for a sum. A reducer that
changes what a member sent is found out by that member, which does not accept the part; if most do, others reduce it
again.

Why not a sum, as with dense vectors: the members' 64 values of 4,096 hardly overlap, so that a sum of four has some 240
of them, each with an index (6 bits) and a value (8 bits, encoded a second time): 13 bits a value sent, where the
contributions themselves take 11. A member sends and receives n − 1/n contributions, n for n members, 0.17 bits a
parameter each: for four less than a fortieth of dense int8, which sends 12 bits. Beyond some 45 members a dense int8
sum would be smaller; there are at most 48.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trainer.aggregation import RuleDecision
from trainer.aggregation.sparse import Averaging, SparseOutcome, SparseVector, aggregate_sparse
from trainer.collective.arithmetic import Arithmetic, Payload, ReducedPart
from trainer.compression.sparse import SparseCodec
from trainer.errors import CodecError, MalformedAnswerError, RoundFailedError
from trainer.network.rpc.envelope import peer_boundary

logger = logging.getLogger(__name__)

_ABSENT, _PRESENT = 0, 1


@dataclass(frozen=True, slots=True)
class GatheringArithmetic(Arithmetic):
    """What one round of sparse contributions computes with; ``residual`` begins as a copy of ``vector``."""

    sparse: SparseCodec = field(kw_only=True)
    own_id: str = field(kw_only=True)
    averaging: Averaging = field(kw_only=True, default="replicas")
    _own: dict[int, bytes] = field(default_factory=dict, init=False)
    _parts: dict[int, tuple[SparseVector | None, ...]] = field(default_factory=dict, init=False)

    def encode_own(self, part: int) -> Payload:
        """Returns this node's contribution to a part; what encoding leaves out stays in the residual."""
        if part in self._own:  # Reduced again, by another.
            return self._own[part]
        place, num_values = self._place(part), self._num_values(part)
        payload = bytes(self.sparse.encode(self.vector[place]))
        if self.residual is not None:
            self.sparse.decode_sparse(payload, num_values).subtract_from(self.residual[place])
        self._own[part] = payload
        return payload

    def reduce(self, part: int, payloads: Mapping[str, Payload], decision: RuleDecision | None = None) -> ReducedPart:
        """Puts the contributions to one part side by side: a byte a member, whether it is there, and the encodings."""
        dropped: dict[str, str] = {}
        present: list[Payload] = []
        flags = bytearray(len(self.agreement.peer_ids))
        for position, sender in enumerate(self.agreement.peer_ids):
            if sender not in payloads:
                continue
            try:
                with peer_boundary(f"member {sender[:8]}"):
                    self.sparse.decode_sparse(payloads[sender], self._num_values(part))
            except (CodecError, MalformedAnswerError) as error:
                dropped[sender] = f"malformed: {error}"[:300]
                continue
            flags[position] = _PRESENT
            present.append(payloads[sender])
        return ReducedPart(b"".join([flags, *present]), len(present), dropped, {})

    def decode_result(self, part: int, payload: Payload, out: torch.Tensor) -> None:
        """Takes the members' contributions to a part; ``out`` is filled at the end, by `outcome`.

        Raises:
            CodecError: it is not of these members, or one of them does not decode, or this node sent another.
        """
        count, size = len(self.agreement.peer_ids), self.encoded_bytes(part)
        view = memoryview(payload).cast("B")
        flags = bytes(view[:count])
        if len(flags) < count or any(flag > _PRESENT for flag in flags) or view.nbytes != count + sum(flags) * size:
            raise CodecError(
                f"part {part}: expected a flag for each of {count} members and {size} bytes of each that is there, "
                f"found {view.nbytes} bytes"
            )
        start = count
        found: list[SparseVector | None] = []
        for peer_id, flag in zip(self.agreement.peer_ids, flags, strict=True):
            if flag == _ABSENT:
                found.append(None)
                continue
            piece = view[start : start + size]
            start += size
            if peer_id == self.own_id and part in self._own and piece != self._own[part]:
                raise CodecError(f"part {part}: the reducer changed what this node sent")
            found.append(self.sparse.decode_sparse(piece, self._num_values(part)))
        self._parts[part] = tuple(found)

    def outcome(self) -> SparseOutcome | None:
        """Aggregates the contributions of all parts; None if there is nothing to aggregate, at all members alike.

        A member of which a part is missing is left out of all: its norm and direction are not known.
        """
        positions = range(len(self.agreement.peer_ids))
        try:
            contributions = [self._whole(position) for position in positions]
            return aggregate_sparse(contributions, self.agreement.weights, self.rule, self.averaging)
        except RoundFailedError as error:
            logger.warning("round %d: %s; it stays as it was", self.agreement.round_index, error)
            return None
        finally:
            self._parts.clear()

    def carried_over(self, outcome: SparseOutcome | None, before: torch.Tensor | None) -> torch.Tensor | None:
        """Returns this node's residual after the round; ``before`` is the one it began with.

        What was sent is in the result, and the rest waits. Of a contribution that did not arrive whole everything
        waits; one without batches changes nothing; and one that the others found odd leaves nothing behind, since it
        would be sent again.
        """
        position = self.agreement.peer_ids.index(self.own_id)
        excluded = {} if outcome is None else outcome.decision.excluded
        if self.agreement.weights[position] == 0 and any(self.agreement.weights):
            return before
        if outcome is None or excluded.get(position) == "not finite":
            return self.vector.clone()
        return None if position in excluded else self.residual

    def _whole(self, position: int) -> SparseVector | None:
        pieces: list[SparseVector] = []
        for part in range(self.agreement.num_parts):
            each = self._parts[part][position]
            if each is None:
                return None
            pieces.append(each)
        offsets = (self.agreement.part_bounds(part)[0] for part in range(self.agreement.num_parts))
        indices = [each.indices + offset for each, offset in zip(pieces, offsets, strict=True)]
        return SparseVector(
            self.agreement.num_values,
            np.concatenate(indices) if indices else np.empty(0, np.int64),
            _joined(pieces),
        )


def _joined(pieces: Sequence[SparseVector]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.concatenate([each.values for each in pieces]) if pieces else np.empty(0, np.float32)
