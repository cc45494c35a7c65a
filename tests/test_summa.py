"""Products panel by panel on a square of ranks, and published schemes: equal training, shares, what is sent."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopart.passes.conversion import Axes
from autopart.passes.shard import collective_counts
from autopart.runtime.placement import take_share
from autopart.tracing import capture
from families import family
from launch import launch
from programs import compile_program
from schemes import is_product, scheme, share
from square import PAIRS, RESULTS, TOKENS, K, N, Q, on_a_square, operands, parsed
from test_shard import check


@pytest.mark.parametrize("name", PAIRS)
def test_equals_the_product(name: str) -> None:
    _, function, shapes, texts, right = PAIRS[name]
    ranks = launch(on_a_square, Q * Q, name, timeout=400.0)
    whole = [tensor.requires_grad_() for tensor in operands(shapes)]
    expected = function(*whole)
    result_text = RESULTS.get(name, "S1 S2")
    places = list(itertools.product(range(Q), repeat=2))
    # The seed of each rank's share, put together as the shares are.
    seed = torch.zeros_like(expected)
    for index, place in enumerate(places):
        positions = take_share(torch.arange(seed.numel()).reshape(seed.shape), parsed(result_text), (Q, Q), place)
        seed.view(-1)[positions.flatten()] = 1.0 + index
    gradients = torch.autograd.grad(expected, whole, seed)
    left_bytes, right_bytes = (shapes[i][-1] * tokens * 8 for i, tokens in ((right - 1, TOKENS), (right, N)))
    if name in ("addmm", "full bias", "matmul"):
        right_bytes = K * N * 8
    for index, place in enumerate(places):
        (found, *found_gradients), counts, largest = ranks[index]
        torch.testing.assert_close(found, take_share(expected.detach(), parsed(result_text), (Q, Q), place))
        for operand, (gradient, text) in enumerate(zip(gradients, texts, strict=True)):
            own = found_gradients[operand]
            if text.startswith("R"):  # each rank of the axis has a part
                own = ranks[place[1]][0][1 + operand] + ranks[Q + place[1]][0][1 + operand]
            torch.testing.assert_close(own, take_share(gradient, parsed(text), (Q, Q), place))
        # Optimus, algorithms 1 to 3: q panels of 1/q^2 of each operand forward, as many again and the sums backward.
        assert counts == {
            ("broadcast", "y", "forward"): (Q, Q * left_bytes // Q**2),
            ("broadcast", "x", "forward"): (Q, Q * right_bytes // Q**2),
            ("broadcast", "y", "backward"): (Q, Q * left_bytes // Q**2),
            ("broadcast", "x", "backward"): (Q, Q * right_bytes // Q**2),
            ("reduce", "y", "backward"): (Q, Q * left_bytes // Q**2),
            ("reduce", "x", "backward"): (Q, Q * right_bytes // Q**2),
        }
        assert largest <= max(TOKENS * K, K * N, TOKENS * N) // Q**2


SCHEMES: dict[str, Axes] = {
    "2d": (("x", 2), ("y", 2)),
    "2.5d": (("x", 2), ("y", 2), ("z", 2)),
    "3d": (("x", 2), ("y", 2), ("z", 2)),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt2-1", "2d"),
        pytest.param("llama-1", "3d", marks=pytest.mark.slow),
        pytest.param("gpt2-1", "2.5d", marks=pytest.mark.slow),
        pytest.param("llama-1", "2d", marks=pytest.mark.slow),
        pytest.param("gpt2-1", "3d", marks=pytest.mark.slow),
        pytest.param("llama-1", "2.5d", marks=pytest.mark.slow),
    ],
)
def test_scheme(tmp_path: Path, name: str, kind: str) -> None:
    """Training equals the plain model's, and of every matrix a rank holds one part in as many as there are ranks."""
    axes = SCHEMES[kind]
    sizes = [parts for _, parts in axes]
    seen: dict[str, Any] = {}

    def choose(graph: Any, *parts: int) -> Any:
        seen["strategies"], seen["storage"] = scheme(kind)(graph, *parts)
        return seen["strategies"], seen["storage"]

    counted = check(tmp_path, name, choose, axes=axes)
    products = [chosen for node, chosen in seen["strategies"].items() if is_product(node)]
    assert len(products) >= 5
    weights = {key: tensor for key, tensor in family(name).build().named_parameters() if tensor.dim() > 1}
    for key, tensor in weights.items():
        assert share(tensor.shape, seen["storage"][key], sizes) * math.prod(sizes) == tensor.numel(), key
    assert (("x", "forward", "broadcast") in counted) is (kind != "3d")


class Mlp(nn.Module):
    """Two products with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 24, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.second(torch.nn.functional.gelu(self.first(x))).square().mean()}


def test_what_a_product_moves_in_three_dimensions() -> None:
    """Bian et al., arXiv 2105.14450, section 3.1: both operands are all-gathered and the result is reduce-scattered,
    each among q ranks and from shares of 1/q^3; backward the gathers become reduce-scatters and the other way round.
    """
    batch, tokens, q = 2, 8, 2
    program = capture(Mlp(), (), {"x": torch.randn(batch, tokens, 8)}, check_eval=False)
    axes = SCHEMES["3d"]
    (graph,) = compile_program(program, axes=axes, choose=scheme("3d")).graphs
    _, product = (node for node in graph.nodes if str(node.target) == "aten.linear.default")
    around: list[Any] = [user for user in product.users if "transition" in user.meta]
    for source in product.all_input_nodes:
        while "transition" in source.meta:
            around.append(source)
            source = source.args[0]
    counts = collective_counts(SimpleNamespace(nodes=around), axes, batch)  # type: ignore[arg-type]
    x, weight, result = (4 * size // q**2 for size in (batch * tokens * 16, 16 * 24, batch * tokens * 24))
    assert counts == {
        ("y", "forward"): {"all_gather": [1, x]},
        ("y", "backward"): {"reduce_scatter": [1, x]},
        ("x", "forward"): {"all_gather": [1, weight]},
        ("x", "backward"): {"reduce_scatter": [1, weight]},
        ("z", "forward"): {"reduce_scatter": [1, result]},
        ("z", "backward"): {"all_gather": [1, result]},
    }
