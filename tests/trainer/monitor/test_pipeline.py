"""The two pages of a driver, asked over real connections."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.support.pipeline_view import SeenPipeline, an_account, some_stages
from trainer.monitor import ApiConfig, ApiServer, SwarmAccount, SwarmStages, create_app
from trainer.monitor.status import ACCOUNT_PATH, STAGES_PATH


@pytest.fixture
def view() -> SeenPipeline:
    return SeenPipeline()


@pytest.fixture
def client(node, view: SeenPipeline) -> Iterator[httpx.Client]:
    config = ApiConfig(port=0)
    with (
        ApiServer(create_app(node.tracker, node.metrics, config=config, pipeline=view), config) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30.0) as client,
    ):
        yield client


def test_the_pages_tell_what_the_driver_knows(client: httpx.Client, view: SeenPipeline) -> None:
    account = SwarmAccount.model_validate_json(client.get(ACCOUNT_PATH).content)
    assert account == view.of_account
    assert account.micro_batches.adds_up and account.tokens.adds_up
    assert SwarmStages.model_validate_json(client.get(STAGES_PATH).content) == view.of_stages
    view.of_stages = some_stages(step=13)
    assert client.get(STAGES_PATH).json()["step"] == 13


def test_an_account_nobody_has_told_yet_is_not_made_up(client: httpx.Client, view: SeenPipeline) -> None:
    view.of_account = None
    answer = client.get(ACCOUNT_PATH)
    assert answer.status_code == 503
    assert "not been heard from" in answer.json()["detail"]


def test_a_loss_that_is_not_finite_is_null(client: httpx.Client, view: SeenPipeline) -> None:
    view.of_stages = some_stages(loss=float("nan"))
    answer = client.get(STAGES_PATH)
    assert answer.status_code == 200
    assert json.loads(answer.content, parse_constant=pytest.fail)["loss"] is None


def test_one_can_see_that_an_account_does_not_add_up() -> None:
    account = an_account(micro_batches={"leased": 5, "done": 2, "lost": 1, "open": 1})
    assert not account.micro_batches.adds_up


def test_every_field_is_described(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    assert {ACCOUNT_PATH, STAGES_PATH} <= set(described["paths"])
    for part in ("SwarmAccount", "SwarmStages", "StageStatus", "WorkerStatus"):
        assert part in described["components"]["schemas"]


def test_other_nodes_have_no_such_pages(api) -> None:
    assert api.client.get(ACCOUNT_PATH).status_code == api.client.get(STAGES_PATH).status_code == 404


def test_names_of_other_sites_are_refused_here_too(client: httpx.Client) -> None:
    assert client.get(STAGES_PATH, headers={"host": "evil.example"}).status_code == 421
