"""hivemind: rounds of its GradientAverager, scheduled ahead or not."""

from __future__ import annotations

import time
from typing import Any

import hivemind
import torch
from hivemind.averaging.control import StepControl
from hivemind.compression import Float16Compression, NoCompression
from hivemind.optim.grad_averager import GradientAverager
from hivemind.utils import get_dht_time

from scripts.baselines.trainer.serving import serve

_COMPRESSIONS = {"fp32": NoCompression, "fp16": Float16Compression}
_ROUND_S = 60.0
_MATCHMAKING_S = 5.0
"""Its default; it matters only to those who are one too few."""
_TOKENS = 1000


class HivemindMember:
    """One peer."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._control: StepControl | None = None

    def join(self, initial_peers: list[str]) -> dict[str, Any]:
        """Starts the DHT node; the addresses others reach it at."""
        self._dht = hivemind.DHT(
            initial_peers=initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_auto_relay=False, start=True
        )
        return {"addresses": [str(address) for address in self._dht.get_visible_maddrs()]}

    def open(self, values: int, compression: str, group_size: int) -> dict[str, Any]:
        """Starts an averager, which is told how many to expect, so that it need not wait for more."""
        self._parameter = torch.nn.Parameter(torch.zeros(values))
        self._averager = GradientAverager(
            [self._parameter],
            dht=self._dht,
            prefix=f"grad-{compression}",
            start=True,
            target_group_size=group_size,
            min_matchmaking_time=_MATCHMAKING_S,
            request_timeout=_MATCHMAKING_S / 2,
            compression=_COMPRESSIONS[compression](),
            allow_state_sharing=False,
        )
        return {}

    def prepare(self, seed: int, ahead_s: float) -> dict[str, Any]:
        """Adds up gradients; with ``ahead_s`` a group is looked for in advance, for so long from now."""
        generator = torch.Generator().manual_seed(seed)
        self._parameter.grad = torch.randn(self._parameter.numel(), generator=generator).mul_(1e-3)
        self._averager.accumulate_grads_(batch_size=_TOKENS)
        self._control = None
        if ahead_s:
            scheduled_s = get_dht_time() + ahead_s
            self._control = self._averager.schedule_step(scheduled_time=scheduled_s, timeout=_ROUND_S)
        return {}

    def round(self) -> dict[str, Any]:
        """Averages what was added up; no optimizer follows."""
        began_s = time.monotonic()
        gathered = self._averager.step(control=self._control, timeout=_ROUND_S)
        with self._averager.use_averaged_gradients():
            until_s = time.monotonic()
        return {"from_s": began_s, "until_s": until_s, "members": len(gathered or ())}


if __name__ == "__main__":
    member = HivemindMember()
    serve({"join": member.join, "open": member.open, "prepare": member.prepare, "round": member.round})
