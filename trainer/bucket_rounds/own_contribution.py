"""This node's contribution to a round: how it is encoded and put, and what of it the round leaves for the next.

    vector + residual ─▶ encoded ─▶ (its slices, where slices have reducers) ─▶ header, signed ─▶ put if absent
    after the round:  listed?  what the payload has left out : all of it      ─▶ residual of the next contribution

Guarantees: a node puts one contribution a round. One that an earlier life of it put stands, and what is left of the
work is then measured from those bytes, not from what this life would have put. The vector of the training thread is
only read.

The trade-off: the vector with its residual is kept until the round has ended, one more vector in fp32 (0.5 GB for 125M
parameters), and the payload beside it, so that error feedback needs no read of the bucket: only a node that was
killed in the round, with slices, reads its own back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from torch import Tensor

from genesis.errors import GenesisError
from genesis.populate.crashpoint import crash_point
from trainer.bucket_rounds.documents import (
    Agreement,
    Claims,
    ContributionHeader,
    contribution_body,
    credential_field,
    payload_digest,
)
from trainer.bucket_rounds.fetching import ContributionId, FetchedContribution
from trainer.bucket_rounds.forms import Aggregated, Form, Payload
from trainer.bucket_rounds.object_names import contribution_key, slice_key
from trainer.bucket_rounds.reducers import SlicedForm
from trainer.bucket_rounds.settings import BucketSettings
from trainer.errors import CodecError, RoundFailedError
from trainer.outer.engine.collective import Contribution

logger = logging.getLogger(__name__)


class OwnContribution:
    """What one node brings to one round; for one thread, but for `copy`, which any may call."""

    def __init__(self, settings: BucketSettings, contribution: Contribution, form: Form) -> None:
        self._settings = settings
        self._contribution = contribution
        self._form = form
        self._sha256 = ""  # Of this node's contribution; empty: it has none yet.
        self._payload: Payload | None = None
        self._slices: Payload | None = None  # Of a round in slices: what the payload has the digests of.
        self._header: ContributionHeader | None = None  # Of what this node itself has put in this round.
        self._vector: Tensor | None = None

    @property
    def is_put(self) -> bool:
        """Whether a contribution of this node is in the bucket, by this life of it or an earlier one."""
        return bool(self._sha256)

    def put(self, earlier: Collection[str] = ()) -> bool:
        """Puts this node's contribution, unless it is there; returns whether it did.

        Args:
            earlier: Payload digests of what is there by an earlier life of this node.

        Raises:
            RoundFailedError: the vector cannot be encoded.
        """
        contribution, settings = self._contribution, self._settings
        if self._sha256 or not contribution.num_batches:
            return False
        if earlier:
            self._sha256 = min(earlier)
            logger.info("round %d: this node has contributed before; that stands", contribution.round_index)
            return False
        contribution.wait_until_filled()
        try:
            payload = self._form.encode(self._whole_vector())
        except CodecError as error:
            raise RoundFailedError(f"round {contribution.round_index}: {error}") from error
        payload = self._in_slices(payload)
        header = self._signed_header(payload)
        crash_point("bucket-contribution-made")
        key = contribution_key(contribution.round_index, settings.own_id, header.payload_sha256)
        if settings.place.put_once(key, contribution_body(header, payload)):
            self._header = header
        crash_point("bucket-contribution-put")
        self._payload, self._sha256 = payload, header.payload_sha256
        return True

    def copy(self, wanted: ContributionId) -> tuple[ContributionHeader, Payload] | None:
        """Returns what this process has itself put under a name; None: it has put nothing there."""
        if self._header is None or self._payload is None:
            return None
        is_own = wanted == (self._header.member, self._header.payload_sha256)
        return (self._header, self._payload) if is_own else None

    def residual(
        self, agreement: Agreement, result: Aggregated, read: Mapping[ContributionId, FetchedContribution]
    ) -> Tensor | None:
        """Returns what the round has not taken of this node's work, [P], for its next contribution; None: nothing.

        Args:
            agreement: What the round consists of.
            result: What has become of that.
            read: All contributions that the agreement lists.
        """
        contribution, settings = self._contribution, self._settings
        if not contribution.num_batches:
            return contribution.residual
        own = next((each for each in agreement.members if each.member == settings.own_id), None)
        if own is None:
            logger.info("round %d went on without this node's work, which goes into the next", agreement.round_index)
            contribution.wait_until_filled()
            # What a residual holds was in no parameter, so all of that stays.
            kept = contribution.vector * settings.carried_share
            return kept if contribution.residual is None else kept.add_(contribution.residual)
        if own.member in dict(result.dropped) and not self._form.keeps_what_was_odd:
            return None
        if self._form.is_lossless and own.payload_sha256 == self._sha256 and self._payload is not None:
            return None
        contribution.wait_until_filled()
        return self._left_out(read[own.member, own.payload_sha256].payload)

    def _left_out(self, payload: Payload | None) -> Tensor | None:
        """Returns what a payload of this node's holds no part of, [P]; None: nothing, or that cannot be said."""
        if payload is not None and isinstance(self._form, SlicedForm):
            payload = self._slices or self._slices_put_before(self._form, payload)
        if payload is None:
            return None
        vector = self._whole_vector()
        left = vector.clone() if vector is self._contribution.vector else vector
        try:
            return self._form.left_out(left, payload)
        except CodecError as error:
            logger.warning("round %d: %s", self._contribution.round_index, error)
            return None

    def _whole_vector(self) -> Tensor:
        """This node's work with what earlier rounds left of it, [P]; made once, not to be changed before the end."""
        if self._vector is None:
            contribution = self._contribution
            vector, residual = contribution.vector, contribution.residual
            self._vector = vector if residual is None else vector + residual
        return self._vector

    def _in_slices(self, payload: Payload) -> Payload:
        """Puts the slices of an encoded vector, where slices have reducers, and returns what stands for them."""
        form, round_index = self._form, self._contribution.round_index
        if not isinstance(form, SlicedForm):
            return payload
        for number, piece in enumerate(form.pieces(payload)):
            key = slice_key(round_index, self._settings.own_id, number, payload_digest(piece))
            self._settings.place.put_once(key, piece)
        self._slices = payload
        return form.digests_of(payload)

    def _signed_header(self, payload: Payload) -> ContributionHeader:
        contribution, settings = self._contribution, self._settings
        return ContributionHeader(
            run_id=settings.run_id,
            member=settings.own_id,
            round_index=contribution.round_index,
            state_digest=contribution.state_digest,
            form=self._form.name,
            num_values=self._form.num_values,
            payload_bytes=len(payload),
            payload_sha256=payload_digest(payload),
            claims=Claims(
                num_batches=contribution.num_batches,
                age_s=round(contribution.age_s, 3),
                progress=contribution.progress,
                vocabulary_rows=settings.vocabulary_rows(),
            ),
            credential=credential_field(settings.credential()),
        ).signed(settings.identity)

    def _slices_put_before(self, form: SlicedForm, digests: Payload) -> Payload | None:
        """Returns this node's slices, which an earlier life of it has put; None: they are not to be had any more."""
        round_index, own_id, found = self._contribution.round_index, self._settings.own_id, bytearray()
        try:
            for number in range(form.num_slices):
                digest = form.digest_of(digests, number)
                key = slice_key(round_index, own_id, number, digest)
                piece = self._settings.place.get_digested(key, form.of_slice(number).max_payload_bytes, digest)
                if piece is None:
                    return None
                found += piece[0]
        except GenesisError as error:
            logger.warning("round %d: what its slices left out of this node's work: %s", round_index, error)
            return None
        return found
