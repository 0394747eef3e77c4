"""What all sides of a pipeline share: names of micro-batches, messages about them, tensors beside these."""
