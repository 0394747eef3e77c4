"""The page inside a real ``genesis serve``: routes, headers, bounds, and what it must not weaken."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from genesis.errors import UsageError
from genesis.pages.page import POLICY
from genesis.store import FolderStore
from genesis.store_page import read_verify_report
from genesis.verification import verify_store
from manifests import shard_key
from tests.support.serve_process import ServeProcess, genesis_serve
from tests.support.small_store import copy_small_store, manifest_of
from tests.support.waiting import wait_until

API = ("/api/store", "/api/shards", "/api/shard?id=0", "/api/document?shard=0", "/api/vocabulary", "/openapi.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page") / "store"
    copy_small_store(found)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServeProcess]:
    with genesis_serve(folder) as serving:
        yield serving


def test_the_page_and_its_files_are_strict(server: ServeProcess) -> None:
    page = server.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    paths = re.findall(r'(?:src|href)="(static/[^"]+)"', page.text)
    assert len(paths) == 3
    names = {path.rpartition("/")[2] for path in paths}
    folder = paths[0].rpartition("/")[0]
    for path in (*paths, f"{folder}/dom.js", f"{folder}/store_shards.js"):
        answer = server.get(f"/{path}")
        assert answer.status_code == 200 and "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-security-policy"] == POLICY
    assert names == {"page.css", "store.css", "store.js"}
    assert server.get("/", if_none_match=page.headers["etag"]).status_code == 304
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=", page.text)


@pytest.mark.parametrize("path", API)
def test_routes_answer_json_and_are_never_kept(server: ServeProcess, path: str) -> None:
    answer = server.get(path)
    assert answer.status_code == 200, answer.text
    answer.json()
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-security-policy"] == POLICY
    assert server.request("HEAD", path).content == b""
    assert server.request("POST", path).status_code == 405


def test_answers_are_as_openapi_says(server: ServeProcess) -> None:
    described = server.get("/openapi.json").json()
    assert set(described["paths"]) == {path.partition("?")[0] for path in API} - {"/openapi.json"}
    for path in API[:-1]:
        of = described["paths"][path.partition("?")[0]]["get"]["responses"]["200"]["content"]["application/json"]
        schema = described["components"]["schemas"][of["schema"]["$ref"].rpartition("/")[2]]
        found = server.get(path).json()
        assert set(found) == set(schema["properties"])


def test_figures_are_the_stores(server: ServeProcess, folder: Path) -> None:
    manifest = manifest_of(folder)
    store = server.get("/api/store").json()
    assert store["totals"]["shards"] == manifest.total_shards
    assert {each["name"]: each["documents"] for each in store["sources"]} == {
        name: totals.documents_processed for name, totals in manifest.sources.items()
    }
    indexed = lambda: server.get("/api/store").json()["index"]["indexed_shards"]  # noqa: E731
    wait_until(lambda: indexed() == manifest.total_shards, "expected the index to be read", 30.0)
    grid = server.get("/api/shards").json()
    assert sum(sum(cell["by_source"]) for cell in grid["cells"]) == manifest.total_shards


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/shard", 400, "id: Field required"),
        ("/api/shard?id=-1", 400, "id: "),
        ("/api/shard?id=999999", 400, "asked for shard 999999"),
        ("/api/shard?id=" + "9" * 4_000, 400, "id: "),
        ("/api/shard?id=0&x=1", 400, "x: Extra inputs"),
        ("/api/document", 400, "expected a shard, or a source and an ordinal"),
        ("/api/document?shard=0&source=alpha&ordinal=0", 400, "expected a shard, or a source"),
        ("/api/document?shard=0&tokens=1000000", 400, "tokens: "),
        ("/api/document?shard=0&token=NaN", 400, "token: "),
        ("/api/document?source=%3Cscript%3E&ordinal=0", 400, "expected one of the sources alpha, beta"),
        ("/api/shards?cells=100000", 400, "cells: "),
        ("/api/vocabulary?text=" + "x" * 300, 400, "text: "),
        ("/api/vocabulary?text=%ff", 400, "expected a query"),
        ("/api/vocabulary?" + "&".join("a=1" for _ in range(50)), 400, "expected a query"),
        ("/api/vocabulary?text=" + "x" * 5_000, 400, "expected a query of at most"),
        ("/static/0/dom.js", 404, "no such file"),
        ("/static/../app.py", 404, ""),
        ("/api/", 404, "expected the key"),
        ("/api/checkpoints", 404, "expected the key"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(server: ServeProcess, path: str, status: int, says: str) -> None:
    answer = server.get(path)
    assert answer.status_code == status
    assert says in answer.text and answer.text.count("\n") == 1
    assert len(answer.text) < 1_100


def test_neither_folder_nor_host_nor_lease_are_told(server: ServeProcess, folder: Path) -> None:
    told = "".join(server.get(path).text for path in (*API, "/api/shard?id=99999", "/api/document?shard=99999"))
    assert str(folder) not in told and str(folder.parent) not in told
    assert "token_id" not in server.get("/api/store").json()["writer"]
    assert set(server.get("/api/store").json()["writer"]) == {"state", "source", "expires_at", "tokens_per_s"}
    assert server.get("/checkpoints.json").status_code == 404


@pytest.mark.parametrize("broken", ["manifest.json", "checkpoints.json", "index", "vocabulary"])
def test_nor_where_something_is_broken(tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "a secret place" / "store"
    folder.parent.mkdir()
    copy_small_store(folder)
    for path in [folder / broken] if broken.endswith(".json") else (folder / broken).iterdir():
        path.write_text("{")
    with genesis_serve(folder) as serving:
        for path in API:
            answer = serving.get(path)
            assert "secret" not in answer.text
            assert answer.status_code in (200, 404, 409)
        store = serving.get("/api/store").json()
        assert store["state"] == ("damaged" if broken == "manifest.json" else "ready")
        assert store["problem"] or store["notes"] or broken == "index"
        wait_until(lambda: broken != "index" or serving.get("/api/store").json()["index"]["problem"], "a line", 30.0)


def test_the_page_can_be_left_out(folder: Path) -> None:
    with genesis_serve(folder, "--no-page") as plain:
        for path in ("/", "/index.html", "/static/x/page.css", *API):
            assert plain.get(path).status_code == 404
        assert plain.get("/manifest.json").status_code == 200


def test_one_address_cannot_take_all_of_the_page(server: ServeProcess) -> None:
    """Sixty at once: some are told to come back, none hangs, and objects are served meanwhile."""
    statuses: list[int] = []
    lock = threading.Lock()

    def ask(number: int) -> None:
        with httpx.Client(verify=False, trust_env=False, timeout=60) as client:
            status = client.get(f"{server.url}/api/document?shard={number % 10}&tokens=2000").status_code
        with lock:
            statuses.append(status)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    assert server.get("/manifest.json").status_code == 200
    for thread in threads:
        thread.join(60)
    assert len(statuses) == 60 and set(statuses) <= {200, 503} and 200 in statuses
    assert server.get("/api/store").status_code == 200


def test_requests_are_counted_by_kind(server: ServeProcess) -> None:
    server.get("/")
    server.get("/api/store")
    assert server.metric("genesis_serve_requests_total", method="GET", status="200", kind="page") >= 1
    assert server.metric("genesis_serve_requests_total", method="GET", status="200", kind="api") >= 1


def test_a_damaged_shard_is_said_and_verify_reports_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store: FolderStore = copy_small_store(folder)
    (tmp_path / "verify.json").write_text(verify_store(store, threads=2).model_dump_json())
    (folder / shard_key(1)).write_bytes(b"x")
    with genesis_serve(folder, "--verify-report", str(tmp_path / "verify.json")) as serving:
        answer = serving.get("/api/document?shard=1")
        assert answer.status_code == 409 and "shard_1.pt: expected" in answer.text and str(folder) not in answer.text
        total = manifest_of(folder).total_shards

        def counted() -> bool:
            index = serving.get("/api/store").json()["index"]
            return index["verified_shards"] == total - 1 and index["damaged_shards"] == 1

        wait_until(counted, "expected one damaged shard and the others verified", 30.0)
        assert serving.get("/api/shard?id=1").json()["check"] == "damaged"
        assert serving.get("/api/store").json()["verified"]["ok"] is True


@pytest.mark.parametrize("body", ["", "{}", "[]", json.dumps({"format": 1}), None])
def test_a_verify_report_that_is_none(tmp_path: Path, body: str | None) -> None:
    path = tmp_path / "verify.json"
    if body is not None:
        path.write_text(body)
    with pytest.raises(UsageError, match=r"--verify-report .*verify\.json: "):
        read_verify_report(path)
