"""Where a shutdown may come from."""

import pytest
from starlette.datastructures import Headers

from trainer.observe.access import shutdown_refusal


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_this_machine(client):
    assert shutdown_refusal(Headers({"host": "localhost"}), client, "http", "") is None


@pytest.mark.parametrize("client", [None, "", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "localhost", "testclient"])
@pytest.mark.parametrize("token", ["", "t"])
def test_anything_else_is_not(client, token):
    refusal = shutdown_refusal(Headers({"host": "localhost", "x-genesis-token": token}), client, "http", token)
    assert "from this machine" in refusal


def test_a_token_allows_a_proxy():
    headers = {"host": "localhost", "x-forwarded-for": "203.0.113.9", "x-genesis-token": "t"}
    assert shutdown_refusal(Headers(headers), "127.0.0.1", "http", "t") is None
    assert "token" in shutdown_refusal(Headers(headers), "127.0.0.1", "http", "other")
