"""Fewer bytes between nodes: codecs of vectors (`vectors`) and of links between stages (`activations`)."""
