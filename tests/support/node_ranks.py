"""Two ranks at the end of their steps, of which one was asked to stop; and what ranks decide beside a round."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from trainer.collective import CollectiveConfig
from trainer.errors import CheckpointMismatchError
from trainer.model.choice import ModelChoice
from trainer.outer.engine.collective import Contribution
from trainer.outer.engine.strategy import OuterResult
from trainer.outer.engine.torch_collective import RankedBytes
from trainer.run.config import RunConfig
from trainer.run.node.cluster import Ranks, cluster_collective
from trainer.run.node.origin import Origin
from trainer.run.node.starting import _check_ranks
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import Node

WAIT_S = 20.0
DIGESTS = [("a" * 64, "a" * 64), ("", ""), ("a" * 64, "b" * 64), ("b" * 64, "a" * 64), ("", "a" * 64), ("a" * 64, "")]
"""Of first weights, at rank 0 and at rank 1: the same twice, and then others."""


class _Unsaved(Node):
    def save(self, *, wait: bool = False) -> None: ...


def _ranks(rank: int) -> Ranks:
    return Ranks(rank=rank, control=RankedBytes(dist.new_group(backend="gloo")))


def end_of_steps(rank: int, num_ranks: int) -> dict[str, list[bool]]:
    """Whether each rank waited for its round in the background, by who was asked to stop just then."""
    ranks = _ranks(rank)
    return {"drained": [_drains(ranks, asked=rank in asked) for asked in ((), (1,), (0, 1))]}


def _drains(ranks: Ranks, *, asked: bool) -> bool:
    drained: list[bool] = []
    stop = StopRequest()
    if asked:
        stop.ask()

    def drain() -> tuple[OuterResult, ...]:
        drained.append(True)
        return ()

    replica = SimpleNamespace(
        inner=SimpleNamespace(step_index=5),
        drain=drain,
        diloco=None,
        gradients=None,
    )
    parts: dict[str, Any] = dict.fromkeys(("dataset", "batches", "store", "network", "evaluator"))
    parts["dataset"] = SimpleNamespace(shards=())
    parts["display"] = SimpleNamespace(speed_from=lambda _: None)
    parts["watch"] = SimpleNamespace(
        end_step=lambda _: None, work=SimpleNamespace(withdrew=lambda *_: None), set_shards=lambda _: None
    )
    parts["checkpointer"] = SimpleNamespace(path="nowhere")
    config = RunConfig(node_id="pod", engine="torch", max_steps=5)
    _Unsaved(config=config, ranks=ranks, replica=cast(Any, replica), stop=stop, **parts).run()
    return bool(drained)


def first_weights(rank: int, num_ranks: int) -> dict[str, list[bool]]:
    """Whether each rank refuses the digests that the ranks begin with; a rank that asked less would be waited for."""
    ranks, refused = _ranks(rank), []
    for digests in DIGESTS:
        try:
            _check_ranks(ranks, Origin(choice=ModelChoice(init_digest=digests[rank])))
            refused.append(False)
        except CheckpointMismatchError:
            refused.append(True)
    return {"refused": refused}


def beside_a_round(rank: int, num_ranks: int) -> dict[str, int]:
    """A round in the background exchanges other bytes while the ranks agree on a number, in another order."""
    ranks, round_ranks = _ranks(rank), RankedBytes()
    gathered: list[int] = []

    def background() -> None:
        gathered.extend(len(part) for part in round_ranks.gather(bytes(100), 100))

    exchange = threading.Thread(target=background, daemon=True)
    if rank == 0:
        exchange.start()
        exchange.join(0.2)  # The other rank comes to it later: it waits.
    least = ranks.least(7 + rank)
    if rank == 1:
        exchange.start()
    exchange.join(WAIT_S)
    return {"least": least, "gathered": sum(gathered)}


def weights_under_a_cap(rank: int, num_ranks: int) -> list[float]:
    """What ranks count for that did 4, 400 ... batches, where the run's cap lets nobody count more than the median."""
    config = RunConfig(node_id="pod", engine="torch", collective=CollectiveConfig(max_weight_ratio=1.0))
    vectors = {"vector": torch.ones(64), "reference": torch.zeros(64)}
    contribution = Contribution(round_index=0, num_batches=4 * 100**rank, age_s=0.0, state_digest="", **vectors)
    return list(cluster_collective(config).reduce(contribution).report.weights)
