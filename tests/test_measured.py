"""Tables of measured steps that users write, and published ones that nothing was fitted to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autopart
from autopart.analysis import analyze
from autopart.cli import main
from autopart.cluster import Cluster
from autopart.cost.devices import device, link
from autopart.cost.gpt import Gpt, Style, layer_parts, layer_products
from autopart.cost.measured import read_file, read_measurements
from autopart.cost.products import forward_products
from autopart.cost.published import AS_MEASURED, Measurement, published_text
from autopart.cost.training import Layout, memory_bytes, step_seconds
from autopart.cost.validate import published, summarize, validate
from autopart.models import load_model
from autopart.runtime.errors import InputError

HEAD = "layers,hidden,heads,cluster,batch,tp,pp,seconds"
ROW = "24,1024,16,8xA100-80GB,64,2,2,1.5"
TAB = "\t"
LIMITS = {"nemo_h100": 0.05, "megatron_sc21_table2": 0.06, "megatron_recomputation": 0.06, "nemo_gpt": 0.04}


@pytest.mark.parametrize("name", AS_MEASURED)
def test_tables_of_that_form(name: str) -> None:
    rows = published()[name]
    assert {item.half for item in rows} == ({"fit", "test"} if name == "nemo_h100" else {"test"})
    found = summarize(name, validate(rows))
    assert (found.fit_error is None) == (name != "nemo_h100")
    assert max(found.error, found.test_error) <= LIMITS[name]
    assert found.error < found.naive_error
    assert found.rank_correlation is not None and found.rank_correlation >= 0.95


@pytest.mark.parametrize(("name", "error"), [("megatron_deepspeed", 0.2), ("nemo_gb200", 0.05)])
def test_runs_of_another_engine_or_device_are_kept_beside(name: str, error: float) -> None:
    """Priced as Megatron-LM would run them, on B200; docs/cost-model.md says how far off that is."""
    found = summarize(name, validate(read_measurements(published_text(name).splitlines(), name, f"{name}.csv")))
    assert found.error < error and found.rank_correlation == 1.0


@pytest.mark.parametrize(
    ("name", "count", "error", "correlation"),
    [
        ("zero_bubble", 35, 0.04, 0.99),
        ("large_clusters", 17, 0.08, 0.95),
        ("internlm", 30, 0.17, 0.85),
        ("dlperf_gpt", 18, 0.11, 0.98),
        ("libai", 22, 0.1, 0.98),
        ("a100_engines", 10, 0.08, 0.98),
        ("simumax_b200", 31, 0.15, 0.98),
    ],
)
def test_tables_that_were_looked_for_later(name: str, count: int, error: float, correlation: float) -> None:
    """Nothing was fitted or chosen for them; docs/cost-model.md says where the last are off by more than the others."""
    rows = read_measurements(published_text(name).splitlines(), name, f"{name}.csv")
    found = summarize(name, validate(rows))
    assert len({item.name for item in rows}) == found.rows == count
    assert found.error < error
    assert found.rank_correlation is not None and found.rank_correlation > correlation


def test_a_search_for_a_plan_by_another_engine() -> None:
    """BigScience's: slower by about a tenth, by more with few samples a microbatch, and so in part out of order."""
    name = "bigscience"
    rows = read_measurements(published_text(name).splitlines(), name, f"{name}.csv")
    found = summarize(name, validate(rows))
    assert len(rows) == 93
    assert found.error < 0.1 and found.rank_correlation is not None and found.rank_correlation > 0.5


def test_heads_that_are_not_aligned_take_longer() -> None:
    """Of 108 numbers rather than 144: the same FLOPs in all, by kernels that load element by element."""
    a100 = device("A100-80GB")
    (narrow, _), (wide, _) = (
        layer_parts(Gpt(78, 13824, heads, 2048, 250880), a100, 4, 8) for heads in (13824 // 108, 13824 // 144)
    )
    assert narrow.core_s > 1.2 * wide.core_s


def test_a_file_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.csv"
    columns, values = ",name,samples,recompute,beside", ",mine,4,none,yes"
    file.write_text(f"# on Tuesday\n{HEAD}{columns}\n{ROW}{values}\n\n{ROW}{values}\n")
    one, two = read_file(file)
    assert one == two and one.table == "runs" and one.name == "mine" and one.seconds == 1.5
    (layout,) = one.layouts
    assert (layout.tp, layout.pp, layout.dp, layout.samples) == (2, 2, 2, 4)
    assert layout.recompute == "none" and layout.style == Style(beside=True)
    assert (one.model.sequence, one.model.vocabulary, one.model.mlp) == (2048, 51200, 4096)
    assert main(["validate", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["predicted_s"] for item in found] == [step_seconds(one.model, one.cluster, layout, 64).total] * 2
    assert main(["validate", str(file)]) == 0
    assert "mine" in capsys.readouterr().out
    assert summarize("runs", validate([one, two])).rank_correlation is None  # equal runs are in no order
    assert main(["validate", str(file), "--fit"]) != 0
    assert "leave out the file" in capsys.readouterr().err


def test_a_cluster_file_is_named_in_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, file = tmp_path / "mine.toml", tmp_path / "runs.csv"
    Cluster.parse("8xA100-80GB").save(cluster)
    file.write_text(f"{HEAD}\n{ROW.removesuffix('64,2,2,1.5')}8,1,1,0.0512\n")
    assert main(["validate", str(file)]) == 0
    named = capsys.readouterr().out
    assert "0.0512" in named, "a step of milliseconds is told"
    plain = file.read_text()
    for given in (str(cluster), cluster.name):  # the latter beside the table
        file.write_text(plain.replace("8xA100-80GB", given))
        assert main(["validate", str(file)]) == 0
        assert capsys.readouterr().out == named


def test_flops_instead_of_seconds() -> None:
    """As table 1 of SC'21 gives both: 163 TFLOP/s, and 102.63 s by its own equation."""
    head = HEAD.replace("seconds", "tflops")
    (row,) = read_measurements([head, "128,25600,160,384x8xA100-80GB,3072,8,64,163"], "sc21", "sc21.csv")
    assert row.seconds == pytest.approx(102.63, rel=0.005)
    text = "128,25600,160,384x8xA100-80GB,3072,8,64,163,{}"
    lines = [f"{head},recompute", *map(text.format, ("full", "selective", "none"))]
    full, selective, none = read_measurements(lines, "sc21", "sc21.csv")
    assert full.seconds == row.seconds
    done = row.model.flops(3072, recompute=False) / row.model.flops(3072)
    assert selective.seconds == none.seconds == pytest.approx(done * row.seconds), "what does not run is not counted"


def test_layers_that_do_not_divide_into_the_stages() -> None:
    """70 layers on 12 stages (BLOOM 176B): the slowest has six, as with 72, and with one layer more it has seven."""
    head, text = HEAD + ",samples", "{},14336,112,48x8xA100-80GB,2048,4,12,105,2"
    (fewer,), (even,), (more,) = (
        read_measurements([head, text.format(layers)], "bloom", "bloom.csv") for layers in (70, 72, 73)
    )
    busy = [item.best()[1] for item in (fewer, even, more)]
    assert busy[0] < busy[1] < busy[2]
    assert busy[1] / busy[0] < 1.04 and busy[2] / busy[1] > 1.12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing columns: layers"),
        (f"{HEAD},speed\n{ROW},1", "unknown columns: 'speed'; the columns are name, cluster"),
        (f"{HEAD.removesuffix(',seconds')}\n{ROW}", "neither seconds nor tflops"),
        (HEAD, "has no rows"),
        (f"{HEAD}\n{ROW},1", "line 2: has more values"),
        (f"{HEAD}\n{ROW.replace('24,', 'x,')}", "line 2: layers is a whole number from 1 to 65,536, not 'x'"),
        (f"{HEAD}\n{ROW.replace('24,', '9' * 5000 + ',', 1)}", "line 2: layers is a whole number from 1 to 65,536"),
        (f"{HEAD}\n{ROW.replace('24,', '99999999999999999999,', 1)}", "line 2: layers is a whole number from 1 to"),
        (f"{HEAD}\n{ROW.replace('1024', '9' * 24)}", "line 2: hidden is a whole number from 1 to"),
        (f"layers,{HEAD}\n12,{ROW}", "columns that are there twice: layers"),
        (f"{HEAD}\n{ROW.removesuffix('1.5')}1.5e-3", r"line 2: .* beyond A100-80GB.* seconds those of a whole step"),
        (f"{HEAD.replace('seconds', 'tflops')}\n{ROW.removesuffix('1.5')}1.2e14", "line 2: .* beyond A100-80GB"),
        (f'{HEAD},name\n{ROW},"of two\nlines"\n{ROW.replace("24,", "x,")},b', "line 4: layers is a whole number"),
        (f"{HEAD},name\n{ROW},{'a' * 200_000}", "cannot be read as comma-separated values: field larger"),
        (f"{HEAD.replace(',', ';')}\n{ROW.replace(',', ';')}", "values are separated by commas, not by semicolons$"),
        (f"{HEAD.replace(',', TAB)}\n{ROW.replace(',', TAB)}", "values are separated by commas, not by tabs$"),
        (f"{HEAD},,\n{ROW},4,", "line 2: has a value in a column without a name$"),
        (
            f"{HEAD}\n{ROW.replace('2,2,', '32,2,').replace('8x', '64x')}",
            "line 2: heads are divided .*16 is no .* of 32$",
        ),
        (f"{HEAD}\n{ROW}e3", "line 2: 1500 s are far beyond the 0.949 s .*: is it milliseconds[?]$"),
        (f"{HEAD}\n{ROW.removesuffix('1.5')}", "line 2: one of seconds and tflops"),
        (f"{HEAD}\n{ROW.removesuffix('1.5')}-1", "line 2: seconds is a number above 0, not '-1'"),
        (f"{HEAD}\n{ROW.replace('8xA100-80GB', '8xA1')}", "line 2: .*A1"),
        (f"{HEAD}\n{ROW.replace('8x', '9x')}", "line 2: 9 devices do not divide by tp x pp"),
        (f"{HEAD}\n{ROW.replace('64', '63')}", "line 2: a batch of 63 does not divide"),
        (
            f"{HEAD}\n{ROW.replace('16', '15')}",
            r"line 2: heads divide the width \(hidden\), but 1024 is no multiple of 15$",
        ),
        (f"{HEAD},recompute\n{ROW},most", "line 2: recompute is one of full, .*not 'most'$"),
        (f"{HEAD},overlap\n{ROW},true", "line 2: overlap is yes or no, not 'true'"),
        (f"{HEAD},half\n{ROW},both", "line 2: half is one of fit, test, not 'both'"),
        (f"{HEAD},kv_heads\n{ROW},5", "line 2: heads of keys and values divide the heads, but 16 is no multiple of 5$"),
        (f"{HEAD},cp\n{ROW},3", "line 2: 8 devices do not divide by tp x pp x cp"),
        (f"{HEAD},cp,sequence\n{ROW},2,1025", "line 2: a sequence of 1025 does not divide among 2 ranks"),
        (f"{HEAD}\n{ROW.replace('24,', '1,', 1)}", "line 2: 2 stages need as many layers, there are 1"),
        (
            f"{HEAD},chunks\n{ROW},14",
            "line 2: 2 stages x 14 chunks need as many layers, embedding and head counted as one each, there are 26$",
        ),
        (f"{HEAD},balanced\n{ROW.replace('24,', '1,', 1).replace('2,2,', '1,8,')},yes", "8 .* halves of layers, .* 2"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=f"runs.csv.*{said}"):
        read_file(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.csv: cannot be read"):
        read_file(tmp_path / "missing.csv")
    with pytest.raises(InputError, match="is a folder; expected is a file"):
        read_file(tmp_path)


def test_a_file_of_a_spreadsheet(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(f"{HEAD}\n{ROW}\n", encoding="utf-8-sig")
    assert len(read_file(file)) == 1
    spaced = f'{HEAD.replace(",", ", ")}, name\n{ROW.replace(",", ", ")}, "of two\nlines"\n{ROW},b\n'
    file.write_text(spaced.replace(', "', ',"'))
    assert [item.name for item in read_file(file)] == ["of two lines", "b"]
    file.write_text(f"{HEAD.title()},,\n{ROW},,\n")
    assert len(read_file(file)) == 1


def test_sums_beside_weights_gradients_hide_no_more_than_these_take() -> None:
    full = published()["megatron_recomputation"][0]
    (layout,) = full.layouts
    alone = replace(layout, style=replace(layout.style, beside=False))
    waits, hides = (step_seconds(full.model, full.cluster, item, full.batch) for item in (alone, layout))
    assert hides.backward == waits.backward and hides.forward == waits.forward
    # of three passes one hides, in the head as well
    assert hides.tensor_collectives == pytest.approx(waits.tensor_collectives * 2 / 3, rel=0.01)
    one = replace(alone, tp=1, dp=8, samples=1), replace(layout, tp=1, dp=8, samples=1)
    seconds = [step_seconds(full.model, full.cluster, item, 8).total for item in one]
    assert seconds[0] == seconds[1]


def test_what_runs_again_is_not_kept() -> None:
    model, (layout,) = published()["megatron_recomputation"][0].model, published()["megatron_recomputation"][0].layouts
    full, selective, none = (
        memory_bytes(model, replace(layout, recompute=name), 4) for name in ("full", "selective", "none")
    )
    tokens, layers, t = 4 * 2048, 48, 8
    # equations 2 and 4 of arXiv 2205.05198, and a layer's input
    assert none - selective == pytest.approx(layers * 5 * 64 * 2048 * tokens / t)
    assert selective - full == pytest.approx(layers * tokens * 6144 * (10 + 24 / t - 2))


def _llama() -> tuple[Measurement, Layout]:
    """405 B on 576 H100: tensor ranks, ranks of a sequence, interleaved stages."""
    (row,) = (item for item in published()["nemo_h100"] if item.name == "Llama 3.1 405B, 126 layers on 576")
    return row, row.layouts[0]


def test_sizes_of_llamas() -> None:
    """As their authors give them; a GPT's are in test_validate."""
    sizes = {item.name.split(" on ")[0]: item.model.parameters / 1e9 for item in published()["nemo_h100"]}
    assert sizes["Llama 3.1 8B"] == pytest.approx(8.03, abs=0.01)
    assert sizes["Llama 3.1 70B"] == pytest.approx(70.55, abs=0.01)
    assert sizes["Nemotron-4 15B"] == pytest.approx(15.6, abs=0.1)
    assert sizes["Nemotron-4 340B"] == pytest.approx(341, abs=1)


def test_products_are_those_of_a_captured_llama() -> None:
    spec = (
        "hf:llama?num_hidden_layers=2&hidden_size=256&intermediate_size=704&num_attention_heads=8"
        "&num_key_value_heads=2&vocab_size=1024&batch=4&seq=128&dtype=fp16&padding=no"
    )
    loaded = load_model(spec, meta=True)
    found = analyze(autopart.capture(loaded.model, loaded.args, loaded.kwargs))
    model = Gpt(2, 256, 8, 128, 1024, 704, 2, gated=True, untied=True, plain=True)
    assert model.parameters == sum(item.numel() for item in loaded.model.parameters())
    forward = sum(product.flops for node in found.block_of for product in forward_products(node, 4))
    assert model.flops(4, recompute=False) == 3 * forward
    layer = sum(product.flops for product in layer_products(model, 4, 1))
    assert forward == 2 * layer + 2 * 4 * 128 * 1024 * 256
    shared = sum(product.flops for product in layer_products(model, 4, 2, 4))
    assert shared == layer / 8


def test_exchanges_that_pass_beside_products_hide_no_more_than_these_take() -> None:
    row, layout = _llama()
    waiting = replace(layout, style=replace(layout.style, tensor_overlap=False, beside=False))
    steps = [step_seconds(row.model, row.cluster, item, row.batch) for item in (layout, waiting)]
    assert steps[0].tensor_collectives < 0.05 * steps[1].tensor_collectives
    # whole products fill the processors better than pieces
    assert steps[1].forward < steps[0].forward < 1.2 * steps[1].forward and steps[0].total < steps[1].total
    nodes = Cluster.parse("72x8xH100").nodes
    slow = Cluster(tuple(replace(node, inside=link("PCIe-3")) for node in nodes))
    exposed, all_of_it = (step_seconds(row.model, slow, item, row.batch) for item in (layout, waiting))
    hidden = all_of_it.tensor_collectives - exposed.tensor_collectives
    assert 0 < hidden < exposed.forward + exposed.backward
    one, same = (step_seconds(row.model, row.cluster, replace(item, tp=1, dp=32), 288) for item in (layout, waiting))
    assert one == same


def test_messages_that_pass_beside_computation() -> None:
    row, layout = _llama()
    passing, waiting = (
        step_seconds(row.model, row.cluster, replace(layout, message_overlap=beside), row.batch)
        for beside in (True, False)
    )
    assert passing.messages == 0 < waiting.messages and passing.forward == waiting.forward
    assert passing.total < waiting.total
    # but for those of filling and draining
    slow = Cluster.parse("72x8xH100@8*Ethernet-100")
    filled = step_seconds(row.model, slow, layout, row.batch)
    assert filled.messages == 0 and filled.bubble > passing.bubble


def test_messages_of_a_sequence_that_tensor_ranks_share() -> None:
    """Are what each rank has of it between layers; scattered ones are gathered on arrival besides."""
    (row,) = (item for item in published()["megatron_recomputation"] if item.name == "530B selective")
    (layout,) = row.layouts
    whole = replace(layout, style=replace(layout.style, sequence_parallel=False))
    steps = [
        step_seconds(row.model, row.cluster, item, row.batch).messages
        for item in (layout, replace(layout, scatter=True), replace(whole, scatter=True), whole)
    ]
    assert steps[0] == steps[1] < steps[2] < steps[3]
    assert 0.9 * layout.tp < steps[3] / steps[0] <= layout.tp  # less than that by what each message waits


def test_gradients_of_interleaved_stages_hide_behind_the_last_microbatches() -> None:
    row, layout = _llama()
    hidden, whole, plain = (
        step_seconds(row.model, row.cluster, item, row.batch).gradients
        for item in (layout, replace(layout, overlap=False), replace(layout, chunks=1))
    )
    assert hidden < 0.2 * whole
    assert hidden <= plain < whole


def test_ranks_that_share_a_sequence() -> None:
    """Each has its share of tokens and products, and sums gradients with the others as replicas do."""
    row, layout = _llama()
    alone, shared = replace(layout, cp=1, dp=8), layout
    steps = [step_seconds(row.model, row.cluster, item, 2 * row.batch) for item in (alone, shared)]
    # half the microbatches of twice the tokens
    assert steps[1].forward == pytest.approx(steps[0].forward, rel=0.1)
    assert steps[1].optimizer == pytest.approx(steps[0].optimizer)
    far = Cluster.parse("72x8xH100@1*Ethernet-10")
    assert step_seconds(row.model, far, shared, 2 * row.batch).tensor_collectives > 0.5 * steps[1].total
