"""Progress as people see it: on a real terminal of any width, in a log, after a kill, when the terminal is closed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

import pytest

from genesis.status import read_status
from genesis.store import open_readable
from manifests import SourcesFile
from tests.support.documents import documents, write_json_lines, write_parquet
from tests.support.populating import ROOT, command, genesis, populate_arguments, snapshot, start
from tests.support.small_store import copy_small_store
from tests.support.terminal import Terminal
from tests.support.waiting import wait_until

SOURCE = "fineweb-edu"
LINE = re.compile(
    rf"\d\d:\d\d:\d\d {SOURCE}: (\d+(?:\.\d)?) %, (?:\d.* left, )?[\d,]+ (?:of [\d,]+ )?shards?(?:, )?"
    r"(?:[\d.]+ MB/s, [\d.]+ M tokens/s)?"
)


@pytest.fixture(scope="module")
def texts():
    return documents(seed=31, count=400)


@pytest.fixture(scope="module")
def long_input(texts, tmp_path_factory):
    """Half a minute of work on a busy machine, in row groups of some 60 kB."""
    return write_parquet(tmp_path_factory.mktemp("long") / "a.parquet", texts * 150, 100)


def arguments_for(store, *inputs, **options):
    return [*populate_arguments(store, *inputs, **options), "--workers", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl"])
def test_the_bar_ends_at_100_percent_when_the_input_ends(name, texts, tmp_path):
    path = tmp_path / name
    write_parquet(path, texts, 40) if name.endswith("parquet") else write_json_lines(path, texts)
    with Terminal(command(*arguments_for(tmp_path / "store", path)), columns=100, NO_COLOR="1") as terminal:
        assert terminal.wait() == 0
    seen = terminal.percents(SOURCE)
    assert seen == sorted(seen)
    assert seen[-1] == 100.0
    assert any(frame.startswith(f"learning {SOURCE}") for frame in terminal.frames)
    assert max(len(frame) for frame in terminal.frames if frame.startswith((SOURCE, "learning")) and "%" in frame) < 100
    assert "\x1b" not in terminal.output
    assert "read to its end" in terminal.frames[-1]
    assert "100 %" not in terminal.frames[-1] + terminal.frames[-2]  # The bar is taken away.


@pytest.mark.slow
def test_a_limit_ends_the_run_before_100_percent(long_input, tmp_path):
    arguments = [*arguments_for(tmp_path / "store", long_input), "--max-shards", "400"]
    with Terminal(command(*arguments), columns=120) as terminal:
        assert terminal.wait() == 0
    seen = terminal.percents(SOURCE)
    assert seen and max(seen) < 20
    # On a fast machine it is over before a speed, and so the nearest limit, is known.
    assert any(re.search(r"\d (of 400 )?shards", frame) for frame in terminal.frames if frame.startswith(SOURCE))


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "variable"), [(34, None), (12, None), (0, None), (200, "40")])
def test_no_line_is_wider_than_the_terminal(columns, variable, texts, tmp_path):
    """A width of 0 is that of 80 columns; COLUMNS may ask for less than there is."""
    path = write_parquet(tmp_path / "a.parquet", texts, 40)
    arguments = command(*arguments_for(tmp_path / "store", path))
    with Terminal(arguments, columns=columns, **({"COLUMNS": variable} if variable else {})) as terminal:
        assert terminal.wait() == 0
    bars = [frame for frame in terminal.frames if re.match(rf"({SOURCE}|learning)? ?[a-z-]* *\d+(\.\d)? %", frame)]
    assert bars
    assert max(map(len, bars)) < (int(variable) if variable else columns or 80)


@pytest.mark.slow
def test_a_window_that_is_made_narrower_is_followed(long_input, tmp_path):
    with Terminal(command(*arguments_for(tmp_path / "store", long_input)), columns=150) as terminal:
        wait_until(lambda: len(terminal.percents(SOURCE)) >= 3, "no bar")
        assert max(len(frame) for frame in terminal.frames if frame.startswith(SOURCE)) == 149
        terminal.resize(50)
        before = len(terminal.frames)
        wait_until(lambda: len(terminal.frames) >= before + 4, "no further bar")
        assert max(map(len, terminal.frames[before + 2 :])) == 49
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait() == 128 + signal.SIGTERM
    assert "stopping: finishing the commit in hand" in terminal.output


@pytest.mark.slow
def test_lines_elsewhere_say_the_same(long_input, tmp_path):
    process = start(
        *arguments_for(tmp_path / "store", long_input), "--max-shards", "700", GENESIS_PROGRESS_INTERVAL_S="0.1"
    )
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    lines = [line for line in errors.splitlines() if re.match(rf"\d\d:\d\d:\d\d {SOURCE}: ", line)]
    assert len(lines) >= 2
    assert all(LINE.fullmatch(line) for line in lines), lines
    seen = [float(LINE.fullmatch(line)[1]) for line in lines]
    assert seen == sorted(seen)
    assert "\r" not in errors + output and "\x1b" not in errors + output
    assert "learning 200 merges" in errors


@pytest.mark.slow
@pytest.mark.parametrize("is_before", [True, False])
def test_quiet_and_verbose_stand_where_one_likes(is_before, texts, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", texts, 40)

    def run(option, store):
        arguments = arguments_for(tmp_path / store, path)
        return genesis(
            *([option, *arguments] if is_before else [*arguments, option]), GENESIS_PROGRESS_INTERVAL_S="0.1"
        )

    quiet = run("--quiet", "one")
    assert quiet.stderr == ""
    assert "read to its end" in quiet.stdout
    with Terminal(command(*arguments_for(tmp_path / "two", path), "-q")) as terminal:
        assert terminal.wait() == 0
    assert "%" not in terminal.output
    assert len(terminal.frames) == len(quiet.stdout.splitlines()) or "read to its end" in terminal.output
    verbose = run("-v", "three")
    assert "populating" in verbose.stderr
    assert len(verbose.stderr.splitlines()) > len(run("--verbose", "three").stdout.splitlines())


@pytest.mark.slow
def test_a_killed_run_goes_on_from_where_the_checkpoint_stands(long_input, tmp_path):
    store = tmp_path / "store"
    arguments = arguments_for(store, long_input, shard_tokens=20_000)
    with Terminal(command(*arguments)) as terminal:
        wait_until(lambda: max(terminal.percents(SOURCE), default=0.0) >= 10.0, "no bar")
        os.killpg(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait(30)
    row = read_status(open_readable(str(store)), SourcesFile(sources=())).sources[0]
    assert row.input_bytes == long_input.stat().st_size
    committed = 100 * row.input_bytes_read / row.input_bytes
    assert 5.0 < committed < 100.0  # The bar is drawn some times a second, so either may be ahead.
    with Terminal(command(*arguments)) as terminal:
        wait_until(lambda: len(terminal.percents(SOURCE)) >= 2, "no bar")
        os.killpg(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait(30)
        assert abs(terminal.percents(SOURCE)[0] - committed) < 0.11
    text = genesis("status", "--store", store).stdout
    assert re.search(rf"^{SOURCE}: .*\d %? of the input read \([\d.]+ .?B of [\d.]+ MB\)", text, re.MULTILINE), text


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_a_populate_in_order(long_input, tmp_path):
    store = tmp_path / "store"
    arguments = arguments_for(store, long_input, shard_tokens=20_000)
    with Terminal(command(*arguments)) as terminal:
        wait_until((store / "shard_3.pt").exists, "no shard")
        terminal.hang_up()
        assert terminal.process.wait(60) == 128 + signal.SIGHUP
    shards = len(snapshot(store)["shards"])
    assert shards >= 3
    assert json.loads((store / "checkpoints.json").read_text())["writer"].get("expires_at") is None
    genesis(*arguments, "--max-shards", str(shards + 1))
    assert len(snapshot(store)["shards"]) == shards + 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_learning_stops_in_order_too(number, long_input, tmp_path):
    process = start(
        "learn", "--store", tmp_path / "store", "--source", SOURCE, "--input", f"{SOURCE}={long_input}",
        "--learn-documents", "60000",
    )  # fmt: skip
    assert process.stderr is not None
    assert "learning" in process.stderr.readline()
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + number, errors
    assert "stopped while learning the vocabulary; nothing was written" in errors
    assert json.loads((tmp_path / "store" / "checkpoints.json").read_text())["writer"].get("expires_at") is None


@pytest.mark.slow
def test_under_nohup_the_end_of_a_terminal_stops_nothing(texts, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", texts * 10, 40)
    process = subprocess.Popen(
        ["nohup", *command(*arguments_for(tmp_path / "store", path))], cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    wait_until((tmp_path / "store" / "shard_1.pt").exists, "no shard")
    os.killpg(process.pid, signal.SIGHUP)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "read to its end" in output
    assert "died" not in errors


@pytest.mark.slow
def test_closed_or_broken_streams_end_nothing(texts, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", texts, 40)
    for number, redirections in enumerate(("2>&-", "2>/dev/full", ">&- 2>&-", "2>&1 | head -n 1")):
        arguments = arguments_for(tmp_path / str(number), path, shard_tokens=20_000)
        line = f"{' '.join(command(*arguments))} {redirections}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
        )
        assert "Traceback" not in done.stderr + done.stdout
        assert len(snapshot(tmp_path / str(number))["shards"]) == len(snapshot(tmp_path / "0")["shards"])


def test_verify_has_the_same_bar(tmp_path):
    store = copy_small_store(tmp_path / "store")
    with Terminal(command("verify", "--store", store.url)) as terminal:
        assert terminal.wait() == 0
    assert terminal.percents("verifying")[-1] == 100.0
    assert "no problem found" in terminal.frames[-1]
    with Terminal(command("verify", "--store", store.url, "--quiet")) as terminal:
        assert terminal.wait() == 0
    assert "verifying" not in terminal.output


@pytest.mark.slow
def test_a_shell_completes_commands_options_and_sources(tmp_path):
    own = tmp_path / "sources.json"
    own.write_text('{"format": 1, "sources": [{"name": "mine", "target_shards": 7}]}')

    def completed(*words):
        variables = {"_GENESIS_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}
        return set(genesis(COMP_CWORD=str(len(words) - 1), **variables).stdout.split())

    assert {"populate", "status", "verify", "cache"} <= completed("genesis", "")
    assert completed("genesis", "populate", "--source", "fineweb") == {"fineweb", "fineweb-edu"}
    assert completed("genesis", "populate", "--sources-file", str(own), "--source", "m") == {"mine"}
    assert {"--store", "--source", "--quiet", "--verbose"} <= completed("genesis", "populate", "--")
    script = genesis("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1").stdout
    assert "_GENESIS_COMPLETE=complete_bash" in script
