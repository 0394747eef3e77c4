"""Engines: the ways a vector is aggregated over the nodes of a run, behind one protocol.

``collective.py`` is the protocol and what crosses it. ``local.py`` is a node alone, ``torch_collective.py`` a process
group inside a trusted cluster, ``ddp.py`` the every-step baseline both are compared with. The collective among
strangers over the internet is a room of its own, ``trainer/collective``.
"""
