"""Credentials and lists of revoked peers: what is signed is what is read, and nothing else is believed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rpc_node import refused
from trainer.errors import RefusedError
from trainer.network.rpc import Credential, Identity, RevokedPeers
from trainer.network.rpc.credential import MAX_CLOCK_SKEW_S, MAX_LIST_BYTES, MAX_REVOKED

_NOW = 1_800_000_000.0
_AUTHORITY = Identity.create()
_PEER = Identity.create().peer_id
_RUN = "corpus-8"
_WIRE = Credential.issue(_AUTHORITY, _RUN, _PEER, "worker", "body-2", _NOW, 3600.0).wire()


def _credential(**changes: Any) -> Credential:
    """As the authority signed it, but for what was changed afterwards."""
    return Credential.parse(_WIRE).model_copy(update=changes)


def test_a_credential_is_read_back_as_it_was_issued() -> None:
    found = Credential.parse(_WIRE)
    assert (found.peer_id, found.role, found.stage, found.run_name) == (_PEER, "worker", "body-2", _RUN)
    assert (found.issued_at, found.expires_at, found.issuer) == (_NOW, _NOW + 3600.0, _AUTHORITY.peer_id)
    found.verify(_RUN, [_AUTHORITY.peer_id], _NOW, ())
    assert len(_WIRE) < 700


@pytest.mark.parametrize(
    ("found", "run", "now", "revoked", "said"),
    [
        (_credential(), "corpus-9", _NOW, (), "expected a document of run 'corpus-9'"),
        (_credential(issuer="0" * 64), _RUN, _NOW, (), "authority that the run names"),
        (_credential(), _RUN, _NOW + 3600.0 + MAX_CLOCK_SKEW_S, (), "expired 120 s ago"),
        (_credential(), _RUN, _NOW - MAX_CLOCK_SKEW_S - 1, (), "issued 121 s from now"),
        (_credential(role="driver"), _RUN, _NOW, (), "signature"),
        (_credential(peer_id="0" * 64), _RUN, _NOW, (), "signature"),
        (_credential(expires_at=_NOW + 1e6), _RUN, _NOW, (), "signature"),
        (_credential(stage="head"), _RUN, _NOW, (), "signature"),
        (_credential(), _RUN, _NOW, (_PEER,), "revoked"),
    ],
)
def test_what_is_not_as_signed_not_of_the_run_or_not_of_now_is_refused(
    found: Credential, run: str, now: float, revoked: tuple[str, ...], said: str
) -> None:
    with refused("revoked" if revoked else "credential", said):
        found.verify(run, [_AUTHORITY.peer_id], now, revoked)


def test_clocks_may_differ_a_little() -> None:
    for now in (_NOW - MAX_CLOCK_SKEW_S + 1, _NOW + 3600.0 + MAX_CLOCK_SKEW_S - 1):
        Credential.parse(_WIRE).verify(_RUN, [_AUTHORITY.peer_id], now, ())


@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_read_or_refused(wire: bytes) -> None:
    for kind in (Credential, RevokedPeers):
        with pytest.raises(RefusedError):
            kind.parse(wire)


_VALUE = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80) | st.lists(st.integers())


@given(st.sampled_from(sorted(json.loads(_WIRE))), _VALUE)
def test_no_changed_field_is_believed(name: str, value: object) -> None:
    content = json.loads(_WIRE)
    if content[name] == value and type(content[name]) is type(value):
        return
    wire = json.dumps(content | {name: value}, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        errors="surrogatepass"
    )
    with pytest.raises(RefusedError):
        Credential.parse(wire).verify(_RUN, [_AUTHORITY.peer_id], _NOW, ())


@given(st.data())
def test_no_changed_byte_is_believed(data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(_WIRE) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda it: it != _WIRE[place]))
    with pytest.raises(RefusedError):
        Credential.parse(_WIRE[:place] + bytes([byte]) + _WIRE[place + 1 :]).verify(
            _RUN, [_AUTHORITY.peer_id], _NOW, ()
        )


@pytest.mark.parametrize(
    "wire",
    [
        b" " + _WIRE,
        _WIRE + b"\n",
        _WIRE.replace(b'"role":"worker"', b'"role": "worker"'),
        _WIRE.replace(b'"role":"worker"', b'"role":"worker","role":"worker"'),
        _WIRE.replace(b'"worker"', b'"\\u0077orker"'),
        _WIRE.replace(b"1800000000.0", b"1.8e9"),
    ],
)
def test_only_one_spelling_is_read(wire: bytes) -> None:
    assert wire != _WIRE
    with refused("credential"):
        Credential.parse(wire)


def test_a_list_is_no_credential_and_a_full_one_fits_a_payload() -> None:
    peers = [f"{number:064x}" for number in range(MAX_REVOKED)]
    found = RevokedPeers.issue(_AUTHORITY, _RUN, 3, peers, _NOW)
    assert len(found.wire()) < MAX_LIST_BYTES
    again = RevokedPeers.parse(found.wire())
    assert (again.number, again.revoked) == (3, tuple(peers))
    again.verify(_RUN, [_AUTHORITY.peer_id], _NOW)
    with refused("credential"):
        Credential.parse(RevokedPeers.issue(_AUTHORITY, _RUN, 3, [_PEER], _NOW).wire())
    with refused("credential"):
        RevokedPeers.parse(_WIRE)
    with refused("credential", "signature"):
        again.model_copy(update={"number": 4}).verify(_RUN, [_AUTHORITY.peer_id], _NOW)
