"""From a store's address to verified ids.

`mirrors` fetches objects, `manifest_keeper` decides which manifest is trusted, `limits` refuses impossible sizes and
names, `catalog` has the entry of every shard, `known_store` remembers the JSON files on this machine, and `shards`
turns an entry into a mapped file, also ahead. Guarantee: the manifest vouches for the sha256 of everything that leaves
here, and, if a key is pinned, its signature for the manifest.
"""
