"""``autopart checkpoint``: what is in a checkpoint, and its weights as one file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autopart.cli.arguments import add_json, file_path
from autopart.cli.progress import working

NAME = "checkpoint"
HELP = "show or convert a checkpoint"
DESCRIPTION = """Shows what autopart.runtime.checkpoint has saved, or writes its weights as one file.

DIR is a checkpoint, or the directory of several: the latest is taken."""
EXAMPLE = "autopart checkpoint convert checkpoints model.safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="list its tensors, its step and the plan that it was saved under")
    convert = actions.add_parser("convert", help="write the plain model's whole state dict, tensor by tensor")
    for action in (show, convert):
        action.add_argument("directory", type=Path, metavar="DIR")
    add_json(show)
    convert.add_argument("out", type=file_path, metavar="OUT", help="a file that ends in .safetensors or .pt")


def run(arguments: argparse.Namespace) -> int:
    with working(f"reading {arguments.directory}"):
        from autopart.runtime.conversion import convert, describe

        if arguments.action == "convert":
            count = convert(arguments.directory, arguments.out)
        else:
            found = describe(arguments.directory)
    if arguments.action == "convert":
        print(f"{count} tensors in {arguments.out}")
    else:
        print(json.dumps(found) if arguments.json else text(found))
    return 0


def text(found: dict[str, Any]) -> str:
    from tabulate import tabulate

    from autopart.report.units import counted, format_bytes

    plan = found["plan"]
    mesh = " x ".join(f"{name} {size}" for name, size in plan["mesh"].items()) or "one device"
    rows = [
        (
            ", ".join((item["name"], *item["aliases"])),
            " x ".join(map(str, item["shape"])) or "scalar",
            item["dtype"],
            format_bytes(item["bytes"]),
            item["pieces"],
            ", ".join(item["optimizer_state"]),
        )
        for item in found["tensors"]
    ]
    lines = [
        found["path"],
        f"step {found['step']}, program {found['fingerprint'] or 'the plain model'}",
        f"saved by {counted(plan['world_size'], 'rank')}: {counted(plan['stages'], 'stage')}, each {mesh}",
        f"weights {format_bytes(found['model_bytes'])}, optimizer state {format_bytes(found['optimizer_bytes'])}, "
        f"{'a' if found['scheduler'] else 'no'} scheduler",
        "",
        tabulate(rows, headers=("name", "shape", "dtype", "size", "pieces", "optimizer state"), disable_numparse=True),
    ]
    return "\n".join(lines)
