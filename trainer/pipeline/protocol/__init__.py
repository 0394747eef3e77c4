"""What all sides of a pipeline share: the names of micro-batches, the messages about them, tensors beside these.

    MicroBatchId(epoch=0, shard=17, row=4096)                # the same name for the same rows, for ever
    await ask_tensors(endpoint, worker, FORWARD, ask, {"input": hidden}, StageAnswer, ...)

Guarantees: messages are strict and bounded, tensors beside them are of the announced type and shape, nothing is
unpickled. The trade-off: activations go through the host's memory and one event loop a process, some 500 MB/s, which no
link between strangers reaches; inside a data centre `torch.distributed.pipelining` is the better tool.
"""
