"""Workers of ``body-1`` that answer with shapes, numbers and types that no tensor, counter or float can have.

Each is asked until it is banned, so every one has a key of its own: a few at a time, `_LIARS` in all. What they are
asked they answer at once, under a valid signature, and spelt as JSON has it or, for NaN and infinities, has it not.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import secrets
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel, ConfigDict

from tests.support.attacks import Target
from trainer.model.config import stage_names
from trainer.network.discovery import Announcement, open_discovery
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.network.rpc import Endpoint, Identity, Reply, Request, envelope
from trainer.network.rpc.stream import Stream
from trainer.pipeline.protocol import messages
from trainer.pipeline.worker.status import STATUS
from trainer.run.config import RunConfig, from_mapping, read_yaml
from trainer.run.swarm.shape import SwarmShape, shape_of

NOT_ONLY_JSON = SimpleNamespace(dumps=lambda value, **how: json.dumps(value, **{**how, "allow_nan": True}))
"""In the place of `json` where frames are sealed: what a liar signs is its own affair, NaN and infinities too."""

_STAGE = "body-1"
_LIARS, _AT_ONCE = 12, 3
_METHODS = (messages.FORWARD, messages.BACKWARD, messages.TAIL, messages.CHAIN, messages.EVALUATE)
_SHAPES: list[Any] = [[0, 2**47, 2**47], [2**47, 0, 2**47], [0, *[2**31] * 4], [2**24] * 16, [1] * 17, []]
_SHAPES += [None, "shape", *([value] for value in (2**63, 2**63 - 1, -1, -(2**63), 1.5, math.nan))]
_TYPES: list[Any] = ["float64", "int64", "bool", "complex64", "object", 7, None]
_NUMBERS: list[Any] = [2**53, 2**63, 2**63 - 1, -1, -(2**63), 1e308, math.nan, math.inf, -math.inf, None, "1", True]


class _Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


class Liar:
    """One worker; told in ``said`` what it lies about."""

    def __init__(self, seed: int, said: Counter[str]) -> None:
        self.incarnation = secrets.token_hex(8)
        self._random = random.Random(seed)
        self._said = said

    def register(self, endpoint: Endpoint) -> None:
        for method in _METHODS:
            endpoint.register(method, _Anything, self._answer)
            endpoint.register_stream(f"{method}/stream", _Anything, self._answer_stream)
        endpoint.register(messages.APPLIED, _Anything, self._applied)
        endpoint.register(STATUS, _Anything, self._status)

    async def _answer(self, request: Request[_Anything]) -> Reply[_Anything]:
        body, payload = self._lie(request.body.model_dump())
        return Reply(_Anything(**body), payload)

    async def _answer_stream(self, request: Request[_Anything], stream: Stream) -> None:
        body, payload = self._lie(request.body.model_dump())
        await stream.send(0, json.dumps(body).encode())
        await stream.send(1, payload)

    async def _applied(self, request: Request[_Anything]) -> Reply[_Anything]:
        counted_as = {"incarnation": self.incarnation, "applied_number": self._any(_NUMBERS), "shared_through": 0}
        asked = request.body.model_dump()["micro_batches"]
        return Reply(_Anything(incarnation=self.incarnation, micro_batches=asked, counted_as=counted_as))

    async def _status(self, _: Request[_Anything]) -> Reply[_Anything]:
        return Reply(_Anything(stage=_STAGE, version=self._any(_NUMBERS), busy=math.nan))

    def _lie(self, ask: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """An answer that is true but for one thing."""
        rows, positions = int(ask["num_rows"]), int(ask["num_positions"])
        width = max([spec["shape"][-1] for spec in ask["tensors"] if len(spec["shape"]) == 3], default=1)
        spec: dict[str, Any] = {"name": "activation", "dtype": "float32", "shape": [rows, positions, width]}
        body = {"incarnation": self.incarnation, "version": 0, "num_rows": rows, "compute_s": 0.0, "loss_sum": None}
        payload = bytes(4 * rows * positions * width)
        what = self._any(["shape", "shape", "type", "number", "values", "payload"])
        self._said[what] += 1
        match what:
            case "shape":
                spec["shape"], payload = self._any(_SHAPES), b""
            case "type":
                spec["dtype"] = self._any(_TYPES)
            case "number":
                body[self._any(["version", "num_rows", "compute_s", "queue_s", "applied_number", "loss_sum"])] = (
                    self._any(_NUMBERS)
                )
            case "values":
                payload = b"\xff" * len(payload)
            case "payload":
                payload = payload[: self._random.randrange(len(payload))]
        return {**body, "tensors": [spec]}, payload

    def _any(self, values: list[Any]) -> Any:
        return self._random.choice(values)


async def shapes(target: Target) -> None:
    """Lies under one key after another."""
    vars(envelope)["json"] = NOT_ONLY_JSON
    begun_s = time.monotonic()
    config = _config(target)
    shape, said, turns = shape_of(config), Counter[str](), asyncio.Semaphore(_AT_ONCE)
    waves = _LIARS // _AT_ONCE

    async def live(number: int) -> None:
        async with turns:
            ends_s = begun_s + target.seconds * (number // _AT_ONCE + 1) / waves
            await _live(config, shape, Liar(target.seed + number, said), number, ends_s)

    await asyncio.gather(*(live(number) for number in range(_LIARS)))
    sys.stdout.write(json.dumps(said) + "\n")


async def _live(config: RunConfig, shape: SwarmShape, liar: Liar, number: int, ends_s: float) -> None:
    endpoint = Endpoint(Identity.create(), config.run_id, config.rpc)
    liar.register(endpoint)
    await endpoint.start()
    discovery = open_discovery(endpoint, config.discovery, stage_names(config.swarm.num_stages))
    await discovery.start()
    try:
        while (left_s := ends_s - time.monotonic()) > 0:
            await discovery.announce(
                Announcement(
                    peer_id=endpoint.peer_id,
                    node_id=f"liar-{number}",
                    run_id=config.run_id,
                    address=endpoint.address,
                    certificate_pem=(endpoint.certificate or b"").decode(),
                    terms_digest=shape.terms(_STAGE).digest(),
                    stage=StageReport(
                        uid=str(StageUid(_STAGE, 600 + number)),
                        incarnation=liar.incarnation,
                        status="serving",
                        rows_per_s=1e6,
                    ),
                )
            )
            await asyncio.sleep(min(left_s, config.discovery.announce_interval_s))
    finally:
        await discovery.close()
        await endpoint.stop()


def _config(target: Target) -> RunConfig:
    settings = read_yaml(Path(target.run_file))
    settings["node_id"] = "liar"
    settings["discovery"] = {**settings.get("discovery", {}), "initial_peers": sorted(target.addresses.values())}
    config = from_mapping(RunConfig, settings)
    rpc = replace(config.rpc, host=target.source_host, port=0, public_address="", stop_grace_s=0.1)
    return replace(config, rpc=rpc)
