"""Vocabulary-sharded embedding and loss: logits are never gathered, and nothing else changes."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autopart.verify
from autopart.analysis import Analysis, analyze
from autopart.offers import Offers
from autopart.passes.rules import name_of
from autopart.plan import Plan
from autopart.planner import make_plan
from autopart.prices import Chosen
from autopart.realize import realize
from autopart.runtime import Axis, local_forms
from autopart.runtime.errors import PlanError
from autopart.tracing import capture
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from families import VOCAB, family
from launch import ChildFailure, launch, run_kept_job

WEIGHTS = {
    "gpt2": ("transformer.wte.weight",),
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight",),
}


# -- the functions themselves, on processes -------------------------------------------------------------------------


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(24, 6, generator=generator, dtype=torch.float64).to(dtype)
    tokens = torch.randint(24, (5, 3), generator=generator)
    labels = torch.randint(24, (5, 3), generator=generator)
    labels[0, 0] = labels[2] = -100
    return weight, tokens, labels


def sharded(dtype: torch.dtype, smoothing: float, reduction: int) -> tuple[Tensor, Tensor, Any]:
    """Tied weights: embedding, logits ``[15, 24/n]``, loss. Returns the loss, the weight shard's gradient, traffic."""
    size, index = torch.distributed.get_world_size(), torch.distributed.get_rank()
    axis = Axis("tp", size, index, torch.distributed.group.WORLD)
    weight, tokens, labels = example(dtype)
    share = weight.chunk(size)[index].clone().requires_grad_()
    hidden = local_forms.vocab_embedding(share, tokens, 3, axis=axis)
    hidden = _Sum.apply(hidden, axis)
    logits = hidden.flatten(0, 1) @ share.t()
    loss = local_forms.vocab_cross_entropy(logits, labels.flatten(), None, reduction, -100, smoothing, axis=axis)
    loss.sum().backward()
    assert share.grad is not None
    return loss.detach(), share.grad, axis.traffic.counts()


class _Sum(torch.autograd.Function):
    """P -> B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        total = x.clone()
        axis.all_reduce(total)
        ctx.axis = axis
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        ctx.axis.all_reduce(total)
        return total, None


def whole(dtype: torch.dtype, smoothing: float, reduction: int) -> tuple[Tensor, Tensor]:
    weight, tokens, labels = example(dtype)
    weight.requires_grad_()
    logits = F.embedding(tokens, weight, 3).flatten(0, 1) @ weight.t()
    kind = ("none", "mean", "sum")[reduction]
    loss = F.cross_entropy(logits, labels.flatten(), reduction=kind, label_smoothing=smoothing)
    loss.sum().backward()
    assert weight.grad is not None
    return loss.detach(), weight.grad


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("smoothing", "reduction"), [(0.0, 1), (0.2, 2), (0.0, 0)])
def test_equal_on_processes(processes: int, smoothing: float, reduction: int) -> None:
    loss, gradient = whole(torch.float64, smoothing, reduction)
    results = launch(sharded, processes, torch.float64, smoothing, reduction)
    for found, _, _ in results:
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
    joined = torch.cat([share for _, share, _ in results])
    torch.testing.assert_close(joined, gradient, rtol=1e-10, atol=1e-12)
    # the largest logit, then the sums: 15 tokens of 8 bytes each; nothing backward
    ((key, count),) = results[0][2].items()
    assert key == ("all_reduce", "tp", "forward")
    assert (count.calls, count.bytes) == (2, 15 * 8 * (4 if smoothing else 3))


def test_half_precision_is_computed_in_single() -> None:
    loss, gradient = whole(torch.bfloat16, 0.0, 1)
    results = launch(sharded, 2, torch.bfloat16, 0.0, 1)
    assert results[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(results[0][0], loss)
    torch.testing.assert_close(torch.cat([share for _, share, _ in results]), gradient, rtol=0.05, atol=0.02)


def outside(what: str) -> None:
    axis = Axis("tp", 2, torch.distributed.get_rank(), torch.distributed.group.WORLD)
    wrong = torch.tensor([3, 8])
    with pytest.raises((IndexError, RuntimeError), match="index"):
        if what == "token":
            local_forms.vocab_embedding(torch.zeros(4, 2), wrong, axis=axis)
        else:
            local_forms.vocab_cross_entropy(torch.zeros(2, 4), wrong, axis=axis)


@pytest.mark.parametrize("what", ["token", "target"])
def test_numbers_outside_of_the_vocabulary_are_refused(what: str) -> None:
    try:
        launch(outside, 2, what)
    except ChildFailure as failure:
        # one rank raised before the other's collective, which is what a job that fails looks like
        assert "Connection" in str(failure)


# -- whole models ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def subject_of(name: str) -> tuple[Subject, Analysis]:
    item = family(name)
    inputs = item.inputs(item.batch)
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][1, 2:] = -100  # as ragged over microbatches as can be
    subject = prepare(item.build(), (), inputs)
    return subject, analyze(subject.program)


def forced(subject: Subject, limits: Mapping[str, Any], devices: int) -> Plan:
    """The planner's plan where the vocabulary's ops offer nothing else."""
    analysis = analyze(subject.program)
    offered = dict(analysis.strategies(2))
    for node in analysis.block_of:
        if name_of(node) == "aten.cross_entropy_loss.default" or (
            name_of(node) == "aten.embedding.default" and node.all_input_nodes[0].meta["val"].shape[0] == VOCAB
        ):
            offered[node] = tuple(item for item in offered[node] if item.form is not None)
            assert offered[node], node
    analysis._strategies[(2,)] = offered
    return make_plan(subject.program, ideal(devices), batch=8, analysis=analysis, **limits)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.slow) for name in WEIGHTS]
)
@pytest.mark.parametrize(
    "limits",
    [{"pp": 1, "tp": 2}, pytest.param({"pp": 2, "tp": 2, "microbatches": 2}, marks=pytest.mark.slow)],
    ids=["tp2", "pp2xtp2"],
)
def test_models(name: str, limits: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of(name)
    plan = forced(subject, {"dp": 1, **limits}, limits["pp"] * 2)
    loss = next(key for key in plan.strategies if key.endswith("cross_entropy_loss"))
    assert plan.strategies[loss] == "c"
    storage = dict.fromkeys(WEIGHTS[name], "S0")
    plan = replace(plan, storage={**plan.storage, **storage})
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    sources = "".join(path.read_text() for path in sorted((tmp_path / "program").glob("stage_*.py")))
    assert "local_forms.vocab_embedding(" in sources and "local_forms.vocab_cross_entropy(" in sources
    for weight in WEIGHTS[name]:
        assert re.search(rf"{weight.rpartition('.')[0].rpartition('.')[2]}.*parameter\({VOCAB // 2}, 32", sources)
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, (result.loss_difference, result.gradient_difference, result.parameter_difference)
    assert all(stage.as_planned for stage in result.traffic), result.traffic
    assert all(stage.counted for stage in result.traffic)


@pytest.mark.parametrize("other", ["tokens", "vocabulary"])
def test_two_axes(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two axes one has rows of the vocabulary and the other tokens, whichever, or both have rows of the vocabulary:
    each rank a quarter of the logits, which are not gathered.
    """
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject, analysis = subject_of("gpt2-1")
    offered = Offers.of

    def of(self: Offers, node: fx.Node) -> tuple[Chosen, ...]:
        """Of the vocabulary's ops what shards it on one axis and what is asked for on the other."""
        found, fits = offered(self, node), _crossed if other == "tokens" else _nested
        return tuple(item for item in found if fits(item)) if node in vocabulary else found

    vocabulary = {
        node
        for node in analysis.block_of
        if name_of(node) == "aten.cross_entropy_loss.default"
        or (name_of(node) == "aten.embedding.default" and node.all_input_nodes[0].meta["val"].shape[0] == VOCAB)
    }
    assert len(vocabulary) == 2
    monkeypatch.setattr(Offers, "of", of)
    limits = {"pp": 1, "dp": 1, "tp": "2x2", "microbatches": 1, "recompute": "none"}
    plan = make_plan(subject.program, ideal(4), batch=8, analysis=analysis, **limits)  # type: ignore[arg-type]
    loss = next(name for key, name in plan.strategies.items() if key.endswith("cross_entropy_loss"))
    assert sorted(name.split("/")[0] for name in loss.split(",")) == ["c", "t" if other == "tokens" else "c"]
    realize(subject.program, plan, analysis).save(tmp_path / "program")
    (source,) = [path.read_text() for path in (tmp_path / "program").glob("stage_*.py")]
    part = VOCAB // (2 if other == "tokens" else 4)
    assert re.search(rf"wte.weight = parameter\({part}, 32", source)
    logits = rf"vocab_cross_entropy\(\s*lm_head.reshape\(\S+( \* b)?, {part}\)"
    assert re.search(logits, source), "logits are not gathered"
    axes = {
        ast.unparse(keyword.value)
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and re.match(r"local_forms\.vocab_(cross|embedding\(.*wte)", ast.unparse(call))
        for keyword in call.keywords
        if keyword.arg == "axis"
    }
    # of the ops that are asked for: whether the positions' rows are sharded on both axes too is the solver's to say
    joined = ({"local_forms.joined(x, y)"}, {"local_forms.joined(y, x)"})  # one as good as the other
    assert axes in joined if other == "vocabulary" else axes <= {"x", "y"}
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, (result.loss_difference, result.gradient_difference, result.parameter_difference)
    assert all(stage.as_planned and stage.counted for stage in result.traffic), result.traffic


def _nested(chosen: Chosen) -> bool:
    return all(strategy.form is not None for strategy in chosen)


def _crossed(chosen: Chosen) -> bool:
    forms = [strategy.form is not None for strategy in chosen]
    other = chosen[forms.index(False)] if sum(forms) == 1 else None
    return other is not None and other.inputs[1].is_shard


# -- what is offered, and what is chosen ----------------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, tied to the output projection, and a loss inside."""

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.words(tokens)
        logits = self.head(hidden + self.down(torch.relu(self.up(hidden))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def planned(vocabulary: int, sequence: int, bandwidth: float, axes: str = "2") -> Plan:
    tokens = torch.randint(50, (4, sequence))
    program = capture(Words(vocabulary), (), {"tokens": tokens, "labels": tokens}, check_eval=False)
    ranks = math.prod(map(int, axes.split("x")))
    return make_plan(program, ideal(ranks, bandwidth=bandwidth), pp=1, dp=1, tp=axes, microbatches=1)


def test_the_solver_shards_a_large_vocabulary_by_itself() -> None:
    plan = planned(4096, 64, 1e9)
    assert plan.strategies[":cross_entropy_loss"] == "c" and plan.strategies["head:linear"] == "n"
    moved = sum(count["bytes"] for stage in plan.stages for count in stage.collectives.values())
    assert moved < 4 * 64 * 4096 * 4 / 20  # gathering the logits alone would be 4 MiB


def test_the_solver_shards_a_large_vocabulary_on_two_axes() -> None:
    plan = planned(4096, 64, 1e9, "2x2")
    loss, head = plan.strategies[":cross_entropy_loss"].split(","), plan.strategies["head:linear"].split(",")
    assert sorted(loss) == ["c", "c/2"] and sorted(head) == ["n", "n/2"]
    assert head.index("n") == loss.index("c")
    moved = sum(count["bytes"] for stage in plan.stages for count in stage.collectives.values())
    assert moved < 4 * 64 * 4096 * 4 / 20


def test_a_vocabulary_that_does_not_divide_is_not_offered() -> None:
    tokens = torch.randint(50, (4, 16))
    analysis = analyze(capture(Words(4095), (), {"tokens": tokens, "labels": tokens}, check_eval=False))
    for parts, expected in ((2, 0), (3, 2)):  # 4095 divides by 3
        found = [item for choices in analysis.strategies(parts).values() for item in choices if item.form is not None]
        assert len(found) == expected


def offered(kinds: Sequence[Tensor], **options: Any) -> set[str]:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.layer(x), y, **options)

    analysis = analyze(capture(Loss(), tuple(kinds), check_eval=False))
    (loss,) = [node for node in analysis.graph.nodes if "cross_entropy" in str(node.target)]
    return {strategy.name for strategy in analysis.strategies(2)[loss]}


def test_probabilities_and_weights_have_no_form() -> None:
    x, numbers = torch.randn(4, 6), torch.randint(8, (4,))
    assert "c" in offered((x, numbers))
    assert "c" in offered((x, numbers), label_smoothing=0.1)
    assert "c" not in offered((x, torch.rand(4, 8)))
    assert "c" not in offered((x, numbers), weight=torch.rand(8))
    with pytest.raises(PlanError, match="not offered"):
        program = capture(Words(97), (), {"tokens": numbers.view(2, 2), "labels": numbers.view(2, 2)})
        plan = make_plan(program, ideal(2), pp=1, dp=1, tp=2)
        realize(program, replace(plan, strategies={"words:embedding": "v"}))
