"""The page's routes: its policy and files, its JSON, the token for reading; what strangers write stays text."""

from __future__ import annotations

import hashlib
import json
import logging
import re

import httpx
import pytest

from tests.support.observing import Announced, Report, SeenPipeline, Step, a_worker, some_stages
from tests.support.shown_pages import a_node, a_view, shown_node, shown_run
from trainer.errors import TrainerUsageError
from trainer.monitor import ApiConfig
from trainer.monitor.history import History
from trainer.monitor.pages.page_view import PageView
from trainer.monitor.pages.routes import COOKIE, COURSE_PATH, TOKEN_PATH, VIEW_PATH, has_charts
from trainer.monitor.run_view import AlarmStatus
from trainer.monitor.swarm import SeenMember

TOKEN = "a-token-of-24-characters"
HOSTILE = "\u202e<script>alert(1)</script>\x1b[2J\ud800" + "x" * 10_000_000


def asking(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False, timeout=60.0)


def test_a_node_shows_its_page_and_its_files_under_a_strict_policy():
    with shown_node() as node, asking(node.url) as client:
        page = client.get("/")
        assert page.status_code == 200 and "Global LLM Status" in page.text
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page.text)
        links = re.findall(r'(?:src|href)="((?!data:|#|api/)[^"]+)"', page.text)
        assert len(links) >= 3 and not any("//" in link for link in links)
        for link in links:
            found = client.get(f"/{link}")
            assert found.status_code == 200 and "immutable" in found.headers["cache-control"], link
        assert client.get("/static/../routes.py").status_code == 404
        assert client.get("/static/0/run.js").status_code == 404
        assert client.get("/", headers={"host": "evil.example"}).status_code == 421
        assert client.get("/api/training/global").headers["cache-control"] == "no-store"


@pytest.mark.skipif(not has_charts(), reason="needs plotly: pip install '.[page]'")
def test_the_chart_library_is_sent_compressed_and_kept_for_ever():
    with shown_node() as node, asking(node.url) as client:
        named = re.search(r'<meta name="chart-library" content="([^"]+)">', client.get("/").text)
        assert named is not None
        paths = named[1].split()
        assert [path.rsplit("/", 1)[1] for path in paths] == ["before_plotly.js", "plotly.min.js"]
        sizes = []
        for path in paths:
            found = client.get(f"/{path}")
            assert found.headers["content-encoding"] == "gzip" and "immutable" in found.headers["cache-control"]
            assert hashlib.sha256(found.content).hexdigest().startswith(path.split("/")[1])
            sizes.append(int(found.headers["content-length"]))
        assert sizes[1] < 2_000_000
        assert client.get("/chart-library/0000/plotly.min.js").status_code == 404


def test_without_the_library_the_page_names_none(monkeypatch):
    from trainer.monitor.pages import routes

    monkeypatch.setattr(routes, "has_charts", lambda: False)
    routes.live_page.cache_clear()
    try:
        with shown_node() as node, asking(node.url) as client:
            assert '<meta name="chart-library" content="">' in client.get("/").text
            assert client.get("/chart-library/0000/plotly.min.js").status_code == 404
    finally:
        routes.live_page.cache_clear()


def test_the_figures_are_those_of_the_api():
    with shown_node() as node, asking(node.url) as client:
        for step in range(150):
            node.observer.step(Step(step=step, loss=9.0 - step / 50), num_tokens=4096 * (step + 1))
        node.observer.round(Report(), outer_step=1, state_digest="d1")
        node.tracker.peers([Announced("a" * 64, "gpu-8", shards=(1, 2))])
        told = client.get("/api/training/global").json()
        view = PageView.model_validate_json(client.get(VIEW_PATH).content)
        assert (view.verdict, view.loss_trend) == ("verified", told["loss_trend"])
        assert (view.total_steps, view.data_shards) == (told["total_steps"], told["data_shards"])
        assert (view.loss, view.convergence) == (told["global_loss"], told["model_convergence"])
        assert (view.num_nodes, view.tokens) == (2, 4096 * 150)
        assert [it.node_id for it in view.nodes] == ["gpu-7", "gpu-8"]
        assert view.own is not None and view.own.outer_syncs == told["diloco"]["outer_syncs"] == 1
        course = client.get(COURSE_PATH, params={"by": "tokens", "points": 50}).json()
        assert (course["begin"], course["end"]) == (4096, 4096 * 150)
        schema = client.get("/openapi.json").json()
        assert "PageView" in schema["components"]["schemas"] and "CourseView" in schema["components"]["schemas"]


def test_a_driver_shows_its_stages_and_the_account():
    view = SeenPipeline(of_stages=some_stages(loss=float("nan")))
    with shown_node(role="driver") as node, asking(node.url) as client:
        node.page.pipeline = view
        found = PageView.model_validate(json.loads(client.get(VIEW_PATH).content, parse_constant=pytest.fail))
        assert [it.stage for it in found.stages] == ["head", "tail"]
        assert found.account == view.of_account and found.flow is not None and found.flow.in_flight == 8
        assert (found.nodes, found.alarms, found.step, found.tokens) == ((), None, 12, 102_400)


def test_a_whole_node_beside_a_swarm_shows_who_is_what_and_whose_rounds_they_were():
    """Workers hold a stage each, drivers nothing; of each stage its holders are compared, and no one else."""
    keys = {name: letter * 64 for name, letter in (("head-1", "a"), ("tail-1", "b"), ("driver-1", "c"), ("gpu-8", "d"))}
    parts = (("head", 3, "h3"), ("tail", 2, "t2"))
    with shown_node(stages=("head", "tail")) as node, asking(node.url) as client:
        node.observer.step(Step(step=0), num_tokens=4096)
        for stage, outer_step in (("head", 3), ("tail", 2)):
            node.observer.round(Report(round_index=outer_step - 1), outer_step=outer_step, state_digest="", stage=stage)
            node.tracker.set_state(outer_step, f"{stage[0]}{outer_step}", inner_step=None, stage=stage)
        node.observer.round_failed(2, "nobody came", "tail")
        node.tracker.peers(
            [
                Announced(keys["head-1"], "head-1", outer_step=3, state_digest="h3", stage_name="head"),
                Announced(keys["tail-1"], "tail-1", outer_step=2, state_digest="t2", stage_name="tail"),
                Announced(keys["driver-1"], "driver-1", outer_step=0, state_digest="", inner_step=7),
                Announced(keys["gpu-8"], "gpu-8", outer_step=2, state_digest="", part_states=parts),
            ]
        )
        told = client.get("/api/training/global").json()
        view = PageView.model_validate_json(client.get(VIEW_PATH).content)
        figures = client.get("/metrics").text
    shown = {it.node_id: it for it in view.nodes}
    assert {name: (it.role, it.stage, it.step, it.behind) for name, it in shown.items()} == {
        "gpu-7": ("node", "", 2, 0),
        "gpu-8": ("node", "", 2, 0),
        "head-1": ("worker", "head", 3, 0),
        "tail-1": ("worker", "tail", 2, 0),
        "driver-1": ("driver", "", None, None),
    }
    assert [(it.stage, it.round_index, bool(it.error)) for it in view.rounds] == [
        *(("tail", 2, True), ("tail", 1, False), ("head", 2, False))
    ]
    assert view.own is not None and view.own.stages == told["diloco"]["stages"] == {"head": 3, "tail": 2}
    assert [(it["node_id"], it["role"], it["stage"]) for it in told["nodes"]][1:3] == [
        *(("driver-1", "driver", ""), ("gpu-8", "node", ""))
    ]
    # Three hold the head's state and three the tail's; workers' steps and tokens are those of the driver.
    assert (told["hash_agreement_rate"], told["hash_agreement"]["num_compared"]) == (100.0, 6)
    assert (told["hash_agreement"]["num_behind"], told["model_convergence"]) == (0, 100.0)
    assert told["total_steps"] == 1 + 7 + 100
    assert told["tokens_per_s"] == 2 * 1000.0
    assert 'genesis_training_stage_outer_step{stage="head"} 3.0' in figures
    assert 'genesis_training_stage_rounds_total{outcome="failed",stage="tail"} 1.0' in figures


def test_over_a_bucket_the_members_of_the_latest_rounds_are_the_others():
    """Of whom nothing is known but what agreements say: the key, the last round, the weight in it."""
    with shown_node() as node, asking(node.url) as client:
        node.observer.step(Step(step=0), num_tokens=4096)
        node.tracker.set_state(3, "d3")
        told = [("f" * 64, 2, 4.0), ("a" * 64, 2, 3.0), ("b" * 64, 0, 5.0)]
        node.tracker.seen_in_rounds(
            SeenMember(peer_id=key, last_round=last, weight=weight, outer_step=last, state_digest=f"d{last}")
            for key, last, weight in told
        )
        view = PageView.model_validate_json(client.get(VIEW_PATH).content)
        whole = client.get("/api/training/global").json()
    assert [(it.node_id, it.is_self, it.last_round, it.weight) for it in view.nodes] == [
        *(("gpu-7", True, 2, 4.0), ("a" * 12, False, 2, 3.0), ("b" * 12, False, 0, 5.0))
    ]
    assert [(it.loss, it.tokens_per_s, it.inner_steps, it.behind) for it in view.nodes[1:]] == [(None,) * 4] * 2
    assert whole["training_nodes"] == 3 and whole["nodes"][1]["last_round"] == 2
    assert whole["global_loss"] == 4.0


def test_an_unchanged_view_is_not_sent_again():
    view = a_view([a_node("gpu-1")])
    with History(None, "run-1") as history, shown_run(lambda: view, history) as url, asking(url) as client:
        first = client.get(VIEW_PATH)
        again = client.get(VIEW_PATH, headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get("/api/run").json() == json.loads(view.model_dump_json())
        assert first.json()["nodes"][0]["node_id"] == "gpu-1"


def test_before_the_first_look_there_is_no_view():
    with History(None, "run-1") as history, shown_run(lambda: None, history) as url, asking(url) as client:
        assert (client.get(VIEW_PATH).status_code, client.get(VIEW_PATH).json()) == (200, None)
        assert client.get("/").status_code == 200
        assert client.get(COURSE_PATH).json()["curves"] == []


@pytest.mark.parametrize("query", ["points=5", "points=99999", "by=loss", "begin=nan", "end=inf", "begin=x"])
def test_ranges_that_make_no_sense_are_refused(query):
    with shown_node() as node, asking(node.url) as client:
        assert client.get(f"{COURSE_PATH}?{query}").status_code == 422


def test_hostile_names_lines_and_figures_are_cut_and_are_json():
    alarm = AlarmStatus(kind="quiet", subject=HOSTILE, text=HOSTILE, since="2026-11-28T00:00:00Z")
    node = a_node(
        "n", node_id=HOSTILE, software=HOSTILE, doubts=(HOSTILE,), loss=float("nan"), tokens_per_s=float("inf")
    )
    view = a_view([node], alarms=(alarm,), unverified=(HOSTILE,))
    with History(None, "run-1") as history, shown_run(lambda: view, history) as url, asking(url) as client:
        body = client.get(VIEW_PATH).content
        assert len(body) < 20_000
        found = json.loads(body, parse_constant=pytest.fail)
        name = found["nodes"][0]["node_id"]
        assert name.startswith("⟨U+202E⟩<script>") and "⟨U+001B⟩" in name and "⟨U+D800⟩" in name and len(name) < 120
        assert found["nodes"][0]["loss"] is None and found["nodes"][0]["tokens_per_s"] is None


def test_hostile_workers_rounds_and_log_lines_of_a_node(monkeypatch, caplog):
    caplog.set_level("INFO", "trainer")
    # pytest would send what it captures to another process, which takes no lone surrogate.
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", False)
    worker = a_worker("head.0.1", node_id=HOSTILE, unsaved_because=HOSTILE, busy=float("nan"))
    stages = some_stages()
    stage = stages.stages[0].model_copy(update={"workers": (worker,)})
    with shown_node(role="driver") as node, asking(node.url) as client:
        node.page.pipeline = SeenPipeline(of_stages=stages.model_copy(update={"stages": (stage,)}))
        node.observer.round_failed(3, HOSTILE)
        node.observer.round(
            Report(dropped=(("c" * 64, HOSTILE),) * 100, seconds=float("nan")), outer_step=1, state_digest=""
        )
        node.observer.event("withdrew", reason=HOSTILE)
        logging.getLogger("trainer.somewhere").warning("%s", HOSTILE)
        body = client.get(VIEW_PATH).content
        assert len(body) < 60_000
        found = json.loads(body, parse_constant=pytest.fail)
        assert found["log"][0]["text"].startswith("⟨U+202E⟩<script>") and len(found["log"][0]["text"]) < 400
        assert len(found["rounds"][0]["left_out"]) <= 32 and found["rounds"][0]["seconds"] is None


# -- the token ---------------------------------------------------------------------------------------------------------


def test_with_a_token_nothing_but_the_form_and_health_is_open():
    config = ApiConfig(port=0, read_token=TOKEN)
    with shown_node(config=config) as node, asking(node.url) as client:
        for path in (VIEW_PATH, COURSE_PATH, "/api/training/global", "/metrics", "/openapi.json", "/static/x/y"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401, path
        form = client.get("/")
        assert form.status_code == 401 and 'name="token"' in form.text
        assert client.get("/healthz").status_code == 200
        assert client.get(VIEW_PATH, headers={"authorization": f"bearer {TOKEN}"}).status_code == 200
        assert client.get(VIEW_PATH, headers={"host": "evil.example"}).status_code == 421


def test_the_form_sets_a_cookie_that_is_not_the_token():
    config = ApiConfig(port=0, read_token=TOKEN)
    with shown_node(config=config) as node, asking(node.url) as client:
        for wrong, status in (("", 403), ("ünïcödé", 403), (TOKEN[:-1], 403), ("x" * 10_000, 413)):
            answer = client.post(TOKEN_PATH, data={"token": wrong})
            assert (answer.status_code, "set-cookie" in answer.headers) == (status, False)
        taken = client.post(TOKEN_PATH, data={"token": f" {TOKEN} "})
        assert (taken.status_code, taken.headers["location"]) == (303, "./")
        cookie = taken.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower() and TOKEN not in cookie
        assert client.get(VIEW_PATH).status_code == 200
        assert "Global LLM Status" in client.get("/").text and 'name="token"' not in client.get("/").text
        client.cookies.clear()
        assert client.get(VIEW_PATH, headers={"cookie": f"{COOKIE}={TOKEN}"}).status_code == 401


def test_the_token_is_in_no_log(caplog):
    caplog.set_level("DEBUG")
    with shown_node(config=ApiConfig(port=0, read_token=TOKEN)) as node, asking(node.url) as client:
        client.post(TOKEN_PATH, data={"token": TOKEN})
        client.get(VIEW_PATH, headers={"authorization": f"Bearer {TOKEN}"})
        assert client.get(VIEW_PATH).status_code == 200
        assert TOKEN not in client.get(VIEW_PATH).text
    ours = [it.getMessage() for it in caplog.records if not it.name.startswith(("httpx", "httpcore"))]
    assert not any(TOKEN in line for line in ours)


@pytest.mark.parametrize("token", ["short", "with a space in it ----", "ümlaut-ümlaut-ümlaut"])
def test_a_token_that_is_none_is_refused(token):
    with pytest.raises(TrainerUsageError, match="read_token: expected 16") as refused:
        ApiConfig(read_token=token)
    assert token not in str(refused.value)
