"""What a user can cause ends with one line and a non-zero exit, loses nothing, and goes on once it is mended."""

import shutil
import subprocess

import pytest

from genesis.store import open_readable
from tests.support.documents import documents, write_json_lines, write_parquet
from tests.support.mounts import mounted
from tests.support.populating import ROOT, command, entries, genesis, populate_arguments, snapshot, stray_objects


def failure(*arguments, expect=1, **environment):
    """The one line that a failing command ends with."""
    done = genesis(*arguments, expect=expect, **environment)
    lines = [line for line in done.stderr.splitlines() if line.startswith("genesis: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0] == done.stderr.splitlines()[-1]
    return lines[0]


@pytest.mark.slow
def test_input_that_changed(small_input, undisturbed, tmp_path):
    path = tmp_path / "a.parquet"
    shutil.copy(small_input, path)
    arguments = populate_arguments(tmp_path / "store", path)
    genesis(*arguments, "--max-shards", "5")
    write_parquet(path, documents(seed=99, count=400), 30)
    assert "a.parquet" in failure(*arguments)
    shutil.copy(small_input, path)
    genesis(*arguments)
    assert snapshot(tmp_path / "store") == undisturbed


@pytest.mark.slow
def test_a_truncated_file_stops_with_its_name_and_keeps_what_was_committed(tmp_path):
    texts = documents(seed=11, count=400)
    write_json_lines(tmp_path / "0.jsonl", texts[:200])
    whole = write_json_lines(tmp_path / "1.jsonl.zst", texts[200:]).read_bytes()
    arguments = populate_arguments(tmp_path / "store", tmp_path / "*.jsonl*")
    genesis(*populate_arguments(tmp_path / "peace", tmp_path / "*.jsonl*"))
    (tmp_path / "1.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    line = failure(*arguments)
    assert "1.jsonl.zst" in line
    assert "--mended-input" in line
    assert len(snapshot(tmp_path / "store")["shards"]) >= 15
    (tmp_path / "1.jsonl.zst").write_bytes(whole)
    genesis(*arguments, "--mended-input")
    assert snapshot(tmp_path / "store") == snapshot(tmp_path / "peace")
    assert stray_objects(tmp_path / "store") == []


@pytest.mark.slow
def test_a_bad_line_can_be_mended_in_the_file_that_was_partly_read(tmp_path):
    texts = documents(seed=15, count=400)
    path = write_json_lines(tmp_path / "a.jsonl", texts)
    whole = path.read_bytes()
    genesis(*populate_arguments(tmp_path / "peace", path))
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:300], b"{broken\n", *lines[301:]]))
    arguments = populate_arguments(tmp_path / "store", path)
    assert "line 301" in failure(*arguments)
    assert len(snapshot(tmp_path / "store")["shards"]) > 10
    path.write_bytes(whole)
    assert "--mended-input" in failure(*arguments)
    genesis(*arguments, "--mended-input")
    assert snapshot(tmp_path / "store") == snapshot(tmp_path / "peace")


@pytest.mark.slow
def test_earlier_files_may_not_change_even_so(tmp_path):
    for number in range(2):
        write_json_lines(tmp_path / f"{number}.jsonl", documents(seed=30 + number, count=200))
    arguments = populate_arguments(tmp_path / "store", tmp_path / "*.jsonl")
    genesis(*arguments)
    write_json_lines(tmp_path / "0.jsonl", documents(seed=40, count=200))
    assert "before '1.jsonl'" in failure(*arguments, "--mended-input")


@pytest.mark.slow
def test_input_without_text_is_no_success(small_input, undisturbed, tmp_path):
    (tmp_path / "empty.jsonl").write_bytes(b'{"text": ""}\n{"text": null}\n')
    line = failure(*populate_arguments(tmp_path / "store", tmp_path / "empty.jsonl"))
    assert "no document" in line
    genesis(*populate_arguments(tmp_path / "store", small_input))
    assert snapshot(tmp_path / "store") == undisturbed


@pytest.mark.slow
def test_a_store_that_lost_its_documents_is_not_overwritten(small_input, tmp_path):
    store = tmp_path / "store"
    genesis(*populate_arguments(store, small_input), "--max-shards", "3")
    before = (store / "shard_0.pt").read_bytes()
    for name in ("manifest.json", "checkpoints.json"):
        (store / name).unlink()
    assert "neither manifest.json nor checkpoints.json" in failure(*populate_arguments(store, small_input))
    assert (store / "shard_0.pt").read_bytes() == before


@pytest.mark.slow
def test_a_signature_is_not_dropped_by_forgetting_the_key(small_input, tmp_path):
    store, key = tmp_path / "store", tmp_path / "key.pem"
    genesis("keygen", "--output", key)
    arguments = [*populate_arguments(store, small_input), "--max-shards"]
    genesis(*arguments, "2", "--sign-key", key)
    signed = (store / "manifest.json").read_bytes()
    assert "--sign-key" in failure(*arguments, "3", expect=2)
    assert (store / "manifest.json").read_bytes() == signed
    genesis(*arguments, "3", "--sign-key", key)
    genesis("verify", "--store", store, "--public-key", f"{key}.pub")


@pytest.mark.slow
def test_a_closed_standard_error_does_not_hinder_and_a_full_output_is_one_line(small_input, undisturbed, tmp_path):
    line = " ".join(command(*populate_arguments(tmp_path / "store", small_input)))
    done = subprocess.run(f"{line} 2>&-", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert snapshot(tmp_path / "store") == undisturbed
    line = " ".join(command("status", "--store", tmp_path / "store"))
    done = subprocess.run(f"{line} > /dev/full", shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("genesis: cannot go on: No space left")
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 400 kB, and how to enlarge it."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=400k", "tmpfs") as folder:
        yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=50m", folder], check=True, timeout=10)


@pytest.mark.slow
def test_a_full_disk(small_disk, small_input, undisturbed):
    folder, enlarge = small_disk
    arguments = populate_arguments(folder / "store", small_input)
    line = failure(*arguments)
    assert "space" in line
    # Of what is published only: the disk may have been full between a checkpoint and its manifest.
    assert 1 <= len(entries(open_readable(str(folder / "store")))) < len(undisturbed["shards"])
    assert "space" in failure(*arguments)
    enlarge()
    genesis(*arguments)
    assert snapshot(folder / "store") == undisturbed
    assert stray_objects(folder / "store") == []
