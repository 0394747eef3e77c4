"""`python -m trainer` of a node that lies: its rounds get minus ten times its pseudo-gradient, of 1e12 batches."""

from __future__ import annotations

import sys
from dataclasses import replace

from trainer.cli.app import run
from trainer.collective import PeerCollective
from trainer.engine.collective import Contribution, RoundResult

FACTOR = -10.0


class _Lying(PeerCollective):
    def reduce(self, contribution: Contribution) -> RoundResult:
        return super().reduce(replace(contribution, vector=FACTOR * contribution.vector, num_batches=1_000_000_000_000))


if __name__ == "__main__":
    import trainer.node.network

    trainer.node.network.PeerCollective = _Lying  # type: ignore[misc]
    sys.exit(run(sys.argv[1:]))
