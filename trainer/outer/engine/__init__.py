"""Engines: the ways a vector is aggregated over the nodes of a run, behind one protocol.

``collective.py`` is the protocol, its values, and a node alone; ``strategy.py`` what the training loop sees;
``torch_collective.py`` a process group inside a trusted cluster; ``ddp.py`` the every-step baseline. The collective
among strangers over the internet is ``trainer/collective``.
"""
