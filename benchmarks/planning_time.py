"""How long planning takes, everything included, from an empty process to the printed plan.

    python benchmarks/planning_time.py [--repeat 3]

Each line runs the command line as a user would, several times, and prints the fastest: in all, and what of it was
spent inside ``make_plan`` and in its solvers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

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
}


def run(arguments: list[str]) -> tuple[float, dict[str, float]]:
    """Seconds of the whole command, and the plan it printed."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "autopart.cli", "plan", *arguments, "--json"], capture_output=True, text=True, check=True
    )
    return time.perf_counter() - start, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    for name, arguments in CASES.items():
        results = [run(arguments) for _ in range(repeat)]
        seconds, plan = min(results, key=lambda item: item[0])
        print(
            f"{name:42} {seconds:6.2f} s in all, {plan['total_s']:5.2f} s planning, {plan['solve_s']:5.2f} s solving; "
            f"pp {plan['pp']:.0f} dp {plan['dp']:.0f} tp {plan['tp']:.0f} m {plan['microbatches']:.0f} "
            f"gap {plan['gap']:.1%}"
        )


if __name__ == "__main__":
    main()
