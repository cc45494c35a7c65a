"""What a layer's ops keep by choice: a tensor counts once where it is read as it is made, and twice where gathered."""

from __future__ import annotations

import itertools

import pytest

from autopart.analysis import Analysis, analyze
from autopart.candidates import Candidates
from autopart.kept_in_layers import Held
from autopart.models import load_model
from autopart.module_sets import ModuleSet
from autopart.solver.degrees import Degrees
from autopart.tensor_choice import Builder
from autopart.tracing import capture
from clusters import ideal

MODELS = (
    "hf:gpt2?n_layer=7&n_embd=64&n_head=4&n_positions=16&seq=16&vocab_size=128",
    "hf:llama?num_hidden_layers=7&hidden_size=64&intermediate_size=128&num_attention_heads=4&num_key_value_heads=4"
    "&seq=16&vocab_size=128",
)
TENSOR, BATCH = 4, 16


def analysis_of(model: str) -> Analysis:
    loaded = load_model(model, meta=True)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


@pytest.mark.parametrize("model", MODELS)
def test_attention_and_the_product_behind_it_keep_its_result_once_or_twice(model: str) -> None:
    """Under every pair of their choices no more than both hold, and as much where the product reads what attention
    made, or gathers it from parts.
    """
    candidates = Candidates(analysis_of(model), ideal(TENSOR), BATCH, "adamw", zero=None)
    config = Degrees(1, 1, (TENSOR,), 1, "1f1b")
    analysis, setting, costs = candidates.analysis, candidates.setting(config), candidates._block_costs
    builder = Builder(analysis, candidates._folded, setting, costs, "adamw", (0,))
    (alike,) = candidates.alike_layers()
    places = {
        node: at for at, node in enumerate(node for number in alike.blocks[0] for node in analysis.blocks[number].nodes)
    }
    attention = next(node for node in places if "scaled_dot_product_attention" in str(node.target))
    (owner, keepers), *_ = (item for item in alike.keeps.items() if item[0].node is attention and len(item[1]) > 1)
    held = Held.of(builder, {owner: keepers}, [ModuleSet()], places)
    maker, reader = keepers
    parts, counted = [], []
    for node in (maker, reader):
        ways = [chosen for chosen, _ in builder.ways(node)]
        own = [
            (
                costs.least_kept(node, way, setting.sizes, setting.prices.batch, {owner}, False),
                *costs.kept_shares(node, way, setting.sizes, owner),
            )
            for way in ways
        ]
        alone = [costs.least_kept(node, way, setting.sizes, setting.prices.batch, (), True) for way in ways]
        parts.append(own)
        counted.append(held.bytes(node, ways)[:, 0] - alone)
    assert {share for own in parts for _, share in own} == {1.0, 1 / TENSOR}
    of_maker, of_reader = (list(zip(*pair, strict=True)) for pair in zip(parts, counted, strict=True))
    for (made, first), (read, second) in itertools.product(of_maker, of_reader):
        both = made[0] + read[0] if read[1] > made[1] else max(made[0], read[0])
        assert first + second <= both * (1 + 1e-9)
        if read[1] >= made[1]:
            assert first + second == pytest.approx(both)
