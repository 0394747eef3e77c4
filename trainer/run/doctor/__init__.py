"""`python -m trainer doctor`: what stands in the way of this node's training, one line a check, with its cure.

A check is a small function from what it looks at to a frozen `genesis.doctor.Finding`; `process` makes them in order
and knows which cannot be made once another has failed. `machine`: GPU, memory, disks, limits; `store`: what the run
needs of its store; `peers`: who answers, clocks, releases, terms; `port`: whether others reach this node; `link`: how
fast, and what a round then takes; `membership`: run file and authority.

It goes the way that a start goes: the node's own key, port, store options, and with an authority its invitation, one
use of which it takes as the node's first start would (later starts of the same key need none). It trains nothing,
announces nothing and keeps nothing but the key and the credential.
"""
