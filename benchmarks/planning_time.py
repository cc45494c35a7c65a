"""How long planning takes, everything included, from an empty process to the printed plan.

    python benchmarks/planning_time.py [--repeat 3] [--only TEXT] [--large] [--phases | --growth | --again]

Each line runs the command line as a user would, several times, and prints the fastest: in all, and what of it was
spent inside ``make_plan`` and in its solvers; CPU seconds are means, the peak of memory is that of all
runs so far.
Nothing that earlier runs kept is used. --large: larger models and longer graphs, up to minutes each.
--phases: one process; seconds of the processor by phase, of the cases that force nothing, without imports, which
torch and transformers go on with when they are first used. --growth: the same for models of more and more layers, ops
in a layer, and devices. --again: whole commands with a cache that is empty at first: the same, again, with twice the
batch, and on twice the devices.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CASES = {
    "GPT-2 124M on 8 H100": ["hf:gpt2?seq=1024", "--cluster", "8xH100", "--batch", "64"],
    "GPT-2 124M on 8 H100, tp 2 forced": ["hf:gpt2?seq=1024", "--cluster", "8xH100", "--batch", "64", "--tp", "2"],
    "GPT-2 124M on 2x4 A100-80GB, tp 2x4 forced": [
        *("hf:gpt2?seq=1024", "--cluster", "2x4xA100-80GB", "--batch", "8", "--tp", "2x4"),
        *("--pp", "1", "--microbatches", "1", "--recompute", "none"),
    ],
    "GPT-2 124M on 8 H100, pp 4 x tp 2 forced": [
        *("hf:gpt2?seq=1024", "--cluster", "8xH100", "--batch", "64"),
        *("--pp", "4", "--tp", "2"),
    ],
    "GPT-2 XL 1.5B on 4x8 A100-80GB": [
        *("hf:gpt2?n_layer=48&n_embd=1600&n_head=25&seq=1024", "--cluster", "4x8xA100-80GB"),
        *("--batch", "512", "--dtype", "bf16"),
    ],
    "Swin of 4 layers on 4 RTX-4090": [
        "hf:swin?image=64&patch_size=4&embed_dim=48&depths=2,2&num_heads=2,4",
        *("--cluster", "4xRTX-4090", "--batch", "48"),
    ],
}
_LLAMA_70B = (
    "hf:llama?num_hidden_layers=80&hidden_size=8192&intermediate_size=28672&num_attention_heads=64"
    "&num_key_value_heads=8&max_position_embeddings=4096&seq=4096"
)
_LLAMA_405B = (
    "hf:llama?num_hidden_layers=126&hidden_size=16384&intermediate_size=53248&num_attention_heads=128"
    "&num_key_value_heads=8&max_position_embeddings=8192&seq=8192&vocab_size=128256"
)
_GEMMA2_27B = (
    "hf:gemma2?num_hidden_layers=46&hidden_size=4608&intermediate_size=36864&num_attention_heads=32"
    "&num_key_value_heads=16&head_dim=128&vocab_size=256000&seq=4096"
)
_GPT3 = "hf:gpt2?n_layer=96&n_embd=12288&n_head=96&n_positions=2048&seq=2048"
_MEDIUM = "hf:gpt2?n_layer=24&n_embd=1024&n_head=16&seq=1024"
_1T = "hf:gpt2?n_layer=128&n_embd=25600&n_head=160&n_positions=2048&seq=2048"
_MIXTRAL = (
    "hf:mixtral?num_hidden_layers=24&hidden_size=4096&intermediate_size=8192&num_attention_heads=32"
    "&num_key_value_heads=8&num_local_experts=8&experts_implementation=grouped_mm&seq=1024"
)
_DEEPSEEK = "hf:deepseek_v3?seq=4096&experts_implementation=grouped_mm"
_T5 = "hf:t5?num_layers=24&d_model=1024&d_ff=16384&num_heads=32&d_kv=128&seq=512"
_SMALL_MIXTRAL = (
    "hf:mixtral?num_hidden_layers=4&hidden_size=256&intermediate_size=512&num_attention_heads=4&num_key_value_heads=2"
    "&num_local_experts=4&experts_implementation=grouped_mm&vocab_size=1000&seq=128"
)
_MAMBA = "hf:mamba?num_hidden_layers=6&hidden_size=128&vocab_size=500&seq=64"
LARGE = {
    "Llama-70B-like on 32x8 H100": [_LLAMA_70B, "--cluster", "32x8xH100", "--batch", "512", "--dtype", "bf16"],
    "Llama-70B-like on 32x8 H100, batch 2,048": [
        *(_LLAMA_70B, "--cluster", "32x8xH100", "--batch", "2048", "--dtype", "bf16"),
    ],
    **{
        f"Llama-70B-like on 32x8 H100, {schedule} forced": [
            *(_LLAMA_70B, "--cluster", "32x8xH100", "--batch", "512", "--dtype", "bf16", "--schedule", schedule),
        ]
        for schedule in ("zb-h1", "interleaved", "zb-v", "2bw", "auto")
    },
    "GPT-3 175B on 128x8 A100-80GB": [_GPT3, "--cluster", "128x8xA100-80GB", "--batch", "1536", "--dtype", "bf16"],
    "GPT 1T on 384x8 A100-80GB": [_1T, "--cluster", "384x8xA100-80GB", "--batch", "3072", "--dtype", "bf16"],
    "Llama-70B-like on 32x8 RTX-4090": [_LLAMA_70B, "--cluster", "32x8xRTX-4090", "--batch", "512", "--dtype", "bf16"],
    "Llama-405B on 256x8 H100": [_LLAMA_405B, "--cluster", "256x8xH100", "--batch", "2048", "--dtype", "bf16"],
    "DeepSeek-V3 on 256x8 H100": [_DEEPSEEK, "--cluster", "256x8xH100", "--batch", "4096", "--dtype", "bf16"],
    "Gemma2-27B on 4x8 A100-80GB": [_GEMMA2_27B, "--cluster", "4x8xA100-80GB", "--batch", "256", "--dtype", "bf16"],
    "T5 2.9B on 2x8 V100-16GB": [_T5, "--cluster", "2x8xV100-16GB", "--batch", "256"],
    "Mixtral on 4x8 A100-40GB": [_MIXTRAL, "--cluster", "4x8xA100-40GB", "--batch", "256", "--dtype", "bf16"],
    **{
        f"GPT-2 355M on {nodes} x (8 A100-80GB, 8 RTX-3090)": [
            *(_MEDIUM, "--cluster", f"{nodes}x8xA100-80GB+{nodes}x8xRTX-3090", "--batch", batch, "--dtype", "bf16"),
        ]
        for nodes, batch in ((1, "256"), (2, "256"), (4, "512"), (8, "1024"), (16, "2048"))
    },
    "Mixtral of 4 small layers on 4x4 RTX-4090": [
        *(_SMALL_MIXTRAL, "--cluster", "4x4xRTX-4090", "--batch", "96"),
    ],
    "Mamba of 6 layers, 64 steps unrolled, on 2x4 V100": [
        *(_MAMBA, "--cluster", "2x4xV100-32GB", "--batch", "16", "--dtype", "fp16"),
    ],
}


_GPT = "hf:gpt2?n_layer={layers}&n_embd=4096&n_head=32&n_positions=1024&seq=1024"
_LLAMA = (
    "hf:llama?num_hidden_layers={layers}&hidden_size=4096&intermediate_size=11008&num_attention_heads=32"
    "&max_position_embeddings=1024&seq=1024"
)
_EXPERTS = _MIXTRAL.replace("=24&", "={layers}&", 1)
FREE = {"--cluster", "--batch", "--dtype"}
"""The options of cases that force nothing."""
GROWTH = [
    *(("layers", _GPT.format(layers=layers), 64) for layers in (12, 24, 48, 96)),
    *(("devices", _GPT.format(layers=48), devices) for devices in (8, 64, 512, 3072)),
    *(("ops in a layer", spec.format(layers=24), 64) for spec in (_GPT, _LLAMA, _EXPERTS)),
]


_importing = {"depth": 0, "seconds": 0.0}


def _clock() -> float:
    """CPU seconds of this process so far that were not spent importing."""
    return time.process_time() - _importing["seconds"]


def _noted(importing: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, noting the time it takes where a module is imported that was not there."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        if _importing["depth"]:
            return importing(*args, **kwargs)
        start, there = time.process_time(), len(sys.modules)
        _importing["depth"] = 1
        try:
            return importing(*args, **kwargs)
        finally:
            _importing["depth"] = 0
            if len(sys.modules) != there:
                _importing["seconds"] += time.process_time() - start

    return noted


def phase_seconds(model: str, cluster: str, batch: int, dtype: str) -> str:
    """CPU seconds of planning in this process by phase, and how much there was to do."""
    import torch

    from autopart import cache
    from autopart.analysis import analyze
    from autopart.cluster import Cluster
    from autopart.collection import seldom_collected
    from autopart.models import load_model
    from autopart.planner import make_plan
    from autopart.tracing import capture

    clock = [_clock()]
    with seldom_collected(), cache.used(False):  # as the command does with --no-cache
        loaded = load_model(model, meta=True, dtype=getattr(torch, dtype))
        clock.append(_clock())
        program = capture(loaded.model, loaded.args, loaded.kwargs)
        clock.append(_clock())
        analysis = analyze(program)
        clock.append(_clock())
        plan = make_plan(program, Cluster.parse(cluster), batch=batch, analysis=analysis)
        clock.append(_clock())
    parts = [after - before for before, after in itertools.pairwise(clock)]
    built, captured, analyzed, planned = parts
    layers = len({layer for layer in analysis.layers if layer})
    tried = sum(row["status"] in ("chosen", "slower") for row in plan.considered)
    return (
        f"{layers:3} layers {len(analysis.block_of):5} ops {plan.device_count:4} devices: {built:4.1f} s build, "
        f"{captured:4.1f} s capture, {analyzed:4.1f} s analysis, {planned:5.1f} s planner, {sum(parts):5.1f} s in all; "
        f"step {plan.step_time_s:.4g} s, gap {plan.gap:.1%}, {len(plan.considered)} configurations, {tried} timed"
    )


def grow(only: str) -> None:
    """Prints what planning takes as one thing grows."""
    for what, spec, devices in GROWTH:
        if only in what:
            found = phase_seconds(spec, f"{devices // 8}x8xH100", 4 * devices, "bfloat16")
            print(f"{what:14} {spec[3:].partition('?')[0]:8} {found}", flush=True)


def phases(only: str, cases: Mapping[str, Sequence[str]]) -> None:
    """Prints what the phases of planning take."""
    for name, (model, *options) in cases.items():
        given = dict(zip(options[::2], options[1::2], strict=True))
        if only in name and given.keys() <= FREE:
            dtype = {"bf16": "bfloat16"}.get(given.get("--dtype", ""), "float32")
            print(f"{name:40} {phase_seconds(model, given['--cluster'], int(given['--batch']), dtype)}", flush=True)


def run(arguments: Sequence[str], kept: str = "off") -> tuple[float, dict[str, float]]:
    """Seconds of the whole command, and the plan it printed. kept: the folder of the cache."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "autopart", "plan", *arguments, "--json"]
    environment = {**os.environ, "AUTOPART_CACHE": kept}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return time.perf_counter() - start, json.loads(done.stdout)


def again(only: str, cases: Mapping[str, Sequence[str]]) -> None:
    """Prints what planning takes with what earlier commands kept."""
    for name, (model, *options) in cases.items():
        given = dict(zip(options[::2], options[1::2], strict=True))
        if only not in name or not given.keys() <= FREE:
            continue
        nodes, *node = given["--cluster"].split("x")
        more = f"{2 * int(nodes)}x{'x'.join(node)}" if len(node) > 1 else f"2x{given['--cluster']}"
        questions = {
            "first": given,
            "again": given,
            "twice the batch": {**given, "--batch": str(2 * int(given["--batch"]))},
            f"on {more}": {**given, "--cluster": more},
        }
        found = []
        with tempfile.TemporaryDirectory() as kept:
            for what, asked in questions.items():
                seconds, plan = run([model, *itertools.chain.from_iterable(asked.items())], kept)
                found.append(f"{what} {seconds:.1f} s, of it planner {plan['total_s']:.1f} s")
        print(f"{name:40} {'; '.join(found)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    if options.phases or options.growth:
        builtins.__import__ = _noted(builtins.__import__)
        importlib.import_module = _noted(importlib.import_module)
        from autopart.collection import seldom_collected

        with seldom_collected():  # as the command does
            if options.phases:
                phases(options.only, LARGE if options.large else CASES)
            else:
                grow(options.only)
        return
    if options.again:
        again(options.only, LARGE if options.large else CASES)
        return
    repeat = options.repeat
    for name, arguments in (LARGE if options.large else CASES).items():
        if options.only not in name:
            continue
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        results = [run(arguments) for _ in range(repeat)]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = (used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime) / repeat
        seconds, plan = min(results, key=lambda item: item[0])
        print(
            f"{name:42} {seconds:6.2f} s in all, {plan['total_s']:5.2f} s planning, {plan['solve_s']:5.2f} s solving, "
            f"{cpu:.1f} s of CPU each, {used.ru_maxrss / 2**20:.1f} GiB; "
            f"pp {plan['pp']:.0f} dp {plan['dp']:.0f} tp {plan['tp']:.0f} m {plan['microbatches']:.0f} "
            f"step {plan['step_time_s']:.4g} s, gap {plan['gap']:.1%}"
        )


if __name__ == "__main__":
    main()
