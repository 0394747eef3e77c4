"""The lease names its holder, yields to nobody while it lives, and to anybody once it is stale."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import LeaseHeldError
from genesis.populate.lease import ProcessId, check_free, describe_writer, lease_end, this_process
from manifests import Writer

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
ELSEWHERE = ProcessId("gpu-7", 1234, "99", "0123abcd-1")


def writer(process: ProcessId, seconds_left: float | None) -> Writer:
    expires = None if seconds_left is None else lease_end(NOW, seconds_left)
    return Writer(id=str(process), token=1, expires_at=expires, source="c4")


@pytest.mark.slow
@given(st.text(min_size=1), st.integers(0), st.text("0123456789"), st.text("0123456789abcdef-"))
def test_process_ids_round_trip(host, pid, started, boot):
    process = ProcessId(host, pid, started, boot)
    assert ProcessId.parse(str(process)) == process


def test_ids_of_another_form_are_not_parsed():
    assert ProcessId.parse("somebody") is None
    assert not ProcessId("", 1, "", "").is_gone()


def test_a_live_lease_names_its_holder():
    with pytest.raises(LeaseHeldError, match=r"process 1234 on gpu-7 \(populating c4\).*30 s"):
        check_free(writer(ELSEWHERE, 30), "./store", NOW)


@pytest.mark.parametrize("lease", [None, writer(ELSEWHERE, None), writer(ELSEWHERE, 0), writer(ELSEWHERE, -5)])
def test_no_returned_or_stale_lease_hinders(lease):
    check_free(lease, "./store", NOW)


def test_a_dead_process_of_this_machine_holds_nothing():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = this_process()
    started = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    process = ProcessId(here.host, child.pid, started, here.boot)
    assert not process.is_gone()
    with pytest.raises(LeaseHeldError):
        check_free(writer(process, 30), "./store", NOW)
    child.communicate(b"\n", timeout=10)
    assert process.is_gone()
    check_free(writer(process, 30), "./store", NOW)


def test_a_reused_process_number_is_not_taken_for_the_holder():
    here = this_process()
    assert here.pid == os.getpid()
    assert ProcessId(here.host, here.pid, "1", here.boot).is_gone()


def test_what_other_machines_run_cannot_be_known():
    assert not ELSEWHERE.is_gone()


def test_writers_are_described():
    assert describe_writer(Writer(id="x", token=1)) == "x"
    assert lease_end(NOW, 60) == (NOW + timedelta(seconds=60)).strftime("%Y-%m-%dT%H:%M:%SZ")
