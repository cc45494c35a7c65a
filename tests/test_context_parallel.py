"""Context parallelism: the sequence is sharded everywhere, keys and values are gathered, weights are whole."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopart.passes.live_bytes import LiveBytes
from autopart.passes.rules import Strategy
from autopart.planner import make_plan
from autopart.runtime import Axis, local_forms
from autopart.tracing import capture
from autopart.verify import Subject, prepare
from clusters import ideal
from families import family
from forcing import forced, is_parameter, op, run
from launch import launch

ATTENTION = "scaled_dot_product_attention"
VOCABULARY = 64


class Causal(nn.Module):
    """Two layers of attention, causal by the op's own flag, four query heads on two pairs of key and value heads."""

    def __init__(self, width: int = 32, sequence: int = 12, hidden: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(sequence, width)
        self.layers = nn.ModuleList(CausalLayer(width, hidden, dropout) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.words(tokens) + self.places(torch.arange(tokens.size(1)))
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class CausalLayer(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        query = self.query(normal).unflatten(2, (4, -1)).transpose(1, 2)
        key, value = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.pair(normal).chunk(2, 2))
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


def causal_inputs(sequence: int = 12, batch: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (batch, sequence), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    return {"tokens": tokens, "labels": labels}


@functools.lru_cache(maxsize=1)
def subject_of(name: str) -> Subject:
    if name == "causal":
        return prepare(Causal().double(), (), causal_inputs())
    item = family(name)
    return prepare(item.build(), (), item.inputs(item.batch))


def by_sequence(node: fx.Node, strategy: Strategy) -> bool:
    return strategy.name == ("B" if is_parameter(node) else "q" if op(node) == ATTENTION else strategy.name)


@pytest.mark.parametrize(
    ("name", "parts"), [("llama", 4), ("causal", 4), *(pytest.param("gpt2", p, marks=pytest.mark.slow) for p in (2, 4))]
)
def test_whole_models(name: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, positions, rotary tables and labels follow; forward only keys and values are exchanged."""
    plan = forced(subject_of(name), parts, by_sequence)
    _, source = run(subject_of(name), plan, tmp_path, monkeypatch)
    assert (source.count("local_forms.query_sharded_attention(") > 0) == (name == "causal")
    assert set(plan.storage.values()) == {"B"}
    counts = plan.stages[0].collectives
    layers = 2 if name == "causal" else 4
    assert layers <= counts["all_gather"]["calls"] <= 2 * layers
    assert counts["reduce_scatter"] == counts["all_gather"]  # of their gradients
    assert counts["all_reduce"] == {"calls": 1, "bytes": 8}  # the loss


# -- the function itself, on processes ------------------------------------------------------------------------------


def attended(gqa: bool, rows: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    heads = 2 if gqa else 4
    shapes = ((2, 4, 12, 8), (2, heads, rows, 8), (2, heads, rows, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def shard_of_queries(gqa: bool, rows: int) -> list[Tensor]:
    size, index = torch.distributed.get_world_size(), torch.distributed.get_rank()
    axis = Axis("tp", size, index, torch.distributed.group.WORLD)
    query, key, value = attended(gqa, rows)
    share = query.chunk(size, 2)[index].detach().requires_grad_()
    found = local_forms.query_sharded_attention(share, key, value, scale=0.3, enable_gqa=gqa, axis=axis)
    found.square().sum().backward()
    assert share.grad is not None and key.grad is not None and value.grad is not None
    assert not axis.traffic.counts()
    return [found.detach(), share.grad, key.grad, value.grad]


@pytest.mark.parametrize("gqa", [False, True])
@pytest.mark.parametrize("rows", [12, 16])
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_equal_on_processes(gqa: bool, rows: int, processes: int) -> None:
    query, key, value = attended(gqa, rows)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=gqa)
    expected.square().sum().backward()
    results = launch(shard_of_queries, processes, gqa, rows)
    joined = [torch.cat([shares[index] for shares in results], 2) for index in (0, 1)]
    summed = [torch.stack([shares[index] for shares in results]).sum(0) for index in (2, 3)]
    for found, whole in zip([*joined, *summed], [expected, query.grad, key.grad, value.grad], strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


def test_under_a_mode() -> None:
    """What counts a rank's memory sees each tensor that is made, where a mask can be none of torch's own kind."""
    query, key, value = attended(False, 12)
    with LiveBytes([query, key, value]) as live:
        found = local_forms.query_sharded_attention(query[:, :, 6:], key, value, axis=Axis("tp", 2, 1))
    assert live.now >= found.nbytes


# -- what the solver does -------------------------------------------------------------------------------------------


def test_the_solver_takes_it_for_long_sequences() -> None:
    """One sample, weights that are small beside the activations: keys and values are the least that can be moved."""
    program = capture(Causal(sequence=4096), (), causal_inputs(4096, 1), check_eval=False)
    plan = make_plan(program, ideal(4, bandwidth=1e11), pp=1, dp=1, tp=4, batch=1)
    assert plan.strategies["layers.*:scaled_dot_product_attention"] == "q"
    exchanged = plan.stages[0].collectives
    assert exchanged["all_gather"] == {"calls": 2, "bytes": 2 * 4096 * 32 * 4}  # keys and values of two heads of 8
    assert exchanged["reduce_scatter"] == exchanged["all_gather"]
