"""`GenesisDataset` as a contestant: as a user iterates over it, with or without torch's DataLoader around it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from contestant import run
from torch.utils.data import DataLoader

from loader import GenesisDataset

if TYPE_CHECKING:
    from contestant import Pass


def prepare(options: dict[str, Any]) -> Callable[[], Pass]:
    """Opens the store; a pass is ``batches`` batches, and the next pass goes on where it ended.

    ``workers``: None iterates over the dataset itself, a number puts it into a DataLoader, whose workers begin anew
    with every pass.
    """
    logging.getLogger("loader").setLevel(logging.ERROR)
    dataset = GenesisDataset(
        options["data"],
        node_id=options["node_id"],
        seq_len=options["seq_len"],
        batch_size=options["batch_size"],
        count=options["count"],
        cache_dir=options["cache_dir"],
    )
    workers = options.get("workers")
    batches = iter(dataset if workers is None else DataLoader(dataset, batch_size=None, num_workers=0))

    def one_pass() -> Pass:
        source = iter(DataLoader(dataset, batch_size=None, num_workers=workers)) if workers else batches
        for batch in islice(source, options["batches"]):
            yield batch["input_ids"], batch["labels"]

    return one_pass


if __name__ == "__main__":
    run(prepare)
