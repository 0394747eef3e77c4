"""Strategies between replicas: when they agree, on what, and what an outer step does with the result.

`engine` is the protocol (`Collective`, `OuterStrategy`) with its forms over torch.distributed and in one process;
`diloco` makes outer steps on pseudo-gradients; `sparta` averages a slice of the parameters in the background.

A strategy does not know who the others are: rounds among strangers (`trainer.collective`) have the same protocol, so
every strategy runs unchanged over torchrun ranks and over the internet.
"""

from __future__ import annotations

__all__: list[str] = []
