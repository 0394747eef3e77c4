"""The processes that `swarm up` starts, how they learn of each other, and what is shown of them."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.observing import SeenPipeline, a_worker, an_account, driver_api, some_stages
from tests.support.pretended_swarm import PROGRAM
from tests.support.waiting import descendants, wait_until_gone
from trainer.errors import MalformedAnswerError, PeerUnavailableError, TrainerUsageError
from trainer.run.cli.app import run
from trainer.run.cli.displays import _SwarmJson, _SwarmLines, _Table, stage_table, workers_table
from trainer.run.swarm.running import (
    LocalSwarm,
    ProcessCount,
    SwarmSnapshot,
    ask_account,
    ask_stages,
    run_local,
    seed_address,
    seed_spec,
    snapshot_through,
    swarm_specs,
)
from trainer.run.swarm.tree import ExitStatus, RestartPolicy

_ROOT = Path(__file__).resolve().parents[4]
_STAGES = ("head", "body-1", "tail")


def _swarm(**changes: object) -> LocalSwarm:
    options: dict[str, object] = {"run": Path("/run.yaml"), "stages": _STAGES, "program": PROGRAM}
    return LocalSwarm(**(options | changes))


def _ports(swarm: LocalSwarm) -> dict[str, int]:
    return {name: number for number, name in enumerate(swarm.port_names, 1)}


def _run_file(folder: Path, swarm: str = "num_stages: 2, vocab_rows: 2048") -> Path:
    file = folder / "run.yaml"
    file.write_text(f"run_id: look\nswarm: {{{swarm}}}\nmodel: {{preset: tiny}}\n")
    return file


class Shown:
    """A display that remembers."""

    every_s = 0.2

    def __init__(self) -> None:
        self.events: list[str] = []
        self.snapshots: list[SwarmSnapshot] = []

    def event(self, text: str) -> None:
        self.events.append(text)

    def show(self, snapshot: SwarmSnapshot) -> None:
        self.snapshots.append(snapshot)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "calls"
    monkeypatch.setenv("PRETENDED_SWARM_CALLS", str(file))
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    return file


def test_all_workers_and_drivers_get_names_ports_and_places_to_begin() -> None:
    swarm = _swarm(num_workers=2, num_drivers=2, store="/store", max_steps=7, settings=("seed=3",))
    specs = swarm_specs(swarm, _ports(swarm), [])
    workers = [f"{stage}.{number}" for stage in _STAGES for number in (1, 2)]
    assert [spec.name for spec in specs] == [*workers, "driver-1", "driver-2"]
    lines = [" ".join(spec.command) for spec in specs]
    own = [spec.command[spec.command.index("--port") + 1] for spec in specs]
    assert len(set(own)) == len(own)
    begin = [f"--initial-peers 127.0.0.1:{port}" for port in (own[6], own[7], own[0], own[2], own[4])]
    for line in lines:
        assert all(text in line for text in begin)
        assert "--run /run.yaml" in line and "--store /store" in line and "--set seed=3" in line
        assert "--set rpc.host=127.0.0.1 --set rpc.public_address=127.0.0.1" in line
    assert "worker --stage body-1 --node-id body-1.2" in lines[3] and "--no-api" in lines[3]
    assert "--pipeline swarm" in lines[6] and "--max-steps 7" in lines[6]
    assert specs[6].api_url.rpartition(":")[2] == specs[6].command[specs[6].command.index("--api-port") + 1]


def test_whole_nodes_begin_where_the_others_do_and_drive_nothing() -> None:
    swarm = _swarm(num_whole_nodes=2, max_steps=7)
    specs = swarm_specs(swarm, _ports(swarm), [])
    assert [(spec.name, spec.role) for spec in specs[-2:]] == [("whole-1", "whole node"), ("whole-2", "whole node")]
    for spec in specs[-2:]:
        line = " ".join(spec.command)
        assert "--pipeline" not in line and " worker " not in line and "--max-steps 7" in line
        assert [v for n, v in pairwise(spec.command) if n == "--initial-peers"] == [
            v for n, v in pairwise(specs[0].command) if n == "--initial-peers"
        ]
    assert len(set(swarm.port_names)) == len(swarm.port_names)
    assert swarm.describe() == "starting 1 worker of each of head, body-1, tail; 1 driver, 2 whole nodes"


def test_seeds_know_those_before_them_and_all_others_know_those_that_are_ready(tmp_path: Path) -> None:
    swarm = _swarm(num_seeds=2)
    ports = _ports(swarm)
    first, second = (seed_spec(swarm, ports, tmp_path, known) for known in ([], ["/ip4/a"]))
    assert "--initial-peers" not in first.command
    assert second.command[-2:] == ("--initial-peers", "/ip4/a")
    for spec in swarm_specs(swarm, ports, ["/ip4/a", "/ip4/b"]):
        given = [value for name, value in pairwise(spec.command) if name == "--initial-peers"]
        assert given == ["/ip4/a", "/ip4/b"]
    for printed, address in (
        ("ready\n  --initial-peers /ip4/127.0.0.1/tc", None),  # Not a whole line.
        ("ready\n  --initial-peers /ip4/x/p2p/Qm\n  --initial-peers /ip4/y\n", "/ip4/x/p2p/Qm"),
    ):
        assert seed_address(f"--- 2026-11-21 python -m trainer seed --initial-peers /ip4/other\n{printed}") == address


@pytest.mark.slow
def test_a_whole_swarm_runs_until_its_drivers_are_done(calls: Path, tmp_path: Path) -> None:
    shown = Shown()
    swarm = _swarm(num_seeds=2, num_whole_nodes=1, max_steps=8)
    outcome = run_local(swarm, tmp_path / "logs", RestartPolicy(), shown, lambda: False)
    assert (outcome.exit_code, outcome.reason) == (0, "all drivers are done")
    started = [json.loads(line) for line in calls.read_text().splitlines()]
    assert [call[0] for call in started[:2]] == ["seed", "seed"]
    assert sorted(call[2] for call in started if call[0] == "worker") == ["body-1", "head", "tail"]
    seen = [it for it in shown.snapshots if it.stages is not None]
    assert an_account() in [it.account for it in seen]
    assert shown.snapshots[-1].stages is not None, "what was said last is shown last, though nobody answers any more"
    assert [count.running for count in shown.snapshots[-1].processes if count.name == "drivers"] == [0]
    wanted = {count.name: count.wanted for count in seen[0].processes}
    assert wanted == {"seeds": 2, "head": 1, "body-1": 1, "tail": 1, "drivers": 1, "whole nodes": 1}
    logs = ("seed-1", "seed-2", "head.1", "body-1.1", "tail.1", "driver-1", "whole-1")
    assert {path.stem for path in (tmp_path / "logs").glob("*.log")} == set(logs)


def test_all_that_could_not_save_are_named(calls, tmp_path, monkeypatch):
    monkeypatch.setenv("PRETENDED_SWARM_UNSAVED", "head,tail")

    def are_up() -> bool:
        return calls.exists() and len(calls.read_text().splitlines()) == 4

    outcome = run_local(_swarm(), tmp_path, RestartPolicy(), Shown(), are_up)
    said = "{0} ended with an error: no room for {0}"
    assert outcome == ExitStatus(1, f"{said.format('head.1')}; {said.format('tail.1')}")


def test_one_folder_has_one_swarm(calls: Path, tmp_path: Path) -> None:
    asked = threading.Event()
    shown = Shown()
    first = threading.Thread(target=run_local, args=(_swarm(), tmp_path, RestartPolicy(), shown, asked.is_set))
    first.start()
    try:
        deadline_s = time.monotonic() + 30
        while not shown.events:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        with pytest.raises(TrainerUsageError, match="another swarm runs there; give this one another --folder"):
            run_local(_swarm(), tmp_path, RestartPolicy(), Shown(), lambda: False)
    finally:
        asked.set()
        first.join(60)
    assert shown.events[-1].startswith("asked to stop; ending all processes; Ctrl+C again kills them at once")


_UP = """
import sys
from tests.support.pretended_swarm import PROGRAM
from trainer.run.swarm.running import LocalSwarm
LocalSwarm.__init__.__kwdefaults__["program"] = PROGRAM
from trainer.run.cli.app import run
sys.exit(run(["swarm", "up", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_the_command_ends_whole_on_ctrl_c(calls: Path, tmp_path: Path) -> None:
    places = ["--run", str(_run_file(tmp_path)), "--folder", str(tmp_path / "all")]
    command = [sys.executable, "-c", _UP, *places, "--json"]
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        first = json.loads(process.stdout.readline())
        assert (first["kind"], first["text"]) == ("event", "starting 1 worker of each of head, tail; 1 driver")
        second = json.loads(process.stdout.readline())
        assert second["kind"] == "event" and "driver-1 answers at http://127.0.0.1:" in second["text"]
        deadline_s = time.monotonic() + 60
        while not calls.exists() or len(calls.read_text().splitlines()) < 3:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        family = descendants(process.pid)
        assert len(family) == 3
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        wait_until_gone(family)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    told = [json.loads(line) for line in calls.read_text().splitlines()]
    settings = [value for call in told for name, value in pairwise(call) if name == "--set"]
    assert f"state_dir={tmp_path / 'all' / 'state'}" in settings


@pytest.mark.slow
def test_status_is_a_driver_s_and_fails_where_the_account_does_not_add_up(monkeypatch, capsys):
    with driver_api(SeenPipeline()) as server:
        url = server.url
        assert ask_stages(url + "/") == some_stages()
        assert ask_account(url) == an_account()
        assert run(["swarm", "status", "--api", url]) == 0
        text = capsys.readouterr().out
        heading, first, *_ = text.splitlines()
        assert heading.split() == ["stage", "serving", "version", "rows/s", "busy", "queued"]
        assert first.split() == ["head", "1/2", "12", "30.0", "75%", "2"] and len(first) == len(heading)
        assert "120 leased = 100 done + 3 lost + 17 open; 2 given again; at most 1 of them perished in a stage" in text
        assert "head.0.43" in text and "empty for 8 s" in text and "lost at body-1: 3 (unclear)" in text
        assert run(["swarm", "status", "--api", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["account"]["micro_batches"]["done"] == 100
        wrong = an_account(micro_batches={"leased": 120, "done": 100, "lost": 3, "open": 16})
        monkeypatch.setattr(SeenPipeline, "account", lambda _: wrong)
        assert run(["swarm", "status", "--api", url]) == 1
        assert "does NOT add up" in capsys.readouterr().out
        with socket.create_server(("127.0.0.1", 0)) as silent:
            for address, error, said in (
                (f"http://127.0.0.1:{silent.getsockname()[1]}", PeerUnavailableError, "no driver answers"),
                (url + "/elsewhere", MalformedAnswerError, "status 404"),
                ("127.0.0.1:8000", TrainerUsageError, "--api: expected http://host:port"),
            ):
                with pytest.raises(error, match=said):
                    ask_stages(address, timeout_s=0.5)
        assert snapshot_through(["http://127.0.0.1:1", url, url]).tokens_per_s == 2 * 1234.5


def test_one_line_and_exit_code_for_a_mistake(tmp_path, monkeypatch, capsys):
    file = _run_file(tmp_path, "num_stages: 1")
    assert run(["swarm", "up", "--run", str(file)]) == 2
    assert capsys.readouterr().err == f"trainer: {file}: swarm.num_stages: expected 2 or more, found 1\n"
    assert run(["swarm", "up", "--run", str(_run_file(tmp_path)), "--whole-nodes", "2"]) == 2
    assert "--whole-nodes: expected a run with swarm.whole_nodes" in capsys.readouterr().err
    refused = ExitStatus(2, "head.1: expected a folder for checkpoints")
    monkeypatch.setattr("trainer.run.swarm.running.run_local", lambda *_: refused)
    assert run(["swarm", "up", "--run", str(_run_file(tmp_path)), "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"trainer: {refused.reason}\n"


@pytest.mark.parametrize(("given", "wholes"), [([], 1), (["--whole-nodes", "0"], 0), (["--whole-nodes", "3"], 3)])
def test_a_mixed_run_is_started_with_a_whole_node_unless_told_otherwise(tmp_path, monkeypatch, given, wholes):
    started = []

    def run_local(swarm, *_):
        started.append(swarm.num_whole_nodes)
        return ExitStatus(2, "enough")

    monkeypatch.setattr("trainer.run.swarm.running.run_local", run_local)
    file = _run_file(tmp_path, "num_stages: 2, vocab_rows: 2048, whole_nodes: true")
    with file.open("a") as more:
        more.write("inner: {micro_batch_size: 2}\n")
    assert run(["swarm", "up", "--run", str(file), "--folder", str(tmp_path), *given]) == 2
    assert started == [wholes]


def test_a_swarm_is_a_table_redrawn_in_place_or_a_line_or_an_object(monkeypatch):
    counts = (ProcessCount("drivers", 1, 1, 0), ProcessCount("head", 2, 2, 1), ProcessCount("tail", 0, 1, 4))
    snapshot = SwarmSnapshot(counts, some_stages(), an_account(), 1234.5)
    lines = stage_table(snapshot)
    assert lines[1].split()[1:5] == ["2/2", "1/2", "12", "30.0"] and lines[1].endswith("restarts: 1")
    assert "empty for 8 s" in lines[2] and lines[2].endswith("restarts: 4")
    assert lines[4] == "step 12  loss 5.2500  1,234 tokens/s"
    assert "\x1b[31mtail" in stage_table(snapshot, is_coloured=True)[2]
    monkeypatch.setenv("COLUMNS", "40")
    stream, plain, objects = io.StringIO(), io.StringIO(), io.StringIO()
    table = _Table(stream, is_coloured=False)
    table.show(snapshot)
    assert len(lines) == 6 and max(map(len, stream.getvalue().splitlines())) < 40
    table.event("head.1 ended (SIGKILL)")
    assert stream.getvalue().count("\x1b[6F\x1b[J") == 1
    _SwarmLines(plain).show(snapshot)
    assert "3/4 processes" in plain.getvalue() and plain.getvalue().endswith("nobody serves tail\n")
    _SwarmJson(objects).show(snapshot)
    shown = json.loads(objects.getvalue())
    assert shown["stages"]["step"] == 12 and shown["processes"][1]["restarts"] == 1


def test_what_is_wrong_with_a_worker_is_shown_and_no_name_breaks_the_table():
    worker = a_worker("head.0.42", node_id="a\nb\x1b[2J" * 20, differs_from=("head.0.43",), unsaved_s=63.2)
    full = worker.model_copy(update={"unsaved_because": "No space left\x1b[2J"})
    silent = a_worker("tail.0.42", node_id="tail.1", silent_s=12.3, age_s=30.0, in_flight=3)
    head, tail = some_stages().stages
    seen = (head.model_copy(update={"workers": (full,) * 4}), tail.model_copy(update={"workers": (silent,)}))
    stages = some_stages().model_copy(update={"stages": seen})
    table = stage_table(SwarmSnapshot((ProcessCount("tail", 1, 1, 0),), stages))
    assert "computes something else than head.0.43; one of them is wrong" in table[3]
    assert table[4].endswith("no checkpoint for 63 s: No space left?[2J")
    assert "and 2 more of this kind: see swarm status" in table
    assert table[2].split()[:7] == ["tail", "1/1", "0/1", "–", "–", "–", "–"]
    _, row, *_, last = workers = workers_table(stages, None)
    assert "no checkpoint for 63 s: No space left" in row
    assert last.split()[:7] == ["tail.0.42", "tail.1", "silent", "12", "–", "–", "–"]
    assert "has not answered for 12 s; micro-batches wait for it (3)" in last and "last heard of 30 s ago" in last
    assert not any(character in line for line in (*table, *workers) for character in "\n\x1b")
