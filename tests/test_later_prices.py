"""Prices of collectives beside which weights' gradients are computed: blocks, problems of the solver, graphs, plans."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autopart.analysis import Analysis, analyze
from autopart.breakdown import COMPUTE, break_down
from autopart.candidates import Candidates
from autopart.conversion_prices import ConversionPrices, TensorAxis
from autopart.cost.communication import all_reduce_seconds
from autopart.cost.devices import Link
from autopart.describe import describe
from autopart.folding import is_stored
from autopart.passes.beside import operand_of
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.runtime.placement import BROADCAST, REPLICATE, shard
from autopart.solver.degrees import Degrees
from autopart.tensor_choice import Builder, stored_as
from autopart.tensor_scheme import TensorScheme
from autopart.tracing import capture
from clusters import ideal

SAMPLES, TOKENS, WIDTH, VOCABULARY = 8, 4, 64, 4096


class Gate(nn.Module):
    """Two column-split products that read one value, and a row-split one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 256), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = self.down(torch.sigmoid(self.gate(h)) * self.up(h))
        return x + y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Gate() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def analysis_of(precision: str = "") -> Analysis:
    model = Gated() if precision else Gated().double()
    return analyze(
        capture(model, (torch.zeros(SAMPLES, TOKENS, dtype=torch.long),), precision=precision, check_eval=False)
    )


@pytest.fixture(scope="module")
def double() -> Analysis:
    return analysis_of()


def config(schedule: str = "1f1b") -> Degrees:
    return Degrees(1, 1, (2,), 1, schedule, "none")


# the collective takes longer; the products do
@pytest.mark.parametrize(("precision", "bandwidth"), [("", 8e7), ("", 1e12), ("bf16-mixed", 4e7)])
def test_prices_credit_what_is_put_off(double: Analysis, precision: str, bandwidth: float) -> None:
    """As many seconds as the shorter takes of the collective and the weights' gradients; everywhere alike."""
    analysis = analysis_of(precision) if precision else double
    cluster = ideal(2, bandwidth=bandwidth)
    candidates = Candidates(analysis, cluster, SAMPLES, "adamw", scheme=TensorScheme("1d"))
    answer = candidates.evaluate(config()).answer
    choice, setting = answer.choice, candidates.setting(config())
    plain = candidates._block_costs.costs(
        setting.prices, choice.strategies, choice.storage, setting.conversions, beside=False
    )
    named = {node: own[0].name for node, own in choice.strategies.items() if operand_of(node) is not None}
    read = [node for node, name in named.items() if name == "n"]
    assert len(read) == 4
    weights = sum(setting.prices.weight_seconds(node, choice.strategies[node], (2,)) for node in read) / 2  # of a layer
    # of a layer norm's result, before it is cast for each product
    size = SAMPLES * TOKENS * WIDTH * (4 if precision else 8)
    summed = all_reduce_seconds(size, 2, setting.axes[0].link)
    hidden = 2 * min(weights, summed)
    assert (weights < summed) == (bandwidth < 1e9)
    backward = sum(block.backward_s for block in plain)
    blocks = sum(block.backward_s for block in answer.problem.blocks)
    assert backward - blocks == pytest.approx(hidden)
    plan = describe(candidates, answer)
    assert plan.stages[0].backward_s == pytest.approx(blocks)
    assert plan.stages[0].hidden_s == pytest.approx({"all_reduce": hidden})
    assert Plan.from_json(plan.to_json()) == plan
    # the solver counts on the same
    work = sum(block.seconds for block in answer.problem.blocks)
    ends = answer.problem.step_end_seconds(answer.cut.way[0])
    assert choice.solution is not None and choice.solution.objective == pytest.approx(work + ends)
    found = break_down(plan, cluster).stages[0]
    assert found.hidden_s == pytest.approx(hidden) and found.collectives_s is not None
    exposed = sum(found.collectives_s.values())
    assert found.seconds[COMPUTE] + exposed == pytest.approx(plan.stages[0].forward_s + blocks)


def test_split_backwards_get_no_credit(double: Analysis) -> None:
    candidates = Candidates(double, ideal(2, bandwidth=1e6), SAMPLES, "adamw", scheme=TensorScheme("1d"))
    setting = candidates.setting(config("zb-h1"))
    assert not setting.beside and candidates.setting(config()).beside
    plan = make_plan(
        double.program, ideal(4), batch=8, analysis=double, pp=2, tp=2, schedule="zb-h1", tensor_scheme="1d"
    )
    assert all(stage.hidden_s == {} for stage in plan.stages)


@pytest.mark.parametrize("bandwidth", [1e5, 1e7, 1e12])
def test_problems_never_charge_more_than_strategies_take(double: Analysis, bandwidth: float) -> None:
    """Random strategies take what the problem says or longer, so that its bound is one; the chosen take just that."""
    candidates = Candidates(double, ideal(2, bandwidth=bandwidth), SAMPLES, "adamw")
    setting, classes = candidates.setting(config()), candidates._folded.classes
    builder = Builder(double, candidates._folded, setting, candidates._block_costs, "adamw", (0,))
    problem, solution = builder.solution(None, 60.0, free=True)
    returned = [edge for edge in problem.edges if any(op == len(classes) for op, _ in edge.uses)]

    def charged(choices: Sequence[int]) -> float:
        """Without what makes outputs whole, which is no block's."""
        (whole,) = problem.ops[-1].choices[0].inputs
        made = [problem.ops[edge.source].choices[choices[edge.source]].outputs[edge.output] for edge in returned]
        ends = sum(edge.seconds(have, whole) for edge, have in zip(returned, made, strict=True))
        return problem.objective(choices) - ends

    def taken(choices: Sequence[int]) -> float:
        strategies, storage = {}, {}
        for nodes, index in zip(classes, choices, strict=False):
            own, _ = builder.ways(nodes[0])[index]
            for node in nodes:
                if is_stored(node):
                    storage[node.meta["name"]] = stored_as(own)
                else:
                    strategies[node] = own
        costs = candidates._block_costs.costs(setting.prices, strategies, storage, setting.conversions)
        return sum(cost.forward_s + cost.backward_s for cost in costs) - candidates.free_seconds(config())

    assert taken(solution.choices) == pytest.approx(charged(solution.choices))
    draw = random.Random(0)
    for _ in range(60):
        found = list(solution.choices)
        for op in draw.sample(range(len(classes)), draw.choice((1, 3, len(classes)))):
            found[op] = draw.randrange(len(problem.ops[op].choices))
        if problem.objective(found) < float("inf"):
            assert charged(found) <= taken(found) * (1 + 1e-9)


def test_the_first_collective_of_a_backward_is_what_is_hidden() -> None:
    """Of a conversion along two axes the last step's, at the share that the other axis leaves."""
    link, size = Link("ideal", 1e9, 0.0), 2**20
    prices = ConversionPrices((TensorAxis("x", 2, link), TensorAxis("y", 2, link)), ideal(1).devices[0])
    whole, half = all_reduce_seconds(size, 2, link), all_reduce_seconds(size / 2, 2, link)
    for source, target, expected in (
        ((REPLICATE, REPLICATE), (REPLICATE, BROADCAST), whole),
        ((REPLICATE, REPLICATE), (BROADCAST, BROADCAST), whole),  # of two the one beside the products
        ((REPLICATE, shard(0)), (BROADCAST, shard(0)), half),
        ((shard(0), REPLICATE), (REPLICATE, REPLICATE), 0.0),  # each takes its share of the gradient
        ((REPLICATE, BROADCAST), (REPLICATE, BROADCAST), 0.0),
    ):
        assert prices.beside(source, target, size) == pytest.approx(expected)
