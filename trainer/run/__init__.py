"""Processes: what `python -m trainer` starts, put together from the packages beside this one.

`cli` reads command lines, `config` run files; `node` is a training node on whole models; `swarm` is a worker that holds
a stage, a driver that sends micro-batches through them, and `swarm up`, which starts many of both.
"""
