"""The parts of `scripts/bench_trainer.py`: members in processes and namespaces of their own, one module a question."""
