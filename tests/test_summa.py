"""Products panel by panel on a square of ranks: values, gradients, what is sent, and what is never held."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schemes import is_product, scheme, share
from test_shard import check
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.passes.conversion import Axes
from autopart.runtime.local_forms.summa import summa_addmm, summa_linear, summa_matmul
from autopart.runtime.mesh import Axis
from autopart.runtime.placement import Placement, take_share
from autopart.runtime.traffic import Traffic
from launch import launch

Q = 2
B, S, K, N = 3, 4, 8, 12
TOKENS = B * S
PAIRS = {
    "linear": (summa_linear, F.linear, [(B, S, K), (N, K), (N,)], ["S1 S2", "S1 S0", "R S0"], 1),
    "no bias": (summa_linear, F.linear, [(B, S, K), (N, K)], ["S1 S2", "S1 S0"], 1),
    "fused": (summa_linear, F.linear, [(B, S, K), (N, K), (N,)], ["S1 S2", "S1 S0/3", "R S0/3"], 1),
    "addmm": (summa_addmm, torch.addmm, [(N,), (TOKENS, K), (K, N)], ["R S0", "S0/3 S1", "S0 S1"], 2),
    "full bias": (summa_addmm, torch.addmm, [(TOKENS, N), (TOKENS, K), (K, N)], ["S0 S1", "S0 S1", "S0 S1"], 2),
    "matmul": (summa_matmul, torch.matmul, [(B, S, K), (K, N)], ["S1 S2", "S0 S1"], 1),
}
RESULTS = {"fused": "S1 S2/3", "addmm": "S0/3 S1", "full bias": "S0 S1"}


def parsed(text: str) -> tuple[Placement, ...]:
    return tuple(map(Placement.parse, text.split()))


def operands(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an op returns inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def on_a_square(name: str) -> tuple[list[Tensor], dict[Any, Any], int]:
    """This rank's share of the result and of the gradients, the traffic, and the largest tensor inside."""
    form, _, shapes, texts, _ = PAIRS[name]
    mesh = dist.device_mesh.DeviceMesh("cpu", torch.arange(4).reshape(Q, Q), mesh_dim_names=("x", "y"))
    place = divmod(dist.get_rank(), Q)
    traffic = Traffic()
    rows, columns = (Axis(n, Q, i, mesh.get_group(n), traffic) for n, i in zip("xy", place, strict=True))
    whole = operands(shapes)
    shares = [
        take_share(tensor, parsed(text), (Q, Q), place).contiguous().requires_grad_()
        for tensor, text in zip(whole, texts, strict=True)
    ]
    with Largest() as largest:
        result = form(*shares, rows=rows, columns=columns)
        seed = torch.ones_like(result) * (1 + dist.get_rank())
        gradients = torch.autograd.grad(result, shares, seed)
    counts = {(op, axis, phase): (c.calls, c.bytes) for (op, axis, phase), c in traffic.counts().items()}
    return [result.detach(), *gradients], counts, largest.elements


@pytest.mark.parametrize("name", PAIRS)
def test_equals_the_product(name: str) -> None:
    _, function, shapes, texts, right = PAIRS[name]
    ranks = launch(on_a_square, Q * Q, name)
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
    [("gpt2", "2d"), ("llama", "2d"), ("gpt2", "3d"), ("llama", "3d"), ("gpt2", "2.5d"), ("llama", "2.5d")],
)
def test_scheme(tmp_path: Path, name: str, kind: str) -> None:
    """Training equals the plain model's, and of every matrix a rank holds one part in as many as there are ranks."""
    axes = SCHEMES[kind]
    sizes = [parts for _, parts in axes]
    seen: dict[str, Any] = {}

    def choose(graph: Any, *parts: int) -> Any:
        seen["strategies"], seen["storage"] = scheme(kind)(graph, *parts)
        seen["shapes"] = {
            node.meta["name"]: tuple(node.meta["val"].shape)
            for node in graph.nodes
            if "name" in node.meta and node.op == "placeholder" and hasattr(node.meta["val"], "shape")
        }
        return seen["strategies"], seen["storage"]

    counted = check(tmp_path, name, choose, axes=axes)
    products = [chosen for node, chosen in seen["strategies"].items() if is_product(node)]
    assert len(products) >= 17
    matrices = {key: shape for key, shape in seen["shapes"].items() if key in seen["storage"] and len(shape) > 1}
    for key, shape in matrices.items():
        if "weight" in key:
            assert share(shape, seen["storage"][key], sizes) * 2 ** len(sizes) == torch.Size(shape).numel(), key
    assert (("x", "forward", "broadcast") in counted) is (kind != "3d")
