"""`python -m trainer authority` as its operator and its nodes use it: real processes, kills, and a revocation."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.pipeline_swarm import STAGES, PipelineSwarm, steps_of
from tests.support.training_swarm import TrainingSwarm, free_port
from tests.support.waiting import wait_until
from trainer.run.cli.app import run

_ROOT = Path(__file__).resolve().parents[4]
_WITHIN_S = 60.0
"""In which a revoked node has to be out everywhere."""


class AuthorityProcess:
    def __init__(self, folder: Path, run_name: str, *options: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._db = str(folder / "authority.sqlite")
        self._command = [sys.executable, "-m", "trainer", "authority", "--run-name", run_name, "--db", self._db]
        self._command += ["--key", str(folder / "authority.key"), "--port", str(self.port), "--host", "127.0.0.1"]
        self._command += options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        before = self.output().count("its key is")
        with (self.folder / "authority.out").open("ab") as output:
            self._process = subprocess.Popen(self._command, cwd=_ROOT, stdout=output, stderr=output)
        wait_until(lambda: self.output().count("its key is") > before, "the authority serves", 60.0)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def stop(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30)

    def output(self) -> str:
        path = self.folder / "authority.out"
        return path.read_text() if path.exists() else ""

    @property
    def key(self) -> str:
        found = re.search(r"its key is ([0-9a-f]{64})", self.output())
        assert found is not None
        return found[1]

    def ask(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "trainer", "authority", *arguments, "--db", self._db]
        return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True, timeout=60).stdout

    def members(self) -> dict[str, dict[str, object]]:
        return {row["peer_id"]: row for row in json.loads(self.ask("list", "--json"))["members"]}


@contextmanager
def authority_process(folder: Path, run_name: str, *options: str) -> Iterator[AuthorityProcess]:
    authority = AuthorityProcess(folder / "authority", run_name, *options)
    authority.start()
    try:
        yield authority
    finally:
        authority.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_goes_on_without_the_authority_and_without_the_revoked(tmp_path: Path) -> None:
    quick = {"data": {"holdout": 0}, "diloco": {"inner_steps": 10}}
    with authority_process(tmp_path, "genesis") as authority, TrainingSwarm(tmp_path, **quick) as swarm:
        token = authority.ask("invite", "--role", "node", "--uses", "3").strip()
        options = ["--authority", authority.url, "--token", token]
        swarm.begin("a", "b", "c", options=options)
        swarm.wait_for_step(2)
        assert {node.peer_id for node in swarm.nodes.values()} == set(authority.members())

        authority.kill()
        gone_at = max(node.outer_step for node in swarm.nodes.values())
        swarm.wait_for_step(gone_at + 3)
        rounds = swarm["a"].events("round")
        assert len(rounds[-1].fields["members"]) == 3  # type: ignore[arg-type]

        authority.start()
        # Nobody comes in without an invitation, or by one that is used up.
        swarm.begin("d", options=["--authority", authority.url])
        swarm.begin("e", options=options)
        for name in ("d", "e"):
            assert swarm[name].exit_code() == 2
            assert "refuses this node (token)" in swarm[name].output()
            assert "Traceback" not in swarm[name].output()

        bad = swarm["c"]
        authority.ask("revoke", bad.peer_id[:16])  # As 'authority list' prints it.
        began_s = time.monotonic()
        assert bad.exit_code(_WITHIN_S) == 1
        assert "has revoked this node" in bad.output()
        others = [swarm["a"], swarm["b"]]
        swarm.wait(
            lambda: all("1 peers are revoked" in node.output() for node in others),
            "the others to know",
            _WITHIN_S,
            others,
        )
        assert time.monotonic() - began_s < _WITHIN_S
        swarm.wait_for_step(swarm["a"].outer_step + 2, "a", "b")
        members = set(swarm["a"].events("round")[-1].fields["members"])  # type: ignore[call-overload]
        assert bad.peer_id not in members
        assert authority.members()[bad.peer_id]["is_revoked"]
        assert swarm.stop("a", "b") == [143, 143]
        assert token.removeprefix("invite-") not in authority.output()
        assert all(token.removeprefix("invite-") not in node.output() for node in swarm.nodes.values())
        assert authority.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pipeline_whose_workers_are_put_where_they_are_needed(tmp_path: Path) -> None:
    with (
        authority_process(tmp_path, "pipeline", "--stages", str(len(STAGES))) as authority,
        PipelineSwarm(tmp_path / "swarm", admission={"authorities": [authority.key], "urls": [authority.url]}) as swarm,
    ):
        driver_token = authority.ask("invite", "--role", "driver").strip()
        worker_token = authority.ask("invite", "--role", "worker", "--uses", "3").strip()
        swarm.begin_driver("driver-1", "--token", driver_token)
        for number in range(3):
            swarm.begin_worker(f"worker-{number}", "auto", ["--token", worker_token])
        swarm.wait_for_steps("driver-1", 3)
        stages = [row["stage"] for row in authority.members().values() if row["role"] == "worker"]
        assert sorted(map(str, stages)) == sorted(STAGES)
        authority.kill()
        swarm.wait_for_steps("driver-1", len(steps_of(swarm["driver-1"])) + 3)
        # A worker's invitation makes no driver.
        swarm.begin("driver-2", options=["--pipeline", "swarm", "--token", worker_token])
        authority.start()
        assert swarm["driver-2"].exit_code() == 2
        assert "refuses this node (role)" in swarm["driver-2"].output()
        swarm.stop_in_order("worker-0", "worker-1", "worker-2")


def test_what_the_operator_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = ["--db", str(tmp_path / "authority.sqlite")]
    assert run(["authority", "invite", "--role", "worker", "--uses", "10", *db]) == 0
    printed = capsys.readouterr()
    assert re.fullmatch(r"invite-[A-Za-z0-9_-]{43}\n", printed.out)
    assert "10 workers" in printed.err
    assert run(["authority", "allow", "0" * 64, "--role", "node", *db]) == 0
    assert run(["authority", "revoke", "1" * 64, *db]) == 0
    assert re.search(r"revoked, from list \d+ on", capsys.readouterr().out)
    assert run(["authority", "list", *db]) == 0
    assert "worker: 10 of 10 uses left" in capsys.readouterr().out
    assert run(["authority", "list", "--json", *db]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["members"] == []
    assert found["invitations"][0]["uses_left"] == 10


@pytest.mark.parametrize("by_name", [True, False])
def test_an_invitation_is_withdrawn_by_its_name_or_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by_name: bool
) -> None:
    db = ["--db", str(tmp_path / "authority.sqlite")]
    assert run(["authority", "invitations", *db]) == 0
    assert "no invitation was made" in capsys.readouterr().err
    assert run(["authority", "invite", "--uses", "10", *db]) == 0
    invitation = capsys.readouterr().out.strip()
    assert run(["authority", "invitations", *db]) == 0
    listed = re.fullmatch(
        r"invitation ([0-9a-f]{8})…  worker: 10 of 10 uses left, valid for .*\n", capsys.readouterr().out
    )
    assert listed is not None
    named = listed[1] if by_name else invitation
    assert run(["authority", "withdraw", named, *db]) == 0
    assert "is withdrawn; 0 of 10 uses were taken" in capsys.readouterr().out
    assert run(["authority", "invitations", "--json", *db]) == 0
    [left] = json.loads(capsys.readouterr().out)["invitations"]
    assert left["uses_left"] == 0
    assert left["expires_at"] <= time.time()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["authority"], "--run: expected the run's file"),
        (["authority", "invite", "--role", "king"], "--role: expected one of node, worker, driver, monitor"),
        (["authority", "withdraw", "abc"], "INVITATION: expected 8 hexadecimal digits"),
        (["authority", "withdraw", "0" * 8], "invitation 00000000: expected the name of one"),
        (["authority", "revoke", "abc"], "PEER_KEY: expected 64 hexadecimal digits"),
        (["authority", "revoke", "0" * 16], "peer 0000000000000000: expected the beginning of one member's key"),
        (["authority", "--run-name", "x", "--life-s", "0"], "--life-s"),
    ],
)
def test_mistakes_of_the_operator_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert run([*arguments, "--db", str(tmp_path / "authority.sqlite")]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.strip().splitlines()) == 1
