"""A run's file comes from a path, a web server, a store or a peer; the owner's signature decides, and no option."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.signed_runs import OWNER, chain_of, run_file
from trainer.errors import RunFileError, TrainerUsageError
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.loop_thread import LoopThread
from trainer.run.signed import RunFile, SignedRun
from trainer.run.signed.sources import check_agrees, fetch_run, options_of

FILE = run_file()
CHAIN = chain_of(FILE, 3, 5)
LINES = b"\n".join(CHAIN.newer_than({}))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_bytes(FILE.to_json())
    (tmp_path / "run.changes.jsonl").write_bytes(LINES)
    (tmp_path / "other.yaml").write_text(FILE.to_yaml())
    return tmp_path


def test_a_run_that_names_authorities_has_its_nodes_ask_them(tmp_path: Path) -> None:
    file = run_file().model_copy(update={"authorities": (OWNER.peer_id,)}).signed(OWNER)
    (tmp_path / "run.json").write_bytes(file.to_json())
    values, fetched = options_of(tmp_path, ())
    assert fetched is not None
    config = from_mapping(RunConfig, {**values, "node_id": "a"})
    assert config.admission.authorities == (OWNER.peer_id,)
    check_agrees(config, fetched)
    others, _ = options_of(tmp_path, (f"admission.authorities=[{'0' * 64}]",))
    with pytest.raises(TrainerUsageError, match=r"admission\.authorities"):
        check_agrees(from_mapping(RunConfig, {**others, "node_id": "a"}), fetched)


def test_from_a_path_and_from_a_folder(folder: Path) -> None:
    for source, changes in ((folder / "run.json", 2), (folder, 2), (folder / "other.yaml", 0)):
        found = fetch_run(str(source))
        assert found is not None
        assert found.file == FILE
        assert len(found.changes) == changes
    (folder / "node.yaml").write_text("inner: {lr: 3e-4}")
    assert fetch_run(str(folder / "node.yaml")) is None


def test_from_a_web_server_and_from_a_store_that_it_serves(folder: Path) -> None:
    (folder / "empty").mkdir()
    with _served(folder) as address:
        for path, changes in (("run.json", 2), ("", 2), ("other.yaml", 0)):
            found = fetch_run(f"{address}/{path}#{FILE.owner}")
            assert found is not None
            assert found.file == FILE
            assert len(found.changes) == changes
        with pytest.raises(RunFileError, match="expected https://, or the owner's key"):
            fetch_run(f"{address}/run.json")
        with pytest.raises(RunFileError, match="expected a run of owner"):
            fetch_run(f"{address}/run.json#{'ab' * 32}")
        with pytest.raises(RunFileError, match="cannot be had") as refused:
            fetch_run(f"{address}/empty#{FILE.owner}")
        assert "\n" not in str(refused.value)


def test_from_a_folder_as_a_store(folder: Path) -> None:
    found = fetch_run(f"file://{folder}")
    assert found is not None
    assert found.file == FILE


def test_from_a_peer(tmp_path: Path) -> None:
    loop = LoopThread("peer")
    loop.start()
    config = RpcConfig(host="127.0.0.1", heartbeat_s=0.2, stall_timeout_s=5.0, stop_grace_s=0.1)
    endpoint = Endpoint(Identity.create(), FILE.name, config)
    run = SignedRun(FILE, CHAIN, RunConfig())
    run.connect(endpoint, lambda: ())
    try:
        loop.run(endpoint.start(), 10)
        found = fetch_run(f"peer://{endpoint.address}/{FILE.name}#{FILE.owner}")
        assert found is not None
        assert found.file == FILE
        assert list(found.changes) == CHAIN.newer_than({})
        with pytest.raises(RunFileError, match="expected run corpus-8 of owner abab"):
            fetch_run(f"peer://{endpoint.address}/{FILE.name}#{'ab' * 32}")
        with pytest.raises(RunFileError, match="cannot be had"):
            fetch_run(f"peer://{endpoint.address}/another#{FILE.owner}")
    finally:
        loop.run(endpoint.stop(), 10)
        loop.stop()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("peer://127.0.0.1:9/corpus-8", "found no owner"),
        ("peer://127.0.0.1:9#OWNER", "found no name"),
        ("peer://127.0.0.1/corpus-8#OWNER", "expected an address"),
        ("peer://127.0.0.1:9/corpus-8#OWNER", "cannot be had"),
        ("https://example.org/run.json#abc", "expected the owner's key behind the #"),
        ("gopher://example.org/run.json", "cannot be had"),
        ("/no/such/run.yaml", "cannot be read"),
    ],
)
def test_addresses_that_lead_nowhere(source: str, said: str) -> None:
    with pytest.raises(TrainerUsageError, match=said) as refused:
        fetch_run(source.replace("OWNER", FILE.owner))
    assert "\n" not in str(refused.value)


def test_a_file_that_was_changed_since_is_refused(folder: Path) -> None:
    path = folder / "other.yaml"
    path.write_text(path.read_text().replace("preset: tiny", "preset: 1b"))
    with pytest.raises(RunFileError, match="found it changed since"):
        fetch_run(str(path))


def _agrees(overrides: list[str], file=FILE, tmp_path: Path | None = None) -> None:
    values, fetched = options_of(tmp_path, overrides)
    assert fetched is not None
    check_agrees(from_mapping(RunConfig, values), fetched)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["inner.lr=1e-4"],  # As the file says.
        ["inner.lr=0.0001", "model.preset=tiny"],
        ["checkpoint.directory=/x", "discovery.initial_peers=[127.0.0.1:9]", "max_steps=3", "inner.compile=off"],
    ],
)
def test_options_that_go_with_a_run(folder: Path, overrides: list[str]) -> None:
    _agrees(overrides, tmp_path=folder / "run.json")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("inner.lr=3e-4", "inner.lr: the run file of corpus-8 says 0.0001, this node's options 0.0003"),
        ("run_id=other", "run_id: the run file of corpus-8 says corpus-8"),
        ("run_digest=", "run_digest: the run file of corpus-8 says"),
        ("data.store=/elsewhere", "data.store: the run file"),
        ("rule.rule=mean", "rule.rule: the run file"),
        ("swarm.num_stages=7", "swarm.num_stages: the run file"),
        ("data.sources={a: 1.0}", "data.sources: the run file"),
    ],
)
def test_options_that_contradict_a_run(folder: Path, override: str, said: str) -> None:
    with pytest.raises(TrainerUsageError) as refused:
        _agrees([override], tmp_path=folder / "run.json")
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_a_run_may_leave_the_store_to_each_node(folder: Path) -> None:
    config = from_mapping(RunConfig, {"run_id": "corpus-8", "model": {"preset": "tiny"}})
    file = RunFile.of(config, OWNER.peer_id, with_store=False).signed(OWNER)
    (folder / "run.json").write_bytes(file.to_json())
    (folder / "run.changes.jsonl").unlink()
    _agrees(["data.store=/anywhere"], tmp_path=folder / "run.json")
    with pytest.raises(TrainerUsageError):
        _agrees(["data.holdout=3"], tmp_path=folder / "run.json")


def test_an_option_that_an_older_file_does_not_have_is_at_its_default(folder: Path) -> None:
    config = {name: value for name, value in FILE.config.items() if name != "rule"}
    older = FILE.model_copy(update={"config": config}).signed(OWNER)
    (folder / "run.json").write_bytes(older.to_json())
    _agrees([], tmp_path=folder / "run.json")
    with pytest.raises(TrainerUsageError, match=r"rule\.rule"):
        _agrees(["rule.rule=mean"], tmp_path=folder / "run.json")
