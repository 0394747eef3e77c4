#!/usr/bin/env python
"""The page of a run of 300 simulated nodes with an hour of history: how soon it is there, what it costs its server.

    python scripts/bench_pages.py                        # 300 nodes, 360 looks, one minute watched by one browser
    python scripts/bench_pages.py --nodes 1000 --watch-s 20

The server is a process of its own: it summarises a look of all nodes every 10 s as `python -m trainer dashboard` does
(what nodes say is made up; asking them over the network is `bench_swarm.py monitor`), keeps it in sqlite and serves it.
A real chromium opens the page, each time with an empty profile. "Ready" is from the request until the figures stand
there, and until the charts are drawn; beside it stands an empty page of the same server, which is the browser's own
share. A node's own page is the same with a million steps in its history. Figures go to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.announcements import announcement
from tests.support.browser import Browser, browsing
from trainer.monitor import ApiConfig, ApiServer
from trainer.monitor.history import History
from trainer.monitor.pages.course import CourseRange
from trainer.monitor.pages.log_lines import LogLines
from trainer.monitor.pages.page_view import PageView
from trainer.monitor.pages.routes import PageSource
from trainer.monitor.pages.run_page import run_page
from trainer.monitor.pages.seen_course import run_course
from trainer.monitor.run_app import create_run_app
from trainer.monitor.run_view import RunView
from trainer.network.discovery.node_report import NodeReport, ReportedRound
from trainer.network.rpc.identity import Identity
from trainer.run.monitoring.summary import RunSummary, utc
from trainer.run.monitoring.watcher import Look, WatchedNode

LOOK_S = 10.0
REPORT_LOOKS = 6


class SimulatedRun:
    """Nodes that say something else at each look, as real ones would."""

    def __init__(self, num_nodes: int) -> None:
        self._keys = [Identity.create() for _ in range(num_nodes)]
        self._nodes: dict[str, WatchedNode] = {}
        self._index = 0

    def look(self, at: float) -> Look:
        """The next look, at a moment."""
        step, index = self._index // 30, self._index
        self._index += 1
        for number, key in enumerate(self._keys):
            loss = 3.0 + 5.0 / (1.0 + index / 40) + (number % 9) / 20
            said = announcement(
                key,
                node_id=f"node-{number}",
                outer_step=step,
                inner_step=index * 20,
                loss=loss,
                tokens_per_s=900.0,
                shards=(number % 600,),
                state_digest=f"{step:064x}",
            ).stamped(at - 1.0, 60.0)
            node = self._nodes.setdefault(key.peer_id, WatchedNode(key.peer_id, at))
            node.said, node.is_reached, node.clock_offset_s = said, True, 0.1
            if (index + number) % REPORT_LOOKS == 0:
                node.take(self._report(key, number, index, at))
        return Look(at=at, nodes=dict(self._nodes))

    def _report(self, key: Identity, number: int, index: int, at: float) -> NodeReport:
        own = ReportedRound(round_index=index // 30, ended_at=at - 5.0, num_members=len(self._keys), completeness=1.0)
        rounds = (own.model_copy(update={"seconds": 3.0, "agree_s": 0.5, "reduce_s": 2.0, "vote_s": 0.1}),)
        return NodeReport(
            peer_id=key.peer_id,
            node_id=f"node-{number}",
            run_id="run",
            role="node",
            incarnation=f"{number:016x}",
            software="1.0.0",
            flops=1e12 * index,
            num_tokens=index * 9_000,
            active_s=index * LOOK_S,
            rounds_shared=index // 30,
            rounds=rounds,
            loss=4.0,
            tokens_per_s=900.0,
            sent_bytes=index * 100_000,
            memory_bytes=2_000_000_000,
            checkpoint_age_s=30.0,
        ).stamped(at, 180.0)


def serve_run(num_nodes: int, num_looks: int, path: Path, tell: Connection) -> None:
    """The server's process: an hour of history, then a look every 10 s until it is told to end."""
    run, began_at = SimulatedRun(num_nodes), time.time()
    shown: list[tuple[RunView, PageView]] = []
    with History(path, "run") as history, LogLines() as lines:
        summary = RunSummary("run", history)
        for index in range(num_looks):
            view = summary.take(run.look(began_at - (num_looks - index) * LOOK_S))
        shown.append((view, run_page(view, history.rows_of, lines, utc)))
        page = PageSource(lambda: shown[-1][1], partial(run_course, history.rows_of))
        app = create_run_app(lambda: shown[-1][0], lambda since: [], page)
        with ApiServer(app, ApiConfig(port=0)) as server:
            tell.send(server.url)
            while not tell.poll(LOOK_S):
                view = summary.take(run.look(time.time()))
                shown[:] = [(view, run_page(view, history.rows_of, lines, utc))]


def serve_node(num_steps: int, path: Path, tell: Connection) -> None:
    """A node's page with so many steps behind it; its steps go on, ten a second."""
    from tests.support.observing import Step
    from tests.support.shown_pages import shown_node

    with shown_node(path) as node:
        for step in range(num_steps):
            node.history.step(Step(step=step, loss=3.0 + (step % 97) / 100), 64 * (step + 1))
            if step % 10_000 == 0:
                node.page.course(CourseRange())  # So that the queue, which is bounded, is emptied.
        tell.send(node.url)
        step = num_steps
        while not tell.poll(0.1):
            node.observer.step(Step(step=step, loss=3.0), num_tokens=64 * (step + 1))
            step += 1


def measured(browser: Browser, start: Callable[[Connection], None], arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of a page and of its server's process."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=start, args=(theirs,), daemon=True)
    child.start()
    try:
        if not ours.poll(900):
            raise SystemExit("bench_pages: the server did not start within 900 s")
        url = ours.recv()
        server = psutil.Process(child.pid)
        opened = [opening(browser, url) for _ in range(arguments.openings)]
        before, began_s = server.cpu_times(), time.perf_counter()
        with browser.open(url) as page:
            page.wait_for("#curves[data-drawn]", timeout_s=300)
            page.tab.wait_for_timeout(1000 * arguments.watch_s)
        spent, elapsed_s = server.cpu_times(), time.perf_counter() - began_s
        cpu = (spent.user - before.user + spent.system - before.system) / elapsed_s
        found = {name: median(each[name] for each in opened) for name in opened[0]}
        return found | {"cpu_percent": 100 * cpu, "memory_mb": server.memory_info().rss / 1e6}
    finally:
        ours.send("end")
        child.join(20)
        child.kill()


def opening(browser: Browser, url: str) -> dict[str, float]:
    """Seconds until an empty page, the figures, and the charts are there."""
    began_s = time.perf_counter()
    with browser.open(f"{url}/healthz"):
        empty_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    with browser.open(url, wait_until="commit") as page:
        page.wait_for("body[data-time]", timeout_s=300)
        figures_s = time.perf_counter() - began_s
        page.wait_for("#curves[data-drawn]", timeout_s=300)
        return {"empty_s": empty_s, "figures_s": figures_s, "charts_s": time.perf_counter() - began_s}


def main() -> None:
    """Measures both pages and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=300)
    parser.add_argument("--looks", type=int, default=360, help="before the page is opened, 10 s apart")
    parser.add_argument("--steps", type=int, default=1_000_000, help="in the history of the node's own page")
    parser.add_argument("--openings", type=int, default=5)
    parser.add_argument("--watch-s", type=float, default=60.0, help="for which one browser watches")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-pages-") as name, browsing() as browser:
        folder = Path(name)
        report = {
            f"run, {arguments.nodes} nodes": measured(
                browser, partial(serve_run, arguments.nodes, arguments.looks, folder / "run.sqlite"), arguments
            ),
            f"node, {arguments.steps:,} steps": measured(
                browser, partial(serve_node, arguments.steps, folder / "node.sqlite"), arguments
            ),
        }
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{'':24}{'empty':>9}{'figures':>9}{'charts':>9}{'server':>12}{'memory':>10}")
    for what, found in report.items():
        seconds = "".join(f"{found[key]:>7.2f} s" for key in ("empty_s", "figures_s", "charts_s"))
        print(f"{what:24}{seconds}{found['cpu_percent']:>6.1f} % core{found['memory_mb']:>7.0f} MB")


if __name__ == "__main__":
    main()
