"""The report as a file: in a real browser, on paper, and by the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import _chromium, browsing
from tests.trainer.monitor.test_report import START, Log, figure
from trainer.monitor.report import run_report
from trainer.monitor.report.page import report_html
from trainer.run.cli.app import run

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e"


def a_run(folder: Path) -> Path:
    for number in range(2):
        log = Log(folder, f"gpu-{number}").event("start", **START | {"peer_id": f"{number}" * 64, "stage": ""})
        log.steps(0, 60).event(
            "round", round_index=0, members=["0" * 64, "1" * 64], dropped=[["2" * 64, EVIL]], seconds=2.0
        )
        log.event("held_out", step=60, loss=3.5, bits_per_byte=1.1, by_source={EVIL: {"loss": 3.5}})
        log.event("sample", step=60, prompt=EVIL, text=f"one\ntwo {EVIL}").event("checkpoint", outcome="saved", step=60)
        log.event("withdrew", reason=EVIL).event("round_failed", round_index=1, reason=EVIL)
        log.event("start", after_s=300, **START | {"run_id": EVIL, "options": {EVIL: EVIL}}).steps(50, 90)
        log.event("shards", shards=[1, 2], num_shards=2).event("end", outcome="failed", reason=EVIL)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (1280, True), (400, False)])
def test_the_file_in_a_browser(tmp_path: Path, width: int, is_dark: bool) -> None:
    report = run_report([a_run(tmp_path / "log")])
    path = tmp_path / "run.html"
    path.write_text(report_html(report), encoding="utf-8")
    with browsing() as browser, browser.open(path.as_uri(), width=width, is_dark=is_dark) as page:
        page.tab.wait_for_selector("body[data-drawn]")
        page.check()
        shown = page.tab.inner_text("body")
        assert "<script>alert(1)</script>" in shown and "\u202e" not in shown
        assert page.tab.evaluate("document.querySelectorAll('main img').length") == 0
        loss = figure(report, "loss at the end")
        assert loss is not None and f"{loss:.4f}" in shown
        rows = page.tab.locator("#timeline tbody tr").count()
        assert rows == sum(it.kind != "note" for it in report.incidents)
        assert page.tab.locator("#nodes tbody tr").count() == 2
        assert page.tab.locator("#timeline .mark").count() == rows
        page.tab.get_by_role("group", name="x axis").get_by_role("button", name="tokens").click()
        page.check()


def test_without_the_chart_library_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.monitor.report import page

    monkeypatch.setattr(page, "has_charts", lambda: False)
    page.report_page.cache_clear()
    try:
        html = report_html(run_report([a_run(tmp_path)]))
    finally:
        page.report_page.cache_clear()
    assert len(html) < 400_000 and "Plotly.newPlot" not in html


def test_the_data_in_the_file_is_the_report(tmp_path: Path) -> None:
    report = run_report([a_run(tmp_path)])
    html = report_html(report)
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', html, re.DOTALL)
    assert found is not None and json.loads(found[1]) == json.loads(report.model_dump_json())
    assert EVIL not in html and "alert(1)</script>" not in html


def command(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = run(["report", *map(str, arguments)])
    output, errors = capsys.readouterr()
    return code, output, errors


def test_the_command_line(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logs, html = a_run(tmp_path / "log"), tmp_path / "run.html"
    code, output, _ = command(capsys, logs, "--html", html, "--title", "Blue")
    assert code == 0 and output.startswith(f"{html}: 2 nodes, 2 rounds,")
    assert "<title>Blue: report on a run</title>" in html.read_text(encoding="utf-8")
    code, output, _ = command(capsys, logs, "--json")
    assert code == 0 and json.loads(output)["format"] == 1
    for arguments, said in (
        ((logs,), "expected --html FILE"),
        ((tmp_path / "gone", "--json"), "found: No such file"),
        ((logs, "--html", tmp_path / "no" / "folder.html"), "No such file"),
    ):
        code, _, errors = command(capsys, *arguments)
        assert code == 2 and said in errors and "Traceback" not in errors
    monkeypatch.setenv("GENESIS_BROWSER", "no-such-browser")
    code, _, errors = command(capsys, logs, "--pdf", tmp_path / "run.pdf")
    assert code == 2 and "no-such-browser" in errors and errors.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pdf(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program, environment = _chromium()
    for name, value in {**environment, "GENESIS_BROWSER": str(program)}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "run.pdf"
    code, _, errors = command(capsys, a_run(tmp_path / "log"), "--pdf", path)
    assert code == 0, errors
    assert path.read_bytes().startswith(b"%PDF-") and path.stat().st_size > 20_000
