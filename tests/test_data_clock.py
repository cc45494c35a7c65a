"""What replicas exchange for divided parameters, on the clock of what is computed meanwhile."""

from __future__ import annotations

import random

import pytest
from torch import fx

from autopart import data_clock
from autopart.cost.devices import Link
from autopart.data_clock import Computed, DataClock
from autopart.data_prices import DataPrices, exposed
from autopart.exchanges import Exchanges, Message
from autopart.passes.data_axis import UnitMessages
from autopart.prices import Prices
from clusters import ideal


@pytest.fixture(autouse=True)
def bytes_are_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_clock, "collective_seconds", lambda kind, size, *_: float(size))


def units(*seconds: tuple[int, int, int]) -> list[UnitMessages]:
    """One op each. seconds: of the gather forward, of that in the backward, of the sum."""
    graph = fx.Graph()
    return [UnitMessages((graph.placeholder(f"op{number}"),), *own) for number, own in enumerate(seconds)]


def computed(found: list[UnitMessages], seconds: list[float]) -> tuple[Computed, Computed]:
    """Each unit's op in so many seconds forward, one after another, and twice as many back."""
    there, back, now = {}, {}, 0.0
    for unit, own in zip(found, seconds, strict=True):
        there[unit.readers[0]] = now, now + own
        now += own
    whole = now
    for op, (start, end) in there.items():
        back[op] = 2 * (whole - end), 2 * (whole - start)
    return Computed(whole, there), Computed(2 * whole, back)


def clock(
    found: list[UnitMessages],
    microbatches: int = 1,
    scattered: list[Message] | None = None,
    arriving: list[Message] | None = None,
    limit: int = 0,
    read: int = 0,
) -> DataClock:
    exchanged = Exchanges({}, {}, {}, found, scattered or [], arriving or [], limit, read)
    return DataClock(exchanged, 2, Link("any", 1.0, 0.0), microbatches)


@pytest.mark.parametrize(
    ("each", "forward", "backward"),
    [
        # of three layers of 10 s, 20 s back: the first gather of each pass, and the last sum, pass beside nothing
        ((4, 4, 4), 34, 60 + 4 + 4),
        ((10, 10, 10), 40, 60 + 10 + 10),
        # gathers take longer than a layer: the first, and of each other what is longer
        ((15, 0, 0), 15 + 15 + 15 + 10, 60),
        # a sum is waited for before the next starts: 5 s twice, and the last
        ((0, 0, 25), 30, 60 + 5 + 5 + 25),
        # in the backward messages are in each other's way: from its second layer on one takes 24 s for 20
        ((0, 12, 12), 30, 12 + 20 + 20 + 4 + 20 + 12),
    ],
)
def test_three_layers(each: tuple[int, int, int], forward: float, backward: float) -> None:
    found = units(each, each, each)
    passes = computed(found, [10.0] * 3)
    there, back, hidden = clock(found).passes(*passes)
    assert (there, back) == pytest.approx((forward, backward))
    whole = 3 * sum(each)
    assert hidden == pytest.approx(whole - (there - 30) - (back - 60))


def test_what_is_in_memory_still_is_not_gathered_again() -> None:
    found = units((4, 4, 4), (0, 4, 4), (4, 4, 4))
    there, _, _ = clock(found).passes(*computed(found, [10.0] * 3))
    assert there == pytest.approx(34)


def test_the_next_microbatch_hides_a_last_sum() -> None:
    found = units((0, 0, 4), (0, 0, 4))
    passes = computed(found, [10.0] * 2)
    for microbatches in (1, 2, 8):
        _, back, _ = clock(found, microbatches=microbatches).passes(*passes)
        assert back == pytest.approx(40 + 4 / microbatches)
    # but no more passes on an axis than there is time for
    there, back, hidden = clock([], microbatches=8, scattered=[Message(100, found[0].readers)]).passes(*passes)
    assert there + back == pytest.approx(100) and hidden == pytest.approx(60)


@pytest.mark.parametrize(
    ("sizes", "readers", "exposed"),
    [
        ((8,), (0,), 8),
        ((8,), (1,), 0),  # beside the other layer
        ((4, 4), (1, 0), 4),
        ((8, 4), (0, 1), 8 + 4),  # in their order, when the first is over
        ((30, 4), (1, 0), 10 + 4),  # which is waited for
    ],
)
def test_messages_of_level_2_leave_when_they_are_full(
    sizes: tuple[int, ...], readers: tuple[int, ...], exposed: int
) -> None:
    """Two layers of 10 s, 20 s back."""
    layers = units((0, 0, 0), (0, 0, 0))
    messages = [Message(size, layers[reader].readers) for size, reader in zip(sizes, readers, strict=True)]
    there, back, hidden = clock([], scattered=messages).passes(*computed(layers, [10.0] * 2))
    assert (there, back) == pytest.approx((20, 40 + exposed))
    assert hidden == pytest.approx(sum(sizes) - exposed)


def test_sums_of_two_levels_do_not_wait_for_each_other() -> None:
    found = units((0, 0, 8), (0, 0, 8))
    # level 2's pass from 20 to 32 s and from 40 to 52, level 3's behind them, to 40 and 60
    messages = [Message(12, unit.readers) for unit in reversed(found)]
    _, back, _ = clock(found, scattered=messages).passes(*computed(found, [10.0] * 2))
    assert back == pytest.approx(60)


@pytest.mark.parametrize(
    ("each", "ahead", "waited"),
    [
        (4, 0.0, 4.0),  # the first one beside nothing
        # two on their way, which end at 15 and 30; the third is begun at 15 and ends at 45, 25 s late
        (15, 0.0, 25.0),
        # behind other stages all arrive first
        (15, 30.0, 15.0),
        (15, 60.0, 0.0),
    ],
)
def test_the_first_forward_waits_for_weights(each: int, ahead: float, waited: float) -> None:
    found = units((0, 0, 0), (0, 0, 0), (0, 0, 0))
    forward, _ = computed(found, [10.0] * 3)
    messages = [Message(each, unit.readers) for unit in found]
    assert clock([], arriving=messages).arrival(forward, ahead) == pytest.approx(waited)
    assert clock([]).arrival(forward, ahead) == 0.0
    unread = [*messages, Message(100, ())]
    assert ahead or clock([], arriving=unread).arrival(forward, ahead) == pytest.approx(waited)


def test_nothing_exchanged_takes_nothing() -> None:
    passes = computed(units((0, 0, 0)), [10.0])
    assert clock([]).passes(*passes) == (10, 20, 0)


@pytest.mark.parametrize("seed", range(50))
def test_a_step_takes_no_less_than_its_parts(seed: int) -> None:
    rng = random.Random(seed)
    found = units(*((rng.randint(0, 9), rng.randint(0, 9), rng.randint(0, 9)) for _ in range(rng.randint(1, 6))))
    passes = computed(found, [rng.uniform(0.0, 9.0) for _ in found])
    microbatches = rng.choice([1, 2, 4])
    own = clock(found, microbatches=microbatches)
    there, back, hidden = own.passes(*passes)
    forward, backward = (each.seconds for each in passes)
    sent = [sum(getattr(unit, name) for unit in found) for name in ("gathered", "gathered_again", "summed")]
    assert there >= max(forward, sent[0]) - 1e-9 and back >= max(backward, sent[1]) - 1e-9
    assert there + back >= sum(sent) - 1e-9
    assert there <= forward + sent[0] + 1e-9 and there + back <= forward + backward + sum(sent) + 1e-9
    assert -1e-9 <= hidden <= sum(sent) + 1e-9


@pytest.mark.parametrize(
    ("exchanged", "seconds", "count", "late", "part"),
    [
        (0, 5, 4, 0, 0.0),
        (10, 20, 4, 0, 0.25),
        (10, 5, 4, 0, 0.5),
        (10, 0, 4, 0, 1.0),
        (10, 20, 4, 5, 0.125),
        (10, 9, 1, 0, 1.0),
    ],
)
def test_the_exposed_part(exchanged: float, seconds: float, count: float, late: float, part: float) -> None:
    assert exposed(exchanged, seconds, count, late) == pytest.approx(part)


def test_more_to_do_hides_more() -> None:
    found = units((4, 0, 0), (14, 0, 0))
    there, back = computed(found, [10.0, 10.0])
    assert clock(found).passes(there, back)[0] == 4 + 14 + 10
    longer = there.longer(8.0)
    assert longer.seconds == 28.0 and longer.spans[found[1].readers[0]] == (14.0, 28.0)
    assert clock(found).passes(longer, back)[0] == 4 + 14 + 14


def test_what_passes_goes_through_the_memory() -> None:
    """Of four replicas three quarters of a message pass on: read and written where weights are gathered, and in sums
    one's own read with it, but for the last microbatch's.
    """
    (node,) = ideal(4, memory_bandwidth=1e9).nodes
    second = node.device.memory_bandwidth * node.device.memory
    data = DataPrices(Prices(node.device, {}, 1, {}), Link("any", 1.0, 0.0), 4, 2.0, 5)
    adding = 3 * 4 / 5
    for level in (0, 1):
        assert data.moving_seconds(second, level) == pytest.approx((0.0, adding))
    summed = 3 * 2 * 0.75 * 4 / 5
    assert data.moving_seconds(second, 2) == pytest.approx((0.0, adding / 4 + summed))
    assert data.moving_seconds(second, 3) == pytest.approx((1.5, adding / 4 + summed))
    assert data.moving_seconds(second, 3, again=True) == pytest.approx((1.5, adding / 4 + summed + 1.5))
    assert data.moving_seconds(second, 3, trained=False) == pytest.approx((1.5, 0.0))
    assert data.least_moving_seconds(second, (0, 2)) == pytest.approx(min(adding, adding / 4 + summed))


@pytest.mark.parametrize(("window", "waited"), [(0, 14.0), (2, 10.0), (4, 8.0), (100, 8.0)])
def test_messages_of_the_next_layer_are_on_their_way_together(window: int, waited: float) -> None:
    """Three layers of 5 s, each of which reads three messages of 2 s: with two on their way one is begun late."""
    found = units((0, 0, 0), (0, 0, 0), (0, 0, 0))
    forward, _ = computed(found, [5.0] * 3)
    messages = [Message(2, unit.readers) for unit in found for _ in range(3)]
    assert clock([], arriving=messages, read=window).arrival(forward, 0.0) == pytest.approx(waited)


def test_a_large_table_arrives_beside_what_layers_read() -> None:
    """Four layers of 5 s read two messages of 1 s each, and what is behind them one of 12 s."""
    found = units(*[(0, 0, 0)] * 5)
    forward, _ = computed(found, [5.0] * 5)
    layers = [Message(1, unit.readers) for unit in found[:-1] for _ in range(2)]
    held_up = [
        clock([], arriving=[*layers, Message(12, found[-1].readers)], read=window).arrival(forward, 0.0)
        for window in (0, 1, 2, 3)
    ]
    # it is begun beside nothing, one or both of the last layer's, and as the third layer reads its first
    assert held_up == pytest.approx([12, 9, 5, 4])


@pytest.mark.parametrize(("limit", "exposed"), [(0, 15 + 1), (1, 1)])
def test_a_backward_goes_on_beside_a_large_message(limit: int, exposed: int) -> None:
    """Four layers of 10 s back: the first message takes 25 s, those behind it need not wait for it."""
    layers = units(*[(0, 0, 0)] * 4)
    messages = [Message(size, unit.readers) for size, unit in zip((25, 1, 1, 1), reversed(layers), strict=True)]
    there, back, hidden = clock([], scattered=messages, limit=limit).passes(*computed(layers, [5.0] * 4))
    assert (there, back) == pytest.approx((20, 40 + exposed))
    assert hidden == pytest.approx(28 - exposed)
