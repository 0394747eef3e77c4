"""The engine ``ray``: on one machine and several, killed or not, the store is the local engine's to the byte."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.documents import documents, write_json_lines, write_parquet
from tests.support.populating import genesis, populate_arguments, snapshot, start, stray_objects
from tests.support.ray_cluster import needs_ray, ray_cluster
from tests.support.s3_servers import free_port, moto_s3, rclone_s3, speaking_to
from tests.support.waiting import wait_until

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.timeout(400)]
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A folder with every kind of task: row groups, lines that one reader decompresses, whole files."""
    folder = tmp_path_factory.mktemp("mixed") / "input"
    folder.mkdir()
    texts = documents(seed=51, count=1500)
    rows: list[str | None] = [*texts[:300], None, "", *texts[300:500]]
    write_parquet(folder / "a.parquet", rows, 40)
    write_json_lines(folder / "b.jsonl.zst", texts[500:900])
    write_json_lines(folder / "c.jsonl", texts[900:1300])
    for number, text in enumerate(texts[1300:]):
        (folder / f"d{number}.txt").write_text(text, encoding="utf-8")
    write_parquet(folder / "e.parquet", [" ".join(documents(seed=52, count=1500))], 10)
    return folder


@pytest.fixture(scope="module")
def local(mixed, tmp_path_factory):
    """What the local engine makes of it."""
    store = tmp_path_factory.mktemp("local") / "store"
    genesis(*populate_arguments(store, mixed, shard_tokens=5000))
    return snapshot(store)


def arguments_for(store, inputs, *more):
    return [*populate_arguments(store, inputs, shard_tokens=5000), "--engine", "ray", *more]


def test_a_cluster_of_this_machine_alone_gives_the_same_store_and_says_no_more(mixed, local, tmp_path):
    """Ray's own output is not the user's; nothing of it is left in the temporary folder."""
    before = set(Path("/tmp").glob("genesis-ray-*"))
    done = genesis(*arguments_for(tmp_path / "store", mixed, "--workers", "2"))
    assert snapshot(tmp_path / "store") == local
    assert stray_objects(tmp_path / "store") == []
    assert all("ray" not in line.lower() or "with Ray at" in line for line in done.stderr.splitlines()), done.stderr
    assert "raylet" not in done.stdout + done.stderr
    assert set(Path("/tmp").glob("genesis-ray-*")) <= before


@pytest.mark.parametrize("machines", [1, 2, 4])
def test_the_number_of_machines_does_not_matter(machines, mixed, local, tmp_path):
    with ray_cluster(machines, processors=1) as cluster:
        arguments = arguments_for(tmp_path / "store", mixed, "--address", cluster.address)
        genesis(*arguments, "--max-shards", "7", **QUIET)
        done = genesis(*arguments, "--json", **QUIET)
    assert snapshot(tmp_path / "store") == local
    assert json.loads(done.stdout)["ended"]
    assert stray_objects(tmp_path / "store") == []


def test_a_driver_outside_the_cluster(mixed, local, tmp_path):
    port = free_port()
    with ray_cluster(1, processors=2, client_port=port):
        genesis(*arguments_for(tmp_path / "store", mixed, "--address", f"ray://127.0.0.1:{port}"), **QUIET)
    assert snapshot(tmp_path / "store") == local


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_machines_put_shards_to_a_bucket(server, mixed, local, tmp_path):
    """The first has conditional writes, the second has not."""
    serving = moto_s3("bucket") if server == "moto" else rclone_s3(tmp_path / "buckets", "bucket")
    with serving as bucket, speaking_to(bucket):
        genesis(*arguments_for("s3://bucket/a", mixed, "--workers", "2"))
        assert snapshot("s3://bucket/a") == local


def test_what_another_run_left_uncommitted_is_replaced_under_the_lease(mixed, local, tmp_path):
    store = tmp_path / "store"
    arguments = arguments_for(store, mixed, "--workers", "2")
    genesis(*arguments, "--max-shards", "2")
    for name in ("shard_2.pt", "shard_3.pt", "packed/shard_4.zst"):
        shutil.copy(store / "shard_0.pt", store / name)
    done = genesis(*arguments)
    assert snapshot(store) == local
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_commit_in_hand(number, tmp_path):
    path = write_json_lines(tmp_path / "long.jsonl", documents(seed=12, count=400) * 150)
    store = tmp_path / "store"
    arguments = [*populate_arguments(store, path, shard_tokens=50_000, merges=20), "--engine", "ray", "--workers", "1"]
    process = start(*arguments)
    wait_until((store / "shard_1.pt").exists, "no shard")
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "the same command goes on from here" in output
    assert "Traceback" not in errors
    shards = len(snapshot(store)["shards"])
    assert stray_objects(store) == []
    genesis(*arguments, "--max-shards", str(shards + 1))
    assert len(snapshot(store)["shards"]) == shards + 1


def test_a_damaged_input_is_told_as_by_the_local_engine(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl", documents(seed=20, count=500))
    path.write_bytes(path.read_bytes() + b"this is no JSON\n")
    found = {}
    for engine in ("local", "ray"):
        arguments = populate_arguments(tmp_path / engine, path)
        done = genesis(*arguments, "--workers", "1", "--engine", engine, expect=1)
        found[engine] = (snapshot(tmp_path / engine), done.stderr.splitlines()[-1])
    assert found["ray"] == found["local"]
    assert "line 501" in found["ray"][1]


def test_no_cluster_is_one_line(tmp_path, small_input):
    arguments = [*populate_arguments(tmp_path / "store", small_input), "--engine", "ray"]
    done = genesis(*arguments, "--address", f"127.0.0.1:{free_port()}", expect=2)
    assert "expected a Ray cluster that runs, found none" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("hidden", ["input", "store"])
def test_a_machine_without_the_disk_is_refused(hidden, tmp_path):
    """A second machine whose raylet sees an empty folder where input or store should be."""
    folders = {name: tmp_path / name for name in ("input", "store")}
    for folder in folders.values():
        folder.mkdir()
    write_parquet(folders["input"] / "a.parquet", documents(seed=1, count=50), 10)
    script = f'mount -t tmpfs none {folders[hidden]} && exec "$@"'
    if subprocess.run(["unshare", "--mount", "sh", "-c", script, "-", "true"], check=False).returncode:
        pytest.skip("cannot unshare mounts here")
    with ray_cluster(1, processors=1) as cluster:
        join = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
        join += ["start", "--address", cluster.address, "--num-cpus", "1", "--block"]
        machine = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "-", *join],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **QUIET}, start_new_session=True,
        )  # fmt: skip
        try:
            arguments = [*populate_arguments(folders["store"], folders["input"] / "a.parquet"), "--engine", "ray"]
            arguments += ["--address", cluster.address]
            wait_until(lambda: _refused(arguments, hidden, folders), "the machine was not refused", 120.0, 1.0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(machine.pid, signal.SIGTERM)
            machine.wait(60)
    assert not list(folders["store"].glob("shard_*"))
    assert not list(folders["store"].glob(".probe-*"))


def _refused(arguments, hidden, folders):
    """Runs until the second machine has joined; before that, the run is good for one shard at most."""
    process = start(*arguments, "--max-shards", "0", **QUIET)
    _, errors = process.communicate(timeout=100)
    if process.returncode == 0:
        return False
    last = errors.splitlines()[-1]
    unseen = {"input": "a.parquet, which is input", "store": f"does not see the store's folder {folders['store']}"}
    assert process.returncode == 2, errors
    assert "of the cluster" in last and unseen[hidden] in last
    return True


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("machines", [1, 2, 4])
def test_twenty_runs_killed_anywhere(machines, tmp_path):
    """Workers, raylets of all machines but the driver's, and the driver itself die by -9 on a seeded schedule."""
    folder = tmp_path / "input"
    folder.mkdir()
    texts = documents(seed=61, count=3000)
    write_parquet(folder / "a.parquet", texts[:2000], 30)
    write_json_lines(folder / "b.jsonl.gz", texts[2000:])
    genesis(*populate_arguments(tmp_path / "peace", folder))
    peace = snapshot(tmp_path / "peace")
    with ray_cluster(machines, processors=2) as cluster:
        for run in range(20):
            store = tmp_path / f"store-{run}"
            arguments = [*populate_arguments(store, folder), "--engine", "ray", "--address", cluster.address]
            schedule = random.Random(20261123 + 100 * machines + run)
            kills = _run_with_kills(arguments, cluster, machines, schedule)
            assert snapshot(store) == peace, f"run {run}, kills {kills}"
            assert stray_objects(store) == []
            shutil.rmtree(store)


def _run_with_kills(arguments, cluster, machines, schedule):
    """Runs to the end through three kills or so; what was killed."""
    killed = []
    for _ in range(12):
        process = start(*arguments, **QUIET)
        done = threading.Event()
        collected = []

        def collect(process=process, done=done, collected=collected):
            collected.append(process.communicate())
            done.set()

        threading.Thread(target=collect, daemon=True).start()
        while not done.wait(schedule.uniform(0.5, 4.0)):
            if len(killed) >= 4:
                assert done.wait(200)
                break
            victim = schedule.choice(["worker", "worker", "machine" if machines > 1 else "worker", "driver"])
            killed.append(victim)
            if victim == "worker":
                cluster.kill_worker(schedule.random())
            elif victim == "machine":
                cluster.kill_machine()
            else:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                assert done.wait(30)
                break
        assert process.returncode in (0, -signal.SIGKILL), collected
        if process.returncode == 0:
            return killed
        time.sleep(0.2)
    raise AssertionError(f"not done after {killed}")
