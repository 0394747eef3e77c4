"""Strategies between replicas: when they agree, on what, and what an outer step does with the result.

A strategy does not know who the others are: rounds among strangers (`trainer.collective`) have the same protocol, so
every strategy runs unchanged over torchrun ranks and over the internet.
"""
