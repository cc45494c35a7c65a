"""Of layers that are alike: prices that no strategies undercut, and bounds of whole candidates by them."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import fx

from autopart.alike_work import AlikeLayers, _conversions, _places
from autopart.analysis import Analysis, analyze
from autopart.candidate_settings import CUDA_OVERHEAD_BYTES
from autopart.candidates import Candidates
from autopart.describe import describe
from autopart.folding import is_stored
from autopart.models import load_model
from autopart.passes.graph import module_path
from autopart.prices import Chosen, share_of
from autopart.runtime.errors import InfeasibleError
from autopart.runtime.placement import REPLICATE
from autopart.solver.degrees import Degrees
from autopart.tensor_choice import Builder, TensorChoice, stored_as
from autopart.tracing import capture
from clusters import ideal

MODELS = (
    "hf:gpt2?n_layer=7&n_embd=64&n_head=4&n_positions=16&seq=16&vocab_size=128",
    "hf:llama?num_hidden_layers=7&hidden_size=64&intermediate_size=128&num_attention_heads=4&num_key_value_heads=4"
    "&seq=16&vocab_size=128",
)
T5 = "hf:t5?num_layers=6&d_model=64&d_ff=128&num_heads=4&d_kv=16&seq=16&vocab_size=128"
BATCH = 16


@functools.cache
def analysis_of(model: str, dtype: torch.dtype = torch.float32) -> Analysis:
    loaded = load_model(model, meta=True, dtype=dtype)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def take(choice: TensorChoice, nodes: Sequence[fx.Node], chosen: Chosen) -> None:
    for node in nodes:
        if is_stored(node):
            choice.storage[node.meta["name"]] = stored_as(chosen)
        else:
            choice.strategies[node] = chosen


@pytest.mark.parametrize(
    ("model", "bandwidth", "dtype"),
    [
        (MODELS[0], 1e9, torch.float32),
        (MODELS[1], 1e9, torch.bfloat16),
        *(
            pytest.param(model, speed, dtype, marks=pytest.mark.slow)
            for model in MODELS
            for speed in (1e7, 1e8)
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
def test_no_strategies_undercut_the_prices_of_a_layer(model: str, bandwidth: float, dtype: torch.dtype) -> None:
    """Random strategies, and those that the solver takes for their speed or their bytes, as blocks are priced, with and
    without modules that run again. The same of blocks that lie before and behind layers.
    """
    candidates = Candidates(analysis_of(model, dtype), ideal(4, bandwidth=bandwidth), BATCH, "adamw", zero=None)
    analysis, config = candidates.analysis, Degrees(1, 1, (4,), 2, "1f1b")
    setting = candidates.setting(config)
    (first,), others = candidates.alike_layers(), candidates._other_layers(config)
    assert len(first.blocks) >= 5 and sum(not item.layer for item in others) == 2
    pieces = candidates._piece_setting(config, transients=True)
    families = [(item, candidates._family(config, item, pieces)) for item in (first, *others)]
    for _, family in families:
        assert len(family.prices) > 20 and family.prices[0].seconds >= family.whole.forward_s + family.whole.backward_s
    builder = Builder(analysis, candidates._folded, setting, candidates._block_costs, "adamw", (0,))

    nearest: dict[tuple[int, ...], float] = {}

    def amounts(choice: TensorChoice, alike: AlikeLayers) -> list[tuple[float, float, float, float]]:
        """Of each layer, also with modules that run again: seconds, those of the forward, bytes of weights and kept."""
        costs = candidates._block_costs.costs(
            setting.prices, choice.strategies, choice.storage, setting.conversions, setting.beside
        )
        found = []
        for blocks, seconds in candidates.least_part_seconds(config).items():
            taken = sum(costs[number].forward_s + costs[number].backward_s for number in blocks)
            assert seconds <= taken * (1 + 1e-9)
            nearest[blocks] = min(nearest.get(blocks, math.inf), taken / seconds)
        parts = {layer.blocks: layer.parts for layer in candidates.problem(config, choice).shapes[0].layers}
        for own in alike.blocks:
            read = ((node, readers) for node, readers in candidates.readers.items() if readers[0] in own)
            mine = [node.meta["name"] for node, readers in read if len(readers) == 1]
            kept = {item: size for number in own for item, size in costs[number].kept.items()}
            held = [analysis.program.tensors[name] for name in mine]
            weights = sum(
                math.prod(info.shape) * share_of(choice.storage.get(info.name, (REPLICATE,)), setting.sizes)
                for info in held
                if info.trainable
            )
            weights *= dtype.itemsize
            seconds = sum(costs[number].forward_s + costs[number].backward_s for number in own)
            forward = sum(costs[number].forward_s for number in own)
            size = sum(kept.values()) + sum(costs[number].inside_bytes for number in own)
            found.append((seconds, forward, weights, size))
            again = [way for way in parts[own][own] if way.name] if alike.layer else []
            assert again or not alike.layer
            found += [(way.seconds, way.forward_s, weights, way.activation_bytes) for way in again]
        return found

    def random_choice(rng: random.Random, base: TensorChoice, changed: int) -> TensorChoice:
        found = TensorChoice(dict(base.strategies), dict(base.storage), None)
        classes = candidates._folded.classes
        for number in rng.sample(range(len(classes)), min(changed, len(classes))):
            take(found, classes[number], rng.choice(builder.ways(classes[number][0]))[0])
        return found

    rng = random.Random(0)
    fastest = candidates.choose(config)
    smaller = candidates.choose(config, fastest.memory_bytes * 0.97)
    _, free = builder.solution(None, 60.0, free=True)  # parameters cost nothing
    work = random_choice(rng, fastest, 0)
    for nodes, index in zip(candidates._folded.classes, free.choices, strict=False):
        take(work, nodes, builder.ways(nodes[0])[index][0])
    near = [math.inf] * len(families)
    for base in (fastest, smaller, work):
        for changed in (0, *(rng.choice((1, 3, 200)) for _ in range(6))):
            try:
                chosen = random_choice(rng, base, changed) if changed else base
                found = [amounts(chosen, alike) for alike, _ in families]
            except ValueError:  # no conversion between these
                continue
            for number, (_, family) in enumerate(families):
                for price, (seconds, forward, weights, kept) in itertools.product(family.prices, found[number]):
                    if not math.isfinite(seconds):
                        continue
                    taken = seconds + price.forward * forward + price.weights * weights + price.kept * kept
                    assert price.seconds <= taken * (1 + 1e-9)
                    near[number] = min(near[number], taken / price.seconds)
    assert near[0] < 1.001 or bandwidth < 1e8, "links so slow that nothing is shared: weights' gradients are hidden"
    assert near[-1] < 1.02
    layers = [own for item in (first, *others) for own in item.blocks]
    assert nearest.keys() == {*layers, *((number,) for own in layers for number in own)}
    assert min(nearest.values()) < 1.02 or bandwidth < 1e8, "blocks share what comes in for nothing"


def test_what_both_norms_of_a_layer_make_is_converted_again_with_it() -> None:
    """They are one class of ops here: each of its values is converted again where all that reads it runs again too."""
    analysis = analysis_of(MODELS[1], torch.bfloat16)
    candidates, config = Candidates(analysis, ideal(4), BATCH, "adamw"), Degrees(1, 1, (4,), 2, "1f1b")
    setting, (alike,) = candidates.setting(config), candidates.alike_layers()
    classes, number = alike.part.classes, {own[0]: at for at, own in enumerate(candidates._folded.classes)}
    builder = Builder(analysis, candidates._folded, setting, candidates._block_costs, "adamw", (0,))
    first = {analysis.classes[own]: at for own, at in number.items()}
    ops = [builder.op(candidates._folded.classes[first[analysis.classes[nodes[0]]]]) for nodes in classes]
    sets = [item for item in candidates._again_sets(alike, "auto") if item.modules]
    _, _, repeated = _conversions(builder, alike, ops, _places(analysis, alike), sets)
    several = {
        tuple(len(classes[op]) for op, _ in edge.uses): times.tolist()
        for (_, edge), times in repeated
        if len(classes[edge.source]) == 2
    }
    only_whole = [*(0.0 for _ in sets[:-1]), 1.0]
    assert several[1, 1, 1] == several[1, 1] == only_whole  # to the products of attention, and of the MLP
    norms = [at for at, item in enumerate(sets) if len(item.modules) == 1 and len(item.covered) == 8]
    assert len(norms) == 2
    inside = several[(2,)]
    assert [inside[at] for at in norms] == [0.5, 0.5] and inside[-1] == 1.0


def test_layers_of_a_decoder_with_masks_of_their_own_are_alike() -> None:
    """Each makes its mask for what the encoder gave it, of nothing that is its own."""
    candidates = Candidates(analysis_of(T5), ideal(4), BATCH, "adamw", zero=None)
    analysis = candidates.analysis
    masks = {node.target for node in analysis.free if len(node.users) == 1 and "decoder.block.3" in module_path(node)}
    assert masks
    names = [[analysis.layers[own[0]] for own in item.blocks] for item in candidates.alike_layers()]
    assert names == [[f"{part}.block.{number}" for number in range(1, 6)] for part in ("encoder", "decoder")]
    for item in candidates.alike_layers():
        found = candidates._pieces.module_sets(item.facts, item.blocks[0])
        # products that keep what enters them free nothing, in no set
        assert found is not None and len(found.sets) < 2000


def test_pipelines_are_bounded_where_the_first_and_last_layers_have_many_blocks() -> None:
    """As of Gemma 3, of whose layers one in six attends to all, and the first is like no other."""
    model = "hf:gemma3_text?num_hidden_layers=7&hidden_size=64&intermediate_size=128&num_attention_heads=4&head_dim=16"
    analysis = analysis_of(f"{model}&num_key_value_heads=2&seq=16&vocab_size=128", torch.bfloat16)
    candidates = Candidates(analysis, ideal(4), BATCH, "adamw")
    (alike,) = candidates.alike_layers()
    assert len(candidates._apart([alike])) >= 25
    assert candidates._pipeline(Degrees(2, 1, (2,), 2, "1f1b"), 0.0) is not None


@pytest.mark.parametrize("model", [*MODELS, T5])
def test_modules_that_run_again_free_and_hold_what_blocks_say(model: str) -> None:
    """Of a layer and of its blocks, without tensor axes: no way undercuts those of bounds, and most are near."""
    candidates = Candidates(analysis_of(model), ideal(4), BATCH, "adamw", zero=None)
    config = Degrees(4, 1, (), 4, "1f1b")
    shape = candidates.problem(config, candidates.choose(config)).shapes[0]
    setting = candidates._piece_setting(config, transients=True)
    found = {layer.blocks: layer.parts for layer in shape.layers}
    near = count = 0
    layers = [(alike, own) for alike in candidates.alike_layers() for own in alike.blocks]
    assert len(layers) >= 5
    for alike, own in layers:
        pieces = {own: candidates._family(config, alike, setting).whole}
        pieces |= {(number,): candidates._pieces.block(number, setting) for number in own}
        for part, piece in pieces.items():
            keep = found[own][part][0]
            for way in found[own][part]:
                amounts = way.seconds - keep.seconds, way.activation_bytes, way.transient_bytes
                below = [
                    run
                    for run in piece.wholes
                    for mine in [(run.seconds, run.kept_bytes, run.transient_bytes)]
                    if all(a <= b * (1 + 1e-9) + 1e-12 for a, b in zip(mine, amounts, strict=True))
                ]
                assert below, (part, way.name)
                count += 1
                near += any(
                    (run.kept_bytes, run.transient_bytes) == pytest.approx(amounts[1:], rel=1e-3) for run in below
                )
    assert near > 0.6 * count


@pytest.mark.parametrize("model", MODELS)
def test_what_ops_keep_by_choice_adds_up_to_what_layers_keep(model: str) -> None:
    """A tensor that several ops keep counts once."""
    candidates, config = (
        Candidates(analysis_of(model), ideal(4), BATCH, "adamw", zero=None),
        Degrees(1, 1, (4,), 1, "1f1b"),
    )
    analysis, setting = candidates.analysis, candidates.setting(config)
    (alike,), sizes = candidates.alike_layers(), candidates.kept_sizes(config)
    builder = Builder(analysis, candidates._folded, setting, candidates._block_costs, "adamw", (0,))
    choice = candidates.choose(config)
    costs = candidates._block_costs.costs(
        setting.prices, choice.strategies, choice.storage, setting.conversions, setting.beside
    )
    own = alike.blocks[1]
    nodes = [node for number in own for node in analysis.blocks[number].nodes if node in analysis.block_of]
    counted = 0.0
    for node in nodes:
        ways = [chosen for chosen, _ in builder.ways(analysis.first.get(node, node))]
        counted += sizes[analysis.classes[node]][ways.index(choice.strategies[node])]
    kept = {item: size for number in own for item, size in costs[number].kept.items()}
    held = sum(kept.values()) + sum(costs[number].inside_bytes for number in own)
    alone = sum(
        candidates._block_costs.held_bytes(node, choice.strategies[node], setting.sizes, setting.prices.batch)[0]
        for node in nodes
    )
    assert 0.95 * held <= counted <= held * (1 + 1e-9) < alone


def test_layers_run_again_up_to_the_last_op_that_keeps_something() -> None:
    """As torch.utils.checkpoint does: not the sum of the ranks' results behind a layer's last product. So blocks are
    priced as the graphs that are emitted, and bounds say no more.
    """
    candidates = Candidates(analysis_of(MODELS[1]), ideal(8, bandwidth=1e9), BATCH, "adamw", zero=0)
    config = Degrees(2, 1, (4,), 4, "1f1b", "full")
    found = candidates.evaluate(config)
    answer, plan = found.answer, describe(candidates, found.answer)
    for stage, step in zip(plan.stages, answer.cut.way, strict=True):
        priced = answer.problem.busy_seconds(step)
        assert stage.forward_s + stage.backward_s == pytest.approx(priced, rel=0.03)  # 0.06 with these sums
    (alike,) = candidates.alike_layers()
    nodes = [node for number in alike.blocks[1] for node in candidates.analysis.blocks[number].nodes]
    again = candidates._block_costs.again(nodes)
    assert nodes[-1] not in again and len(again) == len(nodes) - 1
    assert not candidates.runs_again(nodes[-1]) and candidates.runs_again(nodes[-2])


@pytest.mark.parametrize("model", MODELS)
def test_bounds_hold_where_all_layers_run_again(model: str) -> None:
    """What runs again counts once in them."""
    candidates = Candidates(analysis_of(model), ideal(8, bandwidth=1e9), BATCH, "adamw", zero=0)
    for pp, tp in ((1, 8), (2, 4), (4, 2)):
        config = Degrees(pp, 1, (tp,), 4, "1f1b", "full")
        found = candidates.evaluate(config)
        for floor in (candidates.work_floor(config), candidates.last_floor(config, 2 * found.objective)):
            assert candidates.known_floor(config) <= floor <= found.objective
        assert not candidates.surely_takes(config, found.objective * (1 + 1e-6))


ROOMS = (2**22, 2**20, 3 * 2**18)


MESHES = ((1, 4, 2), (2, 2, 2), (4, 1, 2), (2, 1, 4), (4, 2, 1), (2, 4, 1), (1, 1, 8))


@pytest.mark.parametrize(
    ("model", "room", "bandwidth", "meshes"),
    [
        (MODELS[0], ROOMS[1], 1e8, MESHES[1:2]),
        (MODELS[0], ROOMS[2], 1e9, ((4, 2, 1),)),
        pytest.param(T5, ROOMS[1], 1e8, ((1, 4, 2),), marks=pytest.mark.slow),
        (T5, ROOMS[1], 1e9, ((1, 8, 1),)),
        *(
            pytest.param(model, room, speed, MESHES, marks=pytest.mark.slow)
            for model in (*MODELS, T5)
            for room in ROOMS
            for speed in (1e7, 1e9)
        ),
    ],
)
def test_no_candidate_takes_less_than_its_pipelines_floor(
    model: str, room: int, bandwidth: float, meshes: Sequence[tuple[int, int, int]]
) -> None:
    """With strategies, levels of ZeRO, recomputation and mixtures as memory asks for them."""
    cluster = ideal(8, bandwidth=bandwidth, memory_bytes=CUDA_OVERHEAD_BYTES + room)
    candidates = Candidates(analysis_of(model), cluster, BATCH, "adamw", zero=None)
    raised = fitting = 0
    for pp, dp, tp in meshes:
        for microbatches in (4,) if len(meshes) == 1 else (2, 4):
            config = Degrees(pp, dp, (tp,) if tp > 1 else (), microbatches, "1f1b")
            floor = candidates.work_floor(config)
            raised += floor > candidates.known_floor(config) * 1.01
            try:
                evaluation = candidates.evaluate(config)
            except InfeasibleError:
                continue
            fitting += 1
            assert floor <= evaluation.objective * (1 + 1e-9), config
            last = candidates.last_floor(config, 2 * evaluation.objective)
            assert floor * (1 - 1e-9) <= last <= evaluation.objective * (1 + 1e-9), config
            assert not candidates.surely_takes(config, evaluation.objective * (1 + 1e-6)), config
            known = floor / (1 + 1e-6)
            assert pp == 1 or candidates.surely_takes(config, known), config
    assert raised, fitting
