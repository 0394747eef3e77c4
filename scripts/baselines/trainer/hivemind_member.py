"""hivemind: rounds of its DecentralizedAverager, and training with its Optimizer.

Its processes are forked, so a clock put around its all-reduce before the fork is read here afterwards, through shared
memory: that is how a round is told from the looking for a group before it.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import hivemind
import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.compression import Float16Compression, NoCompression, Uniform8BitQuantization

from scripts.baselines.trainer.serving import serve
from scripts.baselines.trainer.workload import Workload, plain_optimizer

_COMPRESSIONS = {"fp32": NoCompression, "fp16": Float16Compression, "int8": Uniform8BitQuantization}
_ROUND_S = 60.0
_AVERAGING_S = 30.0
_MEET_S = 15.0
_MATCHMAKING_S = 3.0
"""What its guide names for small local runs; the default is 15."""

_all_reduce_s = multiprocessing.Value("d", 0.0)
_aggregate = DecentralizedAverager._aggregate_with_group


async def _timed_aggregate(*arguments: Any, **options: Any) -> Any:
    began_s = time.monotonic()
    try:
        return await _aggregate(*arguments, **options)
    finally:
        _all_reduce_s.value = time.monotonic() - began_s


DecentralizedAverager._aggregate_with_group = _timed_aggregate


class HivemindMember:
    """One peer."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._averagers: dict[str, DecentralizedAverager] = {}
        self._optimizer: hivemind.Optimizer | None = None

    def join(self, host: str, initial_peers: list[str]) -> dict[str, Any]:
        """Starts the DHT node; the addresses others reach it at."""
        self._dht = hivemind.DHT(
            initial_peers=initial_peers, host_maddrs=[f"/ip4/{host}/tcp/0"], use_auto_relay=False, start=True
        )
        return {"addresses": [str(address) for address in self._dht.get_visible_maddrs()]}

    def open(
        self, name: str, values: int, compression: str, group_size: int | None, matchmaking_s: float
    ) -> dict[str, Any]:
        """Starts an averager; ``group_size`` is how many it waits for, without waiting the whole matchmaking time."""
        self._averagers[name] = DecentralizedAverager(
            [torch.zeros(values)],
            self._dht,
            start=True,
            prefix=name,
            target_group_size=group_size,
            min_matchmaking_time=matchmaking_s,
            request_timeout=min(3.0, matchmaking_s / 2),
            compression=_COMPRESSIONS[compression](),
            allow_state_sharing=False,
        )
        return {}

    def round(self, name: str, seed: int) -> dict[str, Any]:
        """One round, and the part of it in which numbers move."""
        averager = self._averagers[name]
        with averager.get_tensors() as tensors:
            tensors[0].copy_(torch.randn(tensors[0].numel(), generator=torch.Generator().manual_seed(seed)))
        began_s = time.monotonic()
        gathered = averager.step(timeout=_ROUND_S)
        until_s = time.monotonic()
        members = len(gathered or ())
        return {"from_s": began_s, "until_s": until_s, "members": members, "all_reduce_s": _all_reduce_s.value}

    def optimize(self, workload: dict[str, Any], rank: int, members: int, run: str, every: int) -> dict[str, Any]:
        """Makes its Optimizer: gradients averaged every step (1), or local steps and an averaging every so many."""
        made = Workload(**workload)
        self._workload = made
        self._model = made.model()
        self._batches = made.batches(rank, members)
        self._optimizer = hivemind.Optimizer(
            dht=self._dht,
            run_id=run,
            target_batch_size=members * made.batch_size * every,
            batch_size_per_step=made.batch_size,
            params=self._model.parameters(),
            optimizer=plain_optimizer,
            use_local_updates=every > 1,
            delay_state_averaging=False,
            matchmaking_time=_MATCHMAKING_S,
            averaging_timeout=_AVERAGING_S,
            averager_opts={"target_group_size": members, "request_timeout": 1.0},
        )
        tracker, until_s = self._optimizer.tracker, time.monotonic() + _MEET_S
        while tracker.global_progress.num_peers < members and time.monotonic() < until_s:
            # Who has reported no sample is not there for the others, and each would train on alone.
            tracker.report_local_progress(0, 1, update_global_samples=False)
            time.sleep(0.2)
        return {"peers": tracker.global_progress.num_peers}

    def train(self, epochs: int, limit_s: float) -> dict[str, Any]:
        """Trains until so many of its epochs are over, or the time is up."""
        optimizer = self._optimizer
        if optimizer is None:
            raise RuntimeError("expected optimize before train")
        began_s, first, steps, longest_s = time.monotonic(), optimizer.local_epoch, 0, 0.0
        while optimizer.local_epoch < first + epochs and time.monotonic() < began_s + limit_s:
            batch = next(self._batches)
            optimizer.zero_grad()
            loss = self._model(batch["input_ids"], batch["labels"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            stepped_s = time.monotonic()
            optimizer.step()
            longest_s = max(longest_s, time.monotonic() - stepped_s)
            steps += 1
        return {
            "tokens": steps * self._workload.tokens_per_step,
            "seconds": time.monotonic() - began_s,
            "longest_s": longest_s,
            "epochs": optimizer.local_epoch - first,
            "peers": optimizer.tracker.global_progress.num_peers,
        }

    def finish(self) -> dict[str, Any]:
        """Ends the Optimizer."""
        if self._optimizer is not None:
            self._optimizer.shutdown()
            self._optimizer = None
        return {}

    def close(self, name: str) -> dict[str, Any]:
        """Ends an averager."""
        self._averagers.pop(name).shutdown()
        return {}


if __name__ == "__main__":
    member = HivemindMember()
    serve(
        {
            "join": member.join,
            "open": member.open,
            "round": member.round,
            "close": member.close,
            "optimize": member.optimize,
            "train": member.train,
            "finish": member.finish,
        }
    )
