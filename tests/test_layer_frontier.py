"""Modules of a layer that are computed again by themselves: what choices cost, what plans choose, how it trains."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import chain_of, subject_of
from test_planner import GPT2, analysis_of
from test_saved_in_runs import watch
from torch import Tensor, fx, nn
from torch.nn import functional

import autopart.verify
from autopart.analysis import analyze
from autopart.api import load
from autopart.block_costs import BlockCosts
from autopart.candidates import Candidates
from autopart.layer_frontier import MOST_POINTS, paths
from autopart.memory_bound import MemoryBound
from autopart.passes.emit.segments import recomputable, segments_of
from autopart.passes.kept import kept_bytes
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.realize import build, realize, realized
from autopart.recomputation import WHOLE
from autopart.report.table import plan_text
from autopart.runtime.errors import PlanError
from autopart.solver.degrees import Degrees
from autopart.solver.stages_choices import least_seconds
from autopart.solver.stages_parts import Choice, Family
from autopart.solver.stages_problem import StageProblem
from autopart.step_memory import step_peaks
from autopart.tensor_scheme import TensorScheme
from autopart.verify import compare_emitted, prepare
from autopart.verify.live_bytes import LiveBytes
from clusters import ideal
from launch import run_kept_job

H = "transformer.h"


def with_modules(plan: Plan, *stages: tuple[str, ...]) -> Plan:
    found = tuple(replace(stage, recompute=own) for stage, own in zip(plan.stages, stages, strict=True))
    return replace(plan, recompute="some", stages=found)


def test_modules_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, an activation function and a whole layer, on two stages."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of("gpt2")
    plan = with_modules(chain_of("gpt2", 2), (f"{H}.0.attn", f"{H}.1.ln_1", f"{H}.1.mlp.act"), (f"{H}.2.mlp", f"{H}.3"))
    emitted = realize(subject.program, plan, analysis)
    first, second = (emitted.files[f"stage_{stage}.py"] for stage in (0, 1))
    assert first.count("checkpoint(self._again") == 3 and "def _again_mlp_act(self, x: Tensor) -> Tensor:" in first
    assert second.count("checkpoint(self._again") == 1 and 'checkpoint(self.transformer.h["3"], ' in second
    emitted.save(tmp_path / "program")
    assert compare_emitted(tmp_path / "program", subject, plan=plan).equal


def test_collectives_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two tensor ranks: equal training, and as many calls and bytes as the plan says."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of("gpt2")
    limits: dict[str, Any] = {"batch": 8, "pp": 1, "dp": 1, "tp": 2, "microbatches": 2, "tensor_scheme": "1d"}

    def planned(memory_bytes: int, recompute: str) -> Plan:
        cluster = ideal(2, memory_bandwidth=1e15, memory_bytes=memory_bytes)
        return make_plan(subject.program, cluster, analysis=analysis, recompute=recompute, **limits)

    kept, full = (planned(2**40, recompute).stages[0].memory_bytes for recompute in ("none", "full"))
    plan = planned((kept + full) // 2, "auto")
    again = plan.stages[0].recompute
    assert any(path.count(".") > 2 for path in again)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal
    for stage in result.traffic:
        assert stage.counted == stage.planned


MODULES = {
    "activations": ("gpt2", ("mlp.act",)),
    "attention": ("gpt2", ("ln_1", "attn")),
    "both": ("gpt2", ("attn", "ln_2", "mlp")),
    "t5": ("t5", ("SelfAttention", "DenseReluDense")),
}


@pytest.mark.parametrize("case", MODULES)
def test_what_a_real_run_holds(case: str, tmp_path: Path) -> None:
    """The most bytes alive in a step, and what its forward keeps, against the walk over the graph."""
    name, modules = MODULES[case]
    subject, analysis = subject_of(name)
    plan = chain_of(name, 1, 2)
    found = realized(analysis, plan)
    offered = recomputable(found.local[0])
    again = tuple(path for path in offered if path.endswith(tuple(f".{module}" for module in modules)))
    plan = with_modules(plan, again)
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    weights = {key: tensor.detach() for key, tensor in subject.model.state_dict().items()}
    model = load(str(tmp_path / "program"), weights, device=torch.device("cpu")).train()
    with LiveBytes([*model.parameters(), *model.buffers(), *subject.leaves.values()]) as live:
        model(**subject.leaves)
    kept: dict[int, int] = {}
    watch((), model.stages[0], 0, kept)
    model(**subject.leaves)
    (predicted,) = step_peaks(analysis, plan, found, "cpu")
    assert predicted.call == pytest.approx(live.most, rel=0.01)
    assert kept_bytes(found.local[0], (), 4, again, "cpu") == pytest.approx(kept[0], rel=0.02)


def families(name: str, tp: tuple[int, ...] = ()) -> tuple[Candidates, Degrees, StageProblem, Any]:
    _, analysis = subject_of(name)
    scheme = TensorScheme("1d") if tp else TensorScheme.AUTO
    candidates = Candidates(analysis, ideal(tp[0] if tp else 1, memory_bandwidth=1e15), 8, "adamw", scheme=scheme)
    config = Degrees(1, 1, tp, 4, "1f1b", "auto")
    choice = candidates.choose(config)
    return candidates, config, candidates.problem(config, choice), choice


@pytest.mark.parametrize(("name", "tp"), [("gpt2", ()), ("gpt2", (2,)), ("t5", ())])
def test_each_choice_keeps_what_its_stage_keeps(name: str, tp: tuple[int, ...]) -> None:
    """The bytes of every point of the first layer's frontier against the graph that is emitted for it."""
    candidates, config, problem, choice = families(name, tp)
    analysis, axes = candidates.analysis, candidates.setting(config).named_sizes
    (graph,) = build(analysis, (0, len(analysis.blocks)), axes, choice.strategies, choice.storage, None, ()).local
    (shape,) = problem.shapes
    layer = shape.layers[0]
    family = layer.parts[layer.blocks]
    assert len(family) > 3 and family[-1].name == WHOLE
    path = analysis.layers[layer.blocks[0]]
    plain = kept_bytes(graph, axes, 2)
    for point in family[1:]:
        again = [path] if point.name == WHOLE else paths(path, point.name)
        apart = [own.path for _, _, parts in segments_of(graph, again) for own in parts if own.path]
        assert sorted(apart) == sorted(again)
        freed = plain - kept_bytes(graph, axes, 2, again)
        expected = family[0].activation_bytes - point.activation_bytes
        assert freed == pytest.approx(expected, rel=0.05, abs=0.01 * family[0].activation_bytes), point.name


def test_a_module_whose_gather_is_begun_before_another_module_runs_again_behind_it() -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")

    def op(path: str, target: Any, *read: fx.Node) -> fx.Node:
        node = graph.call_function(target, read)
        node.meta.update(path=path, layer="h.0", val=torch.empty(2, 2))
        return node

    gathered = op("h.0.mlp.up", torch.ops.aten.clone.default, weight)
    gathered.meta["transition"] = "all_gather"
    norm = op("h.0.norm", torch.ops.aten.tanh.default, op("h.0.norm", torch.ops.aten.exp.default, x))
    up = op("h.0.mlp.up", torch.ops.aten.mm.default, norm, gathered)
    act = op("h.0.mlp", torch.ops.aten.relu.default, up)
    op("h.0", torch.ops.aten.add.Tensor, x, act)
    ((_, is_layer, found),) = segments_of(graph, ("h.0.norm", "h.0.mlp"))
    assert is_layer and [item.path for item in found] == ["", "h.0.norm", "h.0.mlp", ""]
    assert found[0].nodes == (gathered,) and found[2].nodes == (up, act)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Named(nn.Module):
    """Layers of equal ops, each in two modules that have names, or a part of the ops, of their own."""

    def __init__(self, names: Sequence[tuple[str, str]], ends: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for (first, second), end in zip(names, ends, strict=True):
            pairs = ([nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)] for _ in range(2))
            ops = list(itertools.chain.from_iterable(pairs))
            parts = {first: nn.Sequential(*ops[:end]), second: nn.Sequential(*ops[end:])}
            self.layers.append(Residual(OrderedDict(parts)))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = inputs
        for layer in self.layers:
            x = layer(x)
        return {"loss": functional.mse_loss(x, labels)}


@pytest.mark.parametrize(
    ("names", "ends"),
    [([("one", "two"), ("left", "right")] * 3, [4] * 6), ([("one", "two")] * 6, [4, 4, 6, 6, 4, 6])],
)
def test_modules_of_layers_of_equal_ops(names: list[tuple[str, str]], ends: list[int]) -> None:
    """What may run again is each layer's own, not that of another with the same ops; bounds know it too."""
    model = Named(names, ends).double()
    batch = {"inputs": torch.randn(8, 8).double(), "labels": torch.randn(8, 8).double()}
    analysis = analyze(prepare(model, (), batch).program)
    assert len({block.signature for block in analysis.blocks}) < len(set(analysis.kinds))
    candidates = Candidates(analysis, ideal(1, memory_bandwidth=1e15), 8, "adamw")
    config = Degrees(1, 1, (), 1, "1f1b", "auto")
    problem = candidates.problem(config, candidates.choose(config))
    (graph,) = build(analysis, (0, len(analysis.blocks)), (), {}, {}, None, ()).local
    offered, plain = recomputable(graph), kept_bytes(graph, (), 8)
    assert len(problem.shapes[0].layers) == 6
    for layer in problem.shapes[0].layers[:-1]:  # the last one ends in a block with the loss
        keep, *others = layer.parts[layer.blocks]
        for point in others:
            path = analysis.layers[layer.blocks[0]]
            again = [path] if point.name == WHOLE else paths(path, point.name)
            assert set(again) <= set(offered)
            freed = plain - kept_bytes(graph, (), 8, again)
            assert freed == pytest.approx(keep.activation_bytes - point.activation_bytes)
    row = MemoryBound(analysis, BlockCosts(analysis, "cuda"), candidates.readers, "adamw").row
    facts = {tuple(row[number] for number in layer.blocks) for layer in problem.shapes[0].layers[1:-1]}
    assert len(facts) == 2


def test_a_frontier_rises_in_seconds_and_falls_in_bytes() -> None:
    for name, tp in (("gpt2", ()), ("t5", (2,))):
        _, _, problem, _ = families(name, tp)
        for layer in problem.shapes[0].layers:
            for family in layer.parts.values():
                assert family[0].name == "" and len(family) <= MOST_POINTS + 2
                for one, other in itertools.combinations(family, 2):
                    assert one.seconds <= other.seconds
                    assert other.activation_bytes < one.activation_bytes or other.transient_bytes < one.transient_bytes
                assert all(point.activation_bytes < family[0].activation_bytes for point in family[1:])


def test_modules_run_again_that_are_given_no_gathered_weights() -> None:
    """A module would keep what is gathered for its layer; layers that gather nothing are free to choose."""
    _, analysis = subject_of("gpt2")
    candidates = Candidates(analysis, ideal(2), 8, "adamw", zero=None)
    choice = candidates.choose(Degrees(1, 2, (), 2, "1f1b"), level=3)
    gathered = analysis.layers[next(number for number, layer in enumerate(analysis.layers) if layer)]
    levels = {name: level for name, level in choice.levels.items() if name.startswith(gathered)}
    assert levels
    problem = candidates.problem(Degrees(1, 2, (), 2, "1f1b"), replace(choice, levels=levels))
    for layer in problem.shapes[0].layers:
        names = {point.name for point in layer.parts[layer.blocks]} - {"", WHOLE}
        if analysis.layers[layer.blocks[0]] == gathered:
            assert names == {"mlp.act"}
        else:
            assert len(names) > 1 and any("mlp" in name.split(",") for name in names)


@pytest.mark.parametrize("seed", range(60))
def test_equal_blocks_with_many_choices(seed: int) -> None:
    """The knapsack against all combinations, where several blocks have one family of up to five choices."""
    rng = random.Random(seed)
    blocks: list[Family] = []
    for _ in range(rng.randint(1, 2)):
        own = tuple(
            Choice(rng.randint(0, 9) / 8, rng.randint(0, 9) / 8, 1.0, rng.randint(0, 12), rng.randint(0, 3))
            for _ in range(rng.randint(1, 5))
        )
        blocks += [own] * rng.randint(1, 4)
    room, flying = rng.uniform(0, 40), rng.randint(1, 2)
    best = min(
        (
            sum(choice.seconds for choice in chosen)
            for chosen in itertools.product(*blocks)
            if sum(choice.kept_bytes(flying) for choice in chosen) + max(c.transient_bytes for c in chosen) <= room
        ),
        default=None,
    )
    found = least_seconds(blocks, room, flying)
    assert (found.choices is None) == (best is None)
    if found.choices is not None:
        assert found.seconds == pytest.approx(best) and found.bound == pytest.approx(best)


def test_modules_before_layers_where_memory_binds() -> None:
    """Under every limit the plan is at least as fast as with whole layers alone, and mostly faster."""
    analysis = analysis_of(GPT2)
    limits: dict[str, Any] = {"batch": 16, "pp": 1, "dp": 1, "tp": 1, "microbatches": 1, "optimizer": "sgd"}

    def planned(memory_bytes: int, recompute: str = "auto") -> Plan:
        cluster = ideal(1, memory_bytes=memory_bytes)
        return make_plan(analysis.program, cluster, analysis=analysis, recompute=recompute, **limits)

    kept, full = planned(2**40, "none"), planned(2**40, "full")
    least, most = full.stages[0].memory_bytes, kept.stages[0].memory_bytes
    plan = planned(least + (most - least) * 3 // 4)
    assert plan.recompute == "some" and plan.stages[0].memory_bytes <= plan.stages[0].capacity_bytes
    assert any(path.count(".") > 2 for path in plan.stages[0].recompute)
    assert kept.step_time_s < plan.step_time_s < kept.step_time_s + (full.step_time_s - kept.step_time_s) / 8
    assert Plan.from_json(plan.to_json()) == plan and "mlp" in plan_text(plan)


def test_what_cannot_be_computed_again_by_itself() -> None:
    subject, analysis = subject_of("gpt2")
    plan = chain_of("gpt2", 2)
    offered = recomputable(realized(analysis, plan).local[0])
    assert offered[:3] == (f"{H}.0", f"{H}.0.ln_1", f"{H}.0.attn")
    with pytest.raises(PlanError, match=r"stages\[0\].recompute: 'transformer.h.0.mlpp' is no layer .* module"):
        realize(subject.program, with_modules(plan, (f"{H}.0.mlpp",), ()), analysis)
    with pytest.raises(PlanError, match=r"'transformer.h.1.mlp.act' lies in 'transformer.h.1.mlp'.*name one"):
        realize(subject.program, with_modules(plan, (f"{H}.1.mlp", f"{H}.1.mlp.act"), ()), analysis)
    limits: dict[str, Any] = {"batch": 8, "pp": 1, "dp": 2, "tp": 1, "microbatches": 2, "zero": 3}
    divided = make_plan(subject.program, ideal(2), analysis=analysis, recompute="none", **limits)
    with pytest.raises(PlanError, match=r"'transformer.h.0.mlp' reads 'transformer.h.0.mlp.c_fc.bias'.* whole layer"):
        realize(subject.program, with_modules(divided, (f"{H}.0.mlp",)), analysis)


class Level(nn.Module):
    """Blocks of their own list, and behind them ops that are a layer of the outer list's."""

    def __init__(self, down: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        ops = OrderedDict(norm=nn.LayerNorm(8), product=nn.Linear(8, 8), act=nn.Tanh())
        self.down = nn.Sequential(ops) if down else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.down is None else self.down(x)


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Level(down) for down in (True, False))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = inputs
        for layer in self.layers:
            x = layer(x)
        return {"loss": functional.mse_loss(x, labels)}


def test_a_layer_runs_again_beside_others_whose_paths_lie_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    batch = {"inputs": torch.randn(8, 8).double(), "labels": torch.randn(8, 8).double()}
    subject = prepare(Levels().double(), (), batch)
    analysis = analyze(subject.program)
    plan = make_plan(analysis.program, ideal(1), analysis=analysis, recompute="none")
    assert {"layers.0", "layers.0.blocks.0"} <= set(recomputable(realized(analysis, plan).local[0]))
    plan = with_modules(plan, ("layers.0", "layers.0.blocks.0", "layers.0.blocks.1.1"))
    emitted = realize(analysis.program, plan, analysis)
    assert emitted.files["stage_0.py"].count("checkpoint(") == 3
    emitted.save(tmp_path / "program")
    assert compare_emitted(tmp_path / "program", subject, plan=plan).equal
    with pytest.raises(PlanError, match=r"'layers.0.blocks.0.1' lies in 'layers.0.blocks.0'"):
        realize(analysis.program, with_modules(plan, ("layers.0.blocks.0", "layers.0.blocks.0.1")), analysis)
