"""Checkpoints of a swarm's stages by the time of day (spec P-55), and the model that the files of a moment make.

    with StageCheckpoints(config, run_id, plan, "body-1", who) as checkpoints:
        checkpoints.maybe_save(time.time(), state_fn)           # at every optimizer step
    found = newest_set(directory, run_id, at_us)                # of every stage the newest whole file up to then
    found.files["body-1"].read().state.for_replica()            # what a worker of it resumes from
    whole = assemble(found)                                     # config and state dict of the whole model
    load_initial_state(folder, plan, "head")                    # from a Hugging Face or torchtitan checkpoint

Stages step on their own, so no step number identifies a state of the swarm; a moment does. Each worker writes at the
first step after each multiple of `interval_s` of the wall clock, without asking others. So stages of a set are up to
one interval (10 minutes) apart, plus what the machines' clocks differ. Nothing in a file is executed, not even in
torchtitan's.

torch (1 to 2 s) is imported when it is first needed.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
