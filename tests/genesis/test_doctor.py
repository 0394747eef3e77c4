"""`genesis doctor` finds what keeps a store from being read or populated, by the right check, with the right cure."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from pathlib import Path

import pytest

from genesis.cli.app import run
from genesis.doctor import DoctorReport, Finding
from genesis.populate.commit_log import CommitLog
from genesis.store import FolderStore
from manifests import generate_private_key, public_key_pem
from tests.support.fault_proxy import FaultProxy, Reply
from tests.support.mounts import mounted
from tests.support.s3_servers import free_port, moto_s3, rclone_http, speaking_to
from tests.support.small_store import PRIVATE_KEY, copy_small_store, manifest_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Case:
    folder: Path
    store: Path
    stack: ExitStack
    address: str = ""
    arguments: list[str] = field(default_factory=list)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    copy_small_store(tmp_path / "store", signed=True)
    with ExitStack() as stack:
        yield Case(tmp_path, tmp_path / "store", stack, str(tmp_path / "store"))


def examined(capsys: pytest.CaptureFixture[str], case: Case) -> DoctorReport:
    code = run(["doctor", "--json", "--store", case.address, *case.arguments])
    report = DoctorReport.model_validate_json(capsys.readouterr().out)
    assert code == (0 if report.ok else 1)
    assert all(each.cure for each in report.findings if each.status in ("failed", "warning")), report
    return report


def of(report: DoctorReport, check: str) -> Finding:
    return next(each for each in report.findings if each.check == check)


def key_file(case: Case, *, is_right: bool) -> str:
    path = case.folder / "key.pub"
    path.write_bytes(public_key_pem((PRIVATE_KEY if is_right else generate_private_key()).public_key()))
    return str(path)


def test_a_healthy_store_has_nothing_wrong(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    case.arguments = ["--public-key", key_file(case, is_right=True), "--write"]
    report = examined(capsys, case)
    assert report.ok
    for check in ("store", "signature", "index", "vocabulary", "writer", "conditional-writes", "disk-write"):
        assert of(report, check).status == "ok"


# -- faults: each returns the check that finds it, how grave it is, and what its cure names ----------------------------


def no_folder(case: Case) -> tuple[str, str, str]:
    case.address = str(case.folder / "nothing")
    return "store", "failed", "check the path"


def empty_folder(case: Case) -> tuple[str, str, str]:
    (case.folder / "empty").mkdir()
    case.address = str(case.folder / "empty")
    return "store", "failed", "genesis populate"


def no_server(case: Case) -> tuple[str, str, str]:
    case.address = f"http://127.0.0.1:{free_port()}/store"
    return "store", "failed", "check the address"


def unknown_scheme(case: Case) -> tuple[str, str, str]:
    case.address = "ftp://host/store"
    return "store", "failed", "s3://"


def another_key(case: Case) -> tuple[str, str, str]:
    case.arguments = ["--public-key", key_file(case, is_right=False)]
    return "signature", "failed", "its public key"


def changed_segment(case: Case) -> tuple[str, str, str]:
    path = case.store / manifest_of(case.store).index[-1].key
    path.write_bytes(path.read_bytes().replace(b"alpha", b"gamma", 1))
    return "index", "failed", "copy of the store"


def lost_shard(case: Case) -> tuple[str, str, str]:
    for path in (case.store / "packed").iterdir():
        path.unlink()
    return "index", "failed", "restore that object"


def changed_vocabulary(case: Case) -> tuple[str, str, str]:
    tokenizer = manifest_of(case.store).tokenizer
    assert tokenizer is not None
    (case.store / tokenizer.key).write_bytes(b"{}")
    return "vocabulary", "failed", "copy of the store"


def another_writer(case: Case) -> tuple[str, str, str]:
    log = CommitLog(FolderStore(case.store), shard_tokens=2_000, source="alpha", sign_key=PRIVATE_KEY)
    log.open()
    case.stack.callback(log.close)
    return "writer", "warning", "stop it"


def full_disk(case: Case) -> tuple[str, str, str]:
    place = case.stack.enter_context(mounted(case.folder / "small", "-t", "tmpfs", "-o", "size=4m", "none"))
    case.address = str(place)
    return "disk-space", "failed", "make room"


def server_of_another_time(case: Case) -> tuple[str, str, str]:
    server = case.stack.enter_context(rclone_http(case.store))

    def late(_: object, reply: Reply) -> Reply:
        import time

        return replace(reply.with_header("date", formatdate(time.time() - 300, usegmt=True)))

    proxy = case.stack.enter_context(FaultProxy(server.port, alter=late))
    case.address = f"http://127.0.0.1:{proxy.port}"
    return "store-clock", "failed", "NTP"


def private_bucket(case: Case) -> tuple[str, str, str]:
    server = case.stack.enter_context(rclone_http(case.store))
    proxy = case.stack.enter_context(FaultProxy(server.port, answer=lambda _: Reply(403)))
    case.address = f"http://127.0.0.1:{proxy.port}"
    return "store", "failed", "make the store public"


def no_bucket(case: Case) -> tuple[str, str, str]:
    server = case.stack.enter_context(moto_s3("there"))
    case.stack.enter_context(speaking_to(server))
    case.address = "s3://elsewhere/prefix"
    return "store", "failed", "check"


OFTEN = [no_folder, empty_folder, unknown_scheme, another_key, changed_segment, lost_shard, changed_vocabulary]
SELDOM = [no_server, another_writer, full_disk, server_of_another_time, private_bucket, no_bucket]


@pytest.mark.parametrize(
    "inject",
    [*OFTEN, *(pytest.param(each, marks=pytest.mark.slow) for each in SELDOM)],
    ids=lambda inject: inject.__name__,
)
def test_a_fault_is_found_with_its_cure(
    case: Case, inject: Callable[[Case], tuple[str, str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    check, status, cure = inject(case)
    found = of(examined(capsys, case), check)
    assert (found.status, found.check) == (status, check), found
    assert cure in found.cure


@pytest.mark.slow
def test_a_limit_of_open_files_is_found(case: Case) -> None:
    command = f"ulimit -n 100; exec {sys.executable} -m genesis doctor --json --store {case.address}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    found = of(DoctorReport.model_validate_json(done.stdout), "open-files")
    assert done.returncode == 1, done.stderr
    assert (found.status, "ulimit -n" in found.cure) == ("failed", True)


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_found(case: Case) -> None:
    environment = f"HF_ENDPOINT=http://127.0.0.1:{free_port()} {sys.executable}"
    command = f"{environment} -m genesis doctor --json --store {case.address} --source fineweb-edu"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    found = of(DoctorReport.model_validate_json(done.stdout), "hub")
    assert done.returncode == 1, done.stderr
    assert "HF_ENDPOINT" in found.cure


def test_a_failed_populate_names_the_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    assert run(["populate", "--source", "python-docs", "--store", str(place)]) == 1
    assert "genesis doctor --store URL" in capsys.readouterr().err


def test_lines_are_coloured_only_on_a_terminal(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--store", case.address]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert run(["doctor", "--store", case.address, "--public-key", str(case.folder / "none")]) == 1
    out = capsys.readouterr().out
    assert "✗ signature: " in out
    assert out.splitlines()[-1].endswith("(signature)")
