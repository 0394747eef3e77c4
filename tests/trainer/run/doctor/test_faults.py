"""Each fault that keeps a node from training is found, by the check that is about it, with the cure that mends it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genesis.doctor import Checkup, DoctorReport, Finding
from tests.support.authority import running_authority
from tests.support.doctored_node import LOCAL, SlowLink, config_of, peer
from tests.support.mounts import mounted
from tests.support.signed_runs import OWNER
from tests.support.small_store import copy_small_store, text_store
from trainer.network.rpc import Identity
from trainer.network.rpc.config import split_address
from trainer.run.cli.app import run
from trainer.run.doctor.machine import shared_memory_finding
from trainer.run.doctor.process import ERRORS, examine
from trainer.run.doctor.subject import Subject
from trainer.run.node.identity import identity_of
from trainer.run.signed import RunFile


def closed_port() -> int:
    with socket.create_server((LOCAL, 0)) as listener:
        return int(listener.getsockname()[1])


@dataclass
class Case:
    """What a fault needs: a folder, and what is to be ended behind the test."""

    folder: Path
    stack: ExitStack
    peer_address: str
    options: dict[str, Any] = field(default_factory=dict)
    subject: dict[str, Any] = field(default_factory=dict)

    def report(self) -> DoctorReport:
        defaults = {"discovery__initial_peers": [self.peer_address]}
        config = config_of(self.folder, **(defaults | self.options))
        checkup = Checkup(errors=ERRORS)
        examine(Subject(**({"config": config, "role": "node"} | self.subject)), checkup, has_run_option=False)
        return checkup.report()


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    with ExitStack() as stack:
        endpoint = stack.enter_context(peer(tmp_path))
        yield Case(tmp_path, stack, endpoint.address)


def failed(report: DoctorReport) -> dict[str, Finding]:
    assert all(each.cure for each in report.findings if each.status in ("failed", "warning")), report
    return {each.check: each for each in report.findings if each.status == "failed"}


def test_nothing_stands_in_the_way_of_a_node_that_fits(case: Case) -> None:
    report = case.report()
    assert report.ok, failed(report)
    by_check = {each.check: each for each in report.findings}
    assert by_check["reachable"].found.startswith("reachable as 127.0.0.1:")
    assert by_check["round"].figures["round_bytes"] == pytest.approx(4 * 1_246_336)
    assert {
        "device",
        "memory",
        "disk-space",
        "disk-write",
        "open-files",
        "store",
        "vocabulary",
        "clock",
        "version",
    } <= {each.check for each in report.findings if each.status == "ok"}


# -- faults: each returns the check that finds it, and what its cure names ---------------------------------------------


def closed(case: Case) -> tuple[str, str]:
    case.options["rpc__public_address"] = f"{LOCAL}:{closed_port()}"
    return "reachable", "it listens on port"


def wrong_address(case: Case) -> tuple[str, str]:
    port = closed_port()
    case.options |= {"rpc__port": port, "rpc__public_address": "192.168.77.77"}
    return "reachable", f"--public-address {LOCAL}:{port}"


def every_interface(case: Case) -> tuple[str, str]:
    case.options["rpc__public_address"] = "0.0.0.0"
    return "address", "--public-address"


def taken_port(case: Case) -> tuple[str, str]:
    listener = case.stack.enter_context(socket.create_server((LOCAL, 0)))
    case.options["rpc__port"] = listener.getsockname()[1]
    return "reachable", "another --port"


def another_identity(case: Case) -> tuple[str, str]:
    case.options |= {"rpc__port": closed_port(), "rpc__public_address": case.peer_address}
    return "reachable", "it listens on port"


def fast_clock(case: Case) -> tuple[str, str]:
    case.subject["clock"] = lambda: time.time() + 300.0
    return "clock", "NTP"


def full_disk(case: Case) -> tuple[str, str]:
    place = case.folder / "small-disk"
    case.stack.enter_context(mounted(place, "-t", "tmpfs", "-o", "size=2m", "none"))
    case.options["checkpoint__directory"] = str(place / "checkpoints")
    return "disk-space", "checkpoints"


def read_only_disk(case: Case) -> tuple[str, str]:
    place = case.folder / "read-only"
    case.stack.enter_context(mounted(place, "-t", "tmpfs", "-o", "size=900m,ro", "none"))
    case.options["checkpoint__directory"] = str(place / "checkpoints")
    return "disk-write", "writable"


def other_vocabulary(case: Case) -> tuple[str, str]:
    case.options["data__store"] = str(text_store("other"))
    return "terms", "--store"


def unsigned_store(case: Case) -> tuple[str, str]:
    case.options["data__public_key"] = str(public_key(case.folder, signs=False))
    return "signature", "--sign-key"


def store_of_another_key(case: Case) -> tuple[str, str]:
    copy_small_store(case.folder / "signed", signed=True)
    case.options |= {
        "data__store": str(case.folder / "signed"),
        "data__public_key": str(public_key(case.folder, signs=False)),
    }
    return "signature", "public key"


def store_away(case: Case) -> tuple[str, str]:
    case.options["data__store"] = f"http://{LOCAL}:{closed_port()}/store"
    return "store", "check the address"


def store_elsewhere(case: Case) -> tuple[str, str]:
    case.options["data__store"] = str(case.folder / "nothing")
    return "store", "check the path"


def lost_shard(case: Case) -> tuple[str, str]:
    store = copy_small_store(case.folder / "damaged")
    for packed in (case.folder / "damaged" / "packed").iterdir():
        packed.unlink()
    case.options["data__store"] = store.url
    return "index", "restore"


def peer_down(case: Case) -> tuple[str, str]:
    case.options["discovery__initial_peers"] = [f"{LOCAL}:{closed_port()}"]
    return "peers", "start the node or seed there"


def no_such_host(case: Case) -> tuple[str, str]:
    case.options["discovery__initial_peers"] = ["node.invalid:4100"]
    return "peers", "DNS"


def no_node_there(case: Case) -> tuple[str, str]:
    listener = case.stack.enter_context(socket.create_server((LOCAL, 0)))
    case.options["discovery__initial_peers"] = [f"{LOCAL}:{listener.getsockname()[1]}"]
    return "peers", "correct the port"


def other_run(case: Case) -> tuple[str, str]:
    case.options["run_id"] = "another"
    return "peers", "--run-id"


def seed_down(case: Case) -> tuple[str, str]:
    seed = f"/ip4/{LOCAL}/tcp/{closed_port()}/p2p/12D3KooWDqZXKJRwfGgSYdf4rGkVQ5QyZuNPUbhQnNcDp4xmvmAe"
    case.options["discovery__initial_peers"] = [seed]
    return "peers", "start the node or seed"


def little_memory(case: Case) -> tuple[str, str]:
    case.options |= {"model__preset": "7.5b", "model__memory_bytes": 4_000_000_000}
    return "memory", "--preset "


def other_model(case: Case) -> tuple[str, str]:
    case.options["model__preset"] = "15m"
    return "terms", "--preset tiny"


def other_settings(case: Case) -> tuple[str, str]:
    case.options["diloco__inner_steps"] = 77
    return "terms", "the run's file"


def no_gpu(case: Case) -> tuple[str, str]:
    case.options["device"] = "cuda:63"
    return "device", "--device cpu"


def too_long_rows(case: Case) -> tuple[str, str]:
    case.options["inner__seq_len"] = 4096
    return "model", "options"


OFTEN: list[Callable[[Case], tuple[str, str]]] = [
    closed,
    wrong_address,
    fast_clock,
    full_disk,
    other_vocabulary,
    unsigned_store,
    peer_down,
    other_run,
    little_memory,
    other_model,
]
SELDOM: list[Callable[[Case], tuple[str, str]]] = [
    every_interface,
    taken_port,
    another_identity,
    read_only_disk,
    store_of_another_key,
    store_away,
    store_elsewhere,
    lost_shard,
    no_such_host,
    no_node_there,
    seed_down,
    other_settings,
    no_gpu,
    too_long_rows,
]
FAULTS = [*OFTEN, *(pytest.param(inject, marks=pytest.mark.slow) for inject in SELDOM)]


@pytest.mark.parametrize("inject", FAULTS, ids=lambda inject: inject.__name__)
def test_a_fault_is_found_with_its_cure(case: Case, inject: Callable[[Case], tuple[str, str]]) -> None:
    check, cure = inject(case)
    report = case.report()
    found = failed(report)
    assert check in found, report
    assert cure in found[check].cure
    assert not report.ok


def public_key(folder: Path, *, signs: bool) -> Path:
    from manifests import generate_private_key, public_key_pem
    from tests.support.small_store import PRIVATE_KEY

    path = folder / "key.pub"
    path.write_bytes(public_key_pem((PRIVATE_KEY if signs else generate_private_key()).public_key()))
    return path


@pytest.mark.slow
def test_the_pinned_key_is_recognised(case: Case) -> None:
    copy_small_store(case.folder / "signed", signed=True)
    case.options |= {
        "data__store": str(case.folder / "signed"),
        "data__public_key": str(public_key(case.folder, signs=True)),
    }
    assert "signature" not in failed(case.report())


def test_a_peer_of_another_release_is_named(tmp_path: Path) -> None:
    with peer(tmp_path, version="0.0.7") as endpoint, ExitStack() as stack:
        report = Case(tmp_path, stack, endpoint.address).report()
    found = next(each for each in report.findings if each.check == "version")
    assert found.status == "warning"
    assert "0.0.7" in found.cure


@pytest.mark.slow
def test_a_slow_link_is_found(case: Case) -> None:
    """At 40 kB/s a message of 1 MiB takes longer than a silent peer is borne."""
    with SlowLink(split_address(case.peer_address), 40_000.0) as link:
        case.options |= {"discovery__initial_peers": [link.address], "rpc__connect_timeout_s": 10.0}
        found = failed(case.report())
    assert "faster link" in found["bandwidth"].cure
    assert found["bandwidth"].figures["up_bytes_per_s"] < 80_000.0


def test_little_shared_memory_is_found_where_ranks_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "shm", "-t", "tmpfs", "-o", "size=16m", "none") as folder:
        assert shared_memory_finding(folder).status == "warning"
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
        found = shared_memory_finding(folder)
    assert found.status == "failed"
    assert "--shm-size" in found.cure


@pytest.mark.slow
def test_peers_that_refuse_messages_of_another_time_say_so(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine signs is five minutes old by the peer's clock."""
    monkeypatch.setattr("trainer.network.rpc.wire.time", SimpleNamespace(time=lambda: time.time() - 300.0))
    found = failed(case.report())["clock"]
    assert "300" in found.found and "behind" in found.found
    assert "NTP" in found.cure


# -- authority ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["none", "no-token", "expired", "other-authority", "role", "revoked", "away"])
def test_admission(tmp_path: Path, fault: str) -> None:
    """In a run with an authority; `examine` has an event loop of its own, so it runs in a thread."""

    async def ask() -> DoctorReport:
        async with running_authority(tmp_path / "authority") as authority:
            invitation = {
                "no-token": lambda: "",
                "expired": lambda: authority.invite("node", life_s=-5.0),
                "role": lambda: authority.invite("worker"),
            }.get(fault, lambda: authority.invite("node"))()
            if fault == "other-authority":
                from trainer.run.authority.messages import new_invitation

                invitation = new_invitation()
            config = config_of(
                tmp_path,
                run_id=authority.service.run_name,
                rpc__tls=False,
                admission__urls=[authority.url],
                admission__authorities=[authority.key],
                admission__token=invitation,
                admission__join_timeout_s=1.0,
            )
            if fault == "revoked":
                await examined(config)
                authority.register.revoke(identity_of(config).peer_id, time.time(), 14_400.0)
            if fault == "away":
                await authority.kill()
            return await examined(config)

    async def examined(config: Any) -> DoctorReport:
        checkup = Checkup(errors=ERRORS)
        subject = Subject(config=config, role="node")
        await asyncio.to_thread(examine, subject, checkup, has_run_option=False)
        return checkup.report()

    cures = {
        "no-token": "new invitation",
        "expired": "new invitation",
        "other-authority": "new invitation",
        "role": "this node's role",
        "revoked": "revoked this node's key",
        "away": "--authority",
    }
    found = failed(asyncio.run(ask()))
    if fault == "none":
        assert not found
    else:
        assert cures[fault] in found["admission"].cure


# -- the command line --------------------------------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, DoctorReport]:
    code = run(["doctor", "--json", *arguments])
    return code, DoctorReport.model_validate_json(capsys.readouterr().out)


def signed(folder: Path, **options: Any) -> Path:
    config = config_of(folder, **options)
    path = folder / "run.json"
    path.write_bytes(RunFile.of(config, OWNER.peer_id).signed(OWNER).to_json())
    return path


def line_of(folder: Path, file: Path) -> list[str]:
    places = ["--set", f"state_dir={folder}/state", "--checkpoint-dir", f"{folder}/checkpoints"]
    return ["--run", str(file), "--node-id", "n", "--device", "cpu", *places]


def test_a_run_file_that_was_edited_or_is_contradicted_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = signed(tmp_path)
    code, report = told(capsys, *line_of(tmp_path, file))
    assert code == 0, failed(report)
    assert any(each.check == "run-file" and each.status == "ok" for each in report.findings)

    code, report = told(capsys, *line_of(tmp_path, file), "--lr", "0.5")
    assert code == 1
    assert "leave that option out" in failed(report)["run-file"].cure

    values = json.loads(file.read_bytes())
    values["config"]["inner"]["lr"] = 0.5
    file.write_text(json.dumps(values))
    code, report = told(capsys, *line_of(tmp_path, file))
    assert code == 1
    assert "published" in failed(report)["run-file"].cure


def test_the_options_of_a_failed_start_are_taken_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = [
        "--node-id",
        "n",
        "--store",
        str(tmp_path / "none"),
        "--no-api",
        "--log-dir",
        str(tmp_path),
        "--lr",
        "1e-3",
    ]
    start += ["--set", f"state_dir={tmp_path}", "--checkpoint-dir", str(tmp_path), "--device", "cpu"]
    assert run(start) == 1
    assert "python -m trainer doctor' with the same options" in capsys.readouterr().err
    code, report = told(capsys, *start)
    assert code == 1
    assert "store" in failed(report)


def test_lines_are_plain_where_nobody_looks_at_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--node-id", "n", "--store", str(text_store()), "--set", f"state_dir={tmp_path}", "--device", "cpu"]
    assert run(["doctor", *arguments, "--checkpoint-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(lines)
    assert all(line.startswith(("✓ ", "! ", "- ")) for line in lines[:-1])
    assert "nothing stands in the way" in lines[-1]


def test_unusable_options_are_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--preset", "huge"]) == 2
    assert run(["doctor", "--initial-peers", "nonsense"]) == 2
    capsys.readouterr()


@pytest.mark.slow
def test_an_unnamed_node_spends_no_invitation(tmp_path: Path) -> None:
    async def ask() -> tuple[DoctorReport, int]:
        async with running_authority(tmp_path / "authority") as authority:
            config = config_of(
                tmp_path,
                run_id=authority.service.run_name,
                rpc__tls=False,
                admission__urls=[authority.url],
                admission__authorities=[authority.key],
                admission__token=authority.invite("node"),
            )
            checkup = Checkup(errors=ERRORS)
            subject = Subject(config=config, role="node", is_named=False)
            await asyncio.to_thread(examine, subject, checkup, has_run_option=False)
            return checkup.report(), authority.service.num_admitted

    report, num_admitted = asyncio.run(ask())
    assert num_admitted == 0
    assert next(each for each in report.findings if each.check == "admission").status == "skipped"
    assert Identity.create().peer_id not in str(report)
