"""What divided parameters exchange, as strategies are chosen by it, and as graphs tell answers apart."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from autopart.analysis import Analysis, analyze
from autopart.candidate_settings import CUDA_OVERHEAD_BYTES
from autopart.candidates import Candidates
from autopart.cluster import Cluster
from autopart.describe import describe
from autopart.models import load_model
from autopart.planner import make_plan
from autopart.rank_peaks import rank_peaks
from autopart.solver.degrees import Degrees
from autopart.tensor_setting import Setting
from autopart.tracing import capture


@functools.cache
def analysis(**sizes: int) -> Analysis:
    spec = "hf:gpt2?seq=2048&n_positions=2048&vocab_size=51200"
    spec += "".join(f"&{name}={value}" for name, value in sizes.items())
    loaded = load_model(spec, meta=True, dtype=torch.float16)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


@functools.cache
def large_vocabulary(tied: bool) -> Analysis:
    spec = "hf:llama?num_hidden_layers=4&hidden_size=256&intermediate_size=512&num_attention_heads=4&seq=64"
    spec += f"&num_key_value_heads=4&vocab_size=65536&tie_word_embeddings={str(tied).lower()}"
    loaded = load_model(spec, meta=True, dtype=torch.bfloat16)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def test_weights_stay_whole_on_tensor_axes_where_replicas_gather_them_unseen() -> None:
    """Of each layer of a GPT of 76 B parameters: one product's weight, so that its activations are summed nowhere."""
    config, cluster = Degrees(1, 128, (8,), 2, "1f1b"), Cluster.parse("128x8xA100-80GB")
    of = analysis(n_layer=60, n_embd=10240, n_head=80)
    found, dear = (Candidates(of, cluster, 1792, "adamw", zero=None) for _ in range(2))
    setting = found._choosing(config)
    assert setting.exposed <= setting.exposed_beyond < 0.5 and found._passes(config, setting)
    dear._beyond[config] = 1.0  # as if all of it were waited for
    ours, theirs = found.evaluate(config), dear.evaluate(config)
    weights = [name for name in ours.answer.choice.storage if name.endswith("attn.c_proj.weight")]
    assert {ours.answer.choice.storage[name][0].kind.name for name in weights} == {"BROADCAST"}
    assert {theirs.answer.choice.storage[name][0].kind.name for name in weights} == {"SHARD"}
    assert ours.objective < 0.995 * theirs.objective


@pytest.mark.parametrize("needed", [0.0, 0.03, 0.1, 0.5, 2.0])
def test_the_part_that_counts_is_the_least_at_which_the_exchange_passes(
    needed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, asked = Degrees(1, 128, (8,), 2, "1f1b"), list[float]()
    of = analysis(n_layer=60, n_embd=10240, n_head=80)

    def passes(self: Candidates, config: Degrees, setting: Setting) -> bool:
        asked.append(setting.exposed_beyond)
        return setting.exposed_beyond >= needed

    monkeypatch.setattr(Candidates, "_passes", passes)
    candidates = Candidates(of, Cluster.parse("128x8xA100-80GB"), 1792, "adamw", zero=None)
    least = candidates._choosing(config, beyond=False)
    assert least.exposed == least.exposed_beyond and not asked
    found = candidates._choosing(config).exposed_beyond
    assert candidates._choosing(replace(config, recompute="none")).exposed_beyond == found, "kept"
    most = max(found, *asked)
    assert asked[0] == least.exposed <= found <= most < 1.0
    assert found >= needed or found == most, "where none passes the most counts"
    assert all(part < found for part in asked if part < needed)
    assert len(asked) == (1 if needed == 0.0 else 3)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_no_step_holds_more_than_is_planned(zero: int, tied: bool, microbatches: int) -> None:
    """Of a model whose vocabulary is most of it: what its output layer gathers is there while the loss goes back."""
    of = large_vocabulary(tied)
    plan = make_plan(
        *(of.program, Cluster.parse("4xA100-80GB")),
        analysis=of,
        batch=256 * microbatches,
        pp=1,
        dp=4,
        tp=1,
        microbatches=microbatches,
        zero=zero,
        recompute="none",
    )
    (peak,) = rank_peaks(plan, of, "cuda")
    planned = peak.planned - CUDA_OVERHEAD_BYTES
    assert peak.total <= planned


def test_answers_at_other_levels_are_told_apart_on_their_graphs() -> None:
    of = analysis(n_layer=24, n_embd=2560, n_head=20)
    cluster, config = Cluster.parse("16x8xV100-32GB"), Degrees(1, 128, (), 1, "1f1b")
    candidates = Candidates(of, cluster, 512, "adamw", zero=None)
    answer = candidates.evaluate(config).answer
    assert answer.choice.levels and answer.others
    near = candidates.seconds_of(answer)
    assert all(near <= candidates.seconds_of(other) < 1.03 * near for other in answer.others)
    levels = [tuple(own.choice.levels.items()) for own in (answer, *answer.others)]
    assert len(set(levels)) == len(levels)
    plan = make_plan(of.program, cluster, analysis=of, batch=512, pp=1, dp=128, tp=1, microbatches=1)
    first, *others = (describe(candidates, own).step_time_s for own in (answer, *answer.others))
    assert plan.step_time_s == pytest.approx(min(first, *others)) and min(others) < first
