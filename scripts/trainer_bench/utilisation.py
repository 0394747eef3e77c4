"""How much of the time a node trains, over 100 Mbit/s, with the shape of 125M: plain, int8, and overlapped.

Two cores cannot compute four times 125M, so the inner steps are slept: what a node waits for is measured, what it
computes is assumed. The model is a small one, and a step is as much shorter as the model is smaller than 125M, so that
bytes of a round over seconds of 500 steps are those of 125M:

    step = tokens a step x FLOPs a token of 125M / (peak FLOPs of the GPU x share reached) x bytes / bytes of 125M

The times that do not shrink with the model (agreement, vote) weigh some hundred times as much here as they would. For
the variants that wait, the tokens a step at which 0.9 is reached follow from the round's time, and are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from scripts.trainer_bench.crew import crew, load_average
from scripts.trainer_bench.links import open_nodes, train, utilisation
from scripts.trainer_bench.network import Links, can_make_networks, slow_links
from scripts.trainer_bench.workspace import VOCAB_ROWS, make_store, workload_of

ASKED = 0.9
_SHAPE = "125m"
_SHAPE_ROWS = 32_768
_SHAPE_SEQ_LEN = 1024
_SMALL = "tiny"
_INNER_STEPS = 500
_VARIANTS: dict[str, tuple[str, dict[str, int]]] = {
    "fp32": ("fp32", {}),
    "int8": ("int8", {}),
    "fp32, 4 fragments, overlapped": ("fp32", {"num_fragments": 4, "overlap_steps": 100}),
    "int8, 4 fragments, overlapped": ("int8", {"num_fragments": 4, "overlap_steps": 100}),
}


def bench_utilisation(arguments: argparse.Namespace) -> dict[str, Any]:
    """All variants, one after the other."""
    reason = can_make_networks()
    if reason:
        print(f"utilisation: {reason}")
        return {"skipped": reason}
    report: dict[str, Any] = {"load": [load_average()], **assumption(arguments)}
    workload = workload_of(make_store(arguments), preset=_SMALL, batch_size=1, seq_len=1)
    with slow_links(arguments.members) as links, crew("genesis", arguments.members, links.prefixes) as genesis:
        report["variants"] = dict(variants(links, genesis, workload, report, arguments))
    report["load"].append(load_average())
    print(as_text(report, arguments))
    return report


def assumption(arguments: argparse.Namespace) -> dict[str, float]:
    """What a step of 125M would take, and what that makes of it here."""
    from trainer.model import flops_per_token, num_parameters, preset

    shape = preset(_SHAPE, _SHAPE_ROWS)
    reached = arguments.gpu_tflops * 1e12 * arguments.gpu_share
    step_s = arguments.tokens_per_step * flops_per_token(shape, _SHAPE_SEQ_LEN) / reached
    scale = num_parameters(preset(_SMALL, VOCAB_ROWS)) / num_parameters(shape)
    return {"step_s": step_s, "scale": scale, "slept_s": step_s * scale, "parameters": num_parameters(shape)}


def variants(
    links: Links, genesis: Any, workload: dict[str, Any], report: dict[str, Any], arguments: argparse.Namespace
) -> Iterator[tuple[str, dict[str, float]]]:
    """One cycle of 500 steps with its rounds of each."""
    for name, (compression, fragments) in _VARIANTS.items():
        open_nodes(genesis, links, compression)
        links.set_rate(arguments.utilisation_mbit)
        diloco = {"inner_steps": _INNER_STEPS, **fragments}
        answers = train(genesis, workload, steps=_INNER_STEPS, diloco=diloco, sleep_s=report["slept_s"])
        genesis.all("close", name="node")
        found = {
            "utilisation": utilisation(answers),
            "round_s": max(max(each["rounds_s"]) for each in answers),
            "waited_s": max(each["waiting_s"] for each in answers),
            "passes": max(max(each["passes"]) for each in answers),
        }
        if not fragments:
            enough_s = ASKED / (1 - ASKED) * found["waited_s"] / _INNER_STEPS / report["scale"]
            found["tokens_for_asked"] = arguments.tokens_per_step * enough_s / report["step_s"]
        yield name, found


def as_text(report: dict[str, Any], arguments: argparse.Namespace) -> str:
    """The report for people."""
    gpu = f"{arguments.gpu_tflops:g} TFLOP/s at {arguments.gpu_share:.0%}"
    lines = [
        f"utilisation over {arguments.utilisation_mbit:g} Mbit/s, {arguments.members} members, 125M, a round in"
        f" {_INNER_STEPS} steps   ({' to '.join(report['load'])})",
        f"assumed: {arguments.tokens_per_step:,} tokens a step on a GPU of {gpu} = {report['step_s']:.2f} s;"
        f" here 1/{1 / report['scale']:.0f} of it and of the bytes",
        f"  {'':30} {'utilisation':>11} {'round, s':>9} {'waited, s':>9}",
    ]
    for name, found in report["variants"].items():
        line = f"  {name:30} {found['utilisation']:>11.3f} {found['round_s']:>9.2f} {found['waited_s']:>9.2f}"
        if "tokens_for_asked" in found:
            line += f"   {ASKED} from {found['tokens_for_asked']:,.0f} tokens a step"
        passes = f", {found['passes']:.0f} passes" if found["passes"] > 1 else ""
        lines.append(f"{line}{passes}   asked {ASKED}")
    return "\n".join(lines)
