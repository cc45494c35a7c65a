"""The cost model against published step times, and what has to hold of it for any shape."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from functools import cache
from importlib import resources
from math import ceil, gcd
from random import Random
from statistics import median

import pytest

import autopart
from autopart.analysis import analyze
from autopart.cli import main
from autopart.cluster import Cluster
from autopart.cost import communication as comm
from autopart.cost.compute import Product, op_seconds, product_seconds, slower_attention
from autopart.cost.devices import Device, device, link
from autopart.cost.fit import ETHERNET, START, Fit, fit
from autopart.cost.gpt import Gpt, Style, layer_parts, layer_products
from autopart.cost.products import backward_products, forward_products
from autopart.cost.published import Measurement, read_table
from autopart.cost.training import OPTIMIZER_BYTES, Layout, fits, pipeline_seconds, step_seconds
from autopart.cost.transformer import gpt2_forward_flops, gpt2_parameters
from autopart.cost.validate import Row, published, rank_correlation, summaries, summarize, validate
from autopart.models import load_model
from autopart.prices import Prices
from autopart.runtime.errors import PlanError
from autopart.runtime.schedule import make_schedule
from autopart.simulate import StageTimes, simulate

A100 = device("A100-80GB")
LIMITS = {"megatron_sc21_table1": 0.04, "megatron_tp_only": 0.08, "alpa_gpt": 0.15}
GPT = Gpt(8, 1024, 16, 1024, 51200)


@cache
def rows(table: str) -> list[Row]:
    return validate(published()[table])


@cache
def measurements() -> tuple[Measurement, ...]:
    return tuple(item for table in published().values() for item in table)


@cache
def fitted() -> Fit:
    return fit(measurements())


# -- published step times -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("table", "limit"), LIMITS.items())
def test_errors_stay_within_their_limits(table: str, limit: float) -> None:
    for found in summaries(table, rows(table)):
        assert found.error <= limit, found
        assert found.test_error <= limit, found
        assert found.rank_correlation is not None and found.rank_correlation >= 0.95, found
        assert found.error < found.naive_error, found


@pytest.mark.parametrize("table", LIMITS)
def test_every_row_is_priced_once(table: str) -> None:
    columns = {row.measurement.column for row in rows(table)}
    assert len(rows(table)) == len(read_table(table)) * len(columns)
    assert {row.measurement.half for row in rows(table)} == {"fit", "test"}


def test_intra_op_only_collapses_across_slow_links() -> None:
    intra = {row.measurement.name: row for row in rows("alpa_gpt") if row.measurement.column == "intra"}
    collapsed = intra["39B"].predicted
    assert abs(intra["39B"].error) < 0.15
    assert collapsed.tensor_collectives > 0.9 * collapsed.total
    fast = replace(intra["39B"].measurement, cluster=Cluster.parse("8x8xV100-16GB@8*InfiniBand-200"))
    assert fast.best()[1] < 0.2 * collapsed.total


def test_the_table_s_flops_are_reproduced() -> None:
    """F as the papers count it, so that model sizes were read correctly."""
    for row in rows("megatron_sc21_table1"):
        item = row.measurement
        published = next(r for r in read_table("megatron_sc21_table1") if f"{r['params_b']}B" == item.name)
        assert item.flops_per_device / item.seconds / 1e12 == pytest.approx(
            float(published["tflops_per_gpu"]), rel=0.01
        )
        assert item.model.parameters / 1e9 == pytest.approx(float(published["params_b"]), abs=0.06)


# -- no fudge -------------------------------------------------------------------------------------------------------


def test_fitted_constants_are_few_and_are_those_of_the_devices_file() -> None:
    found = fitted().constants
    assert set(found) == set(START) == {"V100-16GB", "V100-32GB", "A100-80GB", "H100", "Ethernet"}
    for name, value in found.items():
        stored = link("Ethernet-25").efficiency if name == ETHERNET else device(name).contraction
        assert stored == pytest.approx(value, abs=0.01), name


def test_the_fit_does_not_look_at_the_test_half() -> None:
    spoiled = [replace(item, seconds=item.seconds * 3) if item.half == "test" else item for item in measurements()]
    assert fit(spoiled) == fitted()


def test_the_devices_file_holds_nothing_else() -> None:
    data = tomllib.loads(resources.files("autopart.cost").joinpath("devices.toml").read_text())
    usual = {"kind", "memory_gib", "peak_flops", "memory_bandwidth", "launch_s", "processors", "contraction"}
    usual |= {"contraction_by", "memory", "attention", "unaligned", "host_s", "inside", "between", "ports_per_device"}
    usual |= {"function_s", "random_s", "mapped_s"}
    for name, table in data["devices"].items():
        assert set(table) <= usual, name
    for name, table in data["links"].items():
        assert set(table) <= {"bandwidth", "latency_s", "sum_latency_s", "efficiency", "direct", "switch_sums"}, name
        family = {entry.get("efficiency") for key, entry in data["links"].items() if key[:4] == name[:4]}
        assert len(family) == 1, name
    for alike in (("A100-40GB", "A100-80GB", "RTX-5000-Ada"), ("H100", "H200")):
        assert len({device(name).contraction for name in alike}) == 1


def test_share_of_a_b200_is_that_of_its_products() -> None:
    """Forward and of inputs' gradients, each by itself; weights' gradients were added to a sum besides."""
    b200, rows = device("B200"), read_table("b200_products")
    shares: dict[str, list[float]] = {}
    for row in rows:
        product = Product.contiguous(*(int(row[name]) for name in "mnk"))
        measured = product.flops / b200.peak("bfloat16") / float(row["share"])
        # Seconds are affine in the share's inverse as long as the same tiles are the best: these two steps find it.
        share = b200.contraction
        for _ in range(8):
            share *= product_seconds(replace(b200, contraction=share), product, "bfloat16") / measured
        shares.setdefault(row["layout"], []).append(share)
    assert len(rows) == 120 and set(shares) == {"TN", "NN", "NT"}
    assert median(shares["TN"] + shares["NN"]) == pytest.approx(b200.contraction, abs=0.01)
    assert median(shares["NT"]) < 0.95 * b200.contraction


# -- matrix products ------------------------------------------------------------------------------------------------


def test_tiles_and_waves() -> None:
    plain = Device("d", "cuda", 2**30, {"float32": 1e12, "float16": 1e12}, 1e12, 0.0, processors=4, contraction=1.0)
    whole = Product(1024, 256, 4096)  # four tiles of 256 x 128 in each of two waves
    products = whole.flops / 1e12
    assert product_seconds(plain, whole, "float32") == pytest.approx(products + 1024 * 256 * 4 / 1e12)
    assert product_seconds(plain, whole, "float16") == pytest.approx(products + 1024 * 256 * 2 / 1e12)
    one_more = replace(whole, m=1025)
    assert product_seconds(plain, one_more, "float32") > 1.05 * product_seconds(plain, whole, "float32")
    assert product_seconds(replace(plain, processors=0), one_more, "float32") == pytest.approx(one_more.flops / 1e12)


def test_more_work_takes_no_less_time() -> None:
    random = Random(0)
    for _ in range(300):
        m, n, k = (int(2 ** random.uniform(0, 15)) for _ in range(3))
        base = Product(m, n, k, random.choice((1, 2, 96)))
        seconds = product_seconds(A100, base, "float16")
        assert seconds >= base.flops / (A100.peak("float16") * A100.contraction) * (1 - 1e-12)
        assert product_seconds(replace(A100, contraction=0.3), base, "float16") > seconds
        size = random.choice(("m", "n", "k", "groups"))
        grown = replace(base, **{size: getattr(base, size) + random.choice((1, 7, 300))})
        assert product_seconds(A100, grown, "float16") >= seconds * (1 - 1e-12), (base, grown)


def test_small_products_are_far_from_the_peak() -> None:
    def share(product: Product) -> float:
        moved = product.num_bytes()
        return product.flops / op_seconds(A100, 0.0, moved, "float16", products=(product,)) / A100.peak("float16")

    assert share(Product(64, 64, 64)) < 0.001 < 0.2 < share(Product(1024, 1024, 1024)) < share(Product(*(8192,) * 3))
    assert 0.6 < share(Product(8192, 8192, 8192)) <= A100.contraction


def test_split_k_helps_products_with_few_tiles() -> None:
    """A weight gradient of a narrow layer: 64 tiles of 256 x 128 would leave 44 of 108 processors idle."""
    product = Product(1024, 2048, 65536)
    waves = ceil(64 / 108) * 108 / 64
    assert product_seconds(A100, product, "float16") < 0.85 * waves * product.flops / (312e12 * A100.contraction)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_of_16_bit_numbers_that_are_not_aligned_slow_products_down(dtype: str) -> None:
    h100, even = device("H100"), Product(8192, 50257, 768)
    odd, forward = replace(even, row=gcd(50257, 768)), product_seconds(h100, even, dtype)
    gradients = [product_seconds(h100, item, dtype) for item in odd.backward]
    slower = 1 / h100.unaligned if dtype == "float16" else 1.0
    assert product_seconds(h100, odd, dtype) == pytest.approx(slower * forward, rel=0.25)
    assert gradients == pytest.approx([slower * product_seconds(h100, item, dtype) for item in even.backward], rel=0.25)
    assert product_seconds(h100, replace(even, n=50264, row=8), dtype) == pytest.approx(forward, rel=0.01)


def test_what_fused_attention_takes_longer_for() -> None:
    """Measured on H100 (PyTorch 2.11, bfloat16), forward and backward of 8 x 32 heads of 64, and of 4 x 32 of 128."""
    assert slower_attention(128, 2048) == 1.0
    for size, full, causal, dropped in ((64, 2232.4, 1432.1, 2208.5), (128, 1801.0, 1143.1, 1556.7)):
        assert slower_attention(size, 2048, causal=True) / slower_attention(size, 2048) == pytest.approx(
            causal / full, rel=0.1
        )
        with_dropout = slower_attention(size, 2048, causal=True, dropout=True)
        assert with_dropout / slower_attention(size, 2048, causal=True) == pytest.approx(dropped / causal, rel=0.1)
    last, whole = (slower_attention(128, 4096, queries=queries, causal=True) for queries in (1024, 4096))
    assert last / whole == pytest.approx(1.75, rel=0.05)  # of all pairs 7/8 for 4/8: the last rank of four sees most
    assert slower_attention(128, 64, causal=True) == slower_attention(128, 128, causal=True)
    sizes = [slower_attention(size, 1024) for size in (32, 64, 128, 256)]
    assert sizes == sorted(sizes, reverse=True)


# -- the planner's prices -------------------------------------------------------------------------------------------


def test_captured_products_are_those_of_the_closed_form() -> None:
    loaded = load_model("hf:gpt2?n_layer=2&n_embd=256&n_head=4&vocab_size=1024&batch=4&seq=128&dtype=fp16", meta=True)
    analysis = analyze(autopart.capture(loaded.model, loaded.args, loaded.kwargs))
    model = Gpt(2, 256, 4, 128, 1024)
    found = {node: forward_products(node, 4) for node in analysis.block_of}
    products = [product for group in found.values() for product in group]
    shapes = [replace(item, slower=1.0) for item in products]
    layer = [replace(item, fused=True, row=0) if item.groups > 1 else item for item in layer_products(model, 4, 1)]
    assert shapes == [*layer * 2, Product(512, 1024, 256, row=256)]
    assert all(item.fused or item.row == gcd(item.n, item.k) for item in products)
    assert sum(product.flops for product in products) == gpt2_forward_flops(4, 128, 2, 256, 1024)

    prices = Prices(A100, analysis.costs("cuda"), 4)
    costs = analysis.costs("cuda")
    for node, group in found.items():
        assert sum(product.flops for product in group) == (costs[node].flops_forward.at(4) if group else 0)
        if group:
            gradients = sum(product.flops for product in backward_products(node, group))
            assert gradients == costs[node].flops_backward.at(4)
        for strategy in analysis.strategies(2)[node]:
            # what bounds are made of is no more than what plans are priced with
            lower = prices.shared_seconds(node, 0.5, 0.5)
            upper = prices.op_seconds(node, (strategy,), (2,))
            assert all(low <= high * (1 + 1e-9) for low, high in zip(lower, upper, strict=True))


def test_closed_forms() -> None:
    assert GPT.parameters == gpt2_parameters(8, 1024, 51200, 1024)
    forward = gpt2_forward_flops(16, 1024, 8, 1024, 51200)
    assert GPT.flops(16, recompute=False) == 3 * forward
    head = 2 * 16 * 1024 * 51200 * 1024
    assert GPT.flops(16) == 4 * forward - head


# -- links ----------------------------------------------------------------------------------------------------------


def test_a_group_over_nodes_waits_for_the_network() -> None:
    cluster = Cluster.parse("4x8xV100-16GB@Ethernet-25")
    inside = comm.all_reduce_seconds(2**26, 8, cluster.group_link(range(8)))
    across = comm.all_reduce_seconds(2**26, 32, cluster.group_link(range(32)))
    assert across > 20 * inside
    # Eight groups beside each other share the port that one alone would have.
    assert cluster.group_link([0, 8, 16, 24]).bandwidth == link("Ethernet-25").bandwidth / 8
    # A ring of 32 crosses the network four times, not 32 times.
    latency = comm.all_reduce_seconds(0, 32, cluster.group_link(range(32)))
    assert latency < 2 * (4 * 30e-6 + 28 * 2e-6) + comm.CALL_S


def test_wires_without_a_switch() -> None:
    mesh, switched = Cluster.parse("8xV100-16GB"), Cluster.parse("8xV100-32GB")
    assert [mesh.group_link(range(n)).bandwidth for n in (2, 4, 8)] == [25e9, 75e9, 150e9]
    assert [switched.group_link(range(n)).bandwidth for n in (2, 4, 8)] == [150e9] * 3


# -- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [[3.0] * 4, [3.0, 3.0, 3.0, 3.6], [3.6, 3.0, 2.7, 3.0], [1.5, 3.0]])
def test_the_pipeline_formula_is_the_simulated_schedule(times: list[float]) -> None:
    stages = [StageTimes(seconds / 3, 2 * seconds / 3) for seconds in times]
    schedule = make_schedule("1f1b", len(times), 16, {(i, i + 1) for i in range(len(times) - 1)})
    simulated = simulate(schedule, stages).makespan_s
    # Where the slowest stage is not the last, it starts before the pipeline is full.
    assert 0.96 * pipeline_seconds(times, 16) < simulated <= pipeline_seconds(times, 16) * (1 + 1e-12)


def test_interleaving_divides_the_bubble() -> None:
    cluster = Cluster.parse("4xA100-80GB")
    once, twice = (step_seconds(GPT, cluster, Layout(1, 4, 1, 2, chunks), 32) for chunks in (1, 2))
    assert twice.bubble == pytest.approx(once.bubble / 2, rel=0.02)  # more messages in it
    assert twice.messages > once.messages
    assert twice.total < once.total


def test_embedding_and_head_may_be_chunks_of_their_own() -> None:
    """126 layers on 16 stages of 8 chunks, as Llama 3 405B was trained (arXiv 2407.21783)."""
    model, cluster = replace(GPT, layers=126, untied=True), Cluster.parse("2x8xA100-80GB")
    seven, eight = (step_seconds(model, cluster, Layout(1, 16, 1, 1, chunks), 32) for chunks in (7, 8))
    assert eight.bubble < 0.9 * seven.bubble
    assert eight.forward == seven.forward
    step_seconds(replace(model, layers=22), Cluster.parse("8xA100-80GB"), Layout(1, 8, 1, 1, 3), 32)
    with pytest.raises(PlanError, match=r"16 stages x 8 chunks need as many layers, .*, there are 127$"):
        step_seconds(replace(model, layers=125), cluster, Layout(1, 16, 1, 1, 8), 32)
    with pytest.raises(PlanError, match=r"16 stages need as many layers, there are 15$"):
        step_seconds(replace(model, layers=15), cluster, Layout(1, 16, 1, 1), 32)


def test_more_work_and_slower_machines_take_longer() -> None:
    cluster, layout = Cluster.parse("8xA100-80GB"), Layout(2, 2, 2, 1)
    seconds = step_seconds(GPT, cluster, layout, 32).total
    assert step_seconds(GPT, cluster, layout, 64).total > 1.8 * seconds
    assert step_seconds(replace(GPT, layers=16), cluster, layout, 32).total > 1.5 * seconds
    assert step_seconds(GPT, Cluster.parse("8xV100-32GB"), layout, 32).total > 1.5 * seconds
    assert step_seconds(GPT, Cluster.parse("4x2xA100-80GB@Ethernet-25"), layout, 32).total > seconds
    assert step_seconds(GPT, cluster, replace(layout, recompute="none"), 32).total < seconds
    selective = replace(layout, recompute="selective", style=Style(sequence_parallel=True))
    none = step_seconds(GPT, cluster, replace(layout, recompute="none"), 32).total
    assert none * 0.9 < step_seconds(GPT, cluster, selective, 32).total < 0.9 * seconds
    fused = replace(layout, recompute="none", style=Style(fused_attention=True))
    assert step_seconds(GPT, cluster, fused, 32).total < none
    short, long = (
        layer_parts(replace(GPT, sequence=rows), device("A100-80GB"), 54, 1, Style(fused_attention=True))[0].core_s
        for rows in (1024, 2048)
    )
    # 54 samples fill whole waves
    causal = slower_attention(64, 2048, causal=True) / slower_attention(64, 1024, causal=True)
    assert long / short == pytest.approx(4 * causal, rel=0.02)
    parts = step_seconds(GPT, cluster, layout, 32)
    held = (GPT.layers // 2 * GPT.layer_parameters + GPT.embedding_parameters) / 2
    assert parts.optimizer == pytest.approx(OPTIMIZER_BYTES * held / (2039e9 * 0.8), rel=0.01)


def test_what_does_not_fit_is_refused() -> None:
    cluster = Cluster.parse("2xV100-16GB")
    assert fits(Gpt(24, 1024, 16, 1024, 51200), cluster, Layout(1, 2, 1, 1), 8)
    assert not fits(Gpt(48, 8192, 64, 1024, 51200), cluster, Layout(1, 2, 1, 1), 8)
    with pytest.raises(PlanError, match="2 devices"):
        step_seconds(GPT, Cluster.parse("4xA100-80GB"), Layout(1, 2, 1, 1), 8)
    with pytest.raises(PlanError, match="does not divide"):
        step_seconds(GPT, cluster, Layout(1, 2, 1, 3), 8)
    with pytest.raises(PlanError, match="3 stages need as many layers, there are 2"):
        step_seconds(replace(GPT, layers=2), Cluster.parse("3xA100-80GB"), Layout(1, 3, 1, 1), 8)


# -- the report -----------------------------------------------------------------------------------------------------


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 4], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)
    with pytest.raises(ValueError, match="no rows"):
        summarize("empty", [])


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate"]) == 0
    printed = capsys.readouterr().out
    assert "529.6B" in printed and "rank correlation" in printed
    assert main(["validate", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == sum(map(len, published().values()))
