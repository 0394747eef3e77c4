"""What of the dependencies is optional, and what to install where something is missing.

The base populates, verifies and serves without torch (some 230 MB less, 2 s less to start). What reads shards into
tensors, trains, meets through a DHT, draws curves or charts or evaluates is an extra each, as pyproject.toml
lists them.
"""

from __future__ import annotations

import importlib.util
import sys

EXTRA_OF = {
    "torch": "loader",
    "blake3": "train",
    "fastapi": "train",
    "grpc": "train",
    "safetensors": "train",
    "yaml": "train",
    "hivemind": "dht",
    "lm_eval": "eval",
    "matplotlib": "plot",
    "plotly": "page",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""By the name of a module: the least extra that brings it."""


def with_extra(error: ModuleNotFoundError, *, least: str = "") -> ModuleNotFoundError:
    """The same error, saying what to install if an extra brings the module; else the error itself.

    Args:
        error: of a whole package, not of a module in one that is there.
        least: the extra that the caller needs anyway, where the module's own is `loader`.
    """
    module = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(module)
    if extra is None or importlib.util.find_spec(module) is not None:
        return error
    extra = least if least and extra == "loader" else extra
    text = (
        f"expected the module {module!r}, found it is not installed; run: pip install 'genesis-training[{extra}]' "
        f"(in a checkout: pip install '.[{extra}]')"
    )
    return ModuleNotFoundError(text, name=error.name)


def report_missing_extra(error: ModuleNotFoundError, program: str, *, least: str = "") -> int:
    """Prints which extra brings the missing module, and returns the command's exit code.

    Args:
        error: see `with_extra`.
        program: the command's name.
        least: see `with_extra`.

    Raises:
        ModuleNotFoundError: no extra brings the module.
    """
    explained = with_extra(error, least=least)
    if explained is error:
        raise error
    print(f"{program}: {explained}", file=sys.stderr)  # noqa: T201
    return 1
