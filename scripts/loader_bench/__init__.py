"""The parts of `scripts/bench_loader.py`: a workspace of cached data and environments, and one module a question."""
