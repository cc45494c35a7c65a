"""What the cost model says of schemes of tensor sharding: step time of 1-D, sequence parallel, 2-D, 2.5-D and 3-D.

    python benchmarks/tensor_schemes.py [--cluster 16x4xV100-16GB@InfiniBand-100 …] [--hidden 2048 4096 8192]

Every device of a cluster shares the tensors of one replica. A GPT-2 of ``--layers`` equal layers is planned on meta
under each scheme that the number of devices allows (q x q, q x q x d, q x q x q), with the same batch and no
microbatches, and a line gives the modelled seconds of a step and the gigabytes that a rank needs. Where a scheme cannot
run a product as it should, or nothing fits into memory, the line says so.
"""

from __future__ import annotations

import argparse
import math
import time

from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.planner import make_plan
from autopart.report.units import format_bytes, format_seconds
from autopart.runtime.errors import AutopartError
from autopart.tracing import capture

CLUSTERS = ("2x4xV100-16GB@InfiniBand-100", "16x4xV100-16GB@InfiniBand-100")


def axes_of(scheme: str, devices: int) -> tuple[int, ...] | None:
    """The tensor axes of a scheme on that many devices, the deepest that is not 1; None where it has none."""
    if scheme in ("1d", "sp"):
        return (devices,)
    if scheme == "2d":
        side = math.isqrt(devices)
        return (side, side) if side * side == devices else None
    sides = [side for side in range(2, devices) if devices % (side * side) == 0 and devices > side * side]
    if scheme == "3d":
        return next(((side, side, side) for side in sides if side**3 == devices), None)
    return (sides[-1], sides[-1], devices // sides[-1] ** 2) if sides else None


def analysis_of(hidden: int, heads: int, layers: int, sequence: int, batch: int) -> Analysis:
    """A GPT-2 in half precision, without dropout, whose vocabulary divides by 64 devices."""
    fields = f"n_embd={hidden}&n_head={heads}&n_layer={layers}&n_positions={sequence}&seq={sequence}"
    spec = f"hf:gpt2?{fields}&vocab_size=51200&resid_pdrop=0&embd_pdrop=0&attn_pdrop=0&dtype=float16"
    loaded = load_model(spec, meta=True, batch=batch)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def report(analysis: Analysis, cluster: Cluster, scheme: str, batch: int) -> str:
    axes = axes_of(scheme, cluster.device_count)
    if axes is None:
        return f"no axes of this kind make {cluster.device_count}"
    start, name = time.process_time(), "x".join(map(str, axes))
    try:
        plan = make_plan(
            analysis.program,
            cluster,
            batch=batch,
            pp=1,
            dp=1,
            tp=axes,
            microbatches=1,
            recompute="none",
            tensor_scheme=scheme,
            analysis=analysis,
        )
    except AutopartError as error:
        return f"{name:8} {str(error).splitlines()[0]}"
    stage = plan.stages[0]
    line = f"{name:8} {format_seconds(plan.step_time_s):>8} {format_bytes(stage.memory_bytes):>9} gap {plan.gap:.1%}"
    return f"{line}, planned in {time.process_time() - start:.1f} s of CPU{''.join(f'; {note}' for note in plan.notes)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", nargs="+", default=CLUSTERS)
    parser.add_argument("--hidden", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--schemes", nargs="+", default=["1d", "sp", "2d", "2.5d", "3d"])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    for hidden in options.hidden:
        analysis = analysis_of(hidden, options.heads, options.layers, options.sequence, options.batch)
        for text in options.cluster:
            cluster = Cluster.parse(text)
            print(f"hidden {hidden}, {options.heads} heads, batch {options.batch} on {text}")
            for scheme in options.schemes:
                print(f"    {scheme:5} {report(analysis, cluster, scheme, options.batch)}", flush=True)


if __name__ == "__main__":
    main()
