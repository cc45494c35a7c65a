"""Bounds of plans on unlike meshes: no plan is below them, and they are near where tensors are divided too."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_unlike_planning import ROOMY, plan_of, subject_of, unlike
from torch import Tensor, nn

from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.mesh_prices import MeshPrices
from autopart.passes.data_axis import LEVELS
from autopart.planner import make_plan
from autopart.runtime.errors import InfeasibleError, PlanError
from autopart.solver.degrees import UnlikeMeshes
from autopart.solver.search_space import NotBetter
from autopart.solver.stages_parts import Block, Cut, Shape
from autopart.solver.stages_problem import Slot, StageProblem
from autopart.tracing import capture
from autopart.unlike import UnlikeCandidates
from autopart.unlike_ends import stages_of, ways_through, with_ends
from clusters import ideal

CLUSTERS = (unlike((2, 1.0, ROOMY), (2, 0.5, ROOMY)), unlike((1, 3.0, ROOMY), (2, 1.0, ROOMY)))


@pytest.mark.parametrize(
    ("cluster", "name"),
    [(CLUSTERS[0], "gpt2"), pytest.param(CLUSTERS[1], "t5", marks=pytest.mark.slow)],
    ids=["gpt2", "t5"],
)
def test_no_forced_plan_is_below_the_bound(cluster: Cluster, name: str) -> None:
    plan = plan_of(name, cluster)
    tried = 0
    for pp, tp, microbatches, zero in itertools.product((1, 2, 3), (1, 2), (1, 4), (None, 3)):
        forced: dict[str, Any] = {"pp": pp, "tp": tp, "microbatches": microbatches, "zero": zero}
        try:
            found = plan_of(name, cluster, meshes="unlike", **forced)
        except (InfeasibleError, PlanError):
            continue
        tried += 1
        assert plan.bound_s <= found.step_time_s * (1 + 1e-9), forced
        assert found.bound_s <= found.step_time_s
    assert tried >= 8


def test_bounds_know_what_hosts_take() -> None:
    """As if GPUs waited for none it was a quarter of the step here, as the model is small."""
    plan = plan_of("gpt2", Cluster.parse("8xRTX-4090"), microbatches=1)
    assert plan.gap < 0.05


def test_bounds_count_with_the_fastest_host() -> None:
    """Stages have their own hosts, so that the one with slow hosts may have next to nothing."""
    cluster = Cluster.parse("2xRTX-4090+2xRTX-3090")
    fast, slow = cluster.nodes
    cluster = replace(cluster, nodes=(fast, replace(slow, device=replace(slow.device, host_s=20 * fast.device.host_s))))
    plan = plan_of("gpt2", cluster, meshes="unlike", pp=2, microbatches=1)
    candidates = Candidates(subject_of("gpt2")[1], cluster, 8, "adamw")
    started = candidates.starting_seconds(UnlikeMeshes(2, 1, "1f1b").equal)
    bound = UnlikeCandidates(MeshPrices(candidates)).lower_bound(UnlikeMeshes(2, 1, "1f1b"))
    assert started / 20 <= bound <= plan.step_time_s < started


def test_bounds_know_what_dividing_tensors_takes() -> None:
    """As if devices shared tensors for nothing it was four fifths of the step here."""
    plan = plan_of("gpt2", CLUSTERS[0], pp=2)
    assert plan.gap < 0.1


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_ends_that_sum_a_tied_gradient_in_less(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of unlike numbers of ranks are one ring, over more or fewer of them; the solver prices one for all."""

    def seconds() -> float:
        cluster = unlike((3, 1.0, ROOMY), (1, 1.0, ROOMY))
        found = UnlikeCandidates(MeshPrices(Candidates(subject_of(name)[1], cluster, 8, "adamw", zero=0)))
        return found.evaluate(UnlikeMeshes(3, 2, "1f1b", "none")).objective

    taken = seconds()
    monkeypatch.setattr(UnlikeCandidates, "_with_less_to_sum", lambda self, answer, below: answer)
    assert taken < 0.95 * seconds()


@pytest.mark.parametrize(
    ("model", "memory"),
    [("gpt2", 2**31 + 3 * 2**19), ("mixtral", 2**31 + 3 * 2**20), ("gpt2", ROOMY), ("mixtral", ROOMY)],
)
def test_what_is_known_before_an_evaluation_is_no_more_than_it_takes(model: str, memory: int) -> None:
    """Whatever levels of ZeRO are chosen, nor is what all numbers of stages share; where it is as much as is asked for,
    nothing is solved.
    """
    _, analysis = subject_of(model)
    cluster = unlike((2, 1.0, memory), (2, 2.0, memory))
    found = UnlikeCandidates(MeshPrices(Candidates(analysis, cluster, 8, "adamw", zero=None)))
    raised = tight = shared = 0
    for config in (UnlikeMeshes(stages, 2, "1f1b", again) for stages in (1, 2, 3) for again in ("none", "auto")):
        try:
            evaluation = found.evaluate(config)
        except InfeasibleError:
            continue
        known = found.refined(config, 2 * evaluation.objective)
        assert found.lower_bound(config) <= known <= evaluation.objective
        raised += known > 1.01 * found.lower_bound(config)
        of_all = found.counts_bound(config, 2 * evaluation.objective)
        assert of_all <= evaluation.objective
        shared += of_all > 1.01 * found.lower_bound(config)
        tight += evaluation.answer.is_tight
        with pytest.raises(NotBetter) as caught:
            found.evaluate(config, 0.99 * known)
        assert 0.99 * known <= caught.value.bound <= evaluation.objective
    assert raised >= 4 and shared >= 2 and (tight >= 2) == (memory < ROOMY)


def test_levels_of_meshes_with_tensor_axes_are_bounded_by_themselves() -> None:
    """From level 2 on sums may pass unseen; each replica updates its part from level 1 on."""
    _, analysis = subject_of("gpt2")
    unlike_candidates = UnlikeCandidates(MeshPrices(Candidates(analysis, CLUSTERS[0], 8, "adamw", zero=None), 2, 2))
    relaxed, meshes = unlike_candidates._relaxed(UnlikeMeshes(1, 2, "1f1b", "none"), LEVELS)
    ends = {
        mesh.zero: sum(block.step_end_s for block in shape.blocks)
        for mesh, shape in zip(meshes, relaxed.shapes, strict=True)
    }
    sums = {
        mesh.zero: sum(own.seconds for own in shape.sums) for mesh, shape in zip(meshes, relaxed.shapes, strict=True)
    }
    assert list(ends) == [0, 1, 2, 3]
    assert ends[0] > ends[1] > ends[2] == ends[3] > 0 and sums[0] > sums[1] > sums[2] == sums[3] == 0
    assert sums[1] == pytest.approx(sums[0] / 2), "weights arrive beside the next forward"


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_bounds_know_what_sums_of_tied_gradients_take(name: str) -> None:
    """Wherever the blocks are that read them: behind BERT's last one there is another, T5's are three of a graph.

    As if stages behind the last reader took nothing, and of a graph as if nothing was summed, it was four fifths.
    """
    cluster = unlike((1, 4.0, ROOMY), (1, 1.0, ROOMY), (1, 1.5, ROOMY))
    plan = plan_of(name, cluster, meshes="unlike", pp=3, microbatches=4)
    assert plan.tied_s > 0.15 * plan.step_time_s and plan.gap < 0.005


def row_of_slots() -> StageProblem:
    """A graph of four blocks, of which 1 and 2 follow 0 and 3 follows both, on three devices and pairs of them."""
    blocks = tuple(Block(f"block {number}", 1.0, 2.0) for number in range(4))
    shape = Shape(blocks, ((Cut(),) * 6,))
    slots = (Slot(0, 1, 0, 1.0), Slot(1, 2, 0, 1.0), Slot(2, 3, 0, 1.0), Slot(0, 2, 0, 1.0), Slot(1, 3, 0, 1.0))
    return StageProblem((shape,), (0b0, 0b1, 0b11, 0b101, 0b111, 0b1111), slots, (0,) * 4, (3,), 4, (3, 2, 1))


def test_slots_that_stages_may_have() -> None:
    three = row_of_slots()
    two = replace(three, in_flight=(2, 1))
    assert ways_through(three, (0, 2)) == [(0, 2)] and ways_through(three, (1,)) == [(1,)]
    assert ways_through(two, (0, 1)) == [(0, 4), (3, 2)] and ways_through(two, (1,)) == [(2,), (4,)]
    assert with_ends(two, [3], None)[1] == [1, 2, 3, 4] and with_ends(two, [3], [2])[1] == [1, 2, 3]


def test_stages_that_blocks_may_be_in() -> None:
    """All that some division into stages has, and of those that none has only such as counting blocks allows."""
    problem = row_of_slots()
    divisions = [
        [problem.blocks_between(first, last) for first, last in itertools.pairwise((0, *cuts, 5))]
        for cuts in itertools.combinations(range(1, 5), 2)
        if all(problem.positions[a] & ~problem.positions[b] == 0 for a, b in itertools.pairwise(cuts))
    ]
    for blocks in ((0, 3), (1, 2), (0, 1, 3), (2, 3)):
        stage_of = [{block: at for at, own in enumerate(ways) for block in own} for ways in divisions]
        found = list(stages_of(problem, blocks))
        assert {tuple(stages[block] for block in blocks) for stages in stage_of} <= set(found)
        assert len(set(found)) == len(found)
    assert list(stages_of(problem, (0, 3))) == [(0, 2)]


def test_of_a_row_of_blocks_exactly_the_possible_stages_are_found() -> None:
    """Also where two blocks, of which none is the first, leave no stage for what is before them."""
    free, positions = row_of_slots(), (0b0, 0b1, 0b11, 0b111, 0b1111)
    problem = replace(free, shapes=(replace(free.shapes[0], cuts=((Cut(),) * 5,)),), positions=positions)
    for blocks in ((1, 2), (2, 1), (0, 3), (1, 3), (0, 1, 2), (3, 1, 0)):
        divisions = ((*cuts, 4) for cuts in itertools.combinations(range(1, 4), 2))
        wanted = {tuple(sum(block >= stop for stop in stops) for block in blocks) for stops in divisions}
        found = list(stages_of(problem, blocks))
        assert len(found) == len(wanted) and set(found) == wanted


class FrozenEnds(nn.Module):
    """An embedding that nothing trains, read where the model begins and where it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 12).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits = hidden @ self.embedding.weight.T
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())}


def test_stages_may_share_what_is_frozen() -> None:
    """Bounds of meshes with tensor axes, and of those without, count it as one group of blocks."""
    program = capture(FrozenEnds(), (torch.randint(23, (8, 5)),))
    plan = make_plan(program, ideal(4), pp=2, meshes="unlike", microbatches=2)
    assert plan.pp == 2 and 0 < plan.bound_s <= plan.step_time_s
