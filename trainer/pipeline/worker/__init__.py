"""The service around a stage: what a worker answers to drivers, when it computes what, and when its stage steps.

    worker = StageWorker(endpoint, plan, "body-1", replica, codec, WorkerConfig(), target_tokens=8192, peers=peers)
    worker.register(); await endpoint.start(); worker.start()
    await worker.run()              # until it is cancelled, or cannot go on
    await worker.stop()

Guarantees: a worker counts a micro-batch at most once, however often and by whatever connections it is sent; what is
answered as counted is counted; nothing is counted later than the request allows, on a clock that goes on while the
process is stopped. What drivers can make a worker hold is bounded, and a driver that floods delays only itself. One
thread computes, two convert tensors. The trade-off: one device a worker; two devices are two workers.

Tensors beside the messages of `trainer.pipeline.protocol.messages`, by name (`trainer.pipeline.protocol.wire`):

| tensor         | form                   | in                                                                      |
|----------------|------------------------|-------------------------------------------------------------------------|
| ``ids``        | int32[rows, positions] | all asks to the head; to others where the codec needs them              |
| ``activation`` | the codec's tensors    | asks to body and tail; answers of `stage/forward`                       |
| ``gradient``   | the codec's tensors    | asks of `stage/backward`; answers of backward, tail, chain (head: none) |
| ``labels``     | int32[rows, positions] | `stage/tail`, `stage/chain`, `stage/evaluate` of the tail               |

So a driver passes on what it gets, under the name it got it (``activation.scales`` included), and needs no codec.
Backward may leave out ``activation`` (head: ``ids``) where it asks the worker that ran the forward pass; the refusal
``no-input`` asks for it.

| refused as         | meaning                                                                                       |
|--------------------|-----------------------------------------------------------------------------------------------|
| ``busy``           | no room, or the micro-batch is under way otherwise or given away; nothing counted; try again  |
| ``malformed``      | not what this stage takes; ``nonfinite``: values that are not finite; nothing counted         |
| ``stage``          | another stage is here; nothing counted                                                        |
| ``stopping``       | this worker joins, leaves or stops; nothing counted                                           |
| ``stale``          | the forward pass is too many steps off; ``no-input``: send the input again; nothing counted   |
| ``expired``        | too late, or given up; nothing counted                                                        |
| ``already-applied``| counted, and the answer is not kept any more, or could not be made                            |
| ``tainted``        | counted too late: all that was not stepped with is dropped, and this is another incarnation   |
| ``not-a-driver``   | only the run's drivers may have micro-batches computed, counted or refused; ask again later   |
| ``hop``            | chain: no clear outcome at a later stage; ask again the same way                              |
| ``hop-…``          | chain: refused there, for that reason; nothing counted here; stage and key come first in text |
| ``partly``         | chain: counted behind a stage and not in it; asking again would not help                      |
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
