"""`python -m trainer` of a node that lies: its rounds get minus ten times its pseudo-gradient, of 1e12 batches."""

from __future__ import annotations

import sys
from dataclasses import replace

from trainer.collective import PeerCollective
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.run.cli.app import run

FACTOR = -10.0


class _Lying(PeerCollective):
    def reduce(self, contribution: Contribution) -> RoundResult:
        return super().reduce(replace(contribution, vector=FACTOR * contribution.vector, num_batches=1_000_000_000_000))


if __name__ == "__main__":
    import trainer.run.node.network

    trainer.run.node.network.PeerCollective = _Lying  # type: ignore[misc]
    sys.exit(run(sys.argv[1:]))
