"""A process that takes its first batch from `GenesisDataset` and says when it got how far.

``python first_batch.py STORE CACHE NODE_ID [BATCHES [SHARDS]]`` prints one line of JSON: monotonic seconds (the
machine's clock, so that whoever started it can subtract), bytes received at the first batch, and batches taken.
"""

import json
import logging
import sys
import time
from itertools import islice


def main() -> None:
    """Takes the batch; then the others, if any are asked for."""
    entered = time.monotonic()
    from loader import GenesisDataset

    imported = time.monotonic()
    store, cache, node_id, batches, shards = [*sys.argv[1:], *("1", "10")[len(sys.argv) - 4 :]]
    logging.getLogger("loader").setLevel(logging.ERROR)
    dataset = GenesisDataset(store, node_id, cache_dir=cache, count=int(shards))
    opened = time.monotonic()
    stream = iter(dataset)
    shape = list(next(stream)["input_ids"].shape)
    first_batch = time.monotonic()
    received_bytes = dataset.received_bytes
    taken = 1 + sum(1 for _ in islice(stream, int(batches) - 1))
    marks = {"entered": entered, "imported": imported, "opened": opened, "first_batch": first_batch}
    print(json.dumps({**marks, "received_bytes": received_bytes, "shape": shape, "taken": taken}))


if __name__ == "__main__":
    main()
