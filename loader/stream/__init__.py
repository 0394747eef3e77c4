"""Which windows of which shards make up a node's batches: pure arithmetic, no store, no torch.

`assignment` chooses a node's shards, `windows` has and orders a shard's windows, `schedule` takes those of batch k, and
`plateau` decides when to leave a shard early. All of it is a function of a few integers and the node's name, so a peer
with the same numbers finds the same batches, and a position is small enough for any checkpoint.
"""
