"""What the cost model says of schemes of tensor sharding: 1-D, sequence parallel, 2-D, 2.5-D, 3-D and the free choice.

    python benchmarks/tensor_schemes.py [--cluster 16x4xRTX-5000 …] [--hidden 2048 4096 8192] [--batch 16 64 256]

All devices of a cluster share the tensors of one replica, as in the papers that compare these schemes (Optimus, arXiv
2104.05343; 3-D, 2105.14450: 64 GPUs, four a node). A GPT-2 of ``--layers`` equal layers is planned on meta under each
scheme that the number of devices allows (q x q, q x q x d, q x q x q), with one microbatch, layers computed again where
memory asks for it. A row gives the modelled seconds of a step with the bytes of a rank's weights, gradients and
optimizer state; a star where layers are computed again; "full" where nothing fits; "!" where a product could not run
as the scheme asks. ``auto`` chooses axes and strategies.
"""

from __future__ import annotations

import argparse
import math
import time

from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.models import load_model
from autopart.passes.annotate import parameter_bytes
from autopart.planner import make_plan
from autopart.report.units import format_bytes, format_seconds
from autopart.runtime.errors import AutopartError, InfeasibleError
from autopart.solver.degrees import axes_text
from autopart.tracing import capture

CLUSTERS = ("16x4xRTX-5000@InfiniBand-56", "16x4xV100-16GB@InfiniBand-100")
SCHEMES = ("1d", "sp", "2d", "2.5d", "3d", "auto")


def axes_of(scheme: str, devices: int) -> int | tuple[int, ...] | None:
    """The tensor axes of a scheme on that many devices, the deepest that is not 1; None where it has none."""
    if scheme in ("1d", "sp"):
        return devices
    if scheme == "2d":
        side = math.isqrt(devices)
        return (side, side) if side * side == devices else None
    sides = [side for side in range(2, devices) if devices % (side * side) == 0 and devices > side * side]
    if scheme == "3d":
        return next(((side, side, side) for side in sides if side**3 == devices), None)
    return (sides[-1], sides[-1], devices // sides[-1] ** 2) if sides else None


def analysis_of(hidden: int, heads: int, layers: int, sequence: int, dtype: str) -> Analysis:
    """A GPT-2 without dropout, whose vocabulary divides by 64 devices."""
    fields = f"n_embd={hidden}&n_head={heads}&n_layer={layers}&n_positions={sequence}&seq={sequence}"
    spec = f"hf:gpt2?{fields}&vocab_size=51200&resid_pdrop=0&embd_pdrop=0&attn_pdrop=0&dtype={dtype}"
    loaded = load_model(spec, meta=True, batch=2)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def cell(analysis: Analysis, cluster: Cluster, scheme: str, batch: int) -> str:
    axes = axes_of(scheme, cluster.device_count)
    if axes is None and scheme != "auto":
        return ""
    try:
        plan = make_plan(
            analysis.program,
            cluster,
            batch=batch,
            pp=1,
            dp=1,
            tp=axes,
            microbatches=1,
            zero=0,
            meshes="equal",
            tensor_scheme=scheme,
            analysis=analysis,
        )
    except InfeasibleError:
        return "full"
    except AutopartError as error:
        return str(error).splitlines()[0]
    stage = plan.stages[0]
    held = parameter_bytes((stage.parameters,), analysis.dtype).total
    again = "" if plan.recompute == "none" else "*"
    chosen = f" ({axes_text([size for _, size in stage.mesh[1:]])}, gap {plan.gap:.0%})" if scheme == "auto" else ""
    unfit = " !" if any("tensor scheme" in note for note in plan.notes) else ""
    return f"{format_seconds(plan.step_time_s)}{again}, {format_bytes(held)}{chosen}{unfit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", nargs="+", default=CLUSTERS)
    parser.add_argument("--hidden", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--dtype", default="float16")
    options = parser.parse_args()
    for text in options.cluster:
        print(f"\n{text}\n\n| hidden | batch | {' | '.join(options.schemes)} | CPU |")
        print("| --- " * (len(options.schemes) + 3) + "|", flush=True)
        for hidden in options.hidden:
            analysis = analysis_of(hidden, options.heads, options.layers, options.sequence, options.dtype)
            for batch in options.batch:
                start = time.process_time()
                cells = [cell(analysis, Cluster.parse(text), scheme, batch) for scheme in options.schemes]
                row = [str(hidden), str(batch), *cells, f"{time.process_time() - start:.0f} s"]
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
