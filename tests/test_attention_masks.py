"""Masks that say that attention is causal become its ``is_causal``, and those that mask nothing go; all others stay as
they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from test_context_parallel import by_sequence
from test_parallel_equals_serial import PLANS
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import autopart.verify
from autopart.analysis import analyze
from autopart.passes import attention_masks
from autopart.passes.attention_masks import MaskKind
from autopart.passes.outline import outline_digest
from autopart.passes.program import Program
from autopart.planner import make_plan
from autopart.precision import float64_throughout
from autopart.realize import realize
from autopart.tracing import capture
from autopart.verify import Subject, compare_emitted, prepare
from clusters import ideal
from families import family
from forcing import forced, op, run
from launch import run_kept_job

LENGTH = 600  # more than is computed as one block
WIDTH = 4
Mask = Callable[[Tensor], Tensor | None]


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of queries, as a column, and of keys."""
    numbers = torch.arange(x.size(1), device=x.device)
    return numbers[:, None], numbers[None, :]


def lower(x: Tensor, diagonal: int = 0) -> Tensor:
    return torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril(diagonal)


def unmasked(x: Tensor) -> None:
    """No mask, and all keys are seen."""


class Attends(nn.Module):
    """Attention of one head by a mask that is made of its input; without one it is causal by itself."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.lead, self.mask = nn.Linear(WIDTH, WIDTH), mask

    def forward(self, x: Tensor) -> Tensor:
        query, mask = self.lead(x).unsqueeze(1), self.mask(x)
        key, causal = x.unsqueeze(1), mask is None and self.mask is not unmasked
        return F.scaled_dot_product_attention(query, key, key, attn_mask=mask, is_causal=causal).sum()


def program_of(mask: Mask, length: int = LENGTH, batch: int = 4) -> Program:
    return capture(Attends(mask), (torch.zeros(batch, length, WIDTH),), check_eval=False)


def masks(program: Program) -> list[str]:
    """Of each attention in order how it is masked."""
    found = []
    for node in program.graph.nodes:
        if op(node) == "scaled_dot_product_attention":
            mask, causal = (*node.args[3:4], None)[0], node.args[5:] == (True,)
            assert not (causal and mask)
            found.append("causal" if causal else "nothing" if mask is None else "mask")
    return found


def expanded(x: Tensor) -> Tensor:
    """As transformers makes it: samples' rows are picked by number, and their places compared."""
    samples = torch.arange(x.size(0))[:, None, None, None]
    own = torch.arange(x.size(1)).expand(x.size(0), -1)
    queries, keys = torch.arange(x.size(1))[None, None, :, None], torch.arange(x.size(1))[None, None, None, :]
    same = own.new_ones((), dtype=torch.bool) & (own[samples, keys] <= own[samples, queries])
    return same.expand(x.size(0), -1, -1, -1)


CAUSAL: dict[str, Mask] = {
    "lower triangle": lower,
    "of numbers": lambda x: torch.ones(x.size(1), x.size(1)).tril().bool(),
    "not above": lambda x: torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(diagonal=1).logical_not(),
    "compared": lambda x: places(x)[0] >= places(x)[1],
    "difference": lambda x: places(x)[1] - places(x)[0] <= 0,
    "view": lambda x: lower(x).view(1, 1, x.size(1), x.size(1)),
    "of each sample": lambda x: lower(x).expand(x.size(0), 1, -1, -1),
    "by samples' numbers": expanded,
    "like the input": lambda x: x.new_ones(x.size(1), x.size(1)).tril() == 1,
    "shaped like the input": lambda x: (
        torch.full_like(x[:, None, :, :1], -1.0).expand(-1, -1, -1, x.size(1)).triu(1) == 0
    ),
    "wide window": lambda x: (places(x)[1] <= places(x)[0]) & (places(x)[1] > places(x)[0] - LENGTH),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_go(name: str) -> None:
    """The same program as of a model that says is_causal."""
    program = program_of(CAUSAL[name])
    assert masks(program) == ["causal"]
    assert program.fingerprint == program_of(lambda x: None).fingerprint


def first_key_unseen(x: Tensor) -> Tensor:
    """Causal, but that the last query does not see the first key."""
    queries, keys = places(x)
    return lower(x) & ((queries < x.size(1) - 1) | (keys > 0))


OTHER: dict[str, Mask] = {
    "window": lambda x: lower(x) & (places(x)[1] > places(x)[0] - LENGTH + 1),
    "one ahead": lambda x: lower(x, 1),
    "one less": lambda x: lower(x, -1) | (places(x)[1] == 0),
    "upper triangle": lambda x: lower(x).transpose(0, 1),
    "one pair": first_key_unseen,
    "one key for all": lambda x: (places(x)[1] == 0).expand(x.size(1), -1),
    "of some samples": lambda x: lower(x) | (torch.arange(x.size(0)) == 1)[:, None, None, None],
    "of the first samples of large batches": lambda x: lower(x) & (torch.arange(x.size(0)) < 999)[:, None, None, None],
    "of small batches": lambda x: lower(x) | (torch.full((), x.size(0)) > 999),
    "of numbers that samples have": lambda x: lower(x) & (torch.ones(x.size(0)).cumsum(0) < 999)[:, None, None, None],
    "by chance": lambda x: lower(x) & (torch.rand(x.size(1), x.size(1)) < 2.0),
    "of the input": lambda x: lower(x) & (x[:, None, None, :, 0] < 999.0),
    "uninitialised": lambda x: lower(x) | (torch.empty(x.size(1), x.size(1)) == 1.5),
    "added": lambda x: torch.zeros(x.size(1), x.size(1)).masked_fill(~lower(x), -torch.inf),
    "one row that is not all open": lambda x: (torch.arange(x.size(1)) < LENGTH - 1)[None, None, None, :],
    "one pair that is not open": lambda x: (places(x)[0] != LENGTH - 1) | (places(x)[1] != 0),
    "a little added": lambda x: torch.zeros(x.size(1), x.size(1)).triu(1) + (places(x)[0] == LENGTH - 1) * 1e-30,
    "nothing, by chance": lambda x: torch.rand(x.size(1), x.size(1)) < 2.0,
    "nothing in the first samples": lambda x: (torch.arange(x.size(0)) < 999)[:, None, None, None],
    "of more dims than the query": lambda x: torch.ones(1, 1, 1, x.size(1), x.size(1), dtype=torch.bool),
    "causal, of more dims than the query": lambda x: lower(x)[None, None, None],
}


NOTHING: dict[str, Mask] = {
    "everything": lambda x: torch.ones(x.size(1), x.size(1), dtype=torch.bool),
    "one row for all": lambda x: torch.ones(x.size(0), 1, 1, x.size(1), dtype=torch.bool),
    "one for all": lambda x: torch.ones(1, 1, dtype=torch.bool),
    "by samples' numbers": lambda x: expanded(x) | expanded(x).logical_not(),
    "wide window": lambda x: places(x)[1] > places(x)[0] - LENGTH,
    "zeros added": lambda x: torch.zeros(x.size(0), 1, x.size(1), x.size(1)),
    "what is open added": lambda x: (1.0 - torch.ones(x.size(0), 1, 1, x.size(1))) * -1e4,
}


@pytest.mark.parametrize("name", NOTHING)
def test_masks_that_mask_nothing_go(name: str) -> None:
    program = program_of(NOTHING[name])
    assert masks(program) == ["nothing"]
    assert program.fingerprint == program_of(unmasked).fingerprint


@pytest.mark.parametrize("name", OTHER)
def test_other_masks_stay(name: str) -> None:
    assert masks(program_of(OTHER[name])) == ["mask"]


def composed(random: Random, depth: int) -> Callable[[Tensor], Tensor]:
    """A mask of comparisons, triangles and single pairs, in some of which it is all that decides."""
    kind, number = random.randrange(9 if depth else 4), random.choice((-1, 0, 0, 1, 19))
    if kind == 0:
        return lambda x: places(x)[1] <= places(x)[0] + number
    if kind == 1:
        return lambda x: ~torch.ones(x.size(1), x.size(1)).triu(number + 1).bool()
    if kind == 2:
        return lambda x: (places(x)[0] != number) | (places(x)[1] != 0)
    if kind == 3:
        return lambda x: places(x)[1] > places(x)[0] - 19 - number
    one, two = composed(random, depth - 1), composed(random, depth - 1)
    if kind == 4:
        return lambda x: one(x) | two(x)
    if kind == 5:
        return lambda x: (one(x).to(torch.int64) - 1 < 0).logical_not() & two(x)
    return lambda x: one(x) & two(x)


def narrowed(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: lower(x) & mask(x)


def widened(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (places(x)[1] <= places(x)[0] + 17) | mask(x)


def test_composed_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds and blocks decide what the whole mask says."""
    monkeypatch.setattr(attention_masks, "_BLOCK", 16)
    x, wanted = torch.zeros(4, 20, WIDTH), []
    for seed in range(40):
        mask = narrowed(composed(Random(seed), 2))
        wanted.append("causal" if mask(x).equal(lower(x)) else "mask")
        assert masks(program_of(mask, 20)) == [wanted[-1]], seed
    for seed in range(60):
        mask = widened(composed(Random(seed), 2))
        wanted.append("nothing" if mask(x).all() else "mask")
        assert masks(program_of(mask, 20)) == [wanted[-1]], seed
    assert min(map(wanted.count, ("causal", "nothing", "mask"))) >= 10


class Held(nn.Module):
    """A mask that the module has: a buffer, or a tensor that is none."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        if buffer:
            self.register_buffer("mask", mask, persistent=False)
        else:
            self.mask = mask
        self.lead = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.lead(x), x, x, attn_mask=self.mask).sum()


@pytest.mark.parametrize("buffer", [True, False])
def test_masks_that_a_module_holds_stay(buffer: bool) -> None:
    """Their values may change, and are not known on meta."""
    assert masks(capture(Held(buffer), (torch.zeros(4, 6, WIDTH),), check_eval=False)) == ["mask"]


def test_fewer_queries_than_keys() -> None:
    class Fewer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.size(1) - 1, x.size(1), dtype=torch.bool).tril()
            return F.scaled_dot_product_attention(x[:, 1:], x, x, attn_mask=mask)

    assert masks(capture(Fewer(), (torch.zeros(4, 6, WIDTH),), check_eval=False)) == ["mask"]


class Layers(nn.Module):
    """Each layer makes its own mask, of which one is a window; what masks another value is not attention's."""

    def __init__(self, masks: list[Mask], dropout: float = 0.0) -> None:
        super().__init__()
        self.masks, self.dropout = masks, dropout
        self.leads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in masks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for lead, make in zip(self.leads, self.masks, strict=True):
            mask = make(x)
            p = self.dropout if self.training else 0.0
            x = x + F.scaled_dot_product_attention(lead(x), x, x, attn_mask=mask, dropout_p=p, scale=0.3)
        return x.sum(), lower(x)


def test_masks_that_are_made_alike_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[MaskKind | None] = []
    decide = attention_masks._kind_of

    def watched(made: fx.Graph, samples: int) -> MaskKind | None:
        looked_at.append(decide(made, samples))
        return looked_at[-1]

    monkeypatch.setattr(attention_masks, "_kind_of", watched)
    model = Layers([lower, lower, OTHER["one ahead"], lower, NOTHING["everything"]], dropout=0.2)
    program = capture(model, (torch.zeros(4, 6, WIDTH),))
    assert masks(program) == ["causal", "causal", "mask", "causal", "nothing"]
    assert looked_at == [MaskKind.CAUSAL, None, MaskKind.FULL]
    assert not program.eval_flaw
    triangles = [node for node in program.graph.nodes if op(node) == "tril"]
    assert len(triangles) == 2, "one of the mask that stays, one that is returned"
    for attention in (node for node in program.graph.nodes if op(node) == "scaled_dot_product_attention"):
        assert attention.args[4] == 0.2 and attention.kwargs == {"scale": 0.3}


def test_fixed_batch() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = lower(x).expand(x.size(0), -1, -1)
            return F.scaled_dot_product_attention(x.view(4, x.size(1), WIDTH), x, x, attn_mask=mask)

    program = capture(Fixed(), (torch.zeros(4, 6, WIDTH),), check_eval=False)
    assert program.static_batch
    assert masks(program) == ["causal"]


@pytest.mark.parametrize("around", [FakeTensorMode, lambda: torch.device("meta")])
def test_captured_without_values(around: Callable[[], Any]) -> None:
    """The same program."""
    with around():
        program = capture(Attends(expanded), (torch.zeros(4, LENGTH, WIDTH),), check_eval=False)
    assert program.fingerprint == program_of(expanded).fingerprint
    assert masks(program) == ["causal"]


def test_long_sequences() -> None:
    """Of 17 billion pairs a few are computed; of 10 million that no bounds decide all."""
    assert masks(program_of(expanded, 131072, 2)) == ["causal"]
    assert masks(program_of(CAUSAL["difference"], 3200, 2)) == ["causal"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [7, 300])
def test_values_are_the_same_bit_by_bit(dtype: torch.dtype, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(3, 4, length, 16, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    query, key, value = (item.requires_grad_() for item in made[:3])
    full, zeros = torch.ones(length, length, dtype=torch.bool), torch.zeros(length, length, dtype=dtype)

    def results(**options: Any) -> list[Tensor]:
        output = F.scaled_dot_product_attention(query, key, value, **options)
        return [output, *torch.autograd.grad(output, (query, key, value), made[3])]

    for alike in (
        [results(attn_mask=full.tril().expand(3, 1, -1, -1)), results(is_causal=True)],
        [results(attn_mask=full.expand(3, 1, -1, -1)), results(attn_mask=zeros), results()],
    ):
        for first, *others in zip(*alike, strict=True):
            assert all(first.equal(other) for other in others)


# -- transformers ---------------------------------------------------------------------------------------------------


def unpadded(name: str, batch: int) -> dict[str, Tensor]:
    found = family(name).inputs(batch)
    return {key: value for key, value in found.items() if "mask" not in key}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gpt2", "causal"), ("llama", "causal"), ("mixtral", "causal"), ("bert", "nothing"), ("vit", "nothing")],
)
def test_families(name: str, expected: str) -> None:
    item = family(name)
    with float64_throughout():
        program = capture(item.build(), (), unpadded(name, 4), check_eval=False)
        padded = capture(item.build(), (), item.inputs(4), check_eval=False)
    assert set(masks(program)) == {expected}
    assert name == "vit" or set(masks(padded)) == {"mask"}
    assert expected != "causal" or len(program.graph.nodes) < len(padded.graph.nodes) - 20


def mistral(length: int) -> Program:
    """Its queries see the last eight keys."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        use_cache=False,
    )
    ids = torch.zeros(4, length, dtype=torch.long)
    return capture(MistralForCausalLM(config), (), {"input_ids": ids, "labels": ids}, check_eval=False)


def test_a_window_that_some_sequences_exceed() -> None:
    """Programs for both lengths count as the same model's."""
    short, long = mistral(8), mistral(9)
    assert (masks(short), masks(long)) == (["causal"], ["mask"])
    assert outline_digest(short.graph, ()) == outline_digest(long.graph, ())


@functools.lru_cache(maxsize=2)
def subject_of(name: str) -> Subject:
    item = family(name)
    return prepare(item.build(), (), unpadded(name, item.batch))


def check(name: str, limits: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Trains a plan's program beside the unmodified model; returns the source of its stages."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    subject = subject_of(name)
    analysis = analyze(subject.program)
    devices = limits["pp"] * limits["dp"] * limits["tp"]
    plan = make_plan(subject.program, ideal(devices), batch=8, analysis=analysis, **limits)
    realize(subject.program, plan, analysis).save(folder / "program")
    result = compare_emitted(folder / "program", subject, plan=plan)
    assert result.equal, f"{result.loss_difference=}"
    assert all(stage.as_planned for stage in result.traffic), result.traffic
    return "".join(path.read_text() for path in sorted((folder / "program").glob("stage_*.py")))


QUICK = [("gpt2", "pp2xtp2"), ("llama", "tp2")]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        pytest.param(name, limits, marks=() if (name, limits) in QUICK else pytest.mark.slow)
        for name in ("gpt2", "llama", "mixtral", "bert", "t5")
        for limits in PLANS
    ],
)
def test_parallel_equals_serial(name: str, limits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = check(name, PLANS[limits], tmp_path, monkeypatch)
    if name != "t5":  # it adds a bias that is learned
        assert ("is_causal=True" in source) == (name != "bert")
        assert "mask" not in source


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_shard_of_the_sequence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context parallelism: each rank's queries know which they are."""
    subject = subject_of(name)
    _, source = run(subject, forced(subject, 2, by_sequence), tmp_path, monkeypatch)
    assert source.count("local_forms.query_sharded_attention(") == 4
