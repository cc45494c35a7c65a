"""The peak memory of a step on the CPU, counted in real runs, against what the emitted graphs predict.

    python benchmarks/memory.py [--model gpt2|hf:swin] [--group divided] [--case 'pp2 .*'] [--json]

Counted are the bytes of all tensors that a step makes, while they are alive, the gradients of parameters among them;
parameters, inputs and optimizer state are there before. ``call`` is the most while the model is called, ``update`` that
while AdamW updates, and ``ratio`` is of the larger one, predicted over counted; ``update ratio`` of the update alone.
Of several steps those count in which
everything is as it will be: the second and third (which know in what order divided weights are gathered), of 2BW the
fourth and fifth; of these the one with less, since threads of gloo may hold a message for a moment longer. The copy
that gloo makes inside of a sum that it scatters is counted. ``first`` is the first call over those.

Every rank of a job counts for itself; the largest of each rank of the pipeline is printed. Groups: ``alone``, in one
process, layers kept or computed again as a whole or in part, and in bf16-mixed; ``pipelines`` by schedule; ``divided``,
replicas that divide parameters (ZeRO); ``sharded``, on tensor axes; ``mixed``, several of these at once.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import autopart
from autopart.analysis import Analysis, analyze
from autopart.cluster import Cluster, Device, Link, Node
from autopart.local_job import run_local_job
from autopart.models import load_model
from autopart.passes.emit.layers import recomputable_layers
from autopart.passes.emit.segments import recomputable
from autopart.plan import Plan
from autopart.realize import realize, realized
from autopart.runtime.errors import BatchError, PlanError
from autopart.step_memory import step_peaks
from autopart.verify.live_bytes import LiveBytes, scattering_in_sight

_TEXT = "vocab_size=4096&batch=8&seq=64"
_PLAIN = str(Path(__file__).parent / "coverage_models.py")
MODELS = {
    "gpt2": f"hf:gpt2?n_layer=4&n_embd=128&n_head=4&{_TEXT}&resid_pdrop=0&embd_pdrop=0&attn_pdrop=0",
    "llama": f"hf:llama?num_hidden_layers=4&hidden_size=128&intermediate_size=344&num_attention_heads=4"
    f"&num_key_value_heads=2&{_TEXT}",
    "bert": f"hf:bert?num_hidden_layers=4&hidden_size=128&intermediate_size=512&num_attention_heads=4&{_TEXT}"
    "&hidden_dropout_prob=0&attention_probs_dropout_prob=0",
    "t5": f"hf:t5?num_layers=2&d_model=128&d_ff=512&num_heads=4&d_kv=32&{_TEXT}&dropout_rate=0",
    "mixtral": f"hf:mixtral?num_hidden_layers=4&hidden_size=128&intermediate_size=256&num_attention_heads=4"
    f"&num_key_value_heads=2&num_local_experts=4&num_experts_per_tok=2&{_TEXT}",
    "whisper": "hf:whisper?task=speech-seq2seq&d_model=128&encoder_layers=2&decoder_layers=2&encoder_attention_heads=4"
    "&decoder_attention_heads=4&encoder_ffn_dim=512&decoder_ffn_dim=512&vocab_size=4096&batch=8&seq=32&dropout=0",
    "vit": "hf:vit?num_hidden_layers=4&hidden_size=128&intermediate_size=512&num_attention_heads=4&image=32"
    "&image_size=32&patch_size=4&num_labels=10&batch=8",
    "resnet": "hf:resnet?embedding_size=16&hidden_sizes=16,16,32,32&depths=1,1,1,1&layer_type=basic&image=64"
    "&num_labels=10&batch=8",
    "unet": f"{_PLAIN}:unet",
    "lstm": f"{_PLAIN}:lstm_stack",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of plan. again: nothing, all layers, or one module of each layer ("modules") runs again."""

    group: str
    pp: int = 1
    dp: int = 1
    tp: str = "1"
    microbatches: int = 2
    schedule: str = "1f1b"
    zero: int = 0
    again: str = ""
    precision: str = ""
    reduce_dtype: str = ""

    @property
    def name(self) -> str:
        parts = [f"pp{self.pp}", f"dp{self.dp}", f"tp{self.tp}", f"m{self.microbatches}", self.schedule]
        parts += [f"zero{self.zero}"] * bool(self.zero) + [f"again-{self.again}"] * bool(self.again)
        return " ".join([*parts, *filter(None, (self.precision, self.reduce_dtype))])

    @property
    def ranks(self) -> int:
        sizes = [int(size) for size in self.tp.split("x")]
        return int(torch.tensor([self.pp, self.dp, *sizes]).prod())

    @property
    def limits(self) -> dict[str, Any]:
        recompute = "full" if self.again == "layers" else "none"
        own = {name: getattr(self, name) for name in ("pp", "dp", "tp", "microbatches", "schedule", "zero")}
        return {**own, "recompute": recompute, "meshes": "equal"}


def _cases() -> Iterator[Case]:
    yield Case("alone", microbatches=1)
    for again in ("", "layers", "modules"):
        yield Case("alone", again=again)
    yield Case("alone", precision="bf16-mixed")
    yield Case("alone", precision="bf16-mixed", again="layers")
    for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "2bw"):
        yield Case("pipelines", pp=2, microbatches=4, schedule=schedule)
    for schedule in ("1f1b", "zb-h1"):
        yield Case("pipelines", pp=2, microbatches=4, schedule=schedule, again="layers")
    yield Case("divided", dp=2)
    for level in (1, 2, 3):
        for microbatches in (1, 2, 4):
            yield Case("divided", dp=2, microbatches=microbatches, zero=level)
        yield Case("divided", dp=2, zero=level, again="layers")
        yield Case("divided", dp=2, zero=level, precision="bf16-mixed")
        yield Case("divided", dp=2, zero=level, reduce_dtype="float64")
    for tp in ("2", "4", "2x2"):
        yield Case("sharded", tp=tp)
    yield Case("sharded", tp="2", again="layers")
    yield Case("sharded", tp="2", precision="bf16-mixed")
    for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"):
        yield Case("mixed", pp=2, tp="2", microbatches=4, schedule=schedule)
    for level in (0, 1, 2, 3):
        yield Case("mixed", pp=2, dp=2, zero=level)
        yield Case("mixed", dp=2, tp="2", zero=level)


CASES = tuple(_cases())


def cluster_of(ranks: int) -> Cluster:
    """Processors that launch ops for nothing, on links without latency, for which sharing of small tensors pays."""
    peaks = dict.fromkeys(("float32", "float64", "bfloat16"), 1e10)
    device, link = Device("ideal", "cpu", 2**40, peaks, 1e12, 0.0), Link("ideal", 1e12, 0.0)
    return Cluster((Node(device, ranks, link, link, 1),))


def count(spec: str, directories: Sequence[str], steps: Sequence[int], results: str) -> None:
    """What each rank does, program after program: writes the most bytes of tensors in each call, and in each update,
    gradients included.
    """
    torch.set_num_threads(1)
    found: list[list[tuple[int, int]]] = []
    for directory, number in zip(directories, steps, strict=True):
        loaded = load_model(spec)
        weights = {name: tensor.detach() for name, tensor in loaded.model.state_dict().items()}
        model = autopart.load(directory, weights, device=torch.device("cpu")).train()
        trained = [item for item in model.parameters() if item.requires_grad]
        optimizer = torch.optim.AdamW(trained) if trained else None
        known = [*model.parameters(), *model.buffers(), *loaded.args, *loaded.kwargs.values()]
        found.append([])
        with scattering_in_sight(), LiveBytes(known) as live:
            for _ in range(number):
                held = sum(item.untyped_storage().nbytes() for item in _state(optimizer))
                live.most = live.now
                output = model(*loaded.args, **loaded.kwargs)
                call, update = live.most - held, 0
                loss = output if isinstance(output, torch.Tensor) else output["loss"]
                if loss.requires_grad:
                    loss.backward()
                    if optimizer is not None:
                        live.most = live.now
                        optimizer.step()
                        update = live.most - held
                        optimizer.zero_grad()
                found[-1].append((call, update))
                del output, loss
        if model.manifest.schedule == "2bw":
            model.finish()  # or what is on its way would reach the next program
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Path(results, f"{rank}.json").write_text(json.dumps(found))


def _state(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    for own in optimizer.state.values() if optimizer is not None else ():
        yield from (item for item in own.values() if isinstance(item, torch.Tensor))


@dataclass(slots=True)
class Subject:
    """A model of :data:`MODELS`, captured once for each type that it is computed in."""

    spec: str
    captured: dict[tuple[str, str], Analysis] = field(default_factory=dict)

    def plan(self, case: Case) -> tuple[Analysis, Plan] | None:
        """None where the model has no such plan."""
        key = case.precision, case.reduce_dtype
        if key not in self.captured:
            loaded = load_model(self.spec)
            program = autopart.capture(
                loaded.model.train(),
                loaded.args,
                loaded.kwargs,
                check_eval=False,
                precision=case.precision,
                reduce_dtype=case.reduce_dtype,
            )
            self.captured[key] = analyze(program)
        analysis = self.captured[key]
        try:
            plan = autopart.make_plan(analysis.program, cluster_of(case.ranks), analysis=analysis, **case.limits)
        except (PlanError, BatchError) as error:
            print(f"{self.spec}: {case.name}: {error}", file=sys.stderr)
            return None
        if case.again == "modules":
            return (analysis, again) if (again := _modules_again(analysis, plan)) is not None else None
        return analysis, plan

    def measure(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Bytes counted and predicted, of each rank of the pipelines. cases: of as many ranks."""
        planned = [(case, *found) for case in cases if (found := self.plan(case)) is not None]
        ranks = cases[0].ranks
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            directories = [str(folder / str(number)) for number in range(len(planned))]
            for directory, (_, analysis, plan) in zip(directories, planned, strict=True):
                realize(analysis.program, plan, analysis).save(Path(directory))
            steps = [5 if case.schedule == "2bw" else 3 for case, *_ in planned]
            (folder / "job").mkdir()
            arguments = {"spec": self.spec, "directories": directories, "steps": steps, "results": name}
            run_local_job("memory:count", ranks, arguments, folder / "job", timeout_s=3000)
            counted = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        rows = []
        for number, (case, analysis, plan) in enumerate(planned):
            predicted = step_peaks(analysis, plan, realized(analysis, plan), "cpu")
            size = ranks // case.pp
            own = [[counted[rank][number] for rank in range(at * size, (at + 1) * size)] for at in range(case.pp)]
            calls, updates = (
                [max(min(step[which] for step in of_rank[-2:]) for of_rank in place) for place in own]
                for which in (0, 1)
            )
            most = list(map(max, calls, updates))
            first = max(of_rank[0][0] / top for place, top in zip(own, calls, strict=True) for of_rank in place)
            rows.append(
                {
                    "plan": case.name,
                    "call": calls,
                    "update": updates,
                    "predicted": [round(item.most) for item in predicted],
                    "ratio": _ratios([item.most for item in predicted], most),
                    "update ratio": _ratios([item.update for item in predicted], updates),
                    "first": round(first, 3),
                }
            )
        return rows


def _modules_again(analysis: Analysis, plan: Plan) -> Plan | None:
    """The plan with one module of each layer computed again, the last of the outermost; None where there are none."""
    stages = []
    for stage, graph in zip(plan.stages, realized(analysis, plan).local, strict=True):
        layers, paths = set(recomputable_layers(graph)), recomputable(graph)
        inside = [path for path in paths if path not in layers]
        outer = [path for path in inside if not any(path.startswith(f"{other}.") for other in inside)]
        last = {layer: path for layer in layers for path in outer if path.startswith(f"{layer}.")}
        stages.append(replace(stage, recompute=tuple(path for path in paths if path in last.values())))
    return replace(plan, recompute="some", stages=tuple(stages)) if any(own.recompute for own in stages) else None


def _ratios(predicted: Sequence[float], counted: Sequence[int]) -> list[float]:
    pairs = zip(predicted, counted, strict=True)
    return [round(ours / theirs, 3) if theirs else 1.0 if not ours else math.inf for ours, theirs in pairs]


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    ratios = [ratio for row in rows for ratio in row["ratio"]]
    near = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
    return f"{near} of {len(ratios)} within 5 %; {min(ratios)} to {max(ratios)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="all", help=f"one of {', '.join(MODELS)}, or any that autopart plan takes")
    parser.add_argument("--group", choices=[*dict.fromkeys(case.group for case in CASES), "all"], default="all")
    parser.add_argument("--case", default=".*", help="pattern of plans' names")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # ranks import this file by its name
    wanted = [
        case for case in CASES if arguments.group in (case.group, "all") and re.fullmatch(arguments.case, case.name)
    ]
    rows: list[dict[str, Any]] = []
    for name in list(MODELS) if arguments.model == "all" else [arguments.model]:
        subject = Subject(MODELS.get(name, name))
        for ranks in sorted({case.ranks for case in wanted}):
            found = subject.measure([case for case in wanted if case.ranks == ranks])
            rows += [{"model": name, **row} for row in found]
            if not arguments.json:
                print(tabulate(rows[-len(found) :], headers="keys", floatfmt=".4g"), flush=True)
    print(json.dumps(rows) if arguments.json else _summary(rows))


if __name__ == "__main__":
    main()
