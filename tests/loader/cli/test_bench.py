"""That the figures of ``bench`` are of what was read; not how large they are."""

import pytest

from tests.support.small_store import SHARD_TOKENS


@pytest.mark.slow
def test_figures_are_of_this_store_and_cache(http_loader, here):
    options = ("--node-id", "n", "--seq-len", "50", "--batch-size", "4", "--batches", "25")
    cold = http_loader.json("bench", *options)
    windows_per_shard = (SHARD_TOKENS - 1) // 50
    assert (cold["batches"], cold["tokens"]) == (25, 25 * 4 * 50)
    assert cold["shards_opened"] == -(-25 * 4 // windows_per_shard)
    assert cold["received_bytes"] > 0 and cold["shards_from_cache"] == 0
    assert cold["first_batch_s"] > 0 and cold["opened_s"] > 0 and cold["stalled_s"] >= 0
    assert cold["of_slicing"] > 0 and cold["of_copying"] > 0 and cold["tokens_per_s"] > 0
    warm, _ = here("bench", *options, "--store", http_loader.store)
    assert [line.split("  ")[0] for line in warm.splitlines()][:4] == [
        "first batch",
        "stream",
        "shards",
        "reading alone",
    ]
    assert "3 of them from the cache; 0 fetched, " in warm
