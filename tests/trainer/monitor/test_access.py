"""Where a shutdown may come from."""

import os
import socket

import pytest
from starlette.datastructures import Headers

from trainer.monitor.access import shutdown_refusal, user_of_peer


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_this_machine(client):
    assert shutdown_refusal(Headers({"host": "localhost"}), client, "http", "", os.getuid()) is None


@pytest.mark.parametrize("client", [None, "", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "localhost", "testclient"])
@pytest.mark.parametrize("token", ["", "t"])
def test_anything_else_is_not(client, token):
    refusal = shutdown_refusal(
        Headers({"host": "localhost", "x-genesis-token": token}), client, "http", token, os.getuid()
    )
    assert "from this machine" in refusal


def test_a_token_allows_a_proxy():
    headers = {"host": "localhost", "x-forwarded-for": "203.0.113.9", "x-genesis-token": "t"}
    assert shutdown_refusal(Headers(headers), "127.0.0.1", "http", "t", None) is None
    assert "token" in shutdown_refusal(Headers(headers), "127.0.0.1", "http", "other", os.getuid())


@pytest.mark.parametrize("user", [os.getuid() + 1, 65_534, None])
def test_another_user_of_this_machine_needs_the_token(user):
    headers = {"host": "localhost"}
    assert "user" in shutdown_refusal(Headers(headers), "127.0.0.1", "http", "", user)
    assert "token" in shutdown_refusal(Headers(headers), "127.0.0.1", "http", "t", user)
    assert shutdown_refusal(Headers({**headers, "x-genesis-token": "t"}), "127.0.0.1", "http", "t", user) is None


@pytest.mark.parametrize(
    ("listens", "asks"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.9"), ("::1", "::1"), ("::", "127.0.0.1")]
)
def test_the_user_of_a_connection_is_told_while_it_is_open(listens, asks):
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    try:
        listener = socket.create_server((listens, 0), family=family, dualstack_ipv6=listens == "::")
    except OSError:
        pytest.skip(f"no {listens} here")
    port = listener.getsockname()[1]
    host = "127.0.0.1" if listens == "::" else listens
    with listener, socket.create_connection((host, port), source_address=(asks, 0)) as client:
        accepted, address = listener.accept()
        with accepted:
            ends = address[:2], accepted.getsockname()[:2]
            assert user_of_peer(*ends) == os.getuid()
            assert user_of_peer(ends[0], (ends[1][0], ends[1][1] - 1)) is None
            # What is left of a closed one is nobody's, and is not root's.
            client.close()
            assert user_of_peer(*ends) is None


def test_where_the_platform_does_not_tell_nobody_is_taken_for_this_user(monkeypatch, tmp_path):
    monkeypatch.setattr("trainer.monitor.access._TABLES", (tmp_path / "none",))
    assert user_of_peer(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
