"""Least seconds of a step with its end and memory: never above what any cut takes, however its layers are run."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from autopart.runtime.schedule import Action, in_flight, make_schedule
from autopart.simulate import StageTimes, makespan
from autopart.solver.linear import LinearModel, Relaxation
from autopart.solver.pipeline_cuts import Divisions, Effort
from autopart.solver.pipeline_floor import least_step_seconds
from autopart.solver.pipeline_pieces import Family, Piece, Pipeline, Price, Run, Way, Weights
from autopart.solver.pipeline_row import Boundary, Place, Row, Tied
from autopart.solver.stages_floor import least_step


@dataclass(frozen=True)
class Strategy:
    """By piece of a layer: seconds, bytes of weights and what is kept, beyond what is shared perfectly. left: of that,
    and of what is shared, what is kept where the layer runs again.
    """

    seconds: tuple[float, ...]
    weights: tuple[float, ...]
    kept: tuple[float, ...]
    left: float


def random_levels(rng: random.Random) -> tuple[Way, ...]:
    end = 2 * rng.random()
    whole = Way(0.0, 1.0, 0.0, end, end * rng.random())
    gathered, again, summed, transient = (rng.choice([0.0, rng.random()]) for _ in range(4))
    sent = gathered + again + summed
    divided = Way(rng.random(), rng.random(), 0.0, end * rng.random(), 0.0, sent, gathered, again, transient)
    return (whole, divided) if rng.random() < 0.5 else (whole,)


def random_piece(rng: random.Random, levels: tuple[Way, ...]) -> Piece:
    weights = (Weights(2 * rng.random(), levels, True),) if rng.random() < 0.8 else (Weights(0.0, levels, True),)
    runs = Way(0.0, 0.0, rng.random()), Way(rng.random())
    return Piece(rng.random(), 2 * rng.random(), weights, runs[: rng.randint(1, 2)], rng.choice([0.0, rng.random()]))


def family(rng: random.Random, count: int) -> tuple[Family, list[Strategy]]:
    """Layers with the prices that their strategies obey. As a whole they free no more than by pieces."""
    levels = random_levels(rng)
    pieces = tuple(random_piece(rng, levels) for _ in range(rng.randint(1, 2)))
    sizes = [piece.weights[0].bytes for piece in pieces]
    kept = sum(piece.runs[0].kept_bytes for piece in pieces)
    runs: tuple[Way, ...] = (Way(0.0, 0.0, kept),)
    if all(len(piece.runs) == 2 for piece in pieces):
        runs = *runs, Way(sum(piece.runs[1].seconds for piece in pieces))
    forward, backward = (sum(getattr(piece, name) for piece in pieces) for name in ("forward_s", "backward_s"))
    transient = max(piece.transient_bytes for piece in pieces)
    whole = Piece(forward, backward, (Weights(sum(sizes), levels, True),), runs, transient)

    def amounts(most: float) -> tuple[float, ...]:
        return tuple(rng.choice([0.0, most * rng.random()]) for _ in pieces)

    strategies = [Strategy(amounts(1.0), amounts(2.0), amounts(1.0), rng.choice([0.0, rng.random()])) for _ in range(3)]
    prices = []
    for weights, kept_price in [(0.0, 0.0), *((rng.random(), rng.choice([0.0, rng.random()])) for _ in range(6))]:
        lowest = min(
            sum(s.seconds) + weights * sum(s.weights) + run.seconds
            + kept_price * (run.kept_bytes + (s.left if run.seconds else sum(s.kept)))
            for s in strategies
            for run in runs
        )  # fmt: skip
        prices.append(Price(weights, kept_price, lowest + forward + backward + weights * sum(sizes)))
    return Family(count, whole, pieces, tuple(prices)), strategies


def whole_family(rng: random.Random, count: int) -> tuple[Family, list[Strategy]]:
    """Layers without strategies to price, each run in one way; as a whole they free no more than by pieces."""
    levels, pieces = random_levels(rng), list[Piece]()
    for _ in range(rng.randint(1, 2)):
        piece = replace(random_piece(rng, levels), runs=())
        kept = [1.0, rng.random(), 0.5 * rng.random()][: rng.randint(1, 3)]
        runs = [
            Run(0.5 * rng.random() if at else 0.0, size, piece.transient_bytes + (rng.random() if at else 0.0))
            for at, size in enumerate(kept)
        ]
        pieces.append(mixed(piece, runs))
    transient = max(piece.transient_bytes for piece in pieces)
    together = [
        Run(
            sum(run.seconds for run in runs),
            sum(run.kept_bytes for run in runs),
            max(transient, *(run.transient_bytes for run in runs)),
        )
        for runs in itertools.product(*(piece.wholes for piece in pieces))
    ]
    forward, backward = (sum(getattr(piece, name) for piece in pieces) for name in ("forward_s", "backward_s"))
    size = sum(piece.weights[0].bytes for piece in pieces)
    whole = mixed(Piece(forward, backward, (Weights(size, levels, True),), (), transient), together)
    none = (0.0,) * len(pieces)
    return Family(count, whole, tuple(pieces)), [Strategy(none, none, none, 0.0)]


def mixed(piece: Piece, runs: list[Run]) -> Piece:
    return replace(piece, runs=tuple(Way(run.seconds, 0.0, run.kept_bytes) for run in runs), wholes=tuple(runs))


CASES = [(kind, name, seed) for kind in (family, whole_family) for name in ("1f1b", "gpipe") for seed in range(40)]


@pytest.mark.parametrize(("kind", "name", "seed"), CASES)
def test_no_cut_is_simulated_faster(
    kind: Callable[[random.Random, int], tuple[Family, list[Strategy]]], name: str, seed: int
) -> None:
    rng = random.Random(seed)
    layers, strategies = kind(rng, rng.randint(1, 3))
    levels = layers.whole.weights[0].levels
    rest = [random_piece(rng, levels) for _ in range(rng.randint(0, 1))]
    # the row: pieces of layers, then the rest
    row = [(layer, piece) for layer in range(layers.count) for piece in range(len(layers.pieces))]
    row += [(-1, 0)] * len(rest)
    stages, m = rng.randint(1, min(3, len(row))), rng.choice([1, 2, 3, 8])
    flying, rooms = tuple(in_flight(name, stages, m)), tuple(rng.uniform(3, 12) for _ in range(stages))
    schedule = make_schedule(name, stages, m, set(itertools.pairwise(range(stages))))
    taken = [rng.choice(strategies) for _ in range(layers.count)]
    work = sum(piece.forward_s + piece.backward_s for piece in rest)
    work += layers.count * (layers.whole.forward_s + layers.whole.backward_s) + sum(sum(s.seconds) for s in taken)
    there, back = ([rng.choice([0.0, 2 * rng.random()]) for _ in range(stages - 1)] for _ in range(2))
    pipeline = Pipeline(m, flying, rooms, work, tuple(there), tuple(back))
    floor = least_step_seconds([layers], rest, pipeline)
    places = tuple(Place(0, layer, piece) if layer >= 0 else Place(-1, -1, piece) for layer, piece in row)
    buffers = rng.choice([0.0, rng.random()])
    sent = [min(own, default=0.0) for own in (there, back)]
    boundaries = tuple(Boundary(blocks, sent[0], sent[1], buffers) for blocks in range(1, len(row)))
    boundaries = (Boundary(0), *boundaries, Boundary(len(row)))
    transfers = tuple([cut] * len(boundaries) for cut in zip(there, back, strict=True))
    shared = (0, *sorted(rng.sample(range(len(row)), rng.randint(0, len(row)))))
    summed = random.Random(-seed).choice([0.0, 0.5 * floor])
    tied = Tied(shared, Piece(0.0, 0.0, row_tied(rng, levels)), summed)
    cut_row = Row(places, boundaries, transfers, (tied,))
    divided = Divisions([layers], rest, cut_row, pipeline).least_seconds(floor, 1.5 * floor)
    assert divided >= floor
    for share in (1.01, 1.1, 1.5) if stages > 1 else ():
        divisions = Divisions([layers], rest, cut_row, pipeline)
        longer = divisions.take(share * floor)
        assert longer == (divisions.least_seconds(floor, share * floor) == share * floor)
    for cuts in itertools.combinations(range(1, len(row)), stages - 1):
        for _ in range(8):
            times = []
            for first, last, flew, room in zip((0, *cuts), (*cuts, len(row)), flying, rooms, strict=True):
                room -= buffers * ((first > 0) + (last < len(row)))
                more = [tied.piece] if first and not set(tied.blocks).isdisjoint(range(first, last)) else []
                found = run_stage(rng, row[first:last], layers, rest, taken, flew, room, more)
                if found is None:
                    break
                times.append(found)
            if len(times) == stages:
                step = makespan(schedule, times, functools.partial(transfer, there, back))
                parted = any(min(shared) < cut <= max(shared) for cut in cuts)
                assert divided <= (step + summed * parted) * (1 + 1e-6) + 1e-9


def transfer(there: list[float], back: list[float], action: Action) -> float:
    return there[action.stage] if action.stage < (action.peer or 0) else back[action.stage - 1]


def row_tied(rng: random.Random, levels: tuple[Way, ...]) -> tuple[Weights, ...]:
    """What several blocks read, beyond the first's own."""
    return (Weights(rng.choice([0.0, 2 * rng.random()]), levels),)


def run_stage(
    rng: random.Random,
    own: list[tuple[int, int]],
    layers: Family,
    rest: list[Piece],
    taken: list[Strategy],
    flew: int,
    room: float,
    tied: list[Piece],
    hides: bool = True,
) -> StageTimes | None:
    """A stage with random levels and ways to run its parts; None where it does not fit. tied: to stages before. hides:
    whether its last backward hides sums of gradients.
    """
    forward = backward = held = transient = 0.0
    levels = list[Way]()
    for piece in tied:
        level, size = rng.choice(piece.weights[0].levels), piece.weights[0].bytes
        levels.append(level.times(size))
        transient = max(transient, level.transient_bytes * size)
    for layer, pieces in itertools.groupby(own, lambda item: item[0]):
        numbers = [piece for _, piece in pieces]
        mine = [layers.pieces[at] if layer >= 0 else rest[at] for at in numbers]
        whole = layer >= 0 and len(numbers) == len(layers.pieces)
        ran = [layers.whole] if whole else mine
        ways = [rng.randrange(len(piece.runs)) for piece in ran]
        runs = [piece.runs[at] for piece, at in zip(ran, ways, strict=True)]
        runs_in = max(
            piece.wholes[at].transient_bytes if piece.wholes else 0.0 for piece, at in zip(ran, ways, strict=True)
        )
        gathered = 0.0
        backward += sum(run.seconds for run in runs)
        held += flew * sum(run.kept_bytes for run in runs)
        for at, piece in zip(numbers, mine, strict=True):
            forward, backward = forward + piece.forward_s, backward + piece.backward_s
            size, runs_in = piece.weights[0].bytes, max(runs_in, piece.transient_bytes)
            if layer >= 0:
                more = taken[layer].seconds[at] * rng.random()
                forward, backward = forward + more, backward + taken[layer].seconds[at] - more
                size += taken[layer].weights[at]
                held += flew * (taken[layer].kept[at] if whole and not runs[0].seconds else 0.0)
                held += flew * (taken[layer].left if whole and runs[0].seconds and not at else 0.0)
            level = rng.choice(piece.weights[0].levels)
            levels.append(level.times(size))
            gathered += level.transient_bytes * size
        transient = max(transient, runs_in + gathered)
    seconds, state, end, sums, sent, there, back = (
        sum(getattr(level, name) for level in levels)
        for name in ("seconds", "state_bytes", "end_s", "sum_s", "sent_s", "gathered_s", "again_s")
    )
    held, forward = held + state, max(forward, there)
    backward = max(backward + seconds, back, sent - forward)
    if held + transient > room:
        return None
    return StageTimes(forward, backward, reduce_s=end - (min(backward, sums) if hides else 0.0))


def equal_layers(count: int, piece: Piece, prices: tuple[Price, ...] = ()) -> list[Family]:
    return [Family(count, piece, (piece,), prices)]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_of_many_equal_layers_it_is_the_closed_form(stages: int) -> None:
    pipeline = Pipeline(16, tuple(in_flight("1f1b", stages, 16)), (1e9,) * stages)
    found = least_step_seconds(equal_layers(64, Piece(1.0, 2.0)), [], pipeline)
    assert found == pytest.approx(192 * least_step(16, pipeline.in_flight), rel=1e-5)
    # the end of the step: stages further on may have more to do, as theirs passes beside the drain
    ends = Piece(1.0, 2.0, (Weights(1.0, (Way(end_s=3.0),)),))
    longer = least_step_seconds(equal_layers(64, ends), [], pipeline)
    assert found + 0.3 * 192 / stages < longer <= (found + 192 / stages) * (1 + 1e-9)


def test_memory_that_does_not_hold_all_is_paid_for() -> None:
    """Half of what 64 layers keep fits on one stage; on two the first holds two microbatches."""
    piece = Piece(1.0, 2.0, (), (Way(0.0, 0.0, 1.0), Way(1.0)))
    one = least_step_seconds(equal_layers(64, piece), [], Pipeline(1, (1,), (32.0,)))
    assert one == pytest.approx(192 + 32, rel=1e-5)
    two = least_step_seconds(equal_layers(64, piece), [], Pipeline(64, (2, 1), (32.0, 32.0)))
    # 30 layers with 14 of them run again, and 34 with 2
    assert two == pytest.approx(65 * 104, rel=1e-5)
    assert least_step_seconds(
        equal_layers(64, Piece(1.0, 2.0, (), (Way(0.0, 0.0, 1.0),))), [], Pipeline(1, (1,), (32.0,))
    ) == float("inf")


def test_layers_that_no_cut_parts_obey_their_prices() -> None:
    """Of four layers that take a second for each byte less that they keep, those that a cut may part need not."""
    piece, prices = Piece(1.0, 2.0, (), (Way(0.0, 0.0, 1.0), Way(0.0))), (Price(0.0, 1.0, 4.0),)
    pipeline = Pipeline(1, (1, 1), (1.0, 1.0))

    def seconds(parted: int) -> float:
        return least_step_seconds([Family(4, piece, (piece,), prices, parted=parted)], [], pipeline)

    # two layers keep nothing, as there is room for two
    assert [seconds(parted) for parted in (0, 1, 2, 3)] == pytest.approx([14.0, 13.0, 12.0, 12.0], rel=1e-5)


def test_strategies_that_hold_less_are_slower() -> None:
    """Whole weights on each rank take 3 s a layer, halves 4 s."""
    prices = (Price(0.0, 0.0, 3.0), Price(1.0, 0.0, 5.0))
    piece = Piece(1.0, 2.0, (Weights(1.0, (Way(state_bytes=1.0),), True),))
    seconds = [
        least_step_seconds(equal_layers(10, piece, prices), [], Pipeline(4, (1,), (room,))) for room in (20, 15, 10)
    ]
    assert seconds == pytest.approx([120, 140, 160], rel=1e-5)


def test_strategies_keep_what_modules_that_run_again_do_not_free() -> None:
    """A layer keeps 4 bytes, or 2 where modules run again for 1 s; of these strategies that take 1 s more free one."""
    piece = Piece(1.0, 2.0, (), (Way(0.0, 0.0, 2.0), Way(1.0)))
    # with a price of a byte: 3 + 4, 4 + 2 where modules run again, and 5 + 1
    prices = Price(0.0, 0.0, 3.0), Price(0.0, 0.5, 5.0), Price(0.0, 1.0, 6.0)
    families = [Family(10, piece, (piece,), prices)]
    seconds = [least_step_seconds(families, [], Pipeline(1, (1,), (room,))) for room in (40, 20, 10)]
    assert seconds == pytest.approx([30, 40, 50], rel=1e-5)


def test_prices_that_an_alike_program_needed_spare_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least seconds are the same, whatever prices are begun with."""
    piece, strategies = Piece(1.0, 2.0, (), (Way(0.0, 0.0, 1.0),)), ((3.0, 4.0), (4.0, 3.0), (5.5, 2.0), (8.0, 1.0))
    prices = tuple(
        Price(0.0, nu, min(seconds + nu * kept for seconds, kept in strategies))
        for nu in (0.0, 0.5, 1.0, 1.5, 2.5, 4.0)
    )
    relax, solved = LinearModel.relax, list[int]()

    def counted(model: LinearModel, *limits: float, **how: bool) -> Relaxation | None:
        solved.append(model.rows)
        return relax(model, *limits, **how)

    monkeypatch.setattr(LinearModel, "relax", counted)
    tight, families = [set[Price]()], equal_layers(10, piece, prices)
    pipelines = [Pipeline(4, (1,), (room,)) for room in (38, 34, 26, 14, 12)]
    alone = [least_step_seconds(families, [], pipeline) for pipeline in pipelines]
    count = len(solved)
    first = [least_step_seconds(families, [], pipeline, tight=tight) for pipeline in pipelines]
    fewer = len(solved) - count
    again = [least_step_seconds(families, [], pipeline, tight=tight) for pipeline in pipelines]
    assert first == pytest.approx(alone, rel=1e-6) and again == pytest.approx(alone, rel=1e-6)
    assert len(pipelines) == len(solved) - count - fewer < fewer < count
    assert 0 < len(tight[0]) < len(prices)


def test_layers_that_cannot_be_cut_leave_one_stage_with_more() -> None:
    """Of five layers on two stages one has three: the first, as the second waits for it. Halves are divided evenly."""
    layer, pipeline = Piece(1.0, 2.0), Pipeline(16, (2, 1), (1e9, 1e9))

    def least(pieces: tuple[Piece, ...]) -> float:
        families = [Family(5, layer, pieces)]
        known = least_step_seconds(families, [], pipeline)
        assert known == pytest.approx(15 + 15 * 7.5, rel=1e-5)
        places = tuple(Place(0, number, piece) for number in range(5) for piece in range(len(pieces)))
        row = Row(places, tuple(Boundary(blocks) for blocks in range(len(places) + 1)))
        return Divisions(families, [], row, pipeline).least_seconds(known, 200.0)

    assert least((layer,)) == pytest.approx(15 * 9 + 2 * 6, rel=2e-3)
    assert least((Piece(0.5, 1.0), Piece(0.5, 1.0))) == pytest.approx(15 + 15 * 7.5, rel=2e-3)
    assert least((Piece(0.25, 0.5), Piece(0.75, 1.5))) == pytest.approx(6.75 + 16 * 8.25, rel=2e-3)


def test_more_is_proved_with_more_effort() -> None:
    """Where more arcs are left than are looked at no more is proved."""
    layer, pipeline = Piece(1.0, 2.0), Pipeline(16, (2, 1), (1e9, 1e9))
    families = [Family(5, layer, (layer,))]
    row = Row(tuple(Place(0, number, 0) for number in range(5)), tuple(Boundary(blocks) for blocks in range(6)))
    divisions = Divisions(families, [], row, pipeline)
    least, known = 15 * 9 + 2 * 6, least_step_seconds(families, [], pipeline)
    assert known < divisions.least_seconds(known, 200.0, Effort(programs=400, arcs=0)) < 0.99 * least
    assert divisions.least_seconds(known, 200.0) == pytest.approx(least, rel=2e-3)


def proved(row: Row, rest: list[Piece], pipeline: Pipeline) -> float:
    """The most seconds that all divisions are proved to take, nearly."""
    low, high = 0.0, 1e3
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if Divisions([], rest, row, pipeline).take(middle) else (low, middle)
    return low


@pytest.mark.parametrize("seed", [10, 13, 22, 34])
def test_it_is_as_much_as_of_the_division_that_takes_the_least(seed: int) -> None:
    """The least before and behind a stage may be of different divisions, of which each takes longer as a whole."""
    rng = random.Random(seed)
    rest = [Piece(rng.random(), 2 * rng.random()) for _ in range(9)]
    places = tuple(Place(-1, -1, number) for number in range(9))
    boundaries = [Boundary(blocks, rng.random(), rng.random()) for blocks in range(10)]
    stages, m = rng.randint(3, 5), rng.choice([4, 8, 16])
    pipeline = Pipeline(m, tuple(in_flight("1f1b", stages, m)), (1e9,) * stages)
    found = proved(Row(places, tuple(boundaries)), rest, pipeline)
    alone = [
        Divisions([], rest, Row(places, tuple(boundaries[at] for at in (0, *cuts, 9))), pipeline)
        for cuts in itertools.combinations(range(1, 9), stages - 1)
    ]
    assert all(division.take(found * (1 - 3e-4)) for division in alone)
    assert not all(division.take(found * (1 + 3e-4)) for division in alone)


def test_what_ends_sooner_takes_longer_before() -> None:
    """The first stage takes 3 s and 10 s in the end, or 4 s: eight microbatches take 32 s at least, not 24."""
    first = Piece(1.0, 2.0, (Weights(1.0, (Way(end_s=10.0), Way(1.0))),))
    row = Row((Place(-1, -1, 0), Place(-1, -1, 1)), (Boundary(0), Boundary(1), Boundary(2)))
    pipeline = Pipeline(8, (2, 1), (100.0, 100.0))
    assert proved(row, [first, Piece(0.5, 1.0)], pipeline) == pytest.approx(32, rel=1e-3)
    # the second stage waits for the first one's forward and backward, and for its end: 4 + 8 * 5
    assert proved(row, [first, Piece(2.0, 3.0)], pipeline) == pytest.approx(44, rel=1e-3)


@pytest.mark.parametrize("stages", [1, 2])
def test_all_that_replicas_exchange_passes_within_the_step(stages: int) -> None:
    """Beside ops, so that it counts only where it takes longer than these; and not where memory asks for none of it.

    With one microbatch in flight stages wait for each other.
    """
    levels = Way(0.0, 1.0), Way(0.0, 0.25, sent_s=0.5)
    piece = Piece(1.0, 2.0, (Weights(100.0, levels),))
    for room, sent in ((100.0, 0.0), (62.5, 25.0), (25.0, 50.0)):
        pipeline = Pipeline(4, (1,) * stages, (room / stages,) * stages, 3.0)
        found = least_step_seconds([], [piece], pipeline)
        ideal = least_step_seconds([], [piece], replace(pipeline, capacity_bytes=(1e3,) * stages))
        assert found == pytest.approx(max(ideal, 4 * sent), rel=1e-4)


def test_computing_waits_for_what_is_exchanged_in_its_pass() -> None:
    """Of all that a microbatch exchanges there is time for in it, but not for what has to be there in the forward."""
    levels = Way(sent_s=3.0, gathered_s=1.5), Way(sent_s=3.5, again_s=3.0)
    for level, seconds in zip(levels, (1.5 + 2.0, 1.0 + 3.0), strict=True):
        piece = Piece(1.0, 2.0, (Weights(1.0, (level,)),))
        found = least_step_seconds([], [piece], Pipeline(4, (1,), (1.0,), 3.0))
        assert found == pytest.approx(4 * seconds, rel=1e-5)


def test_divided_weights_are_whole_while_a_layer_runs() -> None:
    """Four layers of weights of 10 bytes in a room of 30: at a level that holds a tenth, of which twice is whole then,
    there is room for them, but in a room of 23 not.
    """
    levels = Way(0.0, 1.0), Way(1.0, 0.1, transient_bytes=2.0)
    piece = Piece(1.0, 2.0, (Weights(10.0, levels),))
    seconds = [
        least_step_seconds(equal_layers(4, piece), [], Pipeline(1, (1,), (room,))) for room in (40.0, 30.0, 23.0)
    ]
    # with x bytes divided, 40 - 0.9 x are held, and x / 2 passes
    assert seconds == [pytest.approx(12.0), pytest.approx(12.0 + 10 / 0.4), float("inf")]


@pytest.mark.parametrize(
    ("arriving", "awaited", "after", "waits"),
    [(8.0, 0.0, 0.0, 7.0), (8.0, 2.0, 0.5, 7.5), (1.0, 0.75, 0.0, 0.75), (1.5, 0.75, 1.0, 1.5), (0.5, 0.0, 0.0, 0.0)],
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_first_forward_waits_for_what_arrives(
    arriving: float, awaited: float, after: float, waits: float, microbatches: int
) -> None:
    """Before it begins, or for what it reads the last: the longer of both."""
    weights = Weights(1.0, (Way(arriving_s=arriving, awaited_s=awaited),))
    pipeline = Pipeline(microbatches, (1,), (1e9,), after_s=after)
    found = least_step_seconds([], [Piece(1.0, 2.0, (weights,))], pipeline)
    assert found == pytest.approx(waits + 3 * microbatches, rel=1e-5)


def test_a_pipeline_waits_for_the_weights_of_its_first_stage() -> None:
    """Of two equal layers, each with room in one stage: its own arrive in 8 s, of which its forward takes one."""
    layers = equal_layers(2, Piece(1.0, 2.0, (Weights(1.0, (Way(0.0, 1.0, arriving_s=8.0),)),)))
    for microbatches, body in ((1, 6.0), (4, 15.0)):
        pipeline = Pipeline(microbatches, (min(2, microbatches), 1), (1.0, 1.0))
        assert least_step_seconds(layers, [], pipeline) == pytest.approx(7 + body, rel=1e-5)
