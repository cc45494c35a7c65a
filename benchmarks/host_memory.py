"""The peak host memory of a rank that gets its share of a model: built whole, read from files, or made from meta.

    python benchmarks/host_memory.py [--processes 4] [--hidden 1024] [--layers 8]

The same Llama, under pp = the number of processes and under ZeRO-3, is built whole on every rank; built on meta and
read from a folder of safetensors; built on meta and initialized shard by shard. Each case is a job of new processes;
all run one after the other. Printed are megabytes (1e6 bytes): the largest share of a rank, and the most and the least
of the ranks' peaks of resident memory, above what the process had before the model was built (libraries). Peaks contain
capture and planning on rank 0 (so not the least), and pages of the files, which the system can drop.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import autopart
from autopart.local_job import run_local_job

CASES = ("whole", "weights=", "from meta")


def build(hidden: int, layers: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=8 * hidden,
        max_position_embeddings=64,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def status(line: str) -> int:
    """Bytes of the resident memory: VmRSS is now, VmHWM the peak (of this program; ru_maxrss is its parent's too)."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{line}:")[1].split()[0]) * 1024


def rank(case: str, folder: str, limits: dict[str, Any], hidden: int, layers: int) -> dict[str, int]:
    """What one process needs until the model is ready to train."""
    torch.manual_seed(0)
    ids = torch.zeros(8, 16, dtype=torch.int64)
    before = status("VmRSS")
    if case == "whole":
        model = build(hidden, layers)
    else:
        with autopart.parameters_on_meta():
            model = build(hidden, layers)
    named: dict[str, Any] = {"weights": folder} if case == "weights=" else {}
    parallel = autopart.parallelize(model, example={"input_ids": ids, "labels": ids}, verbose=False, **named, **limits)
    return {"peak": status("VmHWM") - before, "share": sum(p.nbytes for p in parallel.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024, help="a multiple of 64 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    plans: dict[str, dict[str, Any]] = {
        "pipeline": {"pp": given.processes},
        "ZeRO-3": {"dp": given.processes, "zero": 3},
    }
    size = {"hidden": given.hidden, "layers": given.layers}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = build(**size)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        largest = max(parameter.nbytes for parameter in model.parameters())
        model.save_pretrained(Path(folder) / "weights")  # type: ignore[operator]
        del model
        for plan, limits in plans.items():
            for case in CASES:
                work = Path(folder) / f"{plan}-{case.strip('=')}"
                work.mkdir()
                arguments = {"case": case, "folder": str(Path(folder) / "weights"), "limits": limits, **size}
                found = run_local_job("host_memory:rank", given.processes, arguments, work)
                peaks = [one["peak"] / 1e6 for one in found]
                share = max(one["share"] for one in found) / 1e6
                rows.append({"plan": plan, "model": case, "share": share, "most": max(peaks), "least": min(peaks)})
    print(f"whole model {whole / 1e6:.0f} MB, its largest parameter {largest / 1e6:.0f} MB")
    print(tabulate(rows, headers="keys", floatfmt=".0f"))


if __name__ == "__main__":
    main()
