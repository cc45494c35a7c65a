"""The backward in two parts: equal to the whole, nothing computed twice, and what W does not need freed by B."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.runtime.recompute import checkpoint
from autopart.runtime.weight_split import LaterGradients, SplitBackward, into_outer

WIDTH, LENGTH = 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + bias @ F.scaled_dot_product_attention(q, k, v)
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Stage(nn.Module):
    """Two blocks; an embedding makes a bias for both, which is returned too; the last projection is tied to it."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bias = nn.Embedding(LENGTH, LENGTH)
        self.first = nn.Conv1d(LENGTH, LENGTH, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        bias = torch.sin(self.bias(torch.arange(LENGTH)))
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(self.call, block, x, bias) if self.recompute else block(x, bias)
        return torch.einsum("bld,lm->bmd", x, self.bias.weight), bias

    def call(self, block: Block, x: Tensor, bias: Tensor) -> Tensor:
        self.calls += 1
        return block(x, bias)


def stage(recompute: bool = False) -> Stage:
    torch.manual_seed(0)
    return Stage(recompute).double()


def leaf() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def seeds(results: Sequence[Tensor]) -> list[Tensor]:
    return [torch.linspace(-1, 1, item.numel(), dtype=item.dtype).view_as(item) for item in results]


def forward(model: Stage, x: Tensor) -> tuple[list[Tensor], LaterGradients]:
    later = LaterGradients()
    with SplitBackward(list(model.parameters()), later):
        results = [into_outer(item) for item in model(x)]
    return results, later


class Count(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [False, True])
def test_equal_to_the_whole_backward(recompute: bool) -> None:
    plain, split = stage(), stage(recompute)
    x = leaf().requires_grad_()
    with Count() as whole:
        results = plain(x)
        torch.autograd.backward(results, seeds(results))
    y = leaf().requires_grad_()
    with Count() as parts:
        found, later = forward(split, y)
        assert all(torch.equal(a, b) for a, b in zip(results, found, strict=True))
        torch.autograd.backward(found, seeds(found))
        assert y.grad is not None and x.grad is not None and torch.equal(x.grad, y.grad)
        if not recompute:
            assert all(p.grad is None for p in split.parameters())
        later.compute(list(split.parameters()))
    for (name, p), q in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-12)
    if recompute:
        assert split.calls == 4  # each block once, and once again
    else:
        products = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.convolution.default")
        assert {op: parts.ops[op] for op in products} == {op: whole.ops[op] for op in products}


def test_what_weights_do_not_need_is_freed_by_b() -> None:
    """GELU's input goes with B; the projection's input stays until W."""
    kept: dict[str, weakref.ref[torch.UntypedStorage]] = {}
    model = stage()

    def gelu(x: Tensor) -> Tensor:
        made = torch.nn.functional.gelu(x)
        kept["before"], kept["after"] = weakref.ref(x.untyped_storage()), weakref.ref(made.untyped_storage())
        return made

    block = model.blocks[1]
    assert isinstance(block, Block)
    x = leaf().requires_grad_()
    later = LaterGradients()
    with SplitBackward(list(model.parameters()), later):
        out = block.down(gelu(block.up(x)))
    gc.collect()
    assert kept["before"]() is not None and kept["after"]() is not None
    out.sum().backward()
    gc.collect()
    assert kept["before"]() is None and kept["after"]() is not None
    later.compute(list(model.parameters()))
    del out
    gc.collect()
    assert kept["after"]() is None
    assert block.down.weight.grad is not None and block.up.weight.grad is not None


def test_frozen_weights_and_evaluation() -> None:
    model = stage()
    model.blocks[0].requires_grad_(False)
    x = leaf().requires_grad_()
    found, later = forward(model, x)
    torch.autograd.backward(found, seeds(found))
    later.compute([p for p in model.parameters() if p.requires_grad])
    assert all((p.grad is None) == (not p.requires_grad) for p in model.parameters())
    with torch.no_grad():
        assert not forward(model, x)[0][0].requires_grad


def test_a_linear_has_its_gradient_without_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stage(), leaf().requires_grad_()
    walks = []
    walk = torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        walks.append(args)
        return walk(*args, **kwargs)

    results, _ = forward(model, x)
    monkeypatch.setattr(torch.autograd, "grad", counted)
    torch.autograd.backward(results, seeds(results))
    # conv, einsum; in each block two norms, the scale; and the bias's product, whose other side is the bias
    assert len(walks) == 2 + 2 * 4


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_linear_of_which_half_is_trained(frozen: str) -> None:
    plain = nn.Linear(WIDTH, 2, dtype=torch.float64)
    getattr(plain, frozen).requires_grad_(False)
    x, y = leaf().requires_grad_(), leaf().requires_grad_()
    plain(x).sum().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad()
    later = LaterGradients()
    with SplitBackward(list(plain.parameters()), later):
        result = into_outer(plain(y))
    result.sum().backward()
    later.compute([parameter for parameter in plain.parameters() if parameter.requires_grad])
    torch.testing.assert_close([x.grad, *expected], [y.grad, *(parameter.grad for parameter in plain.parameters())])
