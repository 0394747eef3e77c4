"""Which windows of which shards make up a node's batches: pure arithmetic, no store, no torch.

`assignment` says which shards are a node's, `permutation` in which order a shard's windows come, `schedule` which of
them make up batch k, `plateau` when to leave a shard early. All of it is a function of a few integers and the node's
name, so a peer with the same numbers finds the same batches, and a position is small enough for any checkpoint.
"""
