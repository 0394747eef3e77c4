"""One training node, put together: what `python -m trainer` runs (`starting.run_node`).

Guarantees: a node that is killed goes on as if it had not been, on a CPU bit for bit; what a user can cause is an error
of `trainer.errors` or of the loader. The loop costs under 3 % of a `tiny` step beside the inner step.
"""
