"""A swarm as processes: what a worker, a driver and `swarm up` do when they start, join, fall behind, leave or die."""
