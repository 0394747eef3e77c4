"""From a store's address to verified ids.

`mirrors` asks the stores, `manifest_keeper` says which manifest may be believed, `limits` refuses what no honest store
names, `catalog` knows every shard the manifest vouches for, `shards` turns one into a mapped file, and `prefetch` does
that for the next shard while this one is read. Guarantee: nothing leaves here whose sha256 is not vouched for by the
manifest, and, where a key is pinned, by its signature.
"""
