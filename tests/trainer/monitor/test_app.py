"""The HTTP interface, asked over real connections."""

from __future__ import annotations

import json
import os
import socket

import httpx
import pytest
from starlette.datastructures import Headers

from tests.support.observing import Announced, Report, Step
from trainer.monitor import ApiConfig, ApiServer, ShutdownHook, create_app
from trainer.monitor.app import shutdown_refusal, user_of_peer
from trainer.monitor.status import TrainingStatus, VerifyStatus

SITE = "https://evil.example"


def test_verify_and_global_tell_the_status(api):
    for index in range(150):
        api.node.tracker.add_step(Step(step=index, loss=9 - index / 50))
    api.node.tracker.add_round(Report(), outer_step=1, state_digest="d1")
    api.node.tracker.peers([Announced("a" * 64, "gpu-8", shards=(1,))])
    short, whole = api.json("/api/training/verify"), api.json("/api/training/global")
    assert short["training_verified"] is True
    assert short["hash_agreement_rate"] == short["sync_success_rate"] == 100.0
    assert short["loss_trend"] == "improving"
    assert whole["total_steps"] == 250
    assert [node["node_id"] for node in whole["nodes"]] == ["gpu-7", "gpu-8"]
    assert set(short) == set(VerifyStatus.model_fields)
    assert set(whole) == set(TrainingStatus.model_fields)


def test_before_training_what_is_not_known_is_null_with_a_reason(api):
    status, health = api.json("/api/training/verify"), api.json("/healthz")
    assert (status["sync_success_rate"], status["sync_success"]["reason"]) == (None, "no round yet")
    assert status["hash_agreement_rate"] is None
    assert (health["status"], health["node_id"], health["last_step_age_s"]) == ("ok", "gpu-7", None)


def test_losses_that_are_not_finite_are_no_invalid_json(api):
    api.node.tracker.add_step(Step(loss=float("nan"), grad_norm=float("inf"), skipped=True))
    api.node.tracker.peers([Announced("a" * 64, "\ud800 <script>", loss=float("nan"), tokens_per_s=float("nan"))])
    for path in ("/api/training/verify", "/api/training/global", "/healthz"):
        answer = api.client.get(path)
        assert answer.status_code == 200
        json.loads(answer.content, parse_constant=pytest.fail)


def test_openapi_describes_every_answer(api):
    described = api.json("/openapi.json")
    assert set(described["paths"]) == {
        "/api/training/verify",
        "/api/training/global",
        "/healthz",
        "/metrics",
        "/api/shutdown",
    }
    parts = described["components"]["schemas"]
    assert "finite" in parts["VerifyStatus"]["properties"]["training_verified"]["description"]
    for name in ("TrainingStatus", "VerifyStatus", "HashAgreement", "SyncSuccess", "NodeStatus", "Health"):
        assert name in parts
    assert api.client.get("/docs").status_code == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
        ("10.1.2.3", 200),
        (socket.gethostname(), 200),
        ("node.example.org:8000", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:8000", 421),
        ("", 421),
        ("[::1", 200),
    ],
)
def test_only_this_machine_s_names_may_be_asked_for(api, host, status):
    assert api.client.get("/api/training/verify", headers={"host": host}).status_code == status


def test_no_answer_is_another_site_s_to_read(api):
    for answer in (
        api.client.get("/api/training/global", headers={"origin": SITE}),
        api.client.options("/api/shutdown", headers={"origin": SITE, "access-control-request-method": "POST"}),
        api.client.get("/nothing"),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


def test_a_shutdown_from_this_machine_is_passed_on(api):
    assert api.client.get("/api/shutdown").status_code == 405
    assert not api.node.stops
    answer = api.client.post("/api/shutdown")
    assert (answer.status_code, answer.json()) == (202, {"status": "stopping"})
    assert api.node.stops == ["asked"]
    assert api.client.post("/api/shutdown", headers={"origin": api.url}).status_code == 202


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": SITE},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"x-forwarded-for": "203.0.113.9"},
        {"forwarded": "for=203.0.113.9"},
        {"via": "1.1 proxy"},
    ],
)
def test_a_page_of_another_site_or_a_proxy_stops_nothing(api, headers):
    answer = api.client.post("/api/shutdown", headers=headers)
    assert answer.status_code == 403
    assert "expected" in answer.json()["detail"]
    assert not api.node.stops


def test_with_a_token_only_who_knows_it_may_stop_the_node(node):
    hook = ShutdownHook(callback=lambda: node.stops.append("asked"), token="geheim-ä")
    config = ApiConfig(port=0)
    with ApiServer(create_app(node.tracker, node.metrics, shutdown=hook), config) as server:
        for headers in ({}, {"x-genesis-token": ""}, {"x-genesis-token": "geheim"}):
            assert httpx.post(f"{server.url}/api/shutdown", headers=headers, trust_env=False).status_code == 403
        right = {"x-genesis-token": "geheim-ä".encode()}
        page = {**right, "origin": SITE}
        assert httpx.post(f"{server.url}/api/shutdown", headers=page, trust_env=False).status_code == 403
        assert not node.stops
        assert httpx.post(f"{server.url}/api/shutdown", headers=right, trust_env=False).status_code == 202
    assert node.stops == ["asked"]


def test_without_a_hook_there_is_no_shutdown(node):
    with ApiServer(create_app(node.tracker, node.metrics), ApiConfig(port=0)) as server:
        assert httpx.post(f"{server.url}/api/shutdown", trust_env=False).status_code == 404


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
    monkeypatch.setattr("trainer.monitor.app._TABLES", (tmp_path / "none",))
    assert user_of_peer(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
