"""The least a process can do for a first batch: import torch, map a uint16 file, widen one window of it.

``python memmap_window.py TOKENS`` prints one line of JSON, monotonic seconds as `first_batch.py` does.
"""

import json
import sys
import time


def main() -> None:
    """Reads 8 x 1024 ids and their labels."""
    entered = time.monotonic()
    import numpy as np
    import torch

    imported = time.monotonic()
    tokens = np.memmap(sys.argv[1], dtype=np.uint16, mode="r")
    window = torch.from_numpy(tokens[: 8 * 1024 + 1].astype(np.int64))
    shape = list(window[:-1].reshape(8, 1024).shape)
    window[1:].reshape(8, 1024)
    first_batch = time.monotonic()
    print(json.dumps({"entered": entered, "imported": imported, "first_batch": first_batch, "shape": shape}))


if __name__ == "__main__":
    main()
