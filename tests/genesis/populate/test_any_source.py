"""Sources beyond the five, from the command line: the Hub by address, buckets; stopping while the Hub lets one wait."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import documents, write_json_lines, write_parquet
from tests.support.hub_server import Fault, HubServer, hub_server
from tests.support.populating import decoded_documents, genesis, snapshot, start
from tests.support.s3_servers import moto_s3, s3_client

pytestmark = pytest.mark.slow

SMALL = ("--shard-tokens", "2000", "--merges", "200", "--learn-documents", "200", "--workers", "1")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    (tmp_path / "repository" / "data").mkdir(parents=True)
    for number in range(2):
        write_parquet(tmp_path / f"repository/data/p{number}.parquet", documents(seed=number, count=150), 30)
    with hub_server(tmp_path / "repository") as served:
        yield served


def environment(hub: HubServer, folder: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home"), "HF_TOKEN": ""}


def last_line(stderr: str) -> str:
    return stderr.splitlines()[-1]


def test_any_data_set_of_the_hub_is_populated_and_gone_on_with_at_its_commit(hub, tmp_path):
    known = environment(hub, tmp_path)
    arguments = ["populate", "--source", "hf://someone/texts/data/*.parquet", "--store", tmp_path / "store", *SMALL]
    genesis(*arguments, "--max-shards", "3", **known)
    genesis(*arguments, **known)
    local = ["populate", "--source", "someone-texts", "--name", "someone-texts", "--store", tmp_path / "local", *SMALL]
    genesis(*local, "--input", tmp_path / "repository")
    assert snapshot(tmp_path / "store")["shards"] == snapshot(tmp_path / "local")["shards"]
    checkpoint = json.loads((tmp_path / "store" / "checkpoints.json").read_bytes())["someone-texts"]
    assert checkpoint["cursor"]["repo"] == "someone/texts"


def test_one_name_is_one_data_set(hub, tmp_path):
    known = environment(hub, tmp_path)
    store = ["--store", tmp_path / "store", *SMALL]
    genesis("populate", "--source", "hf://someone/texts", *store, "--max-shards", "2", **known)
    before = snapshot(tmp_path / "store")
    for other in (
        ["hf://someone/else", "--name", "someone-texts"],
        ["someone-texts", "--input", tmp_path / "repository"],
    ):
        done = genesis("populate", "--source", *other, *store, expect=1, **known)
        assert "the checkpoint stands in someone/texts@" in last_line(done.stderr)
        assert "another --name" in last_line(done.stderr)
    assert snapshot(tmp_path / "store") == before


def test_a_bucket_goes_into_a_bucket_and_filters_may_change_what_comes_later(tmp_path):
    texts = [documents(seed=number, count=110) for number in range(3)]
    with moto_s3("raw", "out") as server:
        client = s3_client(server)
        for number in range(3):
            path = write_json_lines(tmp_path / f"{number}.jsonl", texts[number])
            client.put_object(Bucket="raw", Key=f"set/{number}.jsonl", Body=path.read_bytes())
        client.put_object(Bucket="raw", Key="set/README.txt", Body=b"about")
        known = server.environment()
        arguments = ["populate", "--source", "mine", "--input", "s3://raw/set", "--store", "s3://out/store", *SMALL]
        genesis(*arguments, "--exclude", "2.*", **known)
        genesis(*arguments, **known)
        done = genesis(*arguments, "--exclude", "0.*", expect=1, **known)
        assert "are not those" in last_line(done.stderr)
        local = ["populate", "--source", "mine", "--store", tmp_path / "local", *SMALL]
        genesis(*local, *(part for number in range(3) for part in ("--input", tmp_path / f"{number}.jsonl")))
        local_shards = [path.name for path in sorted((tmp_path / "local").glob("shard_*.pt"))]
        found = client.list_objects_v2(Bucket="out", Prefix="store/shard_")["Contents"]
        assert sorted(entry["Key"].rpartition("/")[2] for entry in found) == local_shards
        for name in local_shards[::7]:
            body = client.get_object(Bucket="out", Key=f"store/{name}")["Body"].read()
            assert body == (tmp_path / "local" / name).read_bytes()
        client.close()
        done = genesis(*arguments[:3], "--input", "s3://out/", *arguments[5:], expect=2, **known)
        assert "lies inside the input" in last_line(done.stderr)


def test_arrays_and_tables_give_the_shards_of_lines(tmp_path):
    texts = documents(seed=3, count=300)
    write_json_lines(tmp_path / "lines.jsonl", texts)
    (tmp_path / "array.json").write_text(json.dumps([{"text": text} for text in texts], indent=2))
    (tmp_path / "table.csv").write_text("text\n" + "".join('"' + text.replace('"', '""') + '"\n' for text in texts))
    stores = []
    for name in ("lines.jsonl", "array.json", "table.csv"):
        store = tmp_path / f"store {name}"
        arguments = ["populate", "--source", "mine", "--input", tmp_path / name, "--store", store, *SMALL]
        genesis(*arguments, "--max-shards", "5")
        genesis(*arguments)
        stores.append(snapshot(store)["shards"])
        assert decoded_documents(store)[:100] == texts[:100]
    assert stores[0] == stores[1] == stores[2]


def test_bad_input_that_stops_the_learning_asks_for_no_mended_input(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl", documents(seed=5, count=300))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:30], b"{broken\n", *lines[30:]]))
    arguments = ["populate", "--source", "mine", "--input", path, "--store", tmp_path / "store", *SMALL]
    line = last_line(genesis(*arguments, expect=1).stderr)
    assert "nothing was written" in line
    assert "line 31 is not a JSON object" in line
    assert "then run the same command again" in line
    for wrong in ("--mended-input", "everything before it"):
        assert wrong not in line
    path.write_bytes(whole)
    genesis(*arguments)
    path.write_bytes(b"".join([*lines[:250], b"{broken\n", *lines[250:]]))
    other = ["populate", "--source", "mine", "--input", path, "--store", tmp_path / "other", *SMALL]
    line = last_line(genesis(*other, expect=1).stderr)
    assert "everything before it was read" in line
    assert "--mended-input" in line
    assert "nothing was written" not in line


@pytest.mark.parametrize(
    ("place", "fault", "doing"),
    [
        ("api", Fault(status=429, headers=(("Retry-After", "600"),)), "listing the input"),
        ("api", Fault(delay_s=90.0), "listing the input"),
        ("cdn", Fault(status=503, headers=(("Retry-After", "600"),)), "learning the vocabulary"),
        ("cdn", Fault(delay_s=90.0), "learning the vocabulary"),
    ],
)
def test_a_signal_is_honoured_while_the_hub_lets_one_wait(hub, tmp_path, place, fault, doing):
    known = environment(hub, tmp_path)
    arguments = ["populate", "--source", "hf://someone/texts/data/*.parquet", "--store", tmp_path / "store", *SMALL]
    hub.inject(place, *[fault] * 20)
    process = start(*arguments, **known)
    try:
        deadline = time.monotonic() + 60
        while place not in hub.begun:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        time.sleep(0.5)  # Until it waits for the answer, or to ask again.
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 143, stderr
    assert f"stopped while {doing}; nothing was written" in stderr
    assert "Traceback" not in stderr
    hub.clear_faults()
    genesis(*arguments, **known)


def test_an_empty_endpoint_is_said_at_once(tmp_path):
    arguments = ["populate", "--source", "hf://someone/texts", "--store", tmp_path / "store", *SMALL]
    done = genesis(*arguments, expect=1, HF_ENDPOINT="", HF_HOME=str(tmp_path / "home"), HF_TOKEN="")
    assert "HF_ENDPOINT: expected an address such as https://huggingface.co, found ''" in last_line(done.stderr)
    assert "trying again" not in done.stderr
