"""Parts of scripts/bench_swarm.py: one measurement a module, each a pure function or a process of its own."""
