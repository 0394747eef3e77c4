"""Checkpoints of a swarm's stages by the time of day (spec P-55), and the model that a moment's files make together.

    with StageCheckpoints(config, run_id, plan, "body-1", who) as checkpoints:
        checkpoints.maybe_save(time.time(), state_fn)           # at every optimizer step
    found = newest_set(directory, run_id, at_us)                # of every stage the newest whole file up to then
    found.files["body-1"].read().state.for_replica()            # what a worker of it goes on from
    whole = assemble(found)                                     # config and state dict of the whole model
    load_initial_state(folder, plan, "head")                    # from a Hugging Face or torchtitan checkpoint

Stages step on their own, so no step number names one state of the swarm; a moment does: the weights that were computing
losses together then. Workers write at the first step behind each multiple of `interval_s` of the wall clock, each by
itself; nobody asks anybody. Guarantees: killed at any moment of a write, what was there before is whole and found;
a file is believed when its digest fits; a set is of one run, one architecture and one cut; rolling back moves files
aside and deletes none; nothing in a file is executed, not even in torchtitan's. The trade-off: stages of a set are up
to one interval (10 minutes) apart where a stage took no step, and clocks are taken to be right: minutes of difference
between machines are minutes between the stages of a set.

What brings torch (1 to 2 s) is imported when it is first named.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
