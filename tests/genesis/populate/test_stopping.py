"""A run that fails or is stopped leaves nothing running behind it, in a library as on the command line."""

import threading
import time

import pytest

from genesis.errors import CorruptInputError
from genesis.populate.commit_log import read_checkpoints
from genesis.populate.options import LearnOptions, PopulateOptions
from genesis.populate.pipeline import populate
from genesis.store import open_store
from manifests import SourceSpec
from tests.support.documents import documents, write_json_lines


def options(store, *inputs):
    return PopulateOptions(
        spec=SourceSpec(name="s"), store_url=str(store), inputs=tuple(map(str, inputs)), num_workers=1,
        shard_tokens=1000, learn=LearnOptions(documents=50, merges=50),
    )  # fmt: skip


@pytest.mark.slow
def test_input_that_fails_commits_what_is_in_hand_and_nothing_later(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl", documents(seed=20, count=500))
    path.write_bytes(path.read_bytes() + b"this is no JSON\n")
    url = tmp_path / "store"
    store = open_store(str(url))
    with pytest.raises(CorruptInputError, match="line 501"):
        populate(options(url, path), store)
    checkpoints, _ = read_checkpoints(store)
    shards = len(list(url.glob("shard_*.pt")))
    assert checkpoints.writer.expires_at is None
    assert checkpoints.manifest.total_shards == shards > 20
    time.sleep(0.5)
    assert read_checkpoints(store)[0] == checkpoints
    assert not [thread for thread in threading.enumerate() if thread.name in ("commit", "lease")]


def test_a_stop_is_heard_while_the_source_is_silent(tmp_path, monkeypatch):
    """The task iterator hangs, as one does that waits for a Hub that asks for patience."""
    path = write_json_lines(tmp_path / "a.jsonl", documents(seed=20, count=100))
    hang, waiting = threading.Event(), threading.Event()

    def silent(plan, cursor):
        waiting.set()
        hang.wait(60)
        yield from ()

    monkeypatch.setattr("genesis.populate.pipeline.tasks", silent)
    stop, results = threading.Event(), []
    store = open_store(str(tmp_path / "store"))
    run = threading.Thread(target=lambda: results.append(populate(options(tmp_path / "store", path), store, stop=stop)))
    run.start()
    assert waiting.wait(60)
    stop.set()
    run.join(20)
    hang.set()
    assert results[0].interrupted
    assert not results[0].ended
    assert read_checkpoints(store)[0].writer.expires_at is None
