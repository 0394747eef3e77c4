"""Named reducers of rounds in a bucket: two members reduce each slice, and the others check them and take the result.

    contribution   the digests of its slices, in place of the vector; the slices are objects of their own
    reduced        a member's signed word on what a slice comes to, with the digest of the encoded result
    result         the encoded result of a slice, named by its digest

Who reduces a slice follows from the agreement: two members at first, in an order by what everybody has contributed; one
more after each ``propose_after_s`` in which two have not come to one word, and only theirs count. Whatever they say
follows from what lies in the bucket for everybody, so that it needs no trust: a member reduces one more slice than it
is asked to, by its own signature, which nobody else can foresee (a spot check), and each slice of which two words are
heard; and it believes itself. Whoever has said something else is named, and is no reducer for this node any more. Two
reducers of one slice that tell the same lie are found out by the n/s members (of n, with s slices) whose spot check it
is. Whoever believed the two then holds another state than those, which the records of states tell, as after any round
(`trainer.bucket_rounds.keeping`): such a lie costs a round, and is not silent.

A slice counts if it was put no later than the agreement, by the store's times, and reducers look a moment after that:
so nobody can show a slice to one reducer and not to another.

The trade-off: a member fetches two slices of every contribution, one more to check, and the result: 1 + 3·n/s vectors
instead of n; with as many slices as members four, whatever their number. Results are encoded once more, as among peers.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import torch
from torch import Tensor

from genesis.errors import GenesisError
from manifests.serialisation import canonical_json, sha256_hex
from trainer.aggregation import RuleConfig, needs_moments
from trainer.bucket_rounds.documents import MAX_RECORD_BYTES, Agreement, Count, Digest, SignedDocument
from trainer.bucket_rounds.forms import PART_VALUES, Aggregated, DenseForm, Payload
from trainer.bucket_rounds.object_names import reduced_key, result_key, slice_key
from trainer.bucket_rounds.place import Place
from trainer.errors import CodecError, MalformedAnswerError, RoundFailedError, TrainerUsageError
from trainer.network.rpc import Identity

logger = logging.getLogger(__name__)

NUM_REDUCERS: Final = 2
"""Of a slice, whose words have to agree."""
DIGEST_BYTES: Final = 32
_THREADS: Final = 4
_CHECK_DOMAIN: Final = b"genesis bucket check 1\n"


class SliceWord(SignedDocument):
    """What a slice of a round comes to, by the word of one of its reducers."""

    DOMAIN: ClassVar[bytes] = b"genesis bucket slice 1\n"
    MAX_BYTES: ClassVar[int] = MAX_RECORD_BYTES

    round_index: Count
    agreement: Digest
    number: Count
    result_sha256: Digest


def require_sliceable(rule: RuleConfig) -> None:
    """Raises TrainerUsageError for a rule that needs whole vectors, which no reducer of a slice has."""
    if needs_moments(rule):
        raise TrainerUsageError(
            f"bucket.num_slices: expected a rule by coordinates (mean, median, trimmed_mean), found {rule.rule}, which "
            "compares whole vectors; leave bucket.num_slices at 0, so that everybody fetches them"
        )


@dataclass(frozen=True, slots=True)
class SlicedForm:
    """A dense vector in slices of whole parts; what is put under the contribution's name are their digests."""

    dense: DenseForm
    most_slices: int

    @property
    def name(self) -> str:
        """See `trainer.bucket_rounds.forms.Form`; members of other slices are in another round."""
        return f"{self.dense.name}-slices{self.most_slices}"

    @property
    def num_values(self) -> int:
        """Length of the vectors."""
        return self.dense.num_values

    @property
    def num_slices(self) -> int:
        """Slices with a part in them: a vector has a part for each 262,144 values."""
        return max(1, min(self.most_slices, -(-self.num_values // PART_VALUES)))

    @property
    def max_payload_bytes(self) -> int:
        """Of the digests."""
        return DIGEST_BYTES * self.num_slices

    @property
    def is_lossless(self) -> bool:
        """See `Form`."""
        return self.dense.is_lossless

    @property
    def keeps_what_was_odd(self) -> bool:
        """See `Form`."""
        return self.dense.keeps_what_was_odd

    def encode(self, vector: Tensor) -> Payload:
        """Returns all slices, one after the other; see `digests_of`."""
        return self.dense.encode(vector)

    def left_out(self, vector: Tensor, payload: Payload) -> Tensor | None:
        """See `Form`; ``payload`` is what `encode` returned."""
        return self.dense.left_out(vector, payload)

    def aggregate(
        self, payloads: Mapping[str, Payload], weights: Mapping[str, float], rule: RuleConfig, reference: Tensor
    ) -> Aggregated:
        """Not for whole vectors: see `SliceReduction`."""
        raise RoundFailedError("a round in slices is aggregated by its reducers")

    def place(self, number: int) -> slice:
        """Returns where a slice is in the vector."""
        num_parts = -(-self.num_values // PART_VALUES)
        first, last = (place * num_parts // self.num_slices for place in (number, number + 1))
        return slice(first * PART_VALUES, min(last * PART_VALUES, self.num_values))

    def of_slice(self, number: int) -> DenseForm:
        """Returns the form of a slice by itself."""
        place = self.place(number)
        return replace(self.dense, num_values=place.stop - place.start)

    def pieces(self, payload: Payload) -> list[memoryview]:
        """Cuts what `encode` returned into slices."""
        view, start, found = memoryview(payload), 0, []
        for number in range(self.num_slices):
            size = self.of_slice(number).max_payload_bytes
            found.append(view[start : start + size])
            start += size
        return found

    def digests_of(self, payload: Payload) -> bytes:
        """Returns the digests of the slices, 32 bytes each, which stand for the vector."""
        return b"".join(hashlib.sha256(piece).digest() for piece in self.pieces(payload))

    def digest_of(self, digests: Payload, number: int) -> str:
        """Returns the digest of one slice of those that `digests_of` has put together."""
        return bytes(digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]).hex()


def reducers_of(agreement: Agreement, number: int, false_reducers: Collection[str] = ()) -> list[str]:
    """Returns who reduces a slice, in order; those known to have said something false come last.

    The order is by what everybody has contributed alone: of an agreement, whoever proposes it could sign many.
    """
    contributed = [[each.member, each.payload_sha256] for each in agreement.members]
    seed = sha256_hex(canonical_json([agreement.run_id, agreement.round_index, contributed]))

    def rank(member: str) -> bytes:
        return hashlib.sha256(f"{seed} {number} {member}".encode()).digest()

    return sorted(agreement.keys, key=lambda member: (member in false_reducers, rank(member)))


def checked_by(agreement: Agreement, identity: Identity, num_slices: int) -> int:
    """Returns the slice that a member reduces to check others; by its signature, so that nobody else can know it."""
    signature = identity.sign(_CHECK_DOMAIN + agreement.digest.encode())
    return int.from_bytes(hashlib.sha256(signature).digest()[:8]) % num_slices


@dataclass(slots=True)
class _Slice:
    number: int
    own: tuple[str, bytes] | None = None  # Digest and encoded result, if this node has reduced it.
    has_said: bool = False
    dropped: dict[str, str] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)
    is_settled: bool = False
    rule: str = ""
    note: str = ""
    completeness: float = 1.0


class SliceReduction:
    """One node's part in reducing an agreed round, and what it takes from the others; for one thread.

    ``digests`` are the members' contributions: of each slice 32 bytes. ``false_reducers`` is added to.
    """

    def __init__(
        self,
        place: Place,
        identity: Identity,
        form: SlicedForm,
        agreement: Agreement,
        digests: Mapping[str, Payload],
        rule: RuleConfig,
        reference: Tensor,
        *,
        false_reducers: set[str],
        agreed_at: float,
        wait_s: float,
        poll_interval_s: float,
        check_time: Callable[[], None],
    ) -> None:
        self._place = place
        self._identity = identity
        self._form = form
        self._agreement = agreement
        self._digests = digests
        self._rule = rule
        self._reference = reference
        self._false = false_reducers
        self._agreed_at = agreed_at  # By the store's clock, when the agreement was put.
        self._wait_s = wait_s
        self._poll_interval_s = poll_interval_s
        self._check_time = check_time
        self._values = torch.zeros(form.num_values)
        self._slices = [_Slice(number) for number in range(form.num_slices)]
        self._words: dict[int, dict[str, str]] = {each.number: {} for each in self._slices}
        self._seen: set[tuple[int, str]] = set()
        self._liars: dict[str, str] = {}

    def run(self) -> Aggregated:
        """Reduces, checks and fetches until all slices are there.

        Raises:
            RoundFailedError: a slice has no usable contribution.
        """
        began_s = time.monotonic()
        self._reduce_due(0)
        while not all(each.is_settled for each in self._slices):
            self._check_time()
            try:
                num_waits = int((time.monotonic() - began_s) / self._wait_s)
                self._hear()
                self._settle(num_waits)
                self._reduce_due(num_waits)
            except GenesisError as error:
                logger.warning("round %d: %s; trying again", self._agreement.round_index, error)
            if not all(each.is_settled for each in self._slices):
                time.sleep(self._poll_interval_s)
        self._spot_check()
        return self._aggregated()

    # -- reducing ------------------------------------------------------------------------------------------------------

    def _reduce_due(self, num_waits: int) -> None:
        """Reduces the slices that are this node's to reduce after so many waits, and says what they come to."""
        for each in self._slices:
            is_due = self._identity.peer_id in self._due(each, num_waits)
            if is_due and not each.is_settled and each.own is None:
                self._reduce(each)
            if each.own is not None and not each.has_said:
                self._say(each, each.own)

    def _reduce(self, each: _Slice) -> tuple[str, bytes]:
        """Reduces a slice from the members' own bytes; whoever's are not there, or others, is left out by all.

        Returns:
            Digest and encoded result.
        """
        form, place = self._form.of_slice(each.number), self._form.place(each.number)
        members = [member.member for member in self._agreement.members]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="bucket-slices") as pool:
            fetched = pool.map(lambda member: self._contributed(member, each.number, form.max_payload_bytes), members)
            found = dict(zip(members, fetched, strict=True))
        payloads = {member: payload for member, payload in found.items() if payload is not None}
        weights = {member.member: member.weight for member in self._agreement.members}
        if not payloads:
            raise RoundFailedError(f"round {self._agreement.round_index}: slice {each.number} has no contribution")
        made = form.aggregate(payloads, weights, self._rule, self._reference[place])
        encoded = bytes(form.encode(made.vector))
        each.own = (sha256_hex(encoded), encoded)
        each.dropped = {
            **dict(made.dropped),
            **dict.fromkeys(found.keys() - payloads, "its slice is not what it named"),
        }
        each.odd, each.rule, each.note = dict(made.odd), made.rule, made.note
        each.completeness = made.completeness * len(payloads) / len(members)
        return each.own

    def _contributed(self, member: str, number: int, size_bytes: int) -> bytes | None:
        digests = self._digests[member]
        if len(digests) != self._form.max_payload_bytes:
            return None
        digest = self._form.digest_of(digests, number)
        key = slice_key(self._agreement.round_index, member, number, digest)
        found = self._place.get_digested(key, size_bytes, digest)
        return None if found is None or found[1] > self._agreed_at else found[0]

    def _say(self, each: _Slice, own: tuple[str, bytes]) -> None:
        digest, encoded = own
        round_index = self._agreement.round_index
        self._place.put_once(result_key(round_index, each.number, digest), encoded)
        word = SliceWord(
            run_id=self._agreement.run_id,
            member=self._identity.peer_id,
            round_index=round_index,
            agreement=self._agreement.digest,
            number=each.number,
            result_sha256=digest,
        ).signed(self._identity)
        self._place.put_once(reduced_key(round_index, each.number, self._identity.peer_id), word.wire())
        each.has_said = True

    # -- taking what others have reduced -------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Reads the words of members on slices, each once."""
        members = set(self._agreement.keys) - {self._identity.peer_id}
        for number, member in self._place.reduced(self._agreement.round_index):
            if (number, member) in self._seen or member not in members or number >= len(self._slices):
                continue
            if self._slices[number].is_settled and self._slices[number].own is None:
                continue
            body = self._place.get_bounded(
                reduced_key(self._agreement.round_index, number, member), SliceWord.MAX_BYTES
            )
            self._seen.add((number, member))
            try:
                word = SliceWord.parse(body or b"", self._agreement.run_id)
            except MalformedAnswerError as error:
                logger.warning("round %d: slice %d: %s", self._agreement.round_index, number, error)
                continue
            if (word.member, word.number, word.agreement) == (member, number, self._agreement.digest):
                self._words[number][member] = word.result_sha256

    def _settle(self, num_waits: int) -> None:
        """Takes slices on which two reducers agree and nobody differs; reduces those that are disputed.

        Others' words dispute, but no two who are not to reduce a slice can have their own said of it; and what two
        have said and nobody can read, this node reduces itself.
        """
        for each in self._slices:
            words = {member: said for member, said in self._words[each.number].items() if member not in self._false}
            if not each.is_settled and each.own is None and len(set(words.values())) > 1:
                logger.warning("round %d: slice %d is disputed", self._agreement.round_index, each.number)
                self._reduce(each)
            if each.own is not None:
                self._judge(each.number, each.own[0])
                if not each.is_settled:
                    self._take(each, each.own[1])
            elif not each.is_settled and len(self._due(each, num_waits) & words.keys()) >= NUM_REDUCERS:
                self._take_said(each, next(iter(words.values())))

    def _due(self, each: _Slice, num_waits: int) -> set[str]:
        """Who is to reduce a slice after so many waits."""
        return set(reducers_of(self._agreement, each.number, self._false)[: NUM_REDUCERS + num_waits])

    def _take_said(self, each: _Slice, digest: str) -> None:
        """Takes what two reducers say; where that is not to be had, this node reduces the slice."""
        if self._takes_result(each, digest):
            return
        logger.warning("round %d: slice %d is not as two say", self._agreement.round_index, each.number)
        own = self._reduce(each)
        self._judge(each.number, own[0])
        self._take(each, own[1])

    def _takes_result(self, each: _Slice, digest: str) -> bool:
        """Takes the result with a digest from the bucket; returns whether it is there, and one."""
        most_bytes = self._form.of_slice(each.number).max_payload_bytes
        body = self._place.get_bounded(result_key(self._agreement.round_index, each.number, digest), most_bytes)
        if body is None or sha256_hex(body) != digest:
            return False
        try:
            self._take(each, body)
        except CodecError as error:
            logger.warning("round %d: slice %d: %s", self._agreement.round_index, each.number, error)
        return each.is_settled

    def _take(self, each: _Slice, encoded: bytes) -> None:
        form, place = self._form.of_slice(each.number), self._form.place(each.number)
        start = 0
        for first in range(0, form.num_values, PART_VALUES):
            count = min(PART_VALUES, form.num_values - first)
            size = form.codec.encoded_bytes(count)
            out = self._values[place.start + first : place.start + first + count]
            form.codec.decode(memoryview(encoded)[start : start + size], count, out=out)
            start += size
        if not bool(torch.isfinite(self._values[place]).all()):
            raise CodecError(f"slice {each.number}: expected finite results, found NaN or infinity")
        each.is_settled = True

    def _judge(self, number: int, truth: str) -> None:
        """Names whoever has said something else of a slice than it comes to."""
        for member, said in self._words[number].items():
            if said != truth and member not in self._liars:
                self._liars[member] = f"said that slice {number} comes to something else"
                self._false.add(member)
                logger.warning("round %d: %s %s", self._agreement.round_index, member[:12], self._liars[member])

    def _spot_check(self) -> None:
        """Reduces the slice that is this node's to check, compares, and tells the others where it differs."""
        each = self._slices[checked_by(self._agreement, self._identity, len(self._slices))]
        if each.own is not None:
            return
        before = self._values[self._form.place(each.number)].clone()
        try:
            own = self._reduce(each)
            self._judge(each.number, own[0])
            self._take(each, own[1])
            if not torch.equal(before, self._values[self._form.place(each.number)]):
                self._say(each, own)
        except GenesisError as error:
            logger.warning("round %d: slice %d is not checked: %s", self._agreement.round_index, each.number, error)

    def _aggregated(self) -> Aggregated:
        own: Sequence[_Slice] = [each for each in self._slices if each.own is not None]
        dropped = {member: why for each in own for member, why in each.dropped.items()}
        odd = {member: why for each in own for member, why in each.odd.items()}
        return Aggregated(
            vector=self._values,
            rule=own[0].rule if own else self._rule.rule,
            note="; ".join(dict.fromkeys(each.note for each in own if each.note)),
            dropped=tuple(sorted({**dropped, **self._liars}.items())),
            odd=tuple(sorted(odd.items())),
            findings=(),
            completeness=min((each.completeness for each in own), default=1.0),
        )
