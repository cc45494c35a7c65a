"""The peak memory of a step on the CPU, counted in a real run, against what the emitted graphs predict.

    python benchmarks/memory.py [--model gpt2] [--pipelines | --divided] [--json]

Counted are the bytes of all tensors that a step makes, while they are alive, the gradients of parameters among them;
parameters and inputs are there before. Every model is run in one process with its layers kept, and computed again in
the backward; with ``--pipelines`` in stages on several ranks over gloo, where each rank counts for itself; with
``--divided`` on two replicas that divide parameters (ZeRO), where the second step counts, which knows in what order
weights are gathered, and the copy that gloo makes inside of a sum that it scatters.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import autopart
from autopart.analysis import Analysis, analyze
from autopart.local_job import run_local_job
from autopart.models import load_model
from autopart.passes.program import Program
from autopart.realize import realize, realized
from autopart.step_memory import step_peaks
from autopart.verify.live_bytes import LiveBytes, scattering_in_sight

MODELS = {
    "gpt2": "hf:gpt2?n_layer=4&n_embd=128&n_head=4&vocab_size=4096&batch=4&seq=64&resid_pdrop=0&embd_pdrop=0"
    "&attn_pdrop=0",
    "llama": "hf:llama?num_hidden_layers=4&hidden_size=128&intermediate_size=344&num_attention_heads=4"
    "&num_key_value_heads=2&vocab_size=4096&batch=4&seq=64",
    "bert": "hf:bert?num_hidden_layers=4&hidden_size=128&intermediate_size=512&num_attention_heads=4&vocab_size=4096"
    "&batch=4&seq=64&hidden_dropout_prob=0&attention_probs_dropout_prob=0",
    "t5": "hf:t5?num_layers=2&d_model=128&d_ff=512&num_heads=4&d_kv=32&vocab_size=4096&batch=4&seq=64&dropout_rate=0",
}


# Limits of plans, on one rank or several.
_LIMITS: dict[str, Any] = {
    "pp": 1,
    "dp": 1,
    "tp": 1,
    "microbatches": 1,
    "schedule": "1f1b",
    "recompute": "none",
    "zero": 0,
}
ALONE: tuple[dict[str, Any], ...] = (
    _LIMITS,
    {**_LIMITS, "microbatches": 2},
    {**_LIMITS, "microbatches": 2, "recompute": "full"},
)
PIPELINES: tuple[dict[str, Any], ...] = (
    *(
        {**_LIMITS, "pp": 2, "microbatches": 4, "schedule": schedule}
        for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
    ),
    *({**_LIMITS, "pp": 4, "microbatches": 4, "schedule": schedule} for schedule in ("1f1b", "zb-h1")),
)
DIVIDED: tuple[dict[str, Any], ...] = tuple(
    {**_LIMITS, "dp": 2, "microbatches": microbatches, "zero": level} for level in (1, 2, 3) for microbatches in (1, 2)
)


def count(spec: str, directory: str, steps: int) -> int:
    """What each rank does. The most bytes of tensors."""
    torch.set_num_threads(1)
    loaded = load_model(spec)
    weights = {name: tensor.detach() for name, tensor in loaded.model.state_dict().items()}
    model = autopart.load(directory, weights, device=torch.device("cpu")).train()
    known = [*model.parameters(), *model.buffers(), *loaded.kwargs.values()]
    with scattering_in_sight(), LiveBytes(known) as live:
        for _ in range(steps):
            model(**loaded.kwargs)
    return live.most


def measure(spec: str, program: Program, analysis: Analysis, about: dict[str, Any]) -> dict[str, Any]:
    """Bytes counted and predicted, of each rank. about: limits of the plan."""
    ranks = about["pp"] * about["dp"]
    plan = autopart.make_plan(program, autopart.Cluster.parse(f"cpu:{ranks}"), analysis=analysis, **about)
    with tempfile.TemporaryDirectory() as name:
        directory, job = Path(name) / "program", Path(name) / "job"
        realize(program, plan, analysis).save(directory)
        arguments: dict[str, Any] = {"spec": spec, "directory": str(directory), "steps": 2 if about["zero"] else 1}
        job.mkdir()
        counted = [count(**arguments)] if ranks == 1 else run_local_job("memory:count", ranks, arguments, job)
    predicted = step_peaks(analysis, plan, realized(analysis, plan), "cpu")
    counted = [max(counted[first : first + plan.dp]) for first in range(0, ranks, plan.dp)]
    return {
        "counted_bytes": counted,
        "predicted_bytes": [round(item) for item in predicted],
        "ratio": [round(ours / theirs, 3) for ours, theirs in zip(predicted, counted, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--pipelines", action="store_true")
    either.add_argument("--divided", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # ranks import this file by its name
    rows = []
    for name in list(MODELS) if arguments.model == "all" else [arguments.model]:
        loaded = load_model(MODELS[name])
        program = autopart.capture(loaded.model.train(), loaded.args, loaded.kwargs)
        analysis = analyze(program)
        for case in PIPELINES if arguments.pipelines else DIVIDED if arguments.divided else ALONE:
            rows.append({"model": name, **case, **measure(MODELS[name], program, analysis, case)})
            if not arguments.json:
                print(tabulate(rows[-1:], headers="keys" if len(rows) == 1 else (), floatfmt=".4g"), flush=True)
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
