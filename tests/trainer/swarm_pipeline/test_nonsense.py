"""Messages that are almost in order, at every method of workers and of the keeper: refused by name, without a trace.

Each is made from one that would be accepted: values replaced, left out or added anywhere in it, tensors announced that
do not come, bytes that are NaN, infinities or ids of no vocabulary. Sent frame by frame, under a valid signature, so
that nothing but the service itself can turn it away.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hostile_caller import HostileCaller, hostile_caller
from tests.support.ledger_run import Run, all_of, ledger_run
from tests.support.model_configs import random_tokens
from tests.support.rpc_node import RUN_ID as LEDGER_RUN
from tests.support.stage_worker import RUN_ID, RunningWorker, WorkerSetup, running_driver, running_worker
from trainer.network.rpc import Endpoint
from trainer.pipeline.ledger import LEDGER_ACCOUNT, LEDGER_LEASE, LEDGER_RENEW, LEDGER_SETTLE, LedgerService
from trainer.pipeline.protocol import messages
from trainer.pipeline.protocol.wire import wire_ids
from trainer.pipeline.worker.status import STATUS

Json = Any

ROWS, POSITIONS, DIM = 2, 8, 16
BOUNDS = {"reply_cache_bytes": 1 << 16, "max_queue_bytes": 1 << 22, "max_request_tokens": 4096}
STAGE_CONFIG = {"max_cached_bytes": 1 << 16}
REFUSED = {
    *("body", "malformed", "nonfinite", "stage", "size", "method", "no-input", "stale", "expired", "busy"),
    *("payload_size", "already-applied", "hop", "hop-malformed", "stopping", "kind", "head", "no_request", "sequence"),
    *("lease", "lease-over", "enough", "data", "settlement", "unavailable"),
}
"""What may be answered: never ``internal``, and never silence."""
CUT_OFF = "status internal"
"""What the caller's own gRPC says of a stream that was refused while more of it was on its way; not always."""


def tensor(name: str, dtype: str, *shape: int) -> dict[str, Json]:
    return {"name": name, "dtype": dtype, "shape": list(shape)}


IDS = tensor("ids", "int32", ROWS, POSITIONS)
LABELS = tensor("labels", "int32", ROWS, POSITIONS)
ACTIVATION = tensor("activation", "float32", ROWS, POSITIONS, DIM)
GRADIENT = tensor("gradient", "float32", ROWS, POSITIONS, DIM)
SIZES = {"ids": 64, "labels": 64, "activation": 1024, "gradient": 1024}


def ask(stage: str, *tensors: dict[str, Json], **fields: Json) -> dict[str, Json]:
    size = {"num_rows": ROWS, "num_positions": POSITIONS, "answer_within_s": 5.0}
    return {"tensors": list(tensors), "micro_batch": "e7.s1.r4", "stage": stage, **size, **fields}


APPLY = {"apply_within_s": 5.0}
COUNTED = {**APPLY, "forward_version": 0, "num_tokens": ROWS * POSITIONS}
HOP = {"stage": "tail", "peer_id": "0" * 64, "address": "127.0.0.1:9", "certificate_pem": ""}
CREDIT = {"stage": "head", "incarnation": "a" * 16, "applied_number": 1, "shared_through": 0}
SETTLED = {"micro_batch": "e0.s1.r0", "outcome": "lost", "credits": [CREDIT], "num_tokens": 3}
SETTLED |= {"lost_at": "tail", "reason": "unclear"}
TOKEN = "0123456789abcdef" * 2
AT_HEAD: dict[str, dict[str, Json]] = {
    messages.FORWARD: ask("head", IDS),
    messages.BACKWARD: ask("head", GRADIENT, IDS, **COUNTED),
    messages.CHAIN: ask("head", IDS, LABELS, **APPLY, route=[{**HOP, "stage": "body-1"}, HOP]),
    messages.EVALUATE: ask("head", IDS),
    messages.APPLIED: {"micro_batches": ["e7.s1.r4", "e7.s1.r6"], "refuse_from_now": False},
    messages.PROGRESS: {"incarnation": "b" * 16, "version": 0, "num_tokens": 0, "joining": False},
    STATUS: {},
    "stage/unknown": {},
}
AT_TAIL: dict[str, dict[str, Json]] = {
    messages.TAIL: ask("tail", ACTIVATION, LABELS, **APPLY),
    messages.CHAIN: ask("tail", ACTIVATION, LABELS, **APPLY, route=[]),
    messages.EVALUATE: ask("tail", ACTIVATION, LABELS),
    messages.FORWARD: ask("tail", ACTIVATION),
}
AT_KEEPER: dict[str, dict[str, Json]] = {
    LEDGER_LEASE: {"token": TOKEN, "data_digest": "0" * 16, "preferred": [0, 1], "num_units": 1},
    LEDGER_RENEW: {"tokens": [TOKEN]},
    LEDGER_SETTLE: {"token": TOKEN, "settlements": [SETTLED], "handed_back": ["e0.s1.r4"], "release": True},
    LEDGER_ACCOUNT: {},
    "ledger/unknown": {},
}
CASES = [
    (where, method, body)
    for where, bodies in (("head", AT_HEAD), ("tail", AT_TAIL), ("keeper", AT_KEEPER))
    for method, body in bodies.items()
]

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20)
    | st.sampled_from(["head", "tail", "e7.s1.r4", "float64", "int64", 1 << 48, (1 << 48) - 1, -1, 0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
FLOATS = [0.5, -3.0, float("nan"), float("inf"), 3e38, -3e38]


@st.composite
def messages_almost_in_order(draw: st.DrawFn) -> tuple[str, str, dict[str, Json], bytes, bool]:
    """Where to, method, body, payload, and whether by stream."""
    where, method, body = draw(st.sampled_from(CASES))
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(0, 2))):
        _spoil(draw, body)
    said = body.get("tensors")
    announced = [spec for spec in said if isinstance(spec, dict)] if isinstance(said, list) else []
    payload = b"".join(_bytes_of(draw, spec) for spec in announced)
    if draw(st.integers(0, 4)) == 0:
        payload = draw(st.binary(max_size=64))
    return where, method, body, payload, draw(st.booleans())


def _spoil(draw: st.DrawFn, body: dict[str, Json]) -> None:
    """Replaces, removes or adds something somewhere."""
    inside: list[Json] = [body] if body else []
    for value in inside:  # Grows on the way.
        inside += [
            each for each in (value.values() if isinstance(value, dict) else value) if isinstance(each, dict | list)
        ]
    inside = [value for value in inside if value]
    if not inside:
        body["more"] = draw(VALUES)
        return
    into = draw(st.sampled_from(inside))
    place = draw(st.sampled_from(sorted(into) if isinstance(into, dict) else range(len(into))))
    match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
        case "replace":
            into[place] = draw(VALUES)
        case "remove":
            del into[place]
        case _ if isinstance(into, dict):
            into["more"] = draw(VALUES)
        case _:
            into.append(copy.deepcopy(into[place]))


def _bytes_of(draw: st.DrawFn, spec: dict[str, Json]) -> bytes:
    name = spec.get("name")
    size = SIZES.get(name, 0) if isinstance(name, str) else 0
    if name in ("ids", "labels"):
        return struct.pack("<i", draw(st.sampled_from([1, 63, 64, -1, -100, 2**31 - 1]))) * (size // 4)
    return struct.pack("<f", draw(st.sampled_from(FLOATS))) * (size // 4)


class Victims(NamedTuple):
    """Who is sent nonsense."""

    head: RunningWorker
    tail: RunningWorker
    keeper: LedgerService
    keeper_endpoint: Endpoint
    run: Run
    callers: dict[str, HostileCaller]
    runner: asyncio.Runner

    async def send(self, where: str, method: str, body: dict[str, Json], payload: bytes, streamed: bool) -> str:
        """What comes back."""
        caller, run_id = self.callers[where], LEDGER_RUN if where == "keeper" else RUN_ID
        if not streamed:
            return await caller.send(caller.frame(method=method, body=body, payload=payload, run_id=run_id))
        shared: dict[str, Json] = {"run_id": run_id, "method": method + "/stream", "nonce": secrets.token_hex(16)}
        opened = caller.frame(kind="open", body=body, **shared)
        data = caller.frame(kind="data", sequence=1, index=1, body=None, payload=payload, **shared)
        end = caller.frame(kind="end", sequence=2, index=0, body=None, **shared)
        return await caller.send(opened, *([data] if payload else []), end)


@asynccontextmanager
async def _victims(folder: Path, runner: asyncio.Runner) -> AsyncIterator[Victims]:
    run = ledger_run(folder)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        setup = {"worker": BOUNDS, "stage_config": STAGE_CONFIG}
        head = await enter(running_worker(WorkerSetup("head", **setup)))
        tail = await enter(running_worker(WorkerSetup("tail", **setup)))
        keeper, keeper_endpoint = await enter(run.keeper())
        peers = {"head": head.peer, "tail": tail.peer, "keeper": keeper_endpoint.peer}
        callers = {name: await enter(hostile_caller(peer)) for name, peer in peers.items()}
        yield Victims(head, tail, keeper, keeper_endpoint, run, callers, runner)


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    with asyncio.Runner() as runner:
        context = _victims(tmp_path_factory.mktemp("nonsense"), runner)
        yield runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.slow
def test_nonsense_is_refused_by_name_and_changes_nothing(victims: Victims) -> None:
    answers: Counter[tuple[str, str]] = Counter()

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(messages_almost_in_order())
    def send(message: tuple[str, str, dict[str, Json], bytes, bool]) -> None:
        said = victims.runner.run(victims.send(*message))
        _, method, _, _, streamed = message
        answers[method, said] += 1
        assert said in REFUSED | {"accepted"} or (streamed and said == CUT_OFF), said

    send()
    assert {"accepted", "body", "malformed", "nonfinite", "method"} <= {said for _, said in answers}
    assert {method for method, _ in answers} == {method for _, method, _ in CASES}
    victims.runner.run(_check_unchanged(victims))


async def _check_unchanged(victims: Victims) -> None:
    given_ = {"ids": wire_ids(random_tokens(64, ROWS, POSITIONS)[0])}
    async with running_driver() as driver:
        for running in (victims.head, victims.tail):
            status = await driver.status(running)
            assert (status.queued, status.queued_bytes) == (0, 0)
            assert status.reply_bytes <= BOUNDS["reply_cache_bytes"]
            assert status.cached_bytes <= STAGE_CONFIG["max_cached_bytes"]
            assert not running.worker.runtime.failure.done()
            module = running.worker.replica.module
            assert all(bool(torch.isfinite(each).all()) for each in module.parameters())
        assert (await driver.forward(victims.head, "e8.s0.r0", given_)).body.num_rows == ROWS
    async with victims.run.driver(victims.keeper_endpoint.peer) as client:
        found = await all_of(client)
    account = await victims.keeper.account()
    counted = account.micro_batches
    assert (counted.leased, counted.done, counted.open) == (15, 15, 0)
    assert len(found) == 15
