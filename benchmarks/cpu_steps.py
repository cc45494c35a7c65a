"""Steps of small models in one process on this machine's CPU, measured and predicted.

    python benchmarks/cpu_steps.py [--model gpt2] [--recalibrate] [--json]

Calibrates the machine for one process, unless that was done before. Then each model is planned for ``Cluster.local(1)``
with each batch, emitted, and trained with AdamW as it is ("eager") and as autopart emits it, a step of one after one of
the other. Predicted by the calibration and, beside it, by presets; errors are those against the emitted
program, medians of its steps.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import autopart
from autopart import cache
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster
from autopart.cost import calibrated
from autopart.cost.calibrate import calibrate
from autopart.cost.validate import rank_correlation
from autopart.models import load_model
from autopart.passes.program import Program

MODELS = {
    "gpt2": "hf:gpt2?n_layer=4&n_embd=256&n_head=4&vocab_size=2048&n_positions=128&seq=128",
    "gpt2 without dropout": "hf:gpt2?n_layer=4&n_embd=256&n_head=4&vocab_size=2048&n_positions=128&seq=128"
    "&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0",
    "llama": "hf:llama?num_hidden_layers=4&hidden_size=256&intermediate_size=688&num_attention_heads=4"
    "&num_key_value_heads=4&vocab_size=2048&max_position_embeddings=128&seq=128",
    "llama, 1,024 tokens": "hf:llama?num_hidden_layers=2&hidden_size=512&intermediate_size=1408&num_attention_heads=8"
    "&num_key_value_heads=4&vocab_size=2048&max_position_embeddings=1024&seq=1024",
    "bert": "hf:bert?num_hidden_layers=4&hidden_size=256&intermediate_size=1024&num_attention_heads=4&vocab_size=2048"
    "&seq=128",
    "t5": "hf:t5?num_layers=2&d_model=256&d_ff=1024&num_heads=4&d_kv=64&vocab_size=2048&seq=128",
    "vit": "hf:vit?num_hidden_layers=4&hidden_size=256&intermediate_size=1024&num_attention_heads=4&image_size=64"
    "&patch_size=8",
}
BATCHES = (2, 8, 32)
"""With 32 times 1,024 tokens activations are tensors of 64 MiB and more."""
_LIMITS: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 1, "recompute": "none"}
_WARM, _LEAST, _SECONDS = 2, 3, 6.0


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    batch: int
    eager_s: float
    emitted_s: float
    predicted_s: float
    preset_s: float


def rows_of(name: str, batches: tuple[int, ...]) -> list[Row]:
    spec = MODELS[name]
    loaded = load_model(f"{spec}&batch=4", meta=True)
    program = autopart.capture(loaded.model, loaded.args, loaded.kwargs, name=name)
    analysis = analyze(program)
    return [_row(name, batch, program, analysis) for batch in batches]


def _row(name: str, batch: int, program: Program, analysis: Analysis) -> Row:
    torch.manual_seed(0)
    loaded = load_model(f"{MODELS[name]}&batch={batch}")
    plan = autopart.make_plan(program, Cluster.local(1), batch=batch, analysis=analysis, **_LIMITS)
    preset = autopart.make_plan(program, _preset(), batch=batch, analysis=analysis, **_LIMITS)
    with tempfile.TemporaryDirectory() as folder:
        autopart.emit(program, plan, folder)
        emitted = autopart.load(folder, copy.deepcopy(loaded.model), device=torch.device("cpu")).train()
    eager = loaded.model.train()
    steps = [
        _step(eager, lambda: eager(*loaded.args, **loaded.kwargs).loss),
        _step(emitted, lambda: emitted(*loaded.args, **loaded.kwargs)["loss"]),
    ]
    taken: list[list[float]] = [[] for _ in steps]
    start = time.perf_counter()
    for number in range(1000):
        if number >= _WARM + _LEAST and time.perf_counter() - start > _SECONDS:
            break
        for index, step in enumerate(steps):
            seconds = step()
            if number >= _WARM:
                taken[index].append(seconds)
    eager_s, emitted_s = (statistics.median(seconds) for seconds in taken)
    return Row(name, batch, eager_s, emitted_s, plan.step_time_s, preset.step_time_s)


def _preset() -> Cluster:
    """This machine as presets have it, which is known where no calibration is looked for."""
    before = os.environ.get(cache.VARIABLE)
    os.environ[cache.VARIABLE] = cache.OFF
    try:
        return Cluster.local(1)
    finally:
        if before is None:
            del os.environ[cache.VARIABLE]
        else:
            os.environ[cache.VARIABLE] = before


def _step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        start = time.perf_counter()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="(default: all)")
    parser.add_argument("--batch", type=int, action="append", help="samples of a step (default: 2, 8 and 32)")
    parser.add_argument("--recalibrate", action="store_true", help="although this machine was calibrated before")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = calibrated.find("cpu", 1)
    if arguments.recalibrate or found is None or found.processes != 1:
        calibrated.store(
            calibrate(torch.device("cpu"), quick=False, progress=lambda text: print(text, file=sys.stderr))
        )
    rows = [row for name in arguments.model or MODELS for row in rows_of(name, tuple(arguments.batch or BATCHES))]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = [
        (
            *(row.model, row.batch),
            *(f"{seconds * 1e3:.1f}" for seconds in (row.eager_s, row.emitted_s, row.predicted_s)),
            f"{row.predicted_s / row.emitted_s - 1:+.1%}",
            f"{row.preset_s / row.emitted_s - 1:+.1%}",
        )
        for row in rows
    ]
    headers = ("model", "batch", "eager ms", "emitted ms", "predicted ms", "error", "preset's error")
    print(tabulate(table, headers=headers, disable_numparse=True))
    for name, predicted in (
        ("calibrated", [row.predicted_s for row in rows]),
        ("preset", [row.preset_s for row in rows]),
    ):
        measured = [row.emitted_s for row in rows]
        errors = [abs(one / other - 1) for one, other in zip(predicted, measured, strict=True)]
        print(
            f"{name}: mean |error| {statistics.mean(errors):.1%}, most {max(errors):.1%}, rank correlation "
            f"{rank_correlation(predicted, measured):.3f}"
        )


if __name__ == "__main__":
    main()
