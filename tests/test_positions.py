"""Stages of graphs that are no chains: where they can be cut, and plans whose stages are no ranges of blocks."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import autopart.verify
from autopart.analysis import Analysis, analyze
from autopart.candidate_settings import CUDA_OVERHEAD_BYTES
from autopart.candidates import Candidates
from autopart.passes import graph as graphs
from autopart.passes.blocks import block_edges
from autopart.pins import read_pins
from autopart.plan import Plan, StagePlan
from autopart.planner import make_plan
from autopart.positions import Positions
from autopart.realize import realize
from autopart.report.table import stage_table
from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.degrees import Degrees
from autopart.solver.stages_coarse import coarsen
from autopart.solver.stages_order import positions
from autopart.verify import compare_emitted, prepare
from autopart.verify.subject import Subject
from clusters import ideal
from launch import run_kept_job


class Towers(nn.Module):
    """Two towers of equal layers that meet at the end."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.left = nn.ModuleList(Layer(width) for _ in range(layers))
        self.right = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y)
        return {"loss": self.head(x * y).square().mean()}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.weight(self.norm(x)))


@functools.lru_cache
def towers() -> tuple[Subject, Analysis]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    subject = prepare(Towers().double(), (), {"x": x, "y": y})
    return subject, analyze(subject.program)


def test_what_lies_between_blocks_is_on_ways_from_one_to_another() -> None:
    edges = ((0, 2), (1, 3), (2, 4), (3, 4), (4, 5))
    found, complete = positions(6, edges)
    of = Positions(found, ((),) * len(found), complete, edges)
    assert not of.in_row and complete
    assert list(of.between((0, 4))) == [0, 2, 4] and list(of.between((1, 2))) == [1, 2]
    assert list(of.between((0, 1, 5))) == list(range(6))
    row = Positions((0, 1, 3, 7), ((),) * 4, True, ((0, 1), (1, 2)))
    assert row.in_row and list(row.between((0, 2))) == [0, 1, 2]


def test_bounds_hold_where_a_cut_parts_layers_of_two_towers() -> None:
    analysis = towers()[1]
    room, raised = analysis.program.batch * 2**12, 0
    for memory in (room, 2 * room, 64 * room):
        cluster = ideal(8, bandwidth=1e8, memory_bytes=CUDA_OVERHEAD_BYTES + memory)
        candidates = Candidates(analysis, cluster, analysis.program.batch, "adamw", zero=None)
        assert not candidates.positions.in_row
        (alike,) = candidates.alike_layers()
        assert len(alike.blocks) == 4 and candidates._parted(alike) == 2
        for pp, dp, microbatches in itertools.product((2, 4), (1, 2), (1, 2)):
            config = Degrees(pp, dp, (), microbatches, "1f1b")
            floor = candidates.work_floor(config)
            try:
                found = candidates.evaluate(config)
            except InfeasibleError:
                continue
            last = candidates.last_floor(config, 2 * found.objective)
            assert floor <= last * (1 + 1e-9) and last <= found.objective * (1 + 1e-9), config
            assert not candidates.surely_takes(config, found.objective * (1 + 1e-6))
            divided = candidates.divided_floor(config, 2 * found.objective)
            assert divided <= last * (1 + 1e-9) and candidates.surely_takes(config, divided * (1 - 1e-3))
            raised += last > candidates.known_floor(config) * 1.01
    assert raised


def towers_of(analysis: Analysis, name: str) -> list[int]:
    """Blocks with ops of one tower."""
    return sorted({index for node, index in analysis.block_of.items() if graphs.module_path(node).startswith(name)})


def test_crossings_are_what_later_stages_read() -> None:
    _, analysis = towers()
    found = Positions.of(analysis)
    assert found.complete and found.crossings[0] == found.crossings[-1] == ()
    for mask, values in zip(found.sets, found.crossings, strict=True):
        inside = {node for node, index in analysis.block_of.items() if mask >> index & 1}
        read = {
            value
            for node in analysis.block_of
            if node not in inside
            for value in graphs.inputs(node)
            if value.node in inside
        }
        assert set(values) == read
        # closed under dependence
        assert all(mask >> source & 1 or not mask >> target & 1 for source, target in block_edges(analysis.blocks))


def test_blocks_follow_branches() -> None:
    """Towers that are written layer by layer in turns become blocks of one tower each, and can be cut apart."""
    _, analysis = towers()
    left, right = towers_of(analysis, "left"), towers_of(analysis, "right")
    assert len(left) >= 4 and not set(left) & set(right)
    sizes = {mask.bit_count() for mask in Positions.of(analysis).sets}
    assert sizes == set(range(len(analysis.blocks) + 1))
    assert any(mask == sum(1 << b for b in left) for mask in Positions.of(analysis).sets)


@pytest.mark.parametrize("seed", range(20))
def test_coarser_graphs_stay_convex(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.randint(5, 60)
    edges = sorted(
        {(dice.randint(max(0, b - 6), b - 1), b) for b in range(1, count) for _ in range(dice.randint(0, 2))}
    )
    needs = [sum(1 << a for a, b in edges if b == block) for block in range(count)]
    weights = [dice.random() for _ in range(count)]
    pieces = coarsen([1 << block for block in range(count)], needs, weights, {}, max(2, count // 3))
    before = 0
    for piece in pieces:  # in an order of the graph, so that no piece needs a later one
        assert not before & piece
        assert all(not needs[block] & ~(before | piece) for block in range(count) if piece >> block & 1)
        before |= piece
    assert before == (1 << count) - 1
    for most in (20, 300):
        found, _ = positions(count, edges, most=most, weights=weights)
        assert found[0] == 0 and found[-1] == before and len(found) <= max(most, most // 2 + 4 * (count + 1))
        assert all(mask >> a & 1 or not mask >> b & 1 for mask in found for a, b in edges)


@pytest.mark.parametrize("seed", range(20))
def test_the_lightest_neighbours_are_merged(seed: int) -> None:
    """Against looking through all pairs of pieces, and all ways between them, before each merge."""
    dice = random.Random(seed)
    count = dice.randint(5, 30)
    edges = {(dice.randint(max(0, b - 6), b - 1), b) for b in range(1, count) for _ in range(dice.randint(1, 3))}
    sent = {edge: float(dice.randint(1, 3)) for edge in sorted(edges)}
    weights = [float(dice.randint(1, 3)) for _ in range(count)]
    needs = [sum(1 << a for a, b in edges if b == block) for block in range(count)]
    pieces = [frozenset({block}) for block in range(count)]
    for most in range(count - 1, 0, -1):
        graph = nx.DiGraph((p, q) for p in pieces for q in pieces for a, b in edges if p != q and a in p and b in q)
        pairs = []
        for p, q in graph.edges:
            if len(list(itertools.islice(nx.all_simple_paths(graph, p, q), 2))) == 1:
                traffic = sum(size for (a, b), size in sent.items() if a in p and b in q)
                pairs.append((sum(weights[b] for b in p | q), -traffic, min(p), min(q), p, q))
        if pairs:
            *_, p, q = min(pairs, key=lambda pair: pair[:4])
            pieces = [piece for piece in pieces if piece not in (p, q)] + [p | q]
        found = coarsen([1 << block for block in range(count)], needs, weights, sent, most)
        assert set(found) == {sum(1 << block for block in piece) for piece in pieces}


def test_long_branches_share_a_stage() -> None:
    """Two branches of 48 blocks have 2,401 positions; of those that are taken some halve both."""
    count = 48
    edges = [(start + i, start + i + 1) for start in (0, count) for i in range(count - 1)]
    edges += [(count - 1, 2 * count), (2 * count - 1, 2 * count)]
    found, complete = positions(2 * count + 1, edges)
    assert not complete and len(found) <= 540
    parts = [((mask & (1 << count) - 1).bit_count(), (mask >> count).bit_count()) for mask in found]
    assert sum(abs(left - count // 2) <= 4 and abs(right - count // 2) <= 4 for left, right in parts) > 4
    # pieces are even: none is more than a few times the mean
    pieces = coarsen([1 << b for b in range(96)], [1 << b - 1 if b else 0 for b in range(96)], [1.0] * 96, {}, 12)
    assert max(piece.bit_count() for piece in pieces) <= 16


def halves_of_both() -> Plan:
    """The first half of each tower on stage 0, the rest on stage 1."""
    subject, analysis = towers()
    left, right = towers_of(analysis, "left"), towers_of(analysis, "right")
    first = sorted([*left[: len(left) // 2], *right[: len(right) // 2]])
    count = len(analysis.blocks)
    order = (*first, *(block for block in range(count) if block not in first))
    stages = tuple(
        StagePlan((stage,), (("dp", 1),), span) for stage, span in enumerate(pairwise((0, len(first), count)))
    )
    program = subject.program
    return Plan(program.fingerprint, program.name, "local", 8, "float64", "1f1b", 4, stages, order=order)


def test_a_stage_has_half_of_each_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a plan trains as the model does in one process: the loss, all gradients, three steps of AdamW."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = towers()
    plan = halves_of_both()
    assert plan.order != tuple(range(len(plan.order)))
    assert Plan.from_json(plan.to_json()) == plan
    emitted = realize(subject.program, plan, analysis)
    for number, stage in enumerate(("stage_0.py", "stage_1.py")):
        text = emitted.files[stage]
        assert "left" in text and "right" in text and ("head" in text) == (number == 1)
    emitted.save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result


def test_planned_towers() -> None:
    """The planner's own divisions may be no ranges; where a tower is pinned to the later stages they are not."""
    subject, analysis = towers()
    pins = {"left.3": 0, "right.0": 1}
    plan = make_plan(
        subject.program, ideal(2), pp=2, tp=1, microbatches=4, recompute="none", pins=pins, analysis=analysis
    )
    assert set(towers_of(analysis, "left")) <= set(plan.blocks_of(0))
    assert set(towers_of(analysis, "right")) <= set(plan.blocks_of(1))
    assert plan.fingerprint and realize(subject.program, plan, analysis).files
    order = halves_of_both().order
    assert ", " in stage_table(halves_of_both().stages, order).splitlines()[2]
    swapped = {"left.0": 1, "right.3": 0}
    plan = make_plan(
        subject.program, ideal(2), pp=2, tp=1, microbatches=4, recompute="none", pins=swapped, analysis=analysis
    )
    assert set(towers_of(analysis, "right")) <= set(plan.blocks_of(0)) and plan.order
    pinned = read_pins(analysis, stages={"left.0": 0})
    assert len(pinned.stages) > 1 and pinned.most_stages == len(analysis.blocks) - len(pinned.stages) + 1


def test_what_an_order_is() -> None:
    subject, analysis = towers()
    plan = halves_of_both()
    with pytest.raises(PlanError, match="order: every block"):
        replace(plan, order=plan.order[1:])
    backward = replace(plan, order=tuple(reversed(plan.order)))
    with pytest.raises(PlanError, match="values go to later stages only"):
        realize(subject.program, backward, analysis)
    with pytest.raises(PlanError, match="no division into stages has"):
        read_pins(analysis, stages={"left.3": 0, "left.0": 1})


def test_all_positions_are_taken_of_layers_with_two_short_branches() -> None:
    """Of n layers with a block before two that read it and one behind these there are 5 n + 1, of 4 n blocks."""
    layers = 100
    edges = [
        (4 * layer + source, 4 * layer + target)
        for layer in range(layers)
        for source, target in ((0, 1), (0, 2), (1, 3), (2, 3), *([(3, 4)] if layer + 1 < layers else []))
    ]
    found, complete = positions(4 * layers, edges)
    assert complete and len(found) == 5 * layers + 1
