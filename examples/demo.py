"""The whole road: an unmodified GPT-2, planned for four CPU devices, emitted, and trained by torchrun.

    make demo        (or: python examples/demo.py)

Trains the same model in one process on the same batches first, then the emitted program in four, and prints the losses
of both side by side. Takes about two minutes on two cores; needs no GPU and downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

# Four devices are four processes on this machine's cores, also where there is a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

import autopart
import corpus
from autopart.report.table import plan_text
from demo_rank import Training, train
from small_gpt2 import build_model

DEVICES = 4
LIMIT_S = 45.0
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plans, emits and trains a small GPT-2 on four local processes.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="rows per step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="bytes per row (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=Path("emitted"), help="for the stages (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(CORES)
    settings = Training(arguments.steps, arguments.batch, arguments.seq)

    torch.manual_seed(0)
    model = build_model(settings.seq).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"GPT2LMHeadModel of the transformers library: {count:,} parameters, unmodified\n")

    x = next(corpus.training_batches(settings.batch, settings.seq))
    program = autopart.capture(model, (), {"input_ids": x, "labels": x}, name="GPT2LMHeadModel")
    plan = autopart.make_plan(program, autopart.Cluster.local(DEVICES))
    print(plan_text(plan), "\n")

    autopart.emit(program, plan, arguments.directory)
    files = ", ".join(sorted(path.name for path in arguments.directory.iterdir()))
    print(f"stages written to {arguments.directory}/ ({files})\n")

    with tempfile.TemporaryDirectory(prefix="autopart-demo-") as folder:
        alone = Path(folder) / "one_process.json"
        found = train(model, settings, "one process", limit_s=LIMIT_S)
        alone.write_text(json.dumps(found))
        # On a slow or busy machine both take fewer steps, so that the whole stays within three minutes.
        settings = replace(settings, steps=len(found["losses"]))
        together = Path(folder) / "parallel.json"
        run_torchrun(arguments.directory, settings, alone, together)
        report(json.loads(alone.read_text()), json.loads(together.read_text()), settings)


def run_torchrun(directory: Path, settings: Training, alone: Path, together: Path) -> None:
    """Trains the emitted program: what a user would start as ``torchrun --nproc-per-node 4 …``."""
    script = Path(__file__).with_name("demo_rank.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(DEVICES)]
    sizes = [str(settings.steps), str(settings.batch), str(settings.seq)]
    # One thread per process: four processes share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    print(f"\ntorchrun --nproc-per-node {DEVICES} examples/demo_rank.py {directory}", flush=True)
    done = subprocess.run([*torchrun, str(script), str(directory), str(alone), str(together), *sizes], env=environment)
    if done.returncode:
        sys.exit(f"torchrun ended with status {done.returncode}; the lines above say why")


def report(alone: dict[str, Any], together: dict[str, Any], settings: Training) -> None:
    pairs = zip(alone["losses"], together["losses"], strict=True)
    largest, step = max((abs(a - b), index + 1) for index, (a, b) in enumerate(pairs))
    print(f"\nlargest difference in loss over {settings.steps} steps: {largest:.1e} (step {step}, float32)")
    print(f"validation loss before {alone['before']:.4f}")
    for name, result in (("one process", alone), (f"{DEVICES} processes", together)):
        print(f"  {name}: validation loss after {result['after']:.4f}, {result['tokens_per_s']:,.0f} tokens/s")
    print(f"(all on the same {CORES} cores, so {DEVICES} processes are not expected to be faster than one)")


if __name__ == "__main__":
    main()
