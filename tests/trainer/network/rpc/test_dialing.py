"""Options and addresses; where an endpoint connects when addresses come from strangers, and how often."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from tests.support.rpc_node import Clock
from trainer.network.rpc import Endpoint, Identity
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.connections import group_of_grpc_peer
from trainer.network.rpc.dialing import Dialing, DialRefusedError, address_group
from trainer.network.rpc.messages import Peer

_OWN = "f" * 64


def _dialing(
    *named: str, allow_private: bool = False, port: int = 4100, clock: Clock | None = None, **config: Any
) -> Dialing:
    rpc = RpcConfig(**({"host": "8.8.8.8"} | config))
    dialing = Dialing(rpc, _OWN, clock or Clock())
    dialing.guard(named, allow_private=allow_private)
    dialing.listening_at(f"{rpc.host if rpc.host != '0.0.0.0' else '192.168.1.5'}:{port}", port)
    return dialing


def _admit(dialing: Dialing, address: str, peer_id: str = "a" * 64) -> tuple[tuple[str, int], ...]:
    return asyncio.run(dialing.admit(Peer(peer_id, address)))


def _refusal(dialing: Dialing, address: str) -> str:
    with pytest.raises(DialRefusedError) as caught:
        _admit(dialing, address)
    return caught.value.reason


def test_what_counts_as_one_host_here_and_as_grpc_names_it() -> None:
    groups = {
        "203.0.113.7": "203.0.113.7",
        "[2001:db8:1:2:3::4]": "2001:db8:1:2::/64",
        "2001:db8:1:2:ffff::": "2001:db8:1:2::/64",
        "::ffff:203.0.113.7": "203.0.113.7",
        "fe80::1%eth0": "fe80::/64",
        "Node.Example": "node.example",
    }
    assert {host: address_group(host) for host in groups} == groups
    groups = {
        "ipv4:127.0.0.1:5000": "127.0.0.1",
        "ipv6:%5B2001:db8::1%5D:5000": "2001:db8::/64",
        "ipv6:[::1]:5000": "::/64",
        "unix:/tmp/socket": "unix:/tmp/socket",
    }
    assert {peer: group_of_grpc_peer(peer) for peer in groups} == groups


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:4101", "private"),
        ("[::ffff:10.0.0.1]:4101", "private"),
        ("169.254.169.254:4101", "private"),
        ("0.0.0.0:4101", "private"),
        ("8.8.8.8:4100", "own"),
        ("1.1.1.1:22", "port"),
        ("1.1.1.1:1023", "port"),
        ("1.1.1.1", "name"),
        ("1.1.1.1:4100", ""),
        ("8.8.8.8:4101", ""),
    ],
)
def test_what_strangers_may_name_on_a_public_run(address: str, reason: str) -> None:
    dialing = _dialing("9.9.9.9:443")
    assert dialing.objection(address) == reason
    if reason and reason != "name":
        assert _refusal(dialing, address) == reason


def test_what_the_operator_named_is_dialled_whatever_it_is_and_as_often() -> None:
    dialing = _dialing("9.9.9.9:443", "127.0.0.1:22")
    for _ in range(30):
        assert _admit(dialing, "9.9.9.9:443") == (("9.9.9.9", 443),)
        assert _admit(dialing, "127.0.0.1:22") == (("127.0.0.1", 22),)
    assert dialing.objection("127.0.0.1:22") == ""


@pytest.mark.parametrize(
    ("named", "config", "address", "is_allowed"),
    [
        (("127.0.0.1:4100",), {}, "127.0.0.1:4999", True),
        (("127.0.0.1:4100",), {}, "10.0.0.1:4999", False),
        (("127.0.0.1",), {}, "127.0.0.1:4999", True),  # Of a DHT's seed only the host is named.
        ((), {"host": "127.0.0.1"}, "127.0.0.1:4999", True),
        ((), {"public_address": "10.0.0.7:4100"}, "10.0.0.8:4999", True),
        ((), {"host": "0.0.0.0"}, "192.168.1.6:4999", True),  # The first of a run in a private network.
        (("192.168.1.9:4100",), {"host": "0.0.0.0"}, "192.168.1.6:4999", True),
        (("8.8.4.4:4100",), {"host": "0.0.0.0"}, "192.168.1.6:4999", False),  # Behind a router, in a public run.
        ((), {"host": "0.0.0.0", "public_address": "8.8.8.8"}, "192.168.1.6:4999", False),
    ],
)
def test_a_kind_is_dialled_where_the_node_was_told_of_one(named, config, address, is_allowed) -> None:
    assert (_dialing(*named, **config).objection(address) == "") is is_allowed
    assert _dialing(*named, allow_private=True, **config).objection(address) == ""


@pytest.mark.parametrize(("public", "is_here"), [("127.0.0.1:4100", True), ("8.8.8.8:4100", False)])
def test_a_node_at_loopback_calls_another_of_its_machine_by_the_address_of_that(public: str, is_here: bool) -> None:
    dialing = Dialing(RpcConfig(public_address=public), _OWN, Clock())
    dialing.guard((), allow_private=False)
    dialing.listening_at(public, 4100, "192.168.1.5")
    assert dialing.objection("192.168.1.5:4999") == ("" if is_here else "private")
    assert dialing.objection("192.168.1.5:4100") == ("own" if is_here else "private")
    assert dialing.objection("192.168.1.6:4999") == "private"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "192.168.1.5"])
def test_the_own_port_is_not_dialled_whoever_is_claimed_to_be_there(host: str) -> None:
    dialing = _dialing(host="0.0.0.0", allow_private=True)
    assert _refusal(dialing, f"{host}:4100") == "own"
    assert dialing.objection(f"{host}:4101") == ""
    assert _admit(dialing, f"{host}:4100", _OWN) == ((host, 4100),)  # A node may call itself.


@pytest.mark.parametrize("address", ["inside.example:4101", "2130706433:4101", "127.1:4101"])
def test_a_name_is_judged_by_what_it_resolves_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (it, 0)) for it in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    dialing = _dialing()
    found = ["127.0.0.1"]
    assert _refusal(dialing, address) == "private"
    found = ["10.0.0.1", "1.1.1.1"]
    clock_later = _dialing()
    assert _admit(clock_later, address) == (("1.1.1.1", 4101),)
    found = ["127.0.0.1"]  # Rebinding: what was judged is what is dialled.
    clock_later.answered(("1.1.1.1", 4101))
    assert _admit(clock_later, address) == (("1.1.1.1", 4101),)


def test_a_named_host_name_makes_its_kind_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("172.18.0.2", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    dialing = _dialing("first:4100")
    assert dialing.objection("172.18.0.3:4100") == "private"
    assert _admit(dialing, "first:4100") == (("172.18.0.2", 4100),)
    assert dialing.objection("172.18.0.3:4100") == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_in_contact", "expected_s"), [(False, [0, 20, 80, 260, 800, 2420]), (True, [0, 10, 40, *range(100, 3600, 60)])]
)
def test_an_address_nobody_answered_at_is_tried_after_pauses_that_grow(is_in_contact, expected_s) -> None:
    clock = Clock()
    dialing = _dialing(clock=clock)
    tries_s = []
    for _ in range(3600):
        clock.now_s += 1.0
        if is_in_contact:
            dialing.in_contact("1.1.1.1")
        try:
            _admit(dialing, "1.1.1.1:4100")
        except DialRefusedError as error:
            assert error.reason == "pause"
        else:
            tries_s.append(clock.now_s - 1_000_001.0)
    assert tries_s == expected_s


def test_where_a_node_answers_there_is_no_limit_until_it_has_been_gone_for_long() -> None:
    dialing = _dialing()
    where = ("1.1.1.1", 4100)
    for _ in range(2):
        _admit(dialing, "1.1.1.1:4100")
        dialing.answered(where)
        for _ in range(30):
            _admit(dialing, "1.1.1.1:4100")
            dialing.failed(where)
        _admit(dialing, "1.1.1.1:4100")
        assert _refusal(dialing, "1.1.1.1:4100") == "pause"
        dialing.answered(where)


@pytest.mark.slow
def test_a_host_that_is_silent_is_not_scanned() -> None:
    clock = Clock()
    dialing = _dialing(clock=clock)

    def num_tried(first_port: int, host: str = "1.1.1.1") -> int:
        count = 0
        for port in range(first_port, first_port + 200):
            try:
                _admit(dialing, f"{host}:{port}")
            except DialRefusedError as error:
                assert error.reason == "budget"
            else:
                count += 1
        return count

    assert num_tried(5000) == 8
    clock.now_s += 60
    assert num_tried(6000) == 6
    assert num_tried(6000, "[2606:4700::1]") + num_tried(6000, "[2606:4700::2]") == 8  # One /64.
    dialing.in_contact("1.1.1.1")  # Many nodes behind one address, one of which calls.
    assert num_tried(7000) == 64
    clock.now_s += 60
    assert num_tried(7200) == 60
    for port in range(8000, 8200):  # All of which answer.
        clock.now_s += 1
        _admit(dialing, f"1.1.1.1:{port}")
        dialing.answered(("1.1.1.1", port))
    assert dialing.num_dials("1.1.1.1") == 64
    assert dialing.counts("1.1.1.1:9000") and not dialing.counts("1.1.1.1:8000")
    assert num_tried(9000) == 64
    assert dialing.num_dials("1.1.1.1") < 1
    _admit(dialing, "1.1.1.1:8000")


@pytest.mark.parametrize(
    ("public", "host", "expected"),
    [
        ("203.0.113.7:99", "127.0.0.1", "203.0.113.7:99"),
        ("[2001:db8::1]", "127.0.0.1", "[2001:db8::1]:0"),
        ("", "10.1.2.3", "10.1.2.3:0"),
        ("", "::1", "[::1]:0"),
    ],
)
def test_the_address_others_are_told(public: str, host: str, expected: str) -> None:
    endpoint = Endpoint(Identity.create(), "run", RpcConfig(host=host, public_address=public))
    assert endpoint.address == expected
    host, _, _ = Endpoint(Identity.create(), "run", RpcConfig()).address.rpartition(":")
    assert host not in ("", "0.0.0.0", "::")  # Listening everywhere gives an address of this machine.
