"""Arguments that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopart.cli.progress import aside, hushed, working

if TYPE_CHECKING:
    import torch

    from autopart.cluster import Cluster
    from autopart.models import LoadedModel
    from autopart.passes.program import Program
    from autopart.plan import Plan

# As written -> torch's own name.
DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
}
_LIMITS = (
    "batch",
    "pp",
    "dp",
    "tp",
    "tensor_scheme",
    "microbatches",
    "schedule",
    "warmup",
    "virtual",
    "recompute",
    "together",
    "zero",
    "meshes",
    "thorough",
)
# Those of autopart.tensor_scheme.TensorScheme, as commands that do not plan start without the planner's imports.
SCHEMES = ("1d", "sp", "2d", "2.5d", "3d", "auto")
# Those of autopart.runtime.schedule.NAMES, which would import torch here.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "2bw", "2bw-flush", "auto")


def add_model(parser: argparse.ArgumentParser, dtype: str | None = "the model's own", or_plan: bool = False) -> None:
    """dtype: what --dtype is where it is not given; None: there is no such option."""
    parser.add_argument(
        "model",
        metavar="plan.json|MODEL" if or_plan else "MODEL",
        help=("a plan file, or " if or_plan else "") + "hf:FAMILY?key=value&… (a transformers model_type; batch, "
        "seq, image, audio and padding=no shape the inputs, task picks the head) or "
        "file.py:function, which returns model, args, kwargs",
    )
    if dtype is not None:
        add_dtype(parser, dtype)


def add_dtype(parser: argparse.ArgumentParser, default: str) -> None:
    """default: in words."""
    parser.add_argument(
        "--dtype", choices=DTYPES, metavar="TYPE", help=f"bf16, fp16, fp32 or fp64 (default: {default})"
    )


def add_limits(parser: argparse.ArgumentParser, cluster_required: bool) -> None:
    """The cluster, and what is forced; what is not given is chosen."""
    parser.add_argument(
        "--cluster",
        required=cluster_required,
        metavar="CLUSTER",
        help="4x8xA100-80GB (4 nodes of 8), 8xH100, cpu:4 (local devices), or a cluster file (.toml)",
    )
    parser.add_argument(
        "--batch", type=positive, metavar="N", help="samples per step over all replicas (default: the example's)"
    )
    parser.add_argument("--pp", type=positive, metavar="N", help="pipeline stages")
    parser.add_argument("--dp", type=positive, metavar="N", help="data-parallel replicas")
    parser.add_argument(
        "--tp",
        type=tensor_axes,
        metavar="N[xN[xN]]",
        help="devices that share the tensors of a stage, on axes such as 2x4",
    )
    parser.add_argument(
        "--tensor-scheme",
        choices=SCHEMES,
        default="auto",
        help="how products with weights are shared: 1d by columns or rows, sp: with the sequence sharded between them, "
        "2d panel by panel on tp = q x q, 2.5d on q x q x d, 3d on q x q x q (default: %(default)s, whatever is "
        "fastest)",
    )
    parser.add_argument("--microbatches", type=positive, metavar="N", help="pieces of each replica's batch")
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        help="order of the microbatches' passes (default: 1f1b, or gpipe where the model computes no loss; auto: tries "
        "several)",
    )
    parser.add_argument("--virtual", type=positive, metavar="N", help="interleaved: stages on each rank (default: 2)")
    parser.add_argument(
        "--warmup",
        type=warmup,
        metavar="N",
        help="1f1b: forwards that a stage runs ahead of the next (1: the least; 2 hides transfers), or a list such as "
        "6,4,2,0 with the forwards of each stage",
    )
    parser.add_argument(
        "--recompute",
        choices=("none", "full", "auto"),
        default="auto",
        help="what to compute again in the backward: nothing, all layers, or of layers and modules in them what "
        "memory asks for (default: %(default)s)",
    )
    parser.add_argument(
        "--together",
        action="append",
        type=patterns,
        metavar="PATTERN,PATTERN",
        help="modules on one stage, such as 'encoder.*,embed'; may be repeated",
    )
    parser.add_argument(
        "--pin",
        action="append",
        type=pin,
        metavar="PATTERN=STAGE",
        help="modules on a given stage, counted from 0, such as decoder.layers.3=2; may be repeated",
    )

    parser.add_argument(
        "--zero",
        type=zero_level,
        metavar="0|1|2|3|auto",
        help="what replicas divide between them: 1 optimizer state, 2 gradients too, 3 weights too "
        "(default: as little as fits)",
    )
    parser.add_argument(
        "--meshes",
        choices=("auto", "equal", "unlike"),
        default="auto",
        help="whether stages may differ in replicas and tensor ranks, and replicas in samples (default auto: where "
        "devices are unlike, their number is no power of two, the batch does not divide by --dp, or equal meshes leave "
        "a stage much slower than the others)",
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="try all configurations that may be faster than the best, of a large model and by little too (minutes)",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="capture and plan anew; captured models, solved strategies and plans are neither used nor kept",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def zero_level(text: str) -> int | None:
    if text not in ("0", "1", "2", "3", "auto"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of 0, 1, 2, 3, auto")
    return None if text == "auto" else int(text)


def tensor_axes(text: str) -> int | tuple[int, ...]:
    from autopart.runtime.errors import PlanError
    from autopart.solver.degrees import read_axes

    try:
        return read_axes(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def warmup(text: str) -> int | tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor a list such as 6,4,2,0")
    return int(text) if len(parts) == 1 else tuple(map(int, parts))


def patterns(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} holds no patterns such as 'encoder.*,embed'")
    return found


def pin(text: str) -> tuple[str, int]:
    pattern, _, stage = text.rpartition("=")
    if not pattern or not stage.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern with a stage, such as decoder.layers.3=2")
    return pattern, int(stage)


def limits(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is forced, as :func:`autopart.make_plan` takes it. Raises PlanError."""
    pins = dict(arguments.pin or ())
    if len(pins) < len(arguments.pin or ()):
        from autopart.runtime.errors import PlanError

        raise PlanError("--pin names one pattern twice; a module is on one stage")
    return {**{name: getattr(arguments, name) for name in _LIMITS}, "pins": pins or None}


def refuse_limits(arguments: argparse.Namespace, but: Collection[str] = ()) -> None:
    """Raises PlanError when limits are given beside a plan file, which has its own. but: those that it does not."""
    from autopart.runtime.errors import PlanError

    parser = argparse.ArgumentParser()
    add_limits(parser, cluster_required=False)
    usual = vars(parser.parse_args([]))
    given = [name for name, value in usual.items() if name not in but and getattr(arguments, name) != value]
    if given:
        raise PlanError(f"a plan file has its own {', '.join(given)}; leave that out, or give the model without a plan")


def file_path(text: str) -> Path:
    """Of a file to write. A slash at its end, which Path would leave out, says that a folder is meant."""
    if text.endswith(os.sep):
        raise argparse.ArgumentTypeError(f"{text!r} is the name of a folder; name a file")
    return Path(text)


def check_output(path: Path | None, *suffixes: str) -> None:
    """Raises PlanError, before any work is done, when a file cannot be written there, or its name says another format.

    suffixes: of the formats that are written, the first where a name says none; none: any.
    """
    from autopart.runtime.errors import PlanError

    if path is not None and suffixes and path.suffix.lower() not in ("", *suffixes):
        formats = " or ".join(suffix[1:].upper() for suffix in suffixes)
        raise PlanError(f"cannot write {path}: what is written is {formats}; name a {' or '.join(suffixes)} file")
    if path is not None and path.is_dir():
        raise PlanError(f"cannot write {path}: it is a folder; name a file")
    if path is not None and not path.absolute().parent.is_dir():
        raise PlanError(f"cannot write {path}: there is no folder {path.parent}")
    if path is not None and not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise PlanError(f"cannot write {path}: no permission")


def read_cluster(text: str) -> Cluster:
    """Of a description, else of a file. Raises ClusterError."""
    from autopart.cluster import Cluster

    return Cluster.read(text)


def read_dtype(arguments: argparse.Namespace) -> torch.dtype | None:
    import torch

    name = getattr(arguments, "dtype", None)
    if name is None:
        return None
    found = getattr(torch, DTYPES[name])
    assert isinstance(found, torch.dtype)
    return found


def read_model(arguments: argparse.Namespace, meta: bool, batch: int | None = None) -> LoadedModel:
    """Raises ModelError."""
    with working(f"building {arguments.model}"), aside():
        from autopart.models import load_model

        return load_model(arguments.model, meta=meta, dtype=read_dtype(arguments), batch=batch)


def read_program(arguments: argparse.Namespace, meta: bool = True, check_eval: bool = False) -> Program:
    """The captured model. meta: without its weights. check_eval: as in ``capture``; planning needs none.

    Raises ModelError, CaptureError.
    """

    def take() -> Program:
        loaded = read_model(arguments, meta)
        with working(f"capturing {loaded.name}"), hushed():
            from autopart.tracing import capture

            return capture(loaded.model, loaded.args, loaded.kwargs, name=loaded.name, check_eval=check_eval)

    if not meta or check_eval:
        return take()
    from autopart.captured import captured

    return captured(arguments.model, read_dtype(arguments), take)


def read_planned(arguments: argparse.Namespace, plan: Plan, check_eval: bool = False) -> Program:
    """The captured model of a plan: in the plan's type, where no --dtype is given and the model's own is another.

    ``arguments.dtype`` is set to it then. Raises ModelError, CaptureError.
    """
    if arguments.dtype is not None or plan.dtype not in DTYPES:
        return read_program(arguments, check_eval=check_eval)
    if arguments.model.startswith("hf:"):
        # these are in float32, where their names do not say otherwise, and are captured once then
        if plan.dtype != "float32" and not re.search("[?&]dtype=", arguments.model):
            arguments.dtype = plan.dtype
        return read_program(arguments, check_eval=check_eval)
    # A user's model may have parameters of several types, so it stays as it is where most are of the plan's.
    program = read_program(arguments, check_eval=check_eval)
    if program.computes_in == plan.dtype:
        return program
    arguments.dtype = plan.dtype
    return read_program(arguments, check_eval=check_eval)


def choose_plan(arguments: argparse.Namespace, program: Program) -> Plan:
    """Raises ClusterError, BatchError, and PlanError when nothing fits."""
    cluster = read_cluster(arguments.cluster)
    with working(f"planning for {cluster}"):
        from autopart.analysis import analyze
        from autopart.fewer_devices import advised_plan

        return advised_plan(cluster, analyze(program), **limits(arguments))
