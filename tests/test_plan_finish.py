"""A chosen plan runs further ahead, or sums its gradients in other messages, where that is faster and fits."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopart.analysis import Analysis, analyze
from autopart.bucket_size import UNIT
from autopart.cluster import Cluster
from autopart.crossing_memory import sent_ahead
from autopart.frontier import capped
from autopart.models import load_model
from autopart.plan import Plan
from autopart.plan_space import PlanSpace
from autopart.planner import make_plan
from autopart.runtime.schedule import deeper_warmup, in_flight
from autopart.tracing import capture

WIDE = "hf:gpt2?n_layer=8&n_embd=1024&n_head=16&seq=512"
BART = "hf:bart?encoder_layers=2&decoder_layers=2&seq=128"
MIXTRAL = (
    "hf:mixtral?num_hidden_layers=3&hidden_size=512&intermediate_size=1024&num_local_experts=4&num_attention_heads=8"
    "&num_key_value_heads=4&seq=128&padding=no&vocab_size=2000"
)
GPT, VIT = "hf:gpt2?n_layer=4&n_embd=256&n_head=4&seq=256&vocab_size=1024", "hf:vit?num_hidden_layers=6&image=224"


@functools.cache
def analysis_of(name: str) -> Analysis:
    loaded = load_model(name, meta=True, dtype=torch.bfloat16)
    return analyze(capture(loaded.model, loaded.args, loaded.kwargs, check_eval=False))


def plan(name: str, cluster: Cluster | str, **limits: Any) -> Plan:
    analysis = analysis_of(name)
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    return make_plan(analysis.program, cluster, analysis=analysis, **limits)


CHAIN: dict[str, Any] = {"batch": 64, "pp": 4, "dp": 1, "microbatches": 16, "meshes": "equal"}


def test_stages_run_further_ahead_where_transfers_would_stop_them() -> None:
    free, least = plan(GPT, "4x1xL40S@Ethernet-100", **CHAIN), plan(GPT, "4x1xL40S@Ethernet-100", warmup=1, **CHAIN)
    assert free.step_time_s < least.step_time_s
    depth = free.warmup[-2]
    assert depth > 1 and free.warmup == deeper_warmup(4, depth)
    assert any("plans with the least warm-up" in note for note in free.notes)
    forced = plan(GPT, "4x1xL40S@Ethernet-100", warmup=depth, **CHAIN)
    assert not any("least warm-up" in note for note in forced.notes)
    assert free.stages == forced.stages and free.step_time_s == forced.step_time_s


def test_stages_are_cut_for_the_warm_up_that_they_run_with(monkeypatch: pytest.MonkeyPatch) -> None:
    after, least = plan(GPT, "4x1xL40S@Ethernet-100", **CHAIN), plan(GPT, "4x1xL40S@Ethernet-100", warmup=1, **CHAIN)
    monkeypatch.setattr(PlanSpace, "better", lambda *_: ())
    before = plan(GPT, "4x1xL40S@Ethernet-100", **CHAIN)
    assert before.warmup == deeper_warmup(4, 2)
    assert [stage.blocks for stage in before.stages] == [stage.blocks for stage in least.stages]
    for more, own in zip(before.stages, least.stages, strict=True):  # of the last stage what arrives ahead
        assert more.memory_bytes > own.memory_bytes
    assert [stage.blocks for stage in after.stages] != [stage.blocks for stage in before.stages]
    assert after.step_time_s < 0.95 * before.step_time_s


@pytest.mark.parametrize(
    ("name", "cluster", "limits"),
    [
        (WIDE, "2x2xV100-16GB@InfiniBand-400", {"batch": 8, "pp": 4}),
        (WIDE, "2x2xH100", {"batch": 256, "pp": 4}),  # in fewer microbatches than under the least
        (BART, "2xV100-16GB", {"batch": 48, "pp": 2}),
        (GPT, "2x1xL40S@Ethernet-100+2x1xV100-16GB@Ethernet-100", {"batch": 32, "pp": 3}),  # unlike meshes
        (VIT, "2xRTX-4090+2xRTX-3090", {"batch": 16}),  # ruled out by a bound under the least
    ],
)
def test_no_warm_up_that_is_given_is_faster_than_the_chosen(name: str, cluster: str, limits: dict[str, Any]) -> None:
    free = plan(name, cluster, **limits)
    for depth in (2, 3):
        assert free.step_time_s <= 1.002 * plan(name, cluster, warmup=depth, **limits).step_time_s, depth


def test_numbers_of_microbatches_far_from_the_best_with_the_least_warm_up_are_tried() -> None:
    """Two devices far apart: of 60 samples three microbatches are the best, and six where they run further ahead."""
    node = Cluster.parse("2xRTX-3090").nodes[0]
    slow = Cluster((replace(node, inside=replace(node.inside, bandwidth=1e9)),))
    limits = {"batch": 60, "recompute": "none", "zero": 0}
    free = plan(MIXTRAL, slow, **limits)
    assert free.pp == 2 and free.warmup[0] > 1
    given = [plan(MIXTRAL, slow, pp=2, dp=1, tp=1, microbatches=pieces, **limits) for pieces in (3, 5, 6)]
    assert free.step_time_s < 1.02 * min(other.step_time_s for other in given) < 0.95 * given[0].step_time_s


def test_stages_run_no_further_ahead_than_memory_has_room_for() -> None:
    least = plan(GPT, "4x1xL40S@Ethernet-100", warmup=1, **CHAIN)
    tight = capped(Cluster.parse("4x1xL40S@Ethernet-100"), least.fullest_bytes)
    found = plan(GPT, tight, recompute="none", **CHAIN)
    assert not found.warmup and found.fullest_bytes <= least.fullest_bytes


def test_the_least_warm_up_stays_where_nothing_waits() -> None:
    assert not plan(GPT, "2xH100", batch=64, pp=2, dp=1, microbatches=2, meshes="equal").warmup


@pytest.mark.parametrize("cluster", ["8xRTX-3090", "2x2xV100-16GB@Ethernet-100"])
def test_messages_have_the_size_of_the_fastest_step(cluster: str) -> None:
    free = plan(VIT, cluster, batch=128)
    degrees = {"pp": len(free.stages), "dp": free.stages[0].mesh[0][1], "microbatches": free.microbatches}
    for size in (UNIT, 2 * UNIT, 8 * UNIT, 16 * UNIT):
        forced = plan(VIT, cluster, batch=128, tp=1, bucket_bytes=size, **degrees)
        assert free.step_time_s <= 1.001 * forced.step_time_s, size
    same = plan(VIT, cluster, batch=128, tp=1, bucket_bytes=free.bucket_bytes, **degrees)
    assert same.step_time_s == free.step_time_s


@pytest.mark.parametrize(("depth", "expected"), [(1, (0, 0, 0, 0)), (2, (0, 1, 1, 1)), (3, (0, 2, 2, 2))])
def test_what_is_sent_ahead(depth: int, expected: tuple[int, ...]) -> None:
    assert sent_ahead(in_flight("1f1b", 4, 64, deeper_warmup(4, depth))) == expected
    assert sent_ahead(in_flight("gpipe", 4, 64)) == (0, 0, 0, 0)
