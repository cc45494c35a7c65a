"""How good the chosen plan is on real runs: every feasible plan of small models is run in local processes.

    python benchmarks/regret.py [--model gpt2] [--processes 4] [--minutes 3] [--most 12] [--recalibrate] [--json]

First the machine is calibrated by as many processes measuring at once, unless it was before. Every (pp, dp, tp,
microbatches) of the processes is then planned and emitted; one job loads all programs and runs them in rounds, one step
of each after another, so that what disturbs the machine disturbs all. Rounds go on for ``--minutes`` per model, five at
least. A step takes as long as on the slowest rank, a plan the median of its rounds.

Regret is the chosen plan's time over the best one's, by these medians; "paired" is the median over rounds of the chosen
plan's time over the best plan's in the same round. ``load`` is the system's load average beside the job's own
processes: near zero on an idle machine; above it figures say less.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
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
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200


@dataclass(frozen=True, slots=True)
class Run:
    """config: the plan's degrees. predicted_s: its step; steps: seconds of each round on the slowest rank."""

    config: str
    predicted_s: float
    steps: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.steps)


def calibrate_together(quick: bool) -> float:
    """What each rank does to calibrate the machine; rank 0 stores what all found. The matrix products' FLOP/s."""
    import torch
    import torch.distributed as dist

    from autopart.cost.calibrate import calibrate
    from autopart.cost.calibrated import store

    torch.set_num_threads(1)
    found = calibrate(torch.device("cpu"), quick)
    if dist.get_rank() == 0:
        store(found)
    return found.rates["float32"]


def run_rounds(spec: str, directories: list[str], seconds: float) -> list[list[float]]:
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
    steps: list[list[float]] = [[] for _ in models]
    begin = time.perf_counter()
    for number in range(_WARM + _MOST_ROUNDS):
        # rank 0's clock decides for all
        late = torch.tensor(float(time.perf_counter() - begin > seconds))
        dist.broadcast(late, 0)
        if number >= _WARM + _LEAST_ROUNDS and late:
            break
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            dist.barrier()
            start = time.perf_counter()
            model(*loaded.args, **loaded.kwargs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number >= _WARM:
                steps[index].append(time.perf_counter() - start)
    return steps


def measure(spec: str, processes: int, minutes: float, most: int | None) -> tuple[list[Run], Run]:
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
        arguments = {"spec": spec, "directories": directories, "seconds": 60 * minutes}
        by_rank = run_local_job("regret:run_rounds", processes, arguments, job, timeout_s=3600)
    runs = []
    for index, (config, plan) in enumerate(plans.items()):
        steps = tuple(max(step) for step in zip(*(rank[index] for rank in by_rank), strict=True))
        runs.append(Run(config, plan.step_time_s, steps))
    return runs, runs[0]


def summary(runs: list[Run], chosen: Run) -> dict[str, Any]:
    from autopart.cost.validate import rank_correlation

    best = min(runs, key=lambda run: run.measured_s)
    return {
        "plans": len(runs),
        "rounds": len(chosen.steps),
        "chosen": chosen.config,
        "chosen_s": chosen.measured_s,
        "best": best.config,
        "best_s": best.measured_s,
        "regret": chosen.measured_s / best.measured_s,
        "paired": statistics.median(mine / its for mine, its in zip(chosen.steps, best.steps, strict=True)),
        "rank_correlation": rank_correlation([run.predicted_s for run in runs], [run.measured_s for run in runs]),
        "ratio": statistics.median(run.predicted_s / run.measured_s for run in runs),
        "runs": [[run.config, run.predicted_s, run.measured_s] for run in runs],
    }


def calibrated(processes: int, again: bool) -> None:
    """Calibrates this machine for so many processes, unless it was before."""
    from autopart.cost.calibrated import find
    from autopart.local_job import run_local_job

    found = find("cpu", processes)
    if not again and found is not None and found.processes == processes:
        return
    print(f"calibrating with {processes} processes at once", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        run_local_job("regret:calibrate_together", processes, {"quick": True}, Path(name), timeout_s=3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=3.0, help="of rounds per model (default: 3)")
    parser.add_argument("--most", type=int, help="plans per model (default: all)")
    parser.add_argument("--recalibrate", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # the ranks import this file by its name
    calibrated(arguments.processes, arguments.recalibrate)
    results = {}
    for name in list(MODELS) if arguments.model == "all" else [arguments.model]:
        before = os.getloadavg()[0]
        found = summary(*measure(MODELS[name], arguments.processes, arguments.minutes, arguments.most))
        found["load"] = [round(before, 1), round(max(0.0, os.getloadavg()[0] - arguments.processes), 1)]
        results[name] = found
        if arguments.json:
            continue
        for config, predicted, measured in sorted(found["runs"], key=lambda run: run[2]):
            mark = "chosen" if config == found["chosen"] else ""
            print(f"  {measured * 1e3:8.1f} ms measured, {predicted * 1e3:8.1f} ms predicted  {config} {mark}")
        print(
            f"{name}: regret {found['regret']:.3f} (paired {found['paired']:.3f}) over {found['plans']} plans in "
            f"{found['rounds']} rounds, rank correlation {found['rank_correlation']:.3f}, predicted over measured "
            f"{found['ratio']:.2f}, load {found['load'][0]} before and {found['load'][1]} beside the job after",
            flush=True,
        )
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
