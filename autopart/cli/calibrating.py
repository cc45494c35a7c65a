"""``autopart calibrate``: measures this machine for the cost model."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from autopart.cli.arguments import add_json, check_output, file_path
from autopart.cli.progress import Progress

if TYPE_CHECKING:
    from autopart.cost.calibration import Calibration

NAME = "calibrate"
HELP = "measure this machine for the cost model"
DESCRIPTION = """Measures matrix products, memory-bound ops, attention and launches, fits the cost model to two thirds
of them and says how well it predicts the rest. The result is stored in the cache folder (AUTOPART_CACHE, else
$XDG_CACHE_HOME/autopart, else ~/.cache/autopart) and used whenever a plan is made for this machine.

Under torchrun all ranks measure at once, and collectives between them are measured as well. Ranks on CPUs share the
cores, so start as many as will train."""
EXAMPLE = "torchrun --nproc-per-node 4 -m autopart calibrate"


_SEEN = 0.01
"""Of what a byte takes to be moved, from which its mapping is told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer shapes, the usual types alone, shorter spans")
    written = "also write this host as a cluster file (.toml) for --cluster"
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help=written)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from autopart.cost.calibrate import calibrate
    from autopart.cost.calibrated import base_device, check_folder, store
    from autopart.cost.calibration import doubts
    from autopart.runtime.errors import ClusterError
    from autopart.runtime.mesh import connect, pick_device

    check_output(arguments.output, ".toml")
    check_folder()  # before minutes of measuring
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world != local:
        raise ClusterError(
            f"{world} ranks on several hosts: calibrate one host at a time, with torchrun --standalone; describe the "
            "network between hosts in a cluster.toml"
        )
    device = pick_device()
    started = world > 1 and not dist.is_initialized()
    connect(device)
    try:
        with Progress() as progress:
            first = world == 1 or dist.get_rank() == 0
            found = calibrate(device, arguments.quick, progress if first else lambda _: None)
    finally:
        if started:
            dist.destroy_process_group()
    if not first:
        return 0
    path = store(found)
    print(f"calibration stored in {path}" if path else "the cache is off: nothing was stored", file=sys.stderr)
    if arguments.output is not None:
        from autopart.cluster import Cluster

        Cluster.local(found.processes, found).save(arguments.output)
    if arguments.json:
        accuracy = found.accuracy(base_device(device.type))
        more = {"accuracy": [asdict(item) for item in accuracy], "warnings": doubts(accuracy)}
        print(json.dumps({**found.to_json_object(), **more}))
    else:
        print(calibration_text(found, torch.device(device).type))
    return 0


def calibration_text(found: Calibration, kind: str) -> str:
    """The fitted parameters, a line for each kind of sample with its errors, and a warning where these are large."""
    from tabulate import tabulate

    from autopart.cost.calibrated import base_device
    from autopart.cost.calibration import doubts
    from autopart.cost.devices import LARGE_BYTES
    from autopart.report.units import format_bytes, format_flops, format_seconds, format_share

    ranks = "1 process" if found.processes == 1 else f"{found.processes} processes at once"
    lines = [f"{found.device}, {ranks}, {', '.join(f'{name} {text}' for name, text in found.libraries.items())}"]
    lines += [f"{name}: {format_flops(rate)}" for name, rate in found.rates.items()]
    lines.append(f"memory: {format_bytes(found.memory_bandwidth)}/s; launch: {format_seconds(found.launch_s)}")
    if found.host_s:
        lines.append(f"the host starts an op of a model in training in {format_seconds(found.host_s)}")
    if found.function_s:
        function, number = (f"{seconds * 1e9:.2g} ns" for seconds in (found.function_s, found.random_s))
        lines.append(f"of an element: an exponential {function}, a random number {number}")
    if found.mapped_s * found.memory_bandwidth > _SEEN:  # a fit that sees none of it leaves next to nothing
        rate = format_bytes(1 / found.mapped_s)
        lines.append(f"new tensors of {format_bytes(LARGE_BYTES)} or more are mapped at {rate}/s")
    if found.unaligned < 1:
        lines.append(f"16-bit products of odd sizes: {format_share(found.unaligned)} of the matrix products' rate")
    for what, by_dtype in (("attention", found.attention), ("its backward", found.attention_back)):
        shares = [f"{format_share(share)} in {name}" for name, share in by_dtype.items()]
        lines += [f"{what}: {', '.join(shares)} of the matrix products' rate"] if shares else []
    if found.link is not None:
        bandwidth = format_bytes(found.link.bandwidth)
        lines.append(f"collectives: {bandwidth}/s, {format_seconds(found.link.latency_s)} a step")
    accuracy = found.accuracy(base_device(kind))
    rows = [
        (
            item.kind.replace("_", "-"),
            item.fitted,
            format_share(item.fit_median),
            item.samples,
            *((format_share(item.median), format_share(item.largest)) if item.samples else ("-", "-")),
        )
        for item in accuracy
    ]
    headers = ("kind", "fitted", "median error", "kept aside", "median error", "largest")
    table = tabulate(rows, headers=headers, disable_numparse=True)
    warnings = [f"warning: {text}" for text in doubts(accuracy)]
    return "\n".join([*lines, "", table, *([""] if warnings else []), *warnings])
