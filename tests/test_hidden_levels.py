"""Levels of ZeRO whose exchange passes beside ops."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import pytest
from torch import fx

from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.data_prices import held_bytes
from autopart.folding import is_stored
from autopart.hidden_levels import hidden_levels, least_price
from autopart.passes.annotate import parameter_bytes
from autopart.solver.degrees import Degrees
from autopart.tracing import capture
from clusters import ideal
from families import family

CONFIG = Degrees(1, 4, (), 2, "1f1b")


@functools.cache
def analysis() -> Analysis:
    item = family("gpt2")
    return analyze(capture(item.build(), (), item.inputs(8), check_eval=False))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.5, 0.8, 1.0, 3.0])
def test_they_take_no_longer_than_what_hides_them(share: float) -> None:
    """share: of the seconds in which all is exchanged at level 3."""
    candidates = Candidates(analysis(), ideal(4), 8, "adamw", zero=None)
    choice, setting, folded = candidates.choose(CONFIG, level=3), candidates.setting(CONFIG), candidates._folded

    def exchange(node: fx.Node, level: int) -> tuple[float, float]:
        return candidates._exchange_seconds(setting, choice, node, level)

    def sent(levels: dict[str, int]) -> tuple[float, float]:
        nodes = [node for node in candidates.readers if node.meta["name"] in levels]
        both = [exchange(node, levels[node.meta["name"]]) for node in nodes]
        return math.fsum(there for there, _ in both), math.fsum(back for _, back in both)

    there, back = rooms = [share * seconds for seconds in sent(choice.levels)]
    tensors = analysis().program.tensors
    classes = [nodes for nodes in folded.classes if is_stored(nodes[0]) and nodes[0].meta["name"] in choice.levels]

    def held(nodes: Sequence[fx.Node], level: int) -> tuple[float, float]:
        info = tensors[nodes[0].meta["name"]]
        whole = parameter_bytes(info.shape, info.dtype, "adamw", True)
        return float(len(nodes) * level), float(len(nodes) * held_bytes(whole, level, 4).total)

    levels = hidden_levels(classes, exchange, held, there, back)
    assert levels == hidden_levels(classes, exchange, held, there, back, 1.0)
    assert set(hidden_levels(classes, exchange, held, there, back, 0.0).values()) == {1}
    assert levels.keys() == choice.levels.keys() and set(levels.values()) <= {1, 2, 3}
    assert all(seconds <= room * (1 + 1e-9) for seconds, room in zip(sent(levels), rooms, strict=True))
    large = {name for name in levels if tensors[name].shape and math.prod(tensors[name].shape) > 1000}
    if share == 0 or share >= 1:
        assert {levels[name] for name in large} == ({3} if share else {1})
    for nodes in folded.classes:
        if is_stored(nodes[0]) and nodes[0].meta["name"] in levels:
            assert len({levels[node.meta["name"]] for node in nodes}) == 1
    # nothing that frees much is left that would have passed as well
    for nodes, level in itertools.product(folded.classes, (2, 3)):
        name = nodes[0].meta["name"] if is_stored(nodes[0]) else ""
        if name in large and levels[name] == level - 1:
            more = {**levels, **{node.meta["name"]: level for node in nodes}}
            assert any(seconds > room for seconds, room in zip(sent(more), rooms, strict=True))


def test_they_are_tried_where_memory_asks_for_something() -> None:
    free = Candidates(analysis(), ideal(4), 8, "adamw", zero=None, all_levels=True)
    for_little, for_all = free.hidden(CONFIG)
    assert set(for_little.levels.values()) <= {1, 2}, "gathers cost something, and memory is worth nothing"
    assert set(for_all.levels.values()) >= {1, 3}
    divided = free._evaluate(CONFIG, for_all, math.inf)
    room = int(divided.answer.problem.stage_bytes(0, divided.answer.cut.way[0])) + 1
    whole = free.evaluate(CONFIG).answer
    assert room < whole.problem.stage_bytes(0, whole.cut.way[0])
    tight = Candidates(analysis(), ideal(4, memory_bytes=room), 8, "adamw", zero=None)
    found = tight._hidden(CONFIG, math.inf)
    assert found is not None and tight.evaluate(CONFIG).objective <= found.objective * (1 + 1e-9)
    assert found.objective <= divided.objective * (1 + 1e-9)


def test_a_byte_is_worth_what_the_last_one_costs_that_has_to_go() -> None:
    layers = [[(1.0, 10.0), (2.0, 5.0), (9.0, 4.0)], [(0.0, 8.0), (3.0, 2.0)]]
    prices = [least_price(layers, room) for room in (18.0, 17.0, 13.0, 12.0, 7.0, 6.5, 6.0, 5.0)]
    assert prices == [0.0, 0.2, 0.2, 0.5, 0.5, 7.0, 7.0, math.inf]
