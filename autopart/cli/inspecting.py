"""``autopart inspect``: what autopart sees in a model."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from autopart.cli.arguments import add_json, add_model, read_program
from autopart.cli.progress import working

if TYPE_CHECKING:
    from autopart.analysis import Analysis

NAME = "inspect"
HELP = "show what is captured of a model"
DESCRIPTION = """Captures a model without its weights and shows its size, inputs, outputs and blocks.

Also whether its batch may be split, and which ops have no rule: those are computed whole on every tensor rank."""
EXAMPLE = "autopart inspect 'hf:bert?num_hidden_layers=4&seq=128'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    program = read_program(arguments)
    with working(f"analysing {program.name}"):
        from autopart.analysis import analyze

        found = inspect(analyze(program))
    print(json.dumps(found) if arguments.json else describe(found))
    return 0


def inspect(analysis: Analysis) -> dict[str, Any]:
    """Plain data: the JSON object of the command."""
    from autopart.passes.graph import is_op
    from autopart.passes.rules import name_of

    program, split = analysis.program, analysis.split
    batch = max(program.batch, 1)
    costs = analysis.costs("cuda")
    without_rule = Counter(
        name_of(node) for node in analysis.block_of if is_op(node) and analysis.rules.rule(node) is None
    )
    blocks: dict[str, dict[str, Any]] = {}
    for block in analysis.blocks:
        flops = sum(costs[node].flops_forward.at(batch) for node in block.nodes if node in costs)
        entry = {"first": block.index, "repeats": 0, "ops": len(block.nodes), "forward_flops_per_sample": flops / batch}
        blocks.setdefault(block.signature, {**entry, "first_op": analysis.keys[block.nodes[0]]})["repeats"] += 1
    return {
        "model": program.name,
        "fingerprint": program.fingerprint,
        "parameters": program.parameter_count,
        "forward_flops_per_sample": sum(cost.flops_forward.at(batch) for cost in costs.values()) / batch,
        "dtype": str(analysis.dtype).removeprefix("torch."),
        "inputs": [
            {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype, "batch_dim": spec.batch_dim}
            for spec in program.inputs
            if spec.kind == "tensor"
        ],
        "outputs": [info.name for info in program.outputs if info.node is not None],
        "loss": program.loss,
        "ops": len(analysis.block_of),
        "blocks": list(blocks.values()),
        "block_count": len(analysis.blocks),
        "batch_splittable": not split.flaw,
        "batch_flaw": split.flaw or program.static_batch,
        "notes": [*program.notes, *split.notes],
        "ops_without_rule": dict(without_rule),
    }


def describe(found: dict[str, Any]) -> str:
    from tabulate import tabulate

    from autopart.report.units import format_count

    inputs = (f"{item['name']} [{', '.join(map(str, item['shape']))}] {item['dtype']}" for item in found["inputs"])
    blocks = [
        (item["repeats"], item["ops"], format_count(item["forward_flops_per_sample"]), item["first_op"])
        for item in found["blocks"]
    ]
    soundness = "may be split" if found["batch_splittable"] else f"is not split: {found['batch_flaw']}"
    missing = ", ".join(f"{count} {name}" for name, count in found["ops_without_rule"].items())
    lines = [
        f"{found['model']} (fingerprint {found['fingerprint']})",
        f"{found['parameters']:,} parameters, {found['dtype']}; "
        f"{format_count(found['forward_flops_per_sample'])} FLOPs forward per sample",
        f"inputs: {', '.join(inputs)} (b: samples)",
        f"outputs: {', '.join(found['outputs'])}; loss: {found['loss'] or 'computed by the caller'}",
        f"batch: {soundness}",
        *(f"note: {note}" for note in found["notes"]),
        f"ops without a rule: {missing or 'none'}",
        f"{found['ops']} ops in {found['block_count']} blocks, {len(found['blocks'])} of them distinct:",
        "",
        tabulate(blocks, headers=("times", "ops", "FLOPs per sample", "first op"), disable_numparse=True),
    ]
    return "\n".join(lines)
