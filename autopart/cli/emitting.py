"""``autopart emit``: the program of a plan as readable files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from autopart.cli.arguments import (
    add_json,
    add_limits,
    add_model,
    choose_plan,
    read_cluster,
    read_model,
    read_planned,
    read_program,
    refuse_limits,
)
from autopart.cli.progress import working

if TYPE_CHECKING:
    from autopart.passes.program import Program

NAME = "emit"
HELP = "write the program of a plan to a folder"
DESCRIPTION = """Writes one Python file per pipeline stage, and the manifest that the runtime reads.

Takes a plan file, or a cluster and limits as 'autopart plan' does."""
EXAMPLE = "autopart emit hf:gpt2 plan.json -o emitted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "the plan's; without a plan file the model's own")
    parser.add_argument("plan", nargs="?", type=Path, metavar="plan.json", help="a plan made for this model")
    add_limits(parser, cluster_required=False)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="new or empty folder")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    from autopart.passes.emit.folder import check_program_folder
    from autopart.plan import Plan
    from autopart.runtime.errors import PlanError

    if (arguments.plan is None) == (arguments.cluster is None):
        raise PlanError("give either a plan file or --cluster with limits")

    if arguments.plan is not None:
        refuse_limits(arguments)
    plan = Plan.load(arguments.plan) if arguments.plan is not None else None
    if plan is None:
        read_cluster(arguments.cluster)
    check_program_folder(arguments.output)  # before the capture, not after it
    if plan is None:
        program = complete(arguments, read_program(arguments, check_eval=True))
        plan = choose_plan(arguments, program)
    else:
        program = complete(arguments, read_planned(arguments, plan, check_eval=True))
    with working(f"writing {arguments.output}"):
        from autopart.realize import emit

        emit(program, plan, arguments.output)
    files = sorted(path.name for path in arguments.output.iterdir())
    if arguments.json:
        print(json.dumps({"directory": str(arguments.output), "ranks": plan.device_count, "files": files}))
    else:
        from autopart.report.units import counted

        print(f"{arguments.output}: {', '.join(files)} for {counted(plan.device_count, 'rank')}")
    return 0


def complete(arguments: argparse.Namespace, program: Program) -> Program:
    """The program with the tensors that no checkpoint holds (rotary frequencies, say): they are written to a file.

    Only where there are any, the model is built with its weights.
    """
    tensors = program.tensors.values()
    missing = {info.name for info in tensors if info.buffer and not info.persistent} - program.constants.keys()
    if not missing:
        return program
    buffers = dict(read_model(arguments, meta=False).model.named_buffers())
    if not missing <= buffers.keys():  # a tensor that forward itself makes from numbers
        return read_program(arguments, meta=False, check_eval=True)
    program.constants.update({name: buffers[name].detach() for name in missing})
    return program
