"""Views of each sample joined along the batch and taken apart again, as in R-Drop, SimCLR or crops of several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopart
from autopart.capture_errors import batch_reason
from autopart.passes.batch import split_batch
from autopart.passes.rules import RULES
from autopart.tracing import capture
from clusters import ideal
from launch import launch
from programs import gradients, in_shares

BATCH, WIDTH, CLASSES = 8, 6, 4
Parts = Callable[[Tensor, int], tuple[Tensor, ...]]

# Of the logits of as many views as the name says; n is the number of samples.
PARTS: dict[str, tuple[int, Parts]] = {
    "chunk": (2, lambda z, n: z.chunk(2)),
    "chunk by name": (2, lambda z, n: torch.chunk(input=z, chunks=2, dim=0)),
    "chunks of two views": (4, lambda z, n: torch.chunk(z, 2)),
    "split": (3, lambda z, n: z.split(n)),
    "split by name": (2, lambda z, n: torch.split(z, split_size_or_sections=n, dim=-2)),
    "split in list": (3, lambda z, n: z.split([n, 2 * n])),
    "tensor_split": (2, lambda z, n: z.tensor_split(2)),
    "slices": (2, lambda z, n: (z[:n], z[n:])),
    "slices from the end": (3, lambda z, n: (z[:-n], z[-n:, ...])),
    "slices of columns": (2, lambda z, n: (z[:n, :2], z[n:, 2:])),
    "narrow": (3, lambda z, n: (z.narrow(0, 0, n), torch.narrow(z, 0, n, 2 * n))),
    "along another dim": (2, lambda z, n: tuple(part.t() for part in z.t().chunk(2, dim=1))),
}


class Joined(nn.Module):
    def __init__(self, views: int, parts: Parts) -> None:
        super().__init__()
        self.linear, self.views, self.parts = nn.Linear(WIDTH, CLASSES), views, parts

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.linear(torch.cat([x * scale for scale in range(1, self.views + 1)]))
        parts = self.parts(z, len(x))
        losses = [weight * part.square().sum(-1).mean() for weight, part in enumerate(parts, 1)]
        return {"loss": F.cross_entropy(z, y.repeat(self.views)) + sum(losses)}


class EachTwice(nn.Module):
    """Samples repeated one by one; the second of each is written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = self.linear(x.repeat_interleave(2, 0))
        z[1::2] *= 2
        return {"loss": F.cross_entropy(z[::2], y) + z.sin().mean()}


def data(samples: int = BATCH, seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, WIDTH, generator=made, dtype=torch.float64)
    return {"x": x, "y": torch.randint(CLASSES, (samples,), generator=made)}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


@pytest.mark.parametrize("make", [*PARTS, EachTwice], ids=str)
def test_equal_in_shares(make: Any) -> None:
    of = make if make is EachTwice else lambda: Joined(*PARTS[make])
    program = capture(built(of), (), data(), check_eval=False)
    split = split_batch(program, RULES)
    assert not split.flaw and not program.static_batch
    whole, ours = in_shares(program, split, built(of), data(), BATCH, 4)
    reference = built(of)
    expected = reference(**data())["loss"]
    expected.backward()
    torch.testing.assert_close(whole["loss"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(ours, gradients(reference), rtol=1e-10, atol=1e-12)


def test_what_fixes_the_batch_is_said_without_words_of_export() -> None:
    size = "L['tensors'][0].size()[0]"
    text = f"Not all values satisfy the generated guard 3*{size} // {size} == 2.Specializations unexpectedly required!"
    assert batch_reason(ValueError(f"Constraints violated\n{text} Run with TORCH_LOGS")) == (
        "the model's code asks that 3*b // b == 2"
    )


def trained(limits: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    model: Any = built(lambda: Joined(*PARTS["chunk"]))
    if limits is not None:
        model = autopart.parallelize(model, cluster=ideal(2), verbose=False, **limits)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step, samples in enumerate((8, 8, 4)):
        loss = model(**data(samples, step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen, model.state_dict()


def in_parallel(expected: Any) -> None:
    for limits in ({"dp": 2, "zero": 2}, {"tp": 2, "microbatches": 2}):
        found = trained({"pp": 1, "dp": 1, "tp": 1, **limits})
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-12)


def test_as_in_one_process() -> None:
    launch(in_parallel, 2, trained(None))
