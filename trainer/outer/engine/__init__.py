"""Engines: the ways a vector is aggregated over the nodes of a run, behind one protocol."""
