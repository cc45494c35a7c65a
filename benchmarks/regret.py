"""How good the chosen plan is on real runs: every feasible plan of small models is run in local processes.

    torchrun --nproc-per-node 4 -m autopart.cli calibrate        # once, on an idle machine
    python benchmarks/regret.py [--model gpt2] [--processes 4] [--rounds 9] [--most 12] [--json]

Every (pp, dp, tp, microbatches) of the processes is planned and emitted; one job loads all programs and runs them in
rounds, one step of each after another, so that what disturbs the machine disturbs all. A step takes as long as on the
slowest rank, a plan the median of its rounds. Regret is the chosen plan's time over the best one's. Without a
calibration of this machine plans are priced by presets, and a line says so.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = {
    "gpt2": "hf:gpt2?n_layer=4&n_embd=256&n_head=4&vocab_size=2048&n_positions=128&seq=128&batch=16",
    "llama": "hf:llama?num_hidden_layers=4&hidden_size=256&intermediate_size=688&num_attention_heads=4"
    "&num_key_value_heads=4&vocab_size=2048&max_position_embeddings=128&seq=128&batch=16",
    "vit": "hf:vit?num_hidden_layers=4&hidden_size=256&intermediate_size=1024&num_attention_heads=4&image_size=64"
    "&patch_size=8&batch=16",
}
_WARM = 2


@dataclass(frozen=True, slots=True)
class Run:
    """config: the plan's degrees. predicted_s: its step; measured_s: the median of its rounds."""

    config: str
    predicted_s: float
    measured_s: float


def run_rounds(spec: str, directories: list[str], rounds: int) -> list[list[float]]:
    """What each rank does: all programs loaded, then one step of each per round. Seconds by program and round."""
    import torch
    import torch.distributed as dist

    import autopart
    from autopart.models import load_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    loaded = load_model(spec)
    # A loaded program takes the original's parameters over, so each gets a copy.
    models = [
        autopart.load(directory, copy.deepcopy(loaded.model), device=torch.device("cpu")).train()
        for directory in directories
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4) for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    for number in range(_WARM + rounds):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            model(*loaded.args, **loaded.kwargs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= _WARM:
                seconds[index].append(time.perf_counter() - start)
    return seconds


def measure(spec: str, processes: int, rounds: int, most: int | None) -> tuple[list[Run], Run]:
    """All runs, and that of the plan which is chosen when nothing is forced."""
    from autopart.analysis import analyze
    from autopart.cluster import Cluster
    from autopart.explain import limits_of
    from autopart.local_job import run_local_job
    from autopart.models import load_model
    from autopart.planner import make_plan
    from autopart.realize import emit
    from autopart.runtime.errors import InfeasibleError
    from autopart.tracing import capture

    loaded = load_model(spec, meta=True)
    program = capture(loaded.model, loaded.args, loaded.kwargs, name=loaded.name, check_eval=False)
    analysis, cluster = analyze(program), Cluster.local(processes)
    chosen = make_plan(program, cluster, analysis=analysis)
    configs = [str(row["config"]) for row in chosen.considered]
    first = next(str(row["config"]) for row in chosen.considered if row["status"] == "chosen")
    others = [config for config in configs if config != first]
    if most is not None:  # evenly over the search's order, which goes by lower bounds
        others = others[:: max(1, -(-len(others) // max(1, most - 1)))]
    plans = {first: chosen}
    for config in others:
        try:
            plans[config] = make_plan(program, cluster, analysis=analysis, **limits_of(config))
        except InfeasibleError:
            continue
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        directories = []
        for index, plan in enumerate(plans.values()):
            directories.append(str(folder / str(index)))
            emit(program, plan, directories[-1])
        job = folder / "job"
        job.mkdir()
        arguments = {"spec": spec, "directories": directories, "rounds": rounds}
        sys.path.insert(0, str(Path(__file__).parent))  # the ranks import this file by its name
        by_rank = run_local_job("regret:run_rounds", processes, arguments, job, timeout_s=3600)
    runs = []
    for index, (config, plan) in enumerate(plans.items()):
        slowest = [max(steps) for steps in zip(*(rank[index] for rank in by_rank), strict=True)]
        runs.append(Run(config, plan.step_time_s, statistics.median(slowest)))
    return runs, runs[0]


def summary(runs: list[Run], chosen: Run) -> dict[str, Any]:
    from autopart.cost.validate import rank_correlation

    best = min(runs, key=lambda run: run.measured_s)
    return {
        "plans": len(runs),
        "chosen": chosen.config,
        "chosen_s": chosen.measured_s,
        "best": best.config,
        "best_s": best.measured_s,
        "regret": chosen.measured_s / best.measured_s,
        "rank_correlation": rank_correlation([run.predicted_s for run in runs], [run.measured_s for run in runs]),
        "runs": [[run.config, run.predicted_s, run.measured_s] for run in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--most", type=int, help="plans per model (default: all)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    from autopart.cost.calibrated import find

    if find("cpu", arguments.processes) is None:
        print("this machine is not calibrated: plans are priced by presets", file=sys.stderr)
    names = list(MODELS) if arguments.model == "all" else [arguments.model]
    results = {}
    for name in names:
        results[name] = summary(*measure(MODELS[name], arguments.processes, arguments.rounds, arguments.most))
        found = results[name]
        if arguments.json:
            continue
        for config, predicted, measured in sorted(found["runs"], key=lambda run: run[2]):
            mark = "chosen" if config == found["chosen"] else ""
            print(f"  {measured * 1e3:8.1f} ms measured, {predicted * 1e3:8.1f} ms predicted  {config} {mark}")
        print(
            f"{name}: regret {found['regret']:.3f} over {found['plans']} plans, "
            f"rank correlation {found['rank_correlation']:.3f}"
        )
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
