"""Steps of models on one GPU, measured and predicted: seconds, and the most memory.

    python benchmarks/gpu_steps.py [--model gpt2_124m] [--batch 8] [--recalibrate] [--output FILE]
    python benchmarks/gpu_steps.py --measured benchmarks/measured/h100.json

With a GPU: calibrates it, unless that was done before; then each model of :mod:`gpu_models` is planned for this GPU in
bfloat16, and trained with AdamW, as autopart emits it and as it is ("eager"), one after the other. ``--output`` writes
what was measured, with the calibration. ``--measured`` needs no GPU: it predicts the rows of such a file anew, from its
calibration and from the preset of its GPU.

A step's time is the mean over a few steps without a wait between them, the median of three such spans; a GPU then waits
for its host where that takes longer. Memory is the most that PyTorch allocated; predicted is what a plan says, but of
:data:`autopart.candidate_settings.CUDA_OVERHEAD_BYTES`, which stands for the process's context and libraries, the
workspaces alone that PyTorch allocates for matrix products. Errors are those against the emitted program where it was
measured, else against the model as it is.

measured/h100.json was put together from single runs (PyTorch 2.11, CUDA 13.0, a virtual machine with 16 cores): the
models as they are, of whose first rows the host's seconds are taken too, and kernels as a calibration measures them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import autopart
from autopart.analysis import Analysis, analyze
from autopart.candidate_settings import CUDA_OVERHEAD_BYTES
from autopart.cluster import Cluster, Node
from autopart.cost import calibrated, devices
from autopart.cost.calibrate import calibrate
from autopart.cost.calibration import Calibration
from autopart.models import load_model
from autopart.plan import Plan

MODELS = Path(__file__).parent / "gpu_models.py"
BATCHES = {"gpt2_124m": (1, 4, 8, 16, 32), "gpt2_355m": (2, 8, 16), "llama_1b": (1, 2, 4, 8)}
_LIMITS: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatches": 1, "recompute": "none"}
_WARM, _STEPS, _SPANS = 2, 3, 3
_HANDLES = 5
_WORKSPACE_BYTES = {"H100": 32 * 2**20, "H200": 32 * 2**20, "B200": 32 * 2**20}
"""cuBLAS' workspace for a handle is 32 MiB on Hopper and Blackwell (NVIDIA, cuBLAS library, cublasSetWorkspace), else
PyTorch's default, 2 of 4 MiB and 16 of 8 KiB; forward and backward have handles of their own, and cuBLASLt too. As many
are held as five: rows of GPT-2 were measured with 161 to 181 MiB more than their tensors, whatever their size.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured. eager_s, eager_bytes: of the model as it is; step_s, memory_bytes: of autopart's program."""

    model: str
    batch: int
    eager_s: float
    eager_bytes: int
    step_s: float | None = None
    memory_bytes: int | None = None


class Subject:
    """A model of :mod:`gpu_models`, captured once."""

    def __init__(self, name: str) -> None:
        self.name = name
        loaded = self.load(2, meta=True)
        self.program = autopart.capture(loaded.model, loaded.args, loaded.kwargs, name=name)
        self.analysis: Analysis = analyze(self.program)

    def load(self, batch: int, meta: bool = False) -> Any:
        return load_model(f"{MODELS}:{self.name}", meta=meta, dtype=torch.bfloat16, batch=batch)

    def plan(self, batch: int, cluster: Cluster) -> Plan:
        return autopart.make_plan(self.program, cluster, batch=batch, analysis=self.analysis, **_LIMITS)


def measure(subject: Subject, batches: Iterable[int], cluster: Cluster) -> Iterator[Row]:
    """Both programs with each batch that fits, from the same weights."""
    with torch.device("cuda"):
        model = subject.load(1).model.cuda().train()
    for batch in batches:
        inputs = _tokens(subject, batch, model.config.vocab_size)
        try:
            eager_s, eager_bytes = _train(model, lambda: model(**inputs).loss)  # noqa: B023
            step_s, memory_bytes = _train_emitted(subject, subject.plan(batch, cluster), model, inputs)
        except torch.cuda.OutOfMemoryError:
            print(f"{subject.name}: a batch of {batch} does not fit", file=sys.stderr)
            continue
        yield Row(subject.name, batch, eager_s, eager_bytes, step_s, memory_bytes)


def _tokens(subject: Subject, batch: int, vocabulary: int) -> dict[str, Any]:
    (shape,) = {tuple(value.shape) for value in subject.load(batch, meta=True).kwargs.values()}
    tokens = torch.randint(vocabulary, shape, device="cuda")
    return {"input_ids": tokens, "labels": tokens}


def _train_emitted(subject: Subject, plan: Plan, model: nn.Module, inputs: dict[str, Any]) -> tuple[float, int]:
    members = [*model.named_parameters(), *model.named_buffers()]
    weights = {name: tensor.detach().clone() for name, tensor in members}
    with tempfile.TemporaryDirectory() as folder:
        autopart.emit(subject.program, plan, folder)
        parallel = autopart.load(folder, weights).train()
    del weights
    return _train(parallel, lambda: parallel(**inputs)["loss"])


def _train(model: nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[float, int]:
    """Seconds of a step, and the most bytes that its tensors took, those of other models left out."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    gc.collect()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_allocated() - _held(model)
    spans = []
    try:
        for number in range(_WARM + _SPANS):
            torch.cuda.synchronize()
            if number == _WARM:
                torch.cuda.reset_peak_memory_stats()
            start, steps = time.perf_counter(), _STEPS if number >= _WARM else 1
            for _ in range(steps):
                loss().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            spans.append((time.perf_counter() - start) / steps)
    finally:
        optimizer.zero_grad()
    return statistics.median(spans[_WARM:]), torch.cuda.max_memory_allocated() - others


def _held(model: nn.Module) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *model.buffers()))


def cluster_of(found: Calibration | None, gpu: str) -> Cluster:
    """One GPU, as it was calibrated or, without a calibration, as its preset is."""
    preset = devices.from_cuda_name(gpu)
    return Cluster((Node.of(found.applied(preset, 1) if found is not None else preset, 1),))


def compared(rows: Sequence[Row], found: Calibration | None, gpu: str) -> list[dict[str, Any]]:
    """Each row with what is predicted now."""
    cluster, subjects = cluster_of(found, gpu), dict[str, Subject]()
    workspace = _WORKSPACE_BYTES.get(devices.from_cuda_name(gpu).name, 2 * 4 * 2**20 + 16 * 8 * 2**10)
    lines = []
    for row in rows:
        subject = subjects.setdefault(row.model, subjects.get(row.model) or Subject(row.model))
        plan = subject.plan(row.batch, cluster)
        memory = plan.stages[0].memory_bytes - CUDA_OVERHEAD_BYTES + _HANDLES * workspace
        lines.append(
            {
                "model": row.model,
                "batch": row.batch,
                "eager ms": row.eager_s * 1e3,
                "emitted ms": row.step_s and row.step_s * 1e3,
                "predicted ms": plan.step_time_s * 1e3,
                "error": plan.step_time_s / (row.step_s or row.eager_s) - 1,
                "eager GiB": row.eager_bytes / 2**30,
                "emitted GiB": row.memory_bytes and row.memory_bytes / 2**30,
                "predicted GiB": memory / 2**30,
                "memory error": memory / (row.memory_bytes or row.eager_bytes) - 1,
            }
        )
    return lines


def text_of(lines: Sequence[dict[str, Any]], title: str) -> str:
    shown = [[_cell(name, value) for name, value in line.items()] for line in lines]
    table = tabulate(shown, headers=list(lines[0]), disable_numparse=True) if lines else "nothing was measured"
    for name in ("error", "memory error"):
        errors = [abs(line[name]) for line in lines] or [0.0]
        table += f"\n{name}: mean {statistics.mean(errors):.1%}, most {max(errors):.1%}"
    return f"{title}\n\n{table}\n"


def _cell(name: str, value: Any) -> Any:
    if "error" in name:
        return f"{value:+.1%}"
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=BATCHES, action="append", help="of gpu_models.py (default: all)")
    parser.add_argument("--batch", type=int, action="append", help="samples of a step (default: several)")
    parser.add_argument("--recalibrate", action="store_true", help="although this GPU was calibrated before")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write what was measured (.json)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="predict what was measured before")
    arguments = parser.parse_args()
    if arguments.measured is not None:
        data = json.loads(arguments.measured.read_text())
        found, gpu = Calibration.from_json_object(data["calibration"]), str(data["gpu"])
        rows = [Row(**row) for row in data["rows"]]
    else:
        gpu = torch.cuda.get_device_name(0)
        stored = None if arguments.recalibrate else calibrated.find("cuda", 1)
        if stored is None:
            stored = calibrate(torch.device("cuda", 0), quick=False)
            calibrated.store(stored)
        found, rows = stored, []
        for name in arguments.model or BATCHES:
            rows += measure(Subject(name), arguments.batch or BATCHES[name], cluster_of(found, gpu))
            if arguments.output is not None:
                data = {"gpu": gpu, "calibration": found.to_json_object(), "rows": [asdict(row) for row in rows]}
                arguments.output.write_text(json.dumps(data, indent=1))
            gc.collect()
    print(text_of(compared(rows, found, gpu), f"{gpu}, calibrated"))
    print(text_of(compared(rows, None, gpu), f"{gpu}, the preset {devices.from_cuda_name(gpu).name}"))


if __name__ == "__main__":
    main()
