"""The HTTP interface, asked over real connections, and its page for Prometheus; docs/observing.md names both."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers

from tests.support.observing import Announced, Report, SeenPipeline, Step, an_account, some_stages
from trainer.monitor import EventLog, SwarmAccount, SwarmStages, read_events
from trainer.monitor.app import shutdown_refusal, user_of_peer
from trainer.monitor.status import ACCOUNT_PATH, STAGES_PATH, Health, TrainingStatus, VerifyStatus

SITE = "https://evil.example"
PAGES = ("/api/training/verify", "/api/training/global", "/healthz", "/metrics", "/api/shutdown")
TEXT = (Path(__file__).parents[3] / "docs" / "observing.md").read_text(encoding="utf-8")


def test_verify_and_global_tell_the_status(client, node):
    health = client.get("/healthz").json()
    assert (health["status"], health["node_id"], health["last_step_age_s"]) == ("ok", "gpu-7", None)
    for index in range(150):
        node.tracker.add_step(Step(step=index, loss=9 - index / 50))
    node.tracker.add_round(Report(), outer_step=1, state_digest="d1")
    node.tracker.peers([Announced("a" * 64, "gpu-8", shards=(1,))])
    short, whole = (client.get(path).json() for path in PAGES[:2])
    assert short["training_verified"] is True
    assert short["hash_agreement_rate"] == short["sync_success_rate"] == 100.0
    assert (short["loss_trend"], whole["total_steps"]) == ("improving", 250)
    assert [node["node_id"] for node in whole["nodes"]] == ["gpu-7", "gpu-8"]
    assert (set(short), set(whole)) == (set(VerifyStatus.model_fields), set(TrainingStatus.model_fields))


def test_losses_that_are_not_finite_are_no_invalid_json(client, node):
    node.tracker.add_step(Step(loss=float("nan"), grad_norm=float("inf"), skipped=True))
    node.tracker.peers([Announced("a" * 64, "\ud800 <script>", loss=float("nan"), tokens_per_s=float("nan"))])
    for path in PAGES[:3]:
        answer = client.get(path)
        assert answer.status_code == 200
        json.loads(answer.content, parse_constant=pytest.fail)


def test_a_driver_tells_what_it_knows_of_its_pipeline(node):
    view = SeenPipeline()
    with node.served(pipeline=view) as client:
        account = SwarmAccount.model_validate_json(client.get(ACCOUNT_PATH).content)
        assert account == view.of_account
        assert account.micro_batches.adds_up and account.tokens.adds_up
        assert SwarmStages.model_validate_json(client.get(STAGES_PATH).content) == view.of_stages
        assert client.get(STAGES_PATH, headers={"host": "evil.example"}).status_code == 421
        view.of_stages = some_stages(step=13, loss=float("nan"))
        stages = json.loads(client.get(STAGES_PATH).content, parse_constant=pytest.fail)
        assert (stages["step"], stages["loss"]) == (13, None)
        view.of_account = None
        answer = client.get(ACCOUNT_PATH)
        assert answer.status_code == 503 and "not been heard from" in answer.json()["detail"]
        described = client.get("/openapi.json").json()
    assert {ACCOUNT_PATH, STAGES_PATH} <= set(described["paths"])
    assert {"SwarmAccount", "SwarmStages", "StageStatus", "WorkerStatus"} <= set(described["components"]["schemas"])
    assert not an_account(micro_batches={"leased": 5, "done": 2, "lost": 1, "open": 1}).micro_batches.adds_up


def test_openapi_describes_every_answer_and_there_are_no_other_pages(client, node):
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) == set(PAGES)
    parts = described["components"]["schemas"]
    assert "finite" in parts["VerifyStatus"]["properties"]["training_verified"]["description"]
    assert {"TrainingStatus", "HashAgreement", "SyncSuccess", "NodeStatus", "Health"} <= parts.keys()
    for path in ("/docs", ACCOUNT_PATH, STAGES_PATH):
        assert client.get(path).status_code == 404
    with node.served(shutdown=None) as other:
        assert other.post("/api/shutdown").status_code == 404


def test_only_this_machine_s_names_may_be_asked_for(client):
    ours = ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "10.1.2.3", socket.gethostname(), "[::1")
    others = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "")
    for host, status in [
        *((host, 200) for host in (*ours, "node.example.org:8000")),
        *((host, 421) for host in others),
    ]:
        assert client.get(PAGES[0], headers={"host": host}).status_code == status, host


def test_no_answer_is_another_site_s_to_read(client):
    for answer in (
        client.get("/api/training/global", headers={"origin": SITE}),
        client.options("/api/shutdown", headers={"origin": SITE, "access-control-request-method": "POST"}),
        client.get("/nothing"),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


def test_a_shutdown_from_this_machine_is_passed_on_and_of_another_site_or_a_proxy_is_not(client, node):
    assert client.get("/api/shutdown").status_code == 405
    for name, value in (
        *(("origin", SITE), ("origin", "null"), ("sec-fetch-site", "cross-site"), ("sec-fetch-site", "same-site")),
        *(("x-forwarded-for", "203.0.113.9"), ("forwarded", "for=203.0.113.9"), ("via", "1.1 proxy")),
    ):
        answer = client.post("/api/shutdown", headers={name: value})
        assert answer.status_code == 403 and "expected" in answer.json()["detail"]
    assert not node.stops
    answer = client.post("/api/shutdown")
    assert (answer.status_code, answer.json()) == (202, {"status": "stopping"})
    assert node.stops == ["asked"]
    assert client.post("/api/shutdown", headers={"origin": str(client.base_url).rstrip("/")}).status_code == 202


def test_with_a_token_only_who_knows_it_may_stop_the_node(node):
    right = {"x-genesis-token": "geheim-ä".encode()}
    with node.served(token="geheim-ä") as client:
        for headers in ({}, {"x-genesis-token": ""}, {"x-genesis-token": "geheim"}, {**right, "origin": SITE}):
            assert client.post("/api/shutdown", headers=headers).status_code == 403
        assert not node.stops
        assert client.post("/api/shutdown", headers=right).status_code == 202
    assert node.stops == ["asked"]


def _refusal(client, token="", user=None, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return shutdown_refusal(Headers({"host": "localhost"} | named), client, "http", token, user)


def test_loopback_is_this_machine_and_nothing_else():
    for client in ("127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1"):
        assert _refusal(client, user=os.getuid()) is None
    for client in (None, "", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "localhost", "testclient"):
        for token in ("", "t"):
            assert "from this machine" in _refusal(client, token, os.getuid(), x_genesis_token=token)


def test_a_proxy_and_another_user_of_this_machine_need_the_token():
    assert _refusal("127.0.0.1", "t", x_genesis_token="t", x_forwarded_for="203.0.113.9") is None
    assert "token" in _refusal("127.0.0.1", "other", os.getuid(), x_genesis_token="t", x_forwarded_for="203.0.113.9")
    for user in (os.getuid() + 1, 65_534, None):
        assert "user" in _refusal("127.0.0.1", user=user)
        assert "token" in _refusal("127.0.0.1", "t", user)
        assert _refusal("127.0.0.1", "t", user, x_genesis_token="t") is None


@pytest.mark.parametrize(
    ("listens", "asks"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.9"), ("::1", "::1"), ("::", "127.0.0.1")]
)
def test_the_user_of_a_connection_is_told_while_it_is_open(listens, asks, monkeypatch, tmp_path):
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    try:
        listener = socket.create_server((listens, 0), family=family, dualstack_ipv6=listens == "::")
    except OSError:
        pytest.skip(f"no {listens} here")
    host, port = "127.0.0.1" if listens == "::" else listens, listener.getsockname()[1]
    with listener, socket.create_connection((host, port), source_address=(asks, 0)) as client:
        accepted, address = listener.accept()
        with accepted:
            ends = address[:2], accepted.getsockname()[:2]
            assert user_of_peer(*ends) == os.getuid()
            assert user_of_peer(ends[0], (ends[1][0], ends[1][1] - 1)) is None
            with monkeypatch.context() as patch:  # Where the platform does not tell.
                patch.setattr("trainer.monitor.app._TABLES", (tmp_path / "none",))
                assert user_of_peer(*ends) is None
            # What is left of a closed one is nobody's, and is not root's.
            client.close()
            assert user_of_peer(*ends) is None


def test_the_docs_have_answers_of_this_release_and_explain_every_field():
    examples = [json.loads(found) for found in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]
    verify, whole, health = examples[:3]
    assert set(verify) == set(VerifyStatus.model_fields)
    assert set(whole) == set(TrainingStatus.model_fields) - set(VerifyStatus.model_fields)
    TrainingStatus.model_validate(verify | whole, strict=False)
    assert set(health) == set(Health.model_fields)
    for name in (*VerifyStatus.model_fields, *TrainingStatus.model_fields):
        assert f"`{name}`" in TEXT or f"`{name}." in TEXT or f'"{name}"' in TEXT


def test_the_docs_list_every_metric(node):
    node.observer.step(Step())
    node.observer.round(Report(dropped=(("a", "dead"),)), outer_step=1, state_digest="d")
    node.tracker.set_state(1, "d", stage="head")  # As at a whole node beside a swarm.
    node.observer.checkpoint("saved", step=1, seconds=0.1)
    node.refused["replayed"] += 1
    lines = node.metrics.page().decode().splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE genesis_training_")}
    for name in {name for name in names if not name.endswith("_created")}:
        assert re.search(rf"`{name.removeprefix('genesis_training_')}[`{{]", TEXT), name


def test_the_docs_show_lines_that_the_log_writes_and_python_that_runs(tmp_path, monkeypatch, capsys):
    shown = [json.loads(line) for line in TEXT.splitlines() if line.startswith('{"') and '"kind":' in line]
    with EventLog(tmp_path / "logs", "gpu-7") as log:
        log.step(Step(step=3, loss=float("nan"), skipped=True))
        log.round(Report(), outer_step=1, state_digest="d")
        log.event("checkpoint", outcome="saved", step=1, seconds=0.1)
    written = {event.kind: set(event.fields) for event in read_events(tmp_path / "logs")}
    assert {line["kind"]: set(line) - {"time", "node", "kind"} for line in shown} == written
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(block, "observing.md", "exec"), {})
    assert capsys.readouterr().out.endswith(" gpu-7 3.0 nan\n")


def read(node):
    """The node's metrics by name and label, as ``rounds_total shared``."""
    families = text_string_to_metric_families(node.metrics.page().decode())
    return {
        " ".join((sample.name.removeprefix("genesis_training_"), *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_steps_and_rounds_are_counted_with_their_units(node):
    assert not {"hash_agreement_percent", "sync_success_percent", "global_loss_nats"} & read(node).keys()
    for index in range(10):
        node.observer.step(Step(step=index, loss=4.0, seconds=0.2), loader_wait_s=0.25)
    node.observer.step(Step(step=10, loss=math.nan, grad_norm=math.inf, skipped=True, seconds=5.0))
    node.observer.round(Report(), outer_step=1, state_digest="d")
    expected = {"hash_agreement_percent": 100, "sync_success_percent": 100, "node_info gpu-7 node run ": 1}
    expected |= {"steps_total": 11, "skipped_steps_total": 1, "tokens_total": 11 * 4096, "loss_nats": 4.0}
    expected |= {"gradient_norm": 0.5, "learning_rate": 1e-4, "step_index": 10, "loader_wait_seconds_total": 2.5}
    expected |= {"step_seconds_count": 11, "step_seconds_bucket 0.3": 10, "global_loss_nats": 4.0}
    found = read(node)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    dropped = (("a", "dead: silent for 10 s"), ("b", "Not finite"))
    node.observer.round(Report(members=("f" * 64,), dropped=dropped, completeness=0.5), outer_step=2, state_digest="e")
    node.observer.round_failed(3, "deadline")
    expected = {f"rounds_total {outcome}": 1 for outcome in ("shared", "alone", "failed")}
    expected |= {"round_seconds_count": 2, "round_completeness_ratio": 0.5, "outer_step": 2}
    expected |= {"round_bytes_total sent": 2_000, "round_bytes_total received": 4_000}
    expected |= {"round_bits_per_parameter sent": 8.0, "round_bits_per_parameter received": 16.0}
    expected |= {"dropped_members_total dead": 1, "dropped_members_total not_finite": 1}
    assert expected.items() <= read(node).items()


def test_what_others_count_is_read_with_the_page(node):
    node.refused.update({"replayed": 2, "Protocol": 3})
    node.observer.checkpoint("saved", step=10, seconds=0.25)
    node.observer.checkpoint("skipped", step=20, seconds=0.0)
    node.observer.peers([Announced("a" * 64), Announced("b" * 64)])
    expected = {"rpc_refused_total replayed": 2, "rpc_refused_total protocol": 3, "lost_events_total": 3, "peers": 2}
    expected |= {"rpc_bytes_total sent": 70, "rpc_bytes_total received": 80, "checkpoint_seconds_total": 0.25}
    expected |= {"checkpoints_total saved": 1, "checkpoints_total skipped": 1}
    assert expected.items() <= read(node).items()


def test_other_nodes_cannot_add_series_without_end(node):
    node.refused.update({f"made-up-{number}": 1 for number in range(1_000)})
    node.refused.update({"x" * 500: 1, 'quote"\n': 1, "": 1})
    dropped = tuple((f"{number}", f"why{number}: because") for number in range(1_000))
    node.observer.round(Report(dropped=dropped), outer_step=1, state_digest="d")
    for _ in range(2):
        found = read(node)
        for name in ("rpc_refused_total", "dropped_members_total"):
            assert sum(key.startswith(name) for key in found) <= 33
            assert found[f"{name} other"] >= 968
    assert len(node.metrics.page()) < 30_000
