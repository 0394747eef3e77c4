"""Engines: the ways a vector is aggregated over the nodes of a run, behind one protocol.

``collective.py`` is the protocol, what crosses it, and a node alone; ``torch_collective.py`` a process group inside a
trusted cluster, ``ddp.py`` the every-step baseline both are compared with. The collective among strangers over the
internet is a package of its own, ``trainer/collective``.
"""
