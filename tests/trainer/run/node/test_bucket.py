"""Nodes whose rounds go through a bucket, from the command line: alike, whoever is killed or comes late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from genesis.store.folder import FolderStore
from genesis.store.opening import open_store
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_servers import Server, free_port, moto_s3, rclone_s3, speaking_to
from tests.support.trainer_command import ROOT, WAIT_S, RunningTrainer, TrainerCommand, TrainerHere, differences
from trainer.bucket_rounds.config import BucketConfig
from trainer.bucket_rounds.documents import AgreedMember, Agreement, Claims, ContributionHeader, credential_field
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.round import BUCKET_CRASH_POINTS
from trainer.network.rpc import Identity
from trainer.network.rpc.credential import Credential, Role
from trainer.run.config import RunConfig
from trainer.run.config.admission import AdmissionConfig
from trainer.run.node.admission import admission_client
from trainer.run.node.bucket_network import seen_members
from trainer.run.node.bucket_settings import settings_of

ROUNDS = (
    *("--inner-steps", "10", "--max-steps", "30", "--set", "collective.gather_timeout_s=60"),
    *("--set", "bucket.poll_interval_s=0.1", "--set", "bucket.watch_interval_s=0.5"),
    *("--set", "bucket.snapshot_rounds=2", "--set", "bucket.keep_rounds=1"),
)


def arguments(bucket: Path | str, number: int, *more: str) -> list[str]:
    return ["--node-id", f"home-{number}", "--rounds", str(bucket), *ROUNDS, *more]


def anchor_of(trainer: TrainerCommand, number: int) -> torch.Tensor:
    anchor: torch.Tensor = trainer.saved(f"home-{number}")["diloco"]["fragments"][0]["anchor"]
    return anchor


def train_together(
    trainer: TrainerCommand, bucket: Path | str, count: int, *more: str, crash_at: dict[int, str] | None = None
) -> list[RunningTrainer]:
    """Runs nodes to their end; one that is killed at a point is started again, by the same command."""
    with ExitStack() as stack:

        def start(number: int, **environment: str) -> RunningTrainer:
            return stack.enter_context(trainer.running(*arguments(bucket, number, *more), **environment))

        points = crash_at or {}
        nodes = [start(n, **({"GENESIS_CRASH_AT": points[n]} if n in points else {})) for n in range(count)]
        for number in points:
            assert nodes[number].process.wait(WAIT_S) == -signal.SIGKILL, "".join(nodes[number].errors)
            nodes[number] = start(number)
        for node in nodes:
            assert node.wait(300.0) == 0, "".join(node.errors)
        return nodes


def assert_alike(trainer: TrainerCommand, count: int) -> None:
    anchors = [anchor_of(trainer, number) for number in range(count)]
    assert all(torch.equal(anchors[0], each) for each in anchors[1:])


@pytest.fixture
def s3() -> Iterator[Server]:
    with moto_s3("bucket") as server:
        yield server


@pytest.mark.slow
def test_two_nodes_over_a_folder_end_alike_and_tell_what_it_cost(trainer: TrainerCommand, tmp_path: Path) -> None:
    nodes = train_together(trainer, tmp_path / "bucket", 2, "--set", "bucket.quorum=2")
    assert_alike(trainer, 2)
    rounds = [event for event in nodes[0].events if event["kind"] == "round"]
    assert [(each["round_index"], len(each["members"])) for each in rounds] == [(0, 2), (1, 2), (2, 2)]
    assert "requests" in "".join(nodes[0].errors)
    assert "list prices" not in "".join(nodes[0].errors)  # A folder costs no money.
    place = Place(FolderStore(tmp_path / "bucket"))
    assert place.agreed_rounds() == [0, 1, 2]


@pytest.mark.slow
def test_a_node_alone_goes_on_where_it_was(trainer: TrainerCommand, tmp_path: Path) -> None:
    more = ("--set", "collective.gather_timeout_s=0.5", "--set", "collective.invite_after_s=0.1")
    trainer(*arguments(tmp_path / "one", 0, *more))
    whole = trainer.saved("home-0")
    other = TrainerCommand(trainer.store, tmp_path / "other")
    other(*arguments(tmp_path / "two", 0, *more, "--max-steps", "17"))
    other(*arguments(tmp_path / "two", 0, *more))
    assert differences(whole["layers"], other.saved("home-0")["layers"]) == []
    assert differences(whole["diloco"], other.saved("home-0")["diloco"]) == []


def test_a_gateway_without_conditional_writes_is_refused(
    here: TrainerHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rclone_s3(tmp_path / "served", "bucket") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        said = here(*arguments("s3://bucket/run", 0), expect=2)
    assert "expected a store that honours If-None-Match" in said


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--port", "0", "--initial-peers", "127.0.0.1:4100"), "neither port nor peers"),
        (("--relay", "127.0.0.1:4002"), "neither port nor peers"),
        (("--strategy", "grad"), "expected strategy diloco"),
        (("--set", "rule.validation=off"), "leave validation on"),
        (("--set", "collective.powersgd_rank=4"), "powersgd_rank 0"),
        (("--set", "bucket.members=[abc]"), "64 hexadecimal digits"),
        (("--set", "bucket.num_slices=4", "--set", "rule.rule=krum"), "a rule by coordinates"),
        (("--set", "bucket.num_slices=4", "--strategy", "sparseloco"), "0 with strategy sparseloco"),
        (("--rounds", "https://bucket.example.org/run"), "can only be read"),
        (("--set", "bucket.access=signed"), "expected s3://bucket/prefix or no bucket.url"),
        (("--rounds", "s3://bucket/run-1", "--set", "bucket.access=signed"), "a run with an authority"),
        (("--set", "bucket.cdn=ftp://cdn.example.org"), "expected https://host/prefix"),
        (("--rounds", "s3:/bucket/run"), "expected s3:// and the rest"),
    ],
)
def test_what_does_not_go_with_a_bucket_is_refused(
    here: TrainerHere, tmp_path: Path, more: tuple[str, ...], expected: str
) -> None:
    assert expected in here(*arguments(tmp_path / "bucket", 0), *more, expect=2)


def test_a_node_of_another_run_is_refused(here: TrainerHere, tmp_path: Path) -> None:
    more = ("--set", "collective.gather_timeout_s=0.5", "--set", "collective.invite_after_s=0.1", "--max-steps", "10")
    here(*arguments(tmp_path / "bucket", 0, *more))
    said = here(*arguments(tmp_path / "bucket", 1, *more, "--compression", "int8"), expect=1)
    assert "compression" in said


def test_only_whom_the_authority_has_admitted_takes_part(tmp_path: Path) -> None:
    authority, member, stranger = Identity.create(), Identity.create(), Identity.create()
    config = RunConfig(
        node_id="home-1",
        run_id="run-1",
        bucket=BucketConfig(url=str(tmp_path)),
        admission=AdmissionConfig(authorities=(authority.peer_id,), urls=("http://127.0.0.1:1",)),
        state_dir=str(tmp_path / "state"),
    )
    client = admission_client(config, member, "node")
    settings = settings_of(config, member, lambda: 0, lambda: False, client)
    now = 1_800_000_000.0

    def header(identity: Identity, credential: Credential | None) -> ContributionHeader:
        return ContributionHeader(
            run_id="run-1",
            member=identity.peer_id,
            round_index=0,
            state_digest="",
            form="dense-fp32",
            num_values=1,
            payload_bytes=4,
            payload_sha256="0" * 64,
            claims=Claims(num_batches=1, age_s=0.0, progress=1.0, vocabulary_rows=0),
            credential=credential_field(credential),
        ).signed(identity)

    def issued(by: Identity, role: Role = "node") -> Credential:
        return Credential.issue(by, "run-1", member.peer_id, role, None, now, 3600.0)

    assert settings.refusal(header(member, issued(authority)), now) == ""
    assert "no credential" in settings.refusal(header(member, None), now)
    assert "no credential" in settings.refusal(header(stranger, issued(authority)), now)
    assert "no credential" in settings.refusal(header(member, issued(authority, "driver")), now)
    assert "authority that the run names" in settings.refusal(header(member, issued(stranger)), now)
    assert "expired" in settings.refusal(header(member, issued(authority)), now + 8000.0)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlap", [0, 4])
@pytest.mark.parametrize("points", [BUCKET_CRASH_POINTS[:4], BUCKET_CRASH_POINTS[4:]])
def test_nodes_killed_at_each_step_of_a_round_end_as_if_nobody_had_been(
    trainer: TrainerCommand, tmp_path: Path, points: tuple[str, ...], overlap: int
) -> None:
    more = ("--set", "collective.min_members=4", "--set", f"diloco.overlap_steps={overlap}", "--compression", "int8")
    more += ("--set", "bucket.quorum=4", "--set", "collective.gather_timeout_s=1000")
    more += ("--set", "collective.invite_after_s=1000")  # Who is back late is awaited with a whole round's work.
    train_together(trainer, tmp_path / "bucket", 4, *more)
    assert_alike(trainer, 4)
    whole = anchor_of(trainer, 0)
    other = TrainerCommand(trainer.store, tmp_path / "other")
    # Not all points are passed by each node: proposer and writer of snapshots change from round to round.
    everybodys = [point for point in points if point not in ("bucket-agreement-put",) and "snapshot" not in point]
    train_together(other, tmp_path / "again", 4, *more, crash_at={n: f"{p}:2" for n, p in enumerate(everybodys)})
    assert_alike(other, 4)
    assert torch.equal(whole, anchor_of(other, 0))


@pytest.mark.slow
def test_a_late_node_takes_up_the_state_that_most_vouch_for(trainer: TrainerCommand, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    more = ("--max-steps", "0", "--set", "collective.gather_timeout_s=20")
    with ExitStack() as stack:
        nodes = [stack.enter_context(trainer.running(*arguments(bucket, n, *more))) for n in range(2)]
        nodes[0].wait_for("round", 5)
        late = stack.enter_context(trainer.running(*arguments(bucket, 2, *more)))
        late.wait_for("round", 6)
        said = "".join(late.errors)
        assert "fetching the state after round" in said or "made without this node" in said
        late.wait_until(
            lambda: any(len(each.get("members", ())) == 3 for each in late.events), "a round with all three"
        )
        for node in (*nodes, late):
            node.stop()


@pytest.mark.slow
def test_nobody_waits_for_a_node_that_is_told_to_stop(trainer: TrainerCommand, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    more = ("--max-steps", "0", "--set", "collective.gather_timeout_s=20", "--set", "bucket.few_members_after_s=1000")
    more += ("--set", "collective.round_timeout_s=1000")

    def members_of_newest(node: RunningTrainer) -> int:
        rounds = [(each["round_index"], len(each["members"])) for each in list(node.events) if "members" in each]
        return max(rounds, default=(-1, 0))[1]

    with ExitStack() as stack:
        nodes = [stack.enter_context(trainer.running(*arguments(bucket, n, *more))) for n in range(3)]
        nodes[2].wait_for("round", 2)
        assert nodes[0].stop(signal.SIGINT) == 128 + signal.SIGINT
        described = (bucket / "run.json").read_bytes()
        (bucket / "run.json").unlink()
        # One alone of three would wait for 1000 s, and two of them for 20 s, for those that have left.
        nodes[2].wait_until(lambda: members_of_newest(nodes[2]) == 2, "a round of two")
        assert nodes[1].stop(signal.SIGINT) == 128 + signal.SIGINT
        nodes[2].wait_until(lambda: members_of_newest(nodes[2]) == 1, "a round alone")
        said = "".join(nodes[2].errors)
        assert "has left before round" in said
        assert (bucket / "run.json").read_bytes() == described  # Whoever closes a round puts it back.
        again = stack.enter_context(trainer.running(*arguments(bucket, 0, *more)))
        again.wait_until(lambda: members_of_newest(again) == 2, "a round of two again")
        for node in (nodes[2], again):
            node.stop()


@pytest.mark.slow
def test_four_nodes_over_s3_end_alike(trainer: TrainerCommand, s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    train_together(trainer, "s3://bucket/run-1", 4, "--set", "collective.min_members=4")
    assert_alike(trainer, 4)


@contextmanager
def authority_of(folder: Path, *arguments: str, **environment: str) -> Iterator[tuple[str, TrainerCommand]]:
    """An authority as its operator starts it; yields its address, and what runs its other commands."""
    port, database = free_port(), str(folder / "authority.sqlite")
    common = ("--db", database, "--key", str(folder / "authority.key"))
    command = TrainerCommand(folder, folder)
    line = [sys.executable, "-m", "trainer", "authority", "--port", str(port), *common, *arguments]
    process = subprocess.Popen(
        line, cwd=ROOT, env=command.environment(**environment), stderr=subprocess.PIPE, text=True
    )
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        deadline_s = time.monotonic() + WAIT_S
        while "its key is" not in "".join(said):
            assert process.poll() is None and time.monotonic() < deadline_s, "".join(said)
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", command
    finally:
        process.terminate()
        process.wait(WAIT_S)
        reader.join(WAIT_S)
        if process.stderr is not None:
            process.stderr.close()
        assert "Traceback" not in "".join(said), "".join(said)


def without_keys() -> dict[str, str]:
    """An environment in which boto3 finds no key and no endpoint."""
    return {
        "AWS_ACCESS_KEY_ID": "",
        "AWS_SECRET_ACCESS_KEY": "",
        "AWS_ENDPOINT_URL": "",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nodes_without_keys_train_by_addresses_that_the_authority_signs(
    trainer: TrainerCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in without_keys().items():
        monkeypatch.setenv(name, value)
    run_file = tmp_path / "run.json"
    with moto_s3("bucket", verifies=True) as server:
        begin = ("--run-name", "signed-1", "--rounds", "s3://bucket/run-1", "--address-life-s", "30")
        with authority_of(tmp_path, *begin, **server.environment()) as (url, authority):
            options = {"access": "signed", "poll_interval_s": 0.1, "watch_interval_s": 0.5, "quorum": 2}
            run_file.write_text(json.dumps({"run_id": "signed-1", "bucket": options, "admission": {"urls": [url]}}))
            invite = ("authority", "invite", "--role", "node", "--uses", "2", "--db", tmp_path / "authority.sqlite")
            token = authority.other(*invite).stdout.split()[0]
            steps = ("--inner-steps", "10", "--max-steps", "30", "--set", "bucket.snapshot_rounds=2")
            common = ("--run", run_file, *steps)
            refused = trainer("--node-id", "stranger", *common, expect=2).stderr
            assert "invitation" in refused
            with ExitStack() as stack:
                nodes = [
                    stack.enter_context(trainer.running("--node-id", f"home-{n}", *common, "--token", token))
                    for n in range(2)
                ]
                for node in nodes:
                    assert node.wait(300.0) == 0, "".join(node.errors)
            assert_alike(trainer, 2)
            assert all(len(e["members"]) == 2 for e in nodes[0].events if e["kind"] == "round")
            assert "at s3 list prices" in "".join(nodes[0].errors)
        with speaking_to(server):
            place = Place(open_store("s3://bucket/run-1"))
            assert place.agreed_rounds() == [0, 1, 2]
            assert place.snapshots()
            place.close()


AWAY_S = 60.0
"""For how long the store answers nothing but errors, or nothing at all."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", [Fault.ERROR_500, Fault.HANG])
def test_a_store_that_is_away_for_a_minute_costs_time_only(
    trainer: TrainerCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    is_away = threading.Event()
    more = ("--set", "bucket.quorum=3", "--set", "collective.min_members=3", "--set", "collective.gather_timeout_s=900")
    more += ("--set", "collective.invite_after_s=900", "--compression", "int8")
    for name, value in without_keys().items():
        monkeypatch.setenv(name, value)
    train_together(trainer, tmp_path / "undisturbed", 3, *more)
    other = TrainerCommand(trainer.store, tmp_path / "other")
    with (
        moto_s3("bucket") as server,
        FaultProxy(server.port, rate=1.0, faults=(fault,), only=lambda _request: is_away.is_set()) as proxy,
        ExitStack() as stack,
    ):
        for name, value in server.environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        nodes = [stack.enter_context(other.running(*arguments("s3://bucket/run-1", n, *more))) for n in range(3)]
        nodes[0].wait_for("round", 1)
        is_away.set()
        time.sleep(AWAY_S)
        is_away.clear()
        for node in nodes:
            assert node.wait(600.0) == 0, "".join(node.errors)
        assert proxy.injected[fault] > 0
    assert_alike(other, 3)
    assert torch.equal(anchor_of(trainer, 0), anchor_of(other, 0))
    rounds = [event for event in nodes[0].events if event["kind"] == "round"]
    assert [(each["round_index"], len(each["members"])) for each in rounds] == [(0, 3), (1, 3), (2, 3)]


def test_whoever_was_in_none_of_the_latest_rounds_is_not_listed_any_more() -> None:
    def agreement(round_index: int, **weights: float) -> Agreement:
        members = tuple(AgreedMember.model_construct(member=key, weight=weight) for key, weight in weights.items())
        return Agreement.model_construct(round_index=round_index, members=members, state_digest=f"d{round_index}")

    seen = seen_members({}, agreement(0, a=1.0, b=2.0), 1)
    for round_index in range(1, 5):
        seen = seen_members(seen, agreement(round_index, a=3.0), 1)
        assert seen["b"].last_round == 0 and seen["b"].weight == 2.0
    assert (seen["a"].last_round, seen["a"].weight, seen["a"].outer_step, seen["a"].state_digest) == (4, 3.0, 4, "d4")
    seen = seen_members(seen, agreement(5, a=3.0), 1)
    assert seen.keys() == {"a"}
    halved = seen_members({}, agreement(5, a=1.0), 2)["a"]
    assert (halved.outer_step, halved.state_digest) == (2, "")
