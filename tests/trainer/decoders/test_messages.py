"""Decoders take whatever a peer sends or raise the errors they document: nothing else ends a task, or a process.

Messages are valid ones with extreme numbers put anywhere, drawn alike in every run. What becomes of their senders is
tested beside each service.
"""

from __future__ import annotations

import json
import struct
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from manifests import canonical_json
from tests.support.example_store import EXAMPLE_KEY
from tests.support.extremes import EXAMPLES, changed, damaged, outcome
from tests.support.hostile_caller import header_fields
from trainer.aggregation import cap_weights, contribution_weight
from trainer.collective.arithmetic import split_sums
from trainer.collective.messages import Agreement, Commit, CommitDecision, JoinRequest, MomentsReply, Plan, Vote
from trainer.collective.planning import check_agreement, check_plan, first_plan, may_follow
from trainer.errors import DiscoveryError, RefusedError, TrainerUsageError
from trainer.network.discovery.announcement import Announcement, sign_announcement, verify_announcement
from trainer.network.discovery.exchange import PeerExchangeReply, PeerExchangeRequest
from trainer.network.discovery.node_report import NodeReport, ReportRefusedError, sign_report, verify_report
from trainer.network.discovery.peer_table import PeerTable
from trainer.network.discovery.report_exchange import ReportsReply
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Identity
from trainer.network.rpc.envelope import parse_body, parse_header, parse_strict_json, seal
from trainer.network.rpc.identity import certificate_digest
from trainer.network.transfer.descriptor import TensorSpec
from trainer.pipeline.driver.failure_detector import is_refused
from trainer.pipeline.driver.workers import workers_in
from trainer.pipeline.ledger.messages import (
    Account,
    LeaseAnswer,
    LeaseAsk,
    RenewAnswer,
    SettleAnswer,
    SettleAsk,
    WorkerCounts,
)
from trainer.pipeline.protocol.messages import AppliedAnswer, ChainAsk, ForwardAsk, ProgressReport, StageAnswer
from trainer.pipeline.worker.status import StatusAnswer

ModelT = TypeVar("ModelT", bound=BaseModel)

KEY = Identity.of(EXAMPLE_KEY)
KEYS = [letter * 64 for letter in "abc"]
NOW = 1_800_000_000.0

REPORT: dict[str, Any] = {"uid": "body1.0.55", "incarnation": "a" * 16, "status": "serving"}
SPEC = {"name": "activation", "dtype": "float32", "shape": [2, 8, 16]}
TASK = {"key": "0.0", "reducer": KEYS[0], "first_part": 0, "last_part": 4}
PLAN = {"agreement": "0" * 64, "pass_index": 0, "members": KEYS, "tasks": [TASK]}
MEMBER = {"address": "127.0.0.1:9", "certificate": None, "weight": 1.0, "progress": 1.0}
AGREEMENT = {"round_index": 3, "attempt": 0, "coordinator": KEYS[0], "state_digest": "0" * 64, "num_values": 4096}
AGREEMENT |= {"part_values": 1024, "vocabulary_rows": 512, "members": [{"peer_id": key, **MEMBER} for key in KEYS]}
ASK = {"micro_batch": "e7.s1.r4", "stage": "body-1", "num_rows": 2, "num_positions": 8}
ASK |= {"answer_within_s": 5.0, "tensors": [SPEC]}
CREDIT = {"stage": "head", "incarnation": "a" * 16, "applied_number": 1, "shared_through": 0}
SETTLED = {"micro_batch": "e7.s1.r4", "outcome": "done", "credits": [CREDIT], "num_tokens": 8}
RUN = {"epoch": 0, "shard": 1, "row": 0, "num_rows": 4}
TALLY = {"leased": 1, "done": 1, "lost": 0, "open": 0}
ACCOUNT = {"micro_batches": TALLY, "tokens": TALLY, "trained_tokens": 1}
ACCOUNT |= dict.fromkeys(("waiting", "reissued", "leases"), 0) | {"lost": [], "perished": [], "lanes": []}
DIGESTS = [{"key": "0.0", "digest": "0" * 64, "num_included": 1}]
COMMIT = {"plan": PLAN, "members": KEYS, "digests": DIGESTS, "dropped": [{"peer_id": KEYS[0], "reason": "late"}]}
COMMIT |= {"completeness": 1.0, "findings": []}
ANSWER = {"incarnation": "a" * 16, "version": 3, "num_rows": 2, "tensors": [SPEC], "loss_sum": 1.5, "compute_s": 0.1}
JOIN = {"round_index": 3, "terms": {"architecture": {"dim": 8}, "tokenizer_lineage": "", "synchronisation": {}}}
JOIN |= {"state_digest": "0" * 64, "num_values": 4096, "num_batches": 4, "age_s": 1.0, "vocabulary_rows": 512}
JOIN |= {"address": "127.0.0.1:9", "certificate": None, "tried": []}
STATUS = {"stage": "tail", "status": "serving", "incarnation": "a" * 16, "refused": {"busy": 1}}
STATUS |= dict.fromkeys(("version", "num_tokens", "applied", "shared_through", "queued", "queued_bytes"), 1)
STATUS |= dict.fromkeys(("computed", "cached_bytes", "reply_bytes"), 1)
STATUS |= dict.fromkeys(("batch_rows", "compute_s", "rows_per_s", "busy"), 0.5)
ROUND = {"round_index": 3, "ended_at": NOW, "num_members": 2, "completeness": 0.5, "seconds": 1.5, "error": "late"}
NODE_REPORT = {"peer_id": KEYS[0], "node_id": "gpu-7", "run_id": "run", "role": "worker", "incarnation": "a" * 16}
NODE_REPORT |= {"flops": 1e15, "num_tokens": 5, "active_s": 1.0, "rounds": [ROUND], "loss": 3.0, "is_called": True}
NODE_REPORT |= {"dht": {"stores": 1, "finds": 2, "records": 3}, "checkpoint_age_s": 60.0}
MESSAGES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (StageAnswer, ANSWER),
    (AppliedAnswer, {"incarnation": "a" * 16, "micro_batches": ["e7.s1.r4"], "counted_as": None}),
    (ForwardAsk, ASK),
    (ChainAsk, {**ASK, "apply_within_s": 5.0, "route": [{"stage": "tail", "peer_id": KEYS[0], "address": "h:9"}]}),
    (ProgressReport, {"incarnation": "a" * 16, "version": 3, "num_tokens": 4, "joining": False}),
    (StageReport, REPORT),
    (NodeReport, NODE_REPORT),
    (ReportsReply, {"sizes": [10, 20], "now": NOW}),
    (WorkerCounts, {"workers": [{"stage": "head", "incarnation": "a" * 16, "micro_batches": 3}]}),
    (LeaseAsk, {"token": "0" * 32, "data_digest": "0" * 16, "preferred": [1], "num_units": 1}),
    (LeaseAnswer, {"runs": [RUN], "lease_s": 30.0, "finished": False}),
    (RenewAnswer, {"live": ["0" * 32], "lease_s": 30.0}),
    (SettleAsk, {"token": "0" * 32, "settlements": [SETTLED], "handed_back": ["e7.s1.r8"]}),
    (SettleAnswer, {"accepted": 1, "repeated": 0, "stale": ["e7.s1.r4"], "unheard": []}),
    (Account, ACCOUNT),
    (Agreement, AGREEMENT),
    (Plan, PLAN),
    (Vote, {"plan": PLAN, "term": 0, "digests": DIGESTS, "failed": [], "dropped": []}),
    (Commit, COMMIT),
    (CommitDecision, {"kind": "commit", "commit": COMMIT}),
    (PeerExchangeReply, {"sizes": [10, 20]}),
    (PeerExchangeRequest, {"own_bytes": 10}),
    (MomentsReply, {"sizes_bytes": [10]}),
    (TensorSpec, SPEC),
    (JoinRequest, JOIN),
    (StatusAnswer, STATUS),
]
HEAD = header_fields("", kind="reply", origin="callee", sent_at=NOW, body={"a": [1, {"b": 2.5}]})


def _announcement(**fields: Any) -> Announcement:
    document = {"peer_id": KEY.peer_id, "node_id": "n", "run_id": "r", "address": "127.0.0.1:9", "shards": [1]}
    said = Announcement.model_validate_json(json.dumps({**document, "stage": REPORT, **fields}))
    return said.stamped(NOW, 60.0)


@pytest.mark.parametrize(("model", "document"), MESSAGES, ids=[model.__name__ for model, _ in MESSAGES])
@EXAMPLES
@given(data=st.data())
def test_bodies(model: type[BaseModel], document: dict[str, Any], data: st.DataObject) -> None:
    assert model.model_validate_json(json.dumps(document))
    try:
        raw = seal(KEY, {**HEAD, "body": data.draw(changed(document))})
    except TrainerUsageError:  # Half a surrogate pair, which this sender cannot spell.
        return
    frame = outcome(RefusedError, parse_header, raw)
    found = None if frame is None else outcome(RefusedError, parse_body, frame, model)
    assert found is None or model.model_validate_json(found.model_dump_json()) == found


@EXAMPLES
@given(data=st.data())
def test_heads(data: st.DataObject) -> None:
    fields = {**data.draw(changed(HEAD)), "sender": KEY.peer_id, "payload_blake3": "0" * 64}
    head = json.dumps(fields).encode()
    head = data.draw(st.just(head) | damaged(head))
    sizes = data.draw(st.just((len(head), 0)) | st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)))
    outcome(RefusedError, parse_header, b"\x89GnR" + struct.pack("<III", 2, *sizes) + bytes(64) + head)


@pytest.mark.parametrize(
    "literal",
    ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "9" * 20, "[" * 9000, '{"a":' * 9000, '"\\ud800"', "\x00"],
)
@pytest.mark.parametrize("form", ['{"a": _}', "_", '{"a": [_]}', '{"body": {"a": _}}'])
def test_odd_json(literal: str, form: str) -> None:
    text = form.replace("_", literal).encode()
    with pytest.raises((ValueError, RecursionError)):
        parse_strict_json(text)
    for model, _ in MESSAGES:
        with pytest.raises(ValidationError):
            model.model_validate_json(text)
    with pytest.raises(DiscoveryError):
        verify_announcement(text, now=NOW, max_clock_skew_s=10.0)
    with pytest.raises(ReportRefusedError):
        verify_report(text, now=NOW, max_clock_skew_s=10.0)


def _announced(document: Any) -> bytes:
    signature = KEY.sign(b"genesis announcement 1\n" + canonical_json(document)).hex()
    return canonical_json({"announcement": document, "signature": signature})


@pytest.mark.slow
@EXAMPLES
@given(data=st.data())
def test_announcements(data: st.DataObject) -> None:
    true = sign_announcement(_announcement(), KEY)
    document = json.loads(true)["announcement"]
    assert _announced(document) == true
    assert verify_announcement(true, now=NOW, max_clock_skew_s=10.0)
    try:
        wire = data.draw(changed(document).map(_announced) | damaged(true))
    except UnicodeEncodeError:
        return
    said = outcome(DiscoveryError, lambda: verify_announcement(wire, now=NOW, max_clock_skew_s=10.0))
    table = PeerTable("r", "0" * 64, max_peers=4, max_clock_skew_s=10.0, clock=lambda: NOW)
    assert (table.offer(wire) is not None) == (said is not None and said.run_id == "r")
    assert len(workers_in(table.announcements())) <= 1


def _reported(document: Any) -> bytes:
    signature = KEY.sign(b"genesis node report 1\n" + canonical_json(document)).hex()
    return canonical_json({"report": document, "signature": signature})


@EXAMPLES
@given(data=st.data())
def test_reports(data: st.DataObject) -> None:
    said = NodeReport.model_validate_json(json.dumps({**NODE_REPORT, "peer_id": KEY.peer_id})).stamped(NOW, 180.0)
    true = sign_report(said, KEY).wire
    document = json.loads(true)["report"]
    assert _reported(document) == true
    assert verify_report(true, now=NOW, max_clock_skew_s=10.0) == said
    try:
        wire = data.draw(changed(document).map(_reported) | damaged(true))
    except UnicodeEncodeError:
        return
    found = outcome(ReportRefusedError, lambda: verify_report(wire, now=NOW, max_clock_skew_s=10.0))
    assert found is None or found.peer_id == KEY.peer_id


@EXAMPLES
@given(st.from_regex(r"\A(head|tail|body[1-9][0-9]{0,3})\.0\.[1-9][0-9]{0,5}\Z"))
def test_each_stage_that_can_be_announced_has_a_name_that_can_be_read(uid: str) -> None:
    assert workers_in([_announcement(stage={**REPORT, "uid": uid})])[0].uid == uid


@pytest.mark.slow
@pytest.mark.parametrize("host", ["a..b", "a" * 70, "-", ".", "1.2.3.4.5", "[::ffff]", "localhost."])
async def test_an_address_that_can_be_announced_can_be_tried(host: str) -> None:
    """A name that no host can have is an error of the codec, not of the network."""
    assert await is_refused(_announcement(address=f"{host}:1").address, 2.0) in (True, False)


@EXAMPLES
@given(data=st.data())
def test_agreements(data: st.DataObject) -> None:
    agreement = _model(Agreement, data.draw(changed(AGREEMENT)))
    if agreement is not None:
        said = next(document for model, document in MESSAGES if model is JoinRequest)
        changes = {"num_values": 4096, "num_batches": 1, "age_s": 0.0, "vocabulary_rows": 512}
        request = JoinRequest.model_validate_json(json.dumps(said)).model_copy(update=changes)
        own: dict[str, Any] = {"own_id": KEYS[1], "values_per_part": 1024, "max_weight_ratio": 4.0}
        outcome(RefusedError, lambda: check_agreement(agreement, request, **own))


@EXAMPLES
@given(data=st.data())
def test_plans(data: st.DataObject) -> None:
    agreement = Agreement.model_validate_json(json.dumps(AGREEMENT))
    first = first_plan(agreement)
    plan = _model(Plan, data.draw(changed(first.model_dump(mode="json"))))
    if plan is not None:
        outcome(RefusedError, lambda: check_plan(plan, agreement, max_passes=4))
        may_follow(plan, first)


@EXAMPLES
@given(st.lists(st.tuples(st.integers(0, 2**48), st.floats(0, 1.7e308)), min_size=1, max_size=4))
def test_weights_of_newcomers(claims: list[tuple[int, float]]) -> None:
    weights = cap_weights([contribution_weight(batches, age_s) for batches, age_s in claims])
    assert all(0 <= weight < float("inf") for weight in weights)


@EXAMPLES
@given(st.lists(st.integers(0, 2**48), max_size=3), st.binary(max_size=20))
def test_sizes_of_sums(sizes: list[int], payload: bytes) -> None:
    pieces = outcome(ValueError, split_sums, MomentsReply(sizes_bytes=tuple(sizes)), payload)
    assert pieces is None or b"".join(pieces) == payload


@EXAMPLES
@given(st.binary(max_size=60), st.booleans())
def test_certificates(data: bytes, wrapped: bool) -> None:
    pem = b"-----BEGIN CERTIFICATE-----\n" + data + b"\n-----END CERTIFICATE-----\n" if wrapped else data
    outcome(ValueError, certificate_digest, pem)


def _model(model: type[ModelT], document: Any) -> ModelT | None:
    found: ModelT | None = outcome(ValueError, lambda: model.model_validate_json(json.dumps(document)))
    return found
