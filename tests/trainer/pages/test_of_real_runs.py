"""The page of real nodes in a real browser: its figures are the API's, and it goes on while nodes die."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser, WatchedPage
from tests.support.pipeline_swarm import PipelineSwarm
from tests.support.training_swarm import TERMINATED, WAIT_S, TrainingNode, TrainingSwarm
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(1_200)]
ROOT = Path(__file__).resolve().parents[3]
OFTEN = {"discovery": {"report_interval_s": 1.0}}


@contextmanager
def dashboard(swarm: TrainingSwarm, folder: Path) -> Iterator[str]:
    """The address of a run's page, looked at every second."""
    address, output = f"127.0.0.1:{next(iter(swarm._ports.values()))}", folder / "dashboard.out"
    command = [sys.executable, "-m", "trainer", "dashboard", "--run", str(swarm._config), "--initial-peers", address]
    command += ["--port", "0", "--db", str(folder / "dashboard.sqlite"), "--interval-s", "1"]
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    shown = re.compile(r"the run is shown at (http://127\.0\.0\.1:\d+)")
    try:
        wait_until(lambda: shown.search(output.read_text()), "the dashboard's address", WAIT_S)
        found = shown.search(output.read_text())
        assert found is not None
        yield found[1]
        process.terminate()
        assert process.wait(60) == TERMINATED, output.read_text()
        assert "Traceback" not in output.read_text()
    finally:
        process.kill()
        process.wait(30)


def url_of(node: TrainingNode) -> str:
    found = re.findall(r"Global LLM Status at (http://127\.0\.0\.1:\d+)/", node.output())
    assert found, node.tail()
    return str(found[-1])


def asked(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=30) as answer:
        return json.load(answer)


def shows(page: WatchedPage, selector: str, text: str) -> None:
    page.tab.locator(selector).get_by_text(text).first.wait_for(timeout=1000 * WAIT_S)


def test_a_node_alone_and_its_curve_after_a_restart(tmp_path: Path, browser: Browser) -> None:
    with TrainingSwarm(tmp_path) as swarm:
        swarm.begin("n1", initial_peers=())
        swarm.wait(lambda: swarm["n1"].num_steps() > 150, "150 steps")
        with browser.open(url_of(swarm["n1"])) as page:
            shows(page, "#verdict", "training, verified")
            page.wait_for("#curves[data-drawn]")
            page.check()
        swarm["n1"].kill()
        course = swarm.folder / "log" / "page-n1.sqlite"
        assert course.is_file()
        command = swarm["n1"].command
        swarm.nodes["n1"] = again = TrainingNode("n1", command, swarm.folder)
        again.start()
        swarm.wait(lambda: again.output().count("Global LLM Status at") == 2, "its page again")
        own = asked(url_of(again), "/api/page/course")
        assert own["begin"] is not None and own["begin"] < 50 < own["end"]


def test_four_nodes_and_one_that_dies(tmp_path: Path, browser: Browser) -> None:
    names = ("n1", "n2", "n3", "n4")
    with TrainingSwarm(tmp_path, **OFTEN) as swarm:
        swarm.begin(*names)
        swarm.wait_for_step(2, *names)
        with dashboard(swarm, tmp_path) as url, browser.open(url) as page, browser.open(url_of(swarm["n1"])) as own:
            for each in (page, own):
                for name in names:
                    shows(each, "#nodes tbody", name)
                shows(each, "#rounds", "4 members")
            page.wait_for("#curves[data-drawn]")
            told = asked(url_of(swarm["n1"]), "/api/training/global")
            assert own.tab.locator("#nodes tbody tr").count() == len(told["nodes"]) == 4
            page.check()
            own.check()
            swarm["n4"].kill()
            row = page.tab.locator("#nodes tbody tr", has_text="n4")
            row.get_by_text(re.compile("gone|unreachable")).wait_for(timeout=1000 * WAIT_S)
            assert page.console == [] and own.console == []


def test_a_pipeline_under_kills(tmp_path: Path, browser: Browser) -> None:
    with PipelineSwarm(tmp_path, **OFTEN) as swarm:
        driver = swarm.begin_driver()
        for stage in ("head", "body-1", "tail"):
            for number in (1, 2):
                swarm.begin_worker(f"{stage}.{number}", stage)
        swarm.wait_for_steps("driver-1", 10, 2 * WAIT_S)
        with dashboard(swarm, tmp_path) as url, browser.open(url) as page, browser.open(url_of(driver)) as own:
            for each in (page, own):
                for stage in ("head", "body-1", "tail"):
                    shows(each, "#swarm", f"{stage}.1")
                shows(each, "#account", "adds up")
            swarm["tail.2"].kill()
            swarm["head.1"].kill()
            alive = [node for name, node in swarm.nodes.items() if name not in ("tail.2", "head.1")]
            for each in (page, own):
                gone = each.tab.locator("#swarm .worker", has_text="tail.2")
                gone.wait_for(state="detached", timeout=1000 * WAIT_S)
            shows(page, "#alarms", "one-replica")
            swarm.wait_for_steps("driver-1", 40, 2 * WAIT_S, alive)
            view = asked(url_of(driver), "/api/page")
            stages = asked(url_of(driver), "/api/swarm/stages")
            assert [it["stage"] for it in view["stages"]] == [it["stage"] for it in stages["stages"]]
            account = view["account"]["micro_batches"]
            assert account["leased"] == account["done"] + account["lost"] + account["open"]
            for each in (page, own):
                each.wait_for("#curves[data-drawn]")
                each.check()


def test_a_worker_has_a_page_of_its_own(tmp_path: Path, browser: Browser) -> None:
    with PipelineSwarm(tmp_path, **OFTEN) as swarm:
        swarm.begin_driver()
        workers = swarm.begin_workers("head", "body-1", "tail")
        swarm.wait_for_steps("driver-1", 10, 2 * WAIT_S)
        with browser.open(url_of(workers[0])) as page:
            shows(page, "#subtitle", "worker")
            page.tab.get_by_text("all figures").click()
            shows(page, "#own", "stage version")
            page.wait_for("#curves[data-drawn]")
            page.check()
