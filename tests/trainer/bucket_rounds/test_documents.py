"""Signed documents: what comes back from the bucket is what was put, or it is refused; nothing else, ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.serialisation import canonical_json
from trainer.bucket_rounds import object_names as names
from trainer.bucket_rounds.documents import (
    MAX_HEADER_BYTES,
    AgreedMember,
    Agreement,
    Claims,
    ContributionHeader,
    Departure,
    StateRecord,
    contribution_body,
    payload_digest,
    split_contribution,
)
from trainer.errors import MalformedAnswerError
from trainer.network.rpc import Identity

IDENTITY = Identity.create()


def header_of(payload: bytes, **changes: object) -> ContributionHeader:
    made = ContributionHeader(
        run_id="run",
        member=IDENTITY.peer_id,
        round_index=3,
        state_digest="a" * 64,
        form="dense-fp32",
        num_values=len(payload) // 4,
        payload_bytes=len(payload),
        payload_sha256=payload_digest(payload),
        claims=Claims(num_batches=4, age_s=1.5, progress=0.5, vocabulary_rows=1024),
    )
    return made.model_copy(update=changes).signed(IDENTITY)


@given(st.binary(max_size=200))
def test_a_contribution_comes_back_as_it_was_put(payload: bytes) -> None:
    header = header_of(payload)
    found, rest = split_contribution(bytes(contribution_body(header, payload)), "run")
    assert found == header
    assert bytes(rest) == payload


@given(st.data())
def test_a_contribution_with_any_other_byte_is_refused(data: st.DataObject) -> None:
    body = bytearray(contribution_body(header_of(b"1234"), b"1234"))
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MalformedAnswerError):
        split_contribution(bytes(body), "run")


@given(st.binary(max_size=400))
def test_whatever_lies_there_is_refused_and_no_more(body: bytes) -> None:
    with pytest.raises(MalformedAnswerError):
        split_contribution(body, "run")
    for kind in (Agreement, StateRecord, Departure):
        with pytest.raises(MalformedAnswerError):
            kind.parse(body, "run")


@pytest.mark.parametrize("num_departures", [0, 2])
def test_an_agreement_comes_back_with_its_departures(num_departures: int) -> None:
    claims = Claims(num_batches=4, age_s=1.5, progress=0.5, vocabulary_rows=1024)
    departures = [
        Departure(run_id="run", member=IDENTITY.peer_id, round_index=3).signed(Identity.create())
        for _ in range(num_departures)
    ]
    agreement = Agreement(
        run_id="run",
        member=IDENTITY.peer_id,
        round_index=3,
        attempt=0,
        follows="",
        state_digest="a" * 64,
        form="dense-fp32",
        num_values=8,
        members=(AgreedMember(member=IDENTITY.peer_id, payload_sha256="b" * 64, claims=claims, weight=2.0),),
        departures=tuple(departures),
    ).signed(IDENTITY)
    assert Agreement.parse(agreement.wire(), "run") == agreement
    # One without them reads as those of releases that had none.
    assert (b"departures" in agreement.wire()) == bool(num_departures)


@given(st.integers(0, 10**10 - 1), st.integers(0, 999), st.binary(min_size=32, max_size=32))
def test_a_name_says_what_it_was_made_of(round_index: int, number: int, key: bytes) -> None:
    member, digest = key.hex(), payload_digest(key)
    made = {
        names.RUN_KEY: ("run", -1, ""),
        names.agreement_key(round_index, number): ("agreement", round_index, ""),
        names.contribution_key(round_index, member, digest): ("contribution", round_index, member),
        names.state_key(round_index, member): ("state", round_index, member),
        names.departure_key(round_index, member): ("departure", round_index, member),
        names.slice_key(round_index, member, number, digest): ("slice", round_index, member),
        names.result_key(round_index, number, digest): ("result", round_index, ""),
        names.reduced_key(round_index, number, member): ("reduced", round_index, member),
        f"{names.snapshot_prefix(round_index, digest)}pages": ("snapshot", round_index, ""),
        names.wish_key(member): ("wish", -1, member),
    }
    for name, said in made.items():
        found = names.parse_name(name)
        assert found is not None
        assert (found.kind, found.round_index, found.member) == said
        for other in (f"{name}x", f"x{name}", f"{name}\n", name[:-1], name.upper()):
            assert names.parse_name(other) is None


def test_headers_of_other_runs_keys_and_sizes_are_refused() -> None:
    good = header_of(b"1234")
    with pytest.raises(MalformedAnswerError, match="of run 'other'"):
        ContributionHeader.parse(good.wire(), "other")
    stolen = good.model_copy(update={"member": Identity.create().peer_id})
    with pytest.raises(MalformedAnswerError, match="signature"):
        ContributionHeader.parse(stolen.wire(), "run")
    with pytest.raises(MalformedAnswerError, match="at most"):
        ContributionHeader.parse(b" " * (MAX_HEADER_BYTES + 1), "run")
    spaced = good.wire().replace(b",", b", ")
    with pytest.raises(MalformedAnswerError, match="another spelling"):
        ContributionHeader.parse(spaced, "run")


def test_no_signature_passes_for_another_kinds() -> None:
    record = StateRecord(
        run_id="run", member=IDENTITY.peer_id, round_index=0, agreement="b" * 64, state_digest="c" * 64
    )
    signed = record.signed(IDENTITY)
    assert StateRecord.parse(signed.wire(), "run") == signed
    content = record.model_dump(mode="json", exclude={"signature"})
    others = (b"agreement", b"wish", b"departure")
    for domain in (b"", *(b"genesis bucket %s 1\n" % each for each in others)):
        forged = record.model_copy(update={"signature": IDENTITY.sign(domain + canonical_json(content)).hex()})
        with pytest.raises(MalformedAnswerError, match="signature"):
            StateRecord.parse(forged.wire(), "run")
