"""genesis_ctl.sh with a stand-in for genesis, and once with the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "genesis_ctl.sh"

STAND_IN = """#!/bin/bash
case $* in
  *--fails*) echo "genesis: no such store" >&2; exit 1 ;;
  *--finished*) exit 0 ;;
  *--stubborn*) trap '' TERM ;;
  *) trap 'echo stopping; exit 0' TERM ;;
esac
echo "called: $*"
case $* in status*) exit 0 ;; esac
while true; do sleep 0.05; done
"""

REAL = f"""#!/bin/sh
PYTHONPATH={ROOT} exec {sys.executable} -c 'from genesis.cli import main; main()' "$@"
"""


class Control:
    """Runs the script with its logs in a folder of the test."""

    def __init__(self, folder: Path, genesis: str) -> None:
        self.logs = folder / "logs"
        program = folder / "genesis"
        program.write_text(genesis)
        program.chmod(0o755)
        self.environment = {
            **os.environ,
            "GENESIS_LOG_DIR": str(self.logs),
            "GENESIS_BIN": str(program),
            "GENESIS_STOP_TIMEOUT_S": "30",
            "GENESIS_START_GRACE_S": "1",
        }

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, *arguments],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def pid(self, source: str) -> int:
        return int((self.logs / f"genesis_{source}.pid").read_text().split()[0])

    def start(self, source: str, *options: str) -> None:
        """Starts a source and waits until the stand-in is at work."""
        started = self("start", source, *(["--", *options] if options else []))
        assert started.returncode == 0, started.stderr
        wait_until(lambda: "called: populate" in self.log(source))

    def log(self, source: str) -> str:
        return (self.logs / f"genesis_{source}.log").read_text()


def kill_all(control: Control) -> None:
    """Kills what the test started, and only that."""
    for path in control.logs.glob("*.pid"):
        pid, _, started = path.read_text().partition("\n")
        if pid.isdigit() and started.strip() and started_at(int(pid)) == started.strip():
            os.kill(int(pid), signal.SIGKILL)


def started_at(pid: int) -> str | None:
    """Start time in ticks; None when there is no such process, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    control = Control(tmp_path, STAND_IN)
    yield control
    kill_all(control)


@pytest.mark.slow
def test_start_status_stop(control: Control) -> None:
    control.start("alpha", "--store", "a folder")
    assert "called: populate --source alpha --store a folder" in control.log("alpha")
    pid = control.pid("alpha")
    assert os.getsid(pid) == pid != os.getsid(0), "it survives the terminal that started it"
    second = control("start", "alpha")
    assert second.returncode == 1
    assert str(pid) in second.stderr
    assert control.pid("alpha") == pid
    assert control("status", "alpha").returncode == 0
    stopped = control("stop", "alpha")
    assert (stopped.returncode, stopped.stdout) == (0, "alpha has stopped\n")
    assert "stopping" in control.log("alpha")
    assert control("status", "alpha").returncode == 3


@pytest.mark.slow
def test_of_many_starts_at_once_one_goes_on(control: Control) -> None:
    runs = [
        subprocess.Popen([SCRIPT, "start", "alpha"], env=control.environment, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 1, 1, 1], errors
    assert control.log("alpha").count("== ") == 1


@pytest.mark.slow
def test_a_stale_pid_file_is_detected(control: Control) -> None:
    control.start("alpha")
    os.kill(control.pid("alpha"), signal.SIGKILL)
    wait_until(lambda: started_at(control.pid("alpha")) is None)
    status = control("status", "alpha")
    assert status.returncode == 3
    assert "gone" in status.stdout
    assert control("start", "alpha").returncode == 0


@pytest.mark.slow
def test_a_damaged_pid_file_and_a_pid_that_another_program_was_given_mean_not_running(control: Control) -> None:
    control.logs.mkdir()
    for content in ("", "17", "17\n", "word\nword\n", "\0\n", f"{os.getpid()}\n1\n"):
        (control.logs / "genesis_alpha.pid").write_text(content)
        assert control("status", "alpha").returncode == 3
    stopped = control("stop", "alpha")
    assert (stopped.returncode, stopped.stdout) == (0, "alpha is not running\n")
    assert control("start", "alpha").returncode == 0


def test_a_run_that_fails_or_has_nothing_to_do_is_told(control: Control) -> None:
    failed = control("start", "alpha", "--", "--fails")
    assert failed.returncode == 1
    assert "no such store" in failed.stderr
    assert not list(control.logs.glob("*.pid"))
    finished = control("start", "alpha", "--", "--finished")
    assert finished.returncode == 0
    assert "ended already" in finished.stdout


@pytest.mark.slow
def test_stop_says_when_its_deadline_has_passed(control: Control) -> None:
    control.start("alpha", "--stubborn")
    stopped = control("stop", "alpha", GENESIS_STOP_TIMEOUT_S="0")
    assert stopped.returncode == 1
    assert "still runs" in stopped.stderr
    os.kill(control.pid("alpha"), signal.SIGKILL)


@pytest.mark.slow
def test_status_of_all_shows_each_and_the_store(control: Control) -> None:
    control.start("alpha")
    control.start("beta")
    status = control("status", "--", "--store", "x")
    assert status.returncode == 0
    assert [line.split(":")[0] for line in status.stdout.splitlines()[:2]] == ["alpha", "beta"]
    assert status.stdout.endswith("called: status --store x\n")


@pytest.mark.slow
def test_logs_prints_the_end_and_follows(control: Control) -> None:
    assert control("logs", "alpha").returncode == 1
    control.start("alpha")
    assert "called: populate" in control("logs", "alpha").stdout
    with subprocess.Popen(
        [SCRIPT, "logs", "alpha", "-f"], env=control.environment, stdout=subprocess.PIPE, text=True
    ) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline().startswith("== ")
        with (control.logs / "genesis_alpha.log").open("a") as log:
            log.write("one more line\n")
        while follower.stdout.readline() != "one more line\n":
            pass
        follower.terminate()


def test_a_wrong_command_line_does_nothing(control: Control) -> None:
    lines = ("", "dance", "start", "start ../x", "start Alpha", "start alpha --store x", "stop", "stop alpha beta")
    for line in (*lines, "status a/b"):
        assert control(*line.split()).returncode == 2
    assert not control.logs.exists()


@pytest.mark.slow
def test_the_real_populate_is_stopped_cleanly_and_goes_on(tmp_path: Path) -> None:
    control = Control(tmp_path, REAL)
    store = str(tmp_path / "store")
    options = ["--store", store, "--workers", "1", "--shard-tokens", "50000", "--merges", "50"]
    try:
        started = control("start", "python-docs", "--", *options, "--learn-documents", "20")
        assert started.returncode == 0, started.stderr
        stopped = control("stop", "python-docs")
        assert stopped.returncode == 0, stopped.stderr
        control("start", "python-docs", "--", *options, "--max-shards", "9")
        wait_until(lambda: control("status", "python-docs").returncode)
    finally:
        kill_all(control)
    assert "Traceback" not in control.log("python-docs")
    verified = subprocess.run([tmp_path / "genesis", "verify", "--store", store], capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
