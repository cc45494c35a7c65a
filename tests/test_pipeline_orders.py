"""Least seconds of a step where ranks run several stages, or W is apart: never above what any cut takes."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace

import pytest
from test_pipeline_floor import equal_layers, family, random_piece, run_stage, transfer

from autopart.runtime.schedule import SPLIT_SCHEDULES, in_flight, make_schedule, places_of
from autopart.simulate import steady_seconds
from autopart.solver.pipeline_floor import least_step_seconds
from autopart.solver.pipeline_groups import Grouping
from autopart.solver.pipeline_orders import Order, ordered_groups
from autopart.solver.pipeline_pieces import Family, Piece, Pipeline, Way, Weights
from autopart.solver.stages_least import least_share

KINDS = [
    ("interleaved", 1, 2),
    ("interleaved", 2, 2),
    ("interleaved", 2, 3),
    ("zb-h1", 3, 1),
    ("zb-v", 2, 2),
    ("2bw", 3, 1),
]


def pipeline_of(
    name: str, ranks: int, virtual: int, m: int, rooms: tuple[float, ...] = (), work: float = 0.0
) -> Pipeline:
    stages = ranks * virtual
    places = places_of(name, stages, virtual)
    flying = tuple(in_flight(name, stages, m, (), places))
    return Pipeline(
        m, flying, rooms or (1e9,) * stages, work, order=Order(places, name in SPLIT_SCHEDULES, name == "2bw")
    )


@pytest.mark.parametrize(("name", "ranks", "virtual"), KINDS)
@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_simulated_faster(name: str, ranks: int, virtual: int, seed: int) -> None:
    rng, stages = random.Random(seed), ranks * virtual
    m = ranks * rng.choice([1, 2, 4])
    layers, strategies = family(rng, rng.randint(stages - 1, stages + 1))
    levels = layers.whole.weights[0].levels
    rest = [random_piece(rng, levels) for _ in range(rng.randint(1, 2))]
    row = [(layer, piece) for layer in range(layers.count) for piece in range(len(layers.pieces))]
    row += [(-1, at) for at in range(len(rest))]
    taken = [rng.choice(strategies) for _ in range(layers.count)]
    work = sum(piece.forward_s + piece.backward_s for piece in rest)
    work += layers.count * (layers.whole.forward_s + layers.whole.backward_s) + sum(sum(s.seconds) for s in taken)
    pipeline = pipeline_of(name, ranks, virtual, m, tuple(rng.uniform(2, 12) for _ in range(stages)), work)
    there, back = ([rng.choice([0.0, 2 * rng.random()]) for _ in range(stages - 1)] for _ in range(2))
    pipeline = replace(pipeline, there=tuple(there), back=tuple(back))
    floor = least_step_seconds([layers], rest, pipeline)
    places = places_of(name, stages, virtual)
    schedule = make_schedule(name, stages, m, set(itertools.pairwise(range(stages))), places=places)
    cuts = list(itertools.combinations(range(1, len(row)), stages - 1))
    for own in rng.sample(cuts, min(len(cuts), 40)):
        for _ in range(4):
            times = []
            ends = zip((0, *own), (*own, len(row)), pipeline.in_flight, pipeline.capacity_bytes, strict=True)
            for first, last, flew, room in ends:
                found = run_stage(rng, row[first:last], layers, rest, taken, flew, room, [], hides=False)
                if found is None:
                    break
                share = rng.choice([0.0, 0.5, rng.uniform(0.0, 0.5)]) if name in SPLIT_SCHEDULES else 0.0
                times.append(replace(found, weight_s=share * found.backward_s))
            if len(times) == stages:
                step = steady_seconds(schedule, name, m, times, functools.partial(transfer, there, back))
                assert floor <= step * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(("name", "virtual"), [("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_memory_and_the_end_of_the_step_are_paid_for(name: str, virtual: int) -> None:
    """Of many equal layers a rank has its share of the work, behind the stages before it."""
    ranks, m = 4, 16
    layer = Piece(1.0, 2.0, (), (Way(0.0, 0.0, 1.0), Way(1.0)))
    free = least_step_seconds(equal_layers(64, layer), [], pipeline_of(name, ranks, virtual, m, work=192.0))
    places = places_of(name, ranks * virtual, virtual)
    assert m * 48 * (1 + 1e-3) < free <= 192 * least_share(name, places, m, 1 / 3) * (1 + 1e-6)
    # nothing that is kept fits: all runs again
    none = pipeline_of(name, ranks, virtual, m, (1e-3,) * (ranks * virtual), 192.0)
    assert least_step_seconds(equal_layers(64, layer), [], none) == pytest.approx(free * 4 / 3, rel=1e-2)
    # ends of three seconds a layer, 48 on a rank, where all chains end with it
    ends = equal_layers(64, Piece(1.0, 2.0, (Weights(1.0, (Way(end_s=3.0),)),)))
    longer = least_step_seconds(ends, [], pipeline_of(name, ranks, virtual, m, work=192.0))
    assert free + 40 < longer < free + 50
    # sums, of which the last backwards hide two seconds a layer, or all
    for seconds, left in [(3.0, 16.0), (1.5, 0.0)]:
        sums = equal_layers(64, Piece(1.0, 2.0, (Weights(1.0, (Way(end_s=seconds, sum_s=seconds),)),)))
        found = least_step_seconds(sums, [], pipeline_of(name, ranks, virtual, m, work=192.0))
        assert free + left - 8 < found < free + left + 2


@pytest.mark.parametrize(
    ("name", "virtual"), [("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2), ("2bw", 1)]
)
@pytest.mark.parametrize(("ranks", "m"), [(1, 4), (2, 4), (8, 64), (32, 256), (64, 1024)])
def test_groups_lose_little_and_are_never_more(name: str, virtual: int, ranks: int, m: int) -> None:
    stages = ranks * virtual
    piece = Piece(1.0, 2.0, (), (Way(0.0, 0.0, 0.1), Way(1.0)))
    rest = [Piece(1.0, 1.0), Piece(5.0, 8.0)]
    pipeline = pipeline_of(name, ranks, virtual, m, (0.4 * stages / virtual,) * stages, 15.0)
    pipeline = replace(pipeline, there=(0.1,) * (stages - 1), back=(0.1,) * (stages - 1))
    families = [Family(3 * stages, piece, (piece,))]
    each, fine, coarse = (least_step_seconds(families, rest, pipeline, grouping=kind) for kind in Grouping)
    assert each * 0.99 < fine <= each * (1 + 1e-9)
    assert each * 0.9 < coarse <= each * (1 + 1e-9)


@pytest.mark.parametrize(("name", "virtual"), [("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("grouping", Grouping)
def test_groups_hold_every_stage_once(name: str, virtual: int, grouping: Grouping) -> None:
    ranks, m = 24, 480
    pipeline = pipeline_of(name, ranks, virtual, m)
    none = (0.0,) * (pipeline.stages - 1)
    assert pipeline.order is not None
    laid = m, pipeline.in_flight, pipeline.capacity_bytes, none, none, pipeline.order
    groups, chains = ordered_groups(*laid, grouping)
    assert sum(group.stages for group in groups) == pipeline.stages
    assert [chain.groups[0] for chain in chains[::virtual]] == [chain.ends[0] for chain in chains[::virtual]]
    assert sorted(chain.groups[0] for chain in chains) == list(range(len(groups)))
    assert all(chain.ends[-len(chain.groups) :] == chain.groups and len(chain.ends) == virtual for chain in chains)
    at = 0
    for group in groups:
        assert group.in_flight == min(pipeline.in_flight[at : at + group.stages])
        at += group.stages
    assert grouping is not Grouping.EACH or len(groups) == pipeline.stages
    assert grouping is not Grouping.COARSE or len(groups) < pipeline.stages / 2
