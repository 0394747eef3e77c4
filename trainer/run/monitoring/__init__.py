"""A monitor as a process: looks at a run from outside, keeps what it saw, and shows it (`python -m trainer monitor`).

It joins nothing: it announces nothing, is a member of no round, takes no shards and serves no state.
"""
