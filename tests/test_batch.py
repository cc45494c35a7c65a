"""Batch soundness: shares put together equal the whole batch, and what mixes samples is named and refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.passes.batch import BatchSplit, split_batch
from autopart.passes.rules import RULES
from autopart.precision import eager_in_float64, float64_throughout
from autopart.tracing import capture
from families import Family, unlike_first
from programs import gradients, in_shares

BATCH, WIDTH, CLASSES = 8, 6, 4


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        # biases of keys have a gradient of zero, up to rounding
        assert (ours[name] - gradient).norm() <= tolerance * max(gradient.norm().item(), 1e-6), name


@pytest.mark.parametrize("family", unlike_first())
def test_families_in_shares(family: Family) -> None:
    model, given = family.build(), family.inputs(BATCH)
    with float64_throughout():
        program = capture(model, (), given, check_eval=False)
    split = split_batch(program, RULES)
    assert not split.flaw
    if family.name == "resnet":
        # Statistics are each share's own, so one share is compared.
        assert any("batch norm" in note for note in split.notes)
    else:
        assert split.notes == ()
    for shares in (1,) if family.name == "resnet" else (2, 4):
        whole, ours = in_shares(program, split, model, given, BATCH, shares)
        reference = family.build()
        with eager_in_float64(reference):
            expected = reference(**given)
        expected.loss.backward()
        torch.testing.assert_close(whole["loss"], expected.loss, rtol=1e-9, atol=0)
        torch.testing.assert_close(whole["logits"], expected.logits, rtol=1e-9, atol=1e-9)
        close(ours, gradients(reference))


Body = Callable[[Any, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Logits of a linear layer; the rest is the test's."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("class_weight", torch.tensor([1.0, 2.0, 0.5, 3.0]))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"loss": self.body(self, x, y)}


def data() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    labels[[0, 1, 2, 6]] = -100
    return {"x": torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator), "y": labels}


def build(body: Body) -> Model:
    torch.manual_seed(0)
    return Model(body).double()


def split_of(body: Body) -> BatchSplit:
    return split_batch(capture(build(body), (), data(), check_eval=False), RULES)


def probabilities(labels: Tensor) -> Tensor:
    return F.one_hot(labels.clamp(min=0), CLASSES).double() * 0.8 + 0.05


def masked_like(losses: Tensor, labels: Tensor) -> Tensor:
    """Made by the shape of what parameters give, from the labels alone, and doubled by a number of its sizes."""
    mask = torch.ones_like(losses).masked_fill((labels < 0).unsqueeze(1), 0.0) * losses.new_full((len(labels), 1), 2.0)
    mask = mask + torch.full_like(losses, fill_value=0.5)
    return (losses * mask).sum() / mask.sum()


def masked_as(losses: Tensor, valid: Tensor) -> Tensor:
    mask = valid.expand_as(losses)
    return (losses * mask).sum() / mask.sum()


def contrast_within(logits: Tensor) -> Tensor:
    return logits.unsqueeze(2) * logits.unsqueeze(1)


LOSSES: dict[str, Body] = {
    "cross entropy": lambda m, x, y: F.cross_entropy(m.linear(x), y),
    "weighted": lambda m, x, y: F.cross_entropy(m.linear(x), y, weight=m.class_weight),
    "smoothed": lambda m, x, y: F.cross_entropy(m.linear(x), y, label_smoothing=0.1),
    "weighted and smoothed": lambda m, x, y: F.cross_entropy(
        m.linear(x), y, weight=m.class_weight, label_smoothing=0.1
    ),
    "probabilities": lambda m, x, y: F.cross_entropy(m.linear(x), probabilities(y)),
    "weighted probabilities": lambda m, x, y: F.cross_entropy(m.linear(x), probabilities(y), weight=m.class_weight),
    "summed": lambda m, x, y: F.cross_entropy(m.linear(x), y, reduction="sum"),
    "not reduced": lambda m, x, y: F.cross_entropy(m.linear(x), y, reduction="none").sum() / x.shape[0],
    "log likelihood": lambda m, x, y: F.nll_loss(F.log_softmax(m.linear(x), -1), y),
    "with positions": lambda m, x, y: F.cross_entropy(contrast_within(m.linear(x)), y.unsqueeze(1).expand(-1, CLASSES)),
    "mse": lambda m, x, y: F.mse_loss(m.linear(x), x[:, :CLASSES]),
    "l1": lambda m, x, y: F.l1_loss(m.linear(x), x[:, :CLASSES]),
    "smooth l1, summed": lambda m, x, y: F.smooth_l1_loss(m.linear(x), x[:, :CLASSES], reduction="sum"),
    "huber": lambda m, x, y: F.huber_loss(m.linear(x), x[:, :CLASSES], delta=0.3),
    "bce": lambda m, x, y: F.binary_cross_entropy_with_logits(m.linear(x), probabilities(y)),
    "bce, weighted": lambda m, x, y: F.binary_cross_entropy_with_logits(
        m.linear(x), probabilities(y), pos_weight=m.class_weight
    ),
    "divergence": lambda m, x, y: F.kl_div(
        F.log_softmax(m.linear(x), -1), F.softmax(x[:, :CLASSES], -1), reduction="batchmean"
    ),
    "triplets": lambda m, x, y: F.triplet_margin_loss(m.linear(x), x[:, :CLASSES], m.linear(-x), margin=3.0),
    "cosines": lambda m, x, y: F.cosine_embedding_loss(m.linear(x), x[:, :CLASSES], (y >= 0) * 2 - 1, margin=-0.5),
    "cosines, summed": lambda m, x, y: F.cosine_embedding_loss(
        m.linear(x), x[:, :CLASSES], (y >= 0) * 2 - 1, reduction="sum"
    ),
    "ranking": lambda m, x, y: F.margin_ranking_loss(m.linear(x)[:, 0], x[:, 0], (y >= 0) * 2 - 1, margin=0.5),
    "hinge": lambda m, x, y: F.hinge_embedding_loss(m.linear(x)[:, 0], (y >= 0) * 2 - 1),
    "counts": lambda m, x, y: F.poisson_nll_loss(m.linear(x), x[:, :CLASSES].abs()),
    "margins": lambda m, x, y: F.multi_margin_loss(m.linear(x), y.clamp(min=0), weight=m.class_weight),
    "margins of several labels": lambda m, x, y: F.multilabel_margin_loss(m.linear(x), x[:, :CLASSES].argsort(-1)),
    "similarity": lambda m, x, y: (1 - F.cosine_similarity(m.linear(x), x[:, :CLASSES])).mean(),
    "distance": lambda m, x, y: F.pairwise_distance(m.linear(x), x[:, :CLASSES]).mean(),
    "distances": lambda m, x, y: torch.cdist(m.linear(x).reshape(-1, 2, CLASSES // 2), m.linear.weight[:, :2]).mean(),
    "instance norm": lambda m, x, y: F.instance_norm(m.linear(x).unsqueeze(1)).relu().mean(),
    "mean": lambda m, x, y: m.linear(x).square().mean(),
    "mean of means": lambda m, x, y: m.linear(x).exp().mean(1).mean(0),
    "divided by the batch size": lambda m, x, y: m.linear(x).square().sum() / x.shape[0],
    "divided by the number of elements": lambda m, x, y: m.linear(x).square().sum() / x.numel(),
    "times a root of the batch size": lambda m, x, y: m.linear(x).square().sum() * x.shape[0] ** -0.5,
    "sum over sum": lambda m, x, y: (m.linear(x).square().sum(1) * (y >= 0)).sum() / (y >= 0).sum(),
    "masked mean": lambda m, x, y: (m.linear(x).square().sum(1) * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1),
    "masked mean, the mask as the loss": lambda m, x, y: masked_like(m.linear(x).square(), y),
    "masked mean, the mask expanded": lambda m, x, y: masked_as(m.linear(x).square(), (y >= 0).unsqueeze(1)),
    "added to zeros": lambda m, x, y: torch.full_like(m.linear(x).mean(), 0.0) + m.linear(x).square().mean(),
    "taken along": lambda m, x, y: torch.take_along_dim(m.linear(x), m.linear(x).topk(2).indices, dim=-1).mean(),
    "taken along, broadcast": lambda m, x, y: (
        m.linear(x).unsqueeze(1).take_along_dim(y.clamp(min=0).reshape(-1, 1, 1), 2).square().mean()
        + m.linear.weight[None].take_along_dim(y.clamp(min=0).reshape(-1, 1, 1), 1).sum(1).mul(x).mean()
    ),
    "times a mean of the inputs": lambda m, x, y: x.square().mean() * m.linear(x).square().mean(),
    "weight penalty": lambda m, x, y: F.cross_entropy(m.linear(x), y) + 0.1 * m.linear.weight.square().sum(),
    "shifted": lambda m, x, y: 2.0 - (F.cross_entropy(m.linear(x), y) + 1.5),
    "standardised by inputs' mean": lambda m, x, y: m.linear(x - x.mean(0)).square().mean(),
    "of two parts": lambda m, x, y: F.cross_entropy(m.linear(x), y) * 0.7 + 0.3 * m.linear(x).abs().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shares", [2, 8])
def test_losses(name: str, shares: int) -> None:
    """With one sample per share, some shares have no valid label."""
    model, given = build(LOSSES[name]), data()
    program = capture(model, (), given, check_eval=False)
    split = split_batch(program, RULES)
    if split.flaw:  # of a cross entropy with probabilities, whose export takes the batch size as it is
        assert torch.__version__ < "2.13" and "probabilities" in name and "batch size is fixed" in split.flaw
        return
    assert split.combine["loss"] == ("sum", 0, 1)
    whole, ours = in_shares(program, split, model, given, BATCH, shares)
    reference = copy.deepcopy(model)
    expected = reference(**given)["loss"]
    expected.backward()
    torch.testing.assert_close(whole["loss"], expected, rtol=1e-12, atol=1e-12)
    close(ours, gradients(reference), 1e-11)


def shuffled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Sorts rows by label, works on them, and puts them back with the inverse permutation."""
    order = torch.argsort(y)
    back = torch.argsort(order)
    return (m.linear(x[order])[back] * x[:, :CLASSES]).square().mean()


def shuffled_by_writing(m: Any, x: Tensor, y: Tensor) -> Tensor:
    _, order = y.sort()
    rows = m.linear(x[order])
    back = torch.empty_like(rows)
    back[order] = rows
    return (back * x[:, :CLASSES]).square().mean()


def shuffled_with_counter(m: Any, x: Tensor, y: Tensor) -> Tensor:
    _, order = y.sort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return (m.linear(x[order])[inverse] * x[:, :CLASSES]).square().mean()


def never_put_back(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.linear(x[torch.argsort(y)]).square().mean()


def own_label(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.linear(x)[torch.arange(x.shape[0]), y.clamp(min=0)].mean()


def own_label_marked(m: Any, x: Tensor, y: Tensor) -> Tensor:
    marked = torch.zeros_like(m.linear(x))
    marked[torch.arange(x.shape[0]), y.clamp(min=0)] = 1.0
    return (m.linear(x) * marked).square().mean()


def chosen_rewritten(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Of each sample some entries, as many as the layer takes: by the largest of its scores, and two fixed ones."""
    hidden = torch.stack([x, x.sin(), x.cos()], 1)
    rows = torch.arange(x.shape[0])[:, None]
    chosen = m.linear(hidden).sum(-1).topk(2).indices
    written = hidden.clone()
    written[rows, chosen] = hidden[rows, chosen] * m.linear(x)[:, None, :1]
    written[rows, torch.tensor([0, 2]), 1] = m.linear.bias[:2]
    written[rows, chosen, 2] += x[:, 3:4]
    return m.linear(written).square().mean()


def bagged(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Bags of two, whose weights depend on the sample."""
    entries = torch.stack([y.clamp(min=0), x.argmax(-1) % CLASSES], 1)
    weights = x[:, :2].sigmoid()
    summed = F.embedding_bag(entries, m.linear.weight, mode="sum", per_sample_weights=weights)
    return (summed + F.embedding_bag(entries, m.linear.weight)).square().mean()


@pytest.mark.parametrize(
    "body",
    [
        bagged,
        shuffled,
        shuffled_by_writing,
        shuffled_with_counter,
        never_put_back,
        own_label,
        own_label_marked,
        chosen_rewritten,
    ],
    ids=lambda body: body.__name__,
)
def test_permutations_and_row_numbers(body: Body) -> None:
    LOSSES[body.__name__] = body
    test_losses(body.__name__, 4)


def contrastive(m: Any, x: Tensor, y: Tensor) -> Tensor:
    left, right = F.normalize(m.linear(x), dim=-1), F.normalize(x[:, :CLASSES], dim=-1)
    return F.cross_entropy(left @ right.t(), torch.arange(x.shape[0]))


def bags_of_others(m: Any, x: Tensor, y: Tensor) -> Tensor:
    entries = torch.cat([y.clamp(min=0), y.clamp(min=0)])
    return F.embedding_bag(entries, m.linear.weight, torch.arange(0, 2 * x.shape[0], 2)).square().mean()


def bags_by_frequency(m: Any, x: Tensor, y: Tensor) -> Tensor:
    entries = torch.stack([y.clamp(min=0), y.clamp(min=0)], 1)
    return F.embedding_bag(entries, m.linear.weight, mode="sum", scale_grad_by_freq=True).square().mean()


def written_across(m: Any, x: Tensor, y: Tensor) -> Tensor:
    table = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
    table[torch.arange(x.shape[0]), y.clamp(min=0)[:, None]] = 1.0
    return (m.linear(x) * table[:, :CLASSES]).square().mean()


def broken_permutation(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return (m.linear(x[torch.argsort(y)]) * x[:, :CLASSES]).square().mean()


def inverse_of_another(m: Any, x: Tensor, y: Tensor) -> Tensor:
    back = torch.argsort(torch.argsort(x[:, 0]))
    return (m.linear(x[torch.argsort(y)])[back] * x[:, :CLASSES]).square().mean()


def counts_as_positions(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return (m.linear(x) + torch.arange(x.shape[0]).unsqueeze(1)).square().mean()


def mean_of_positions(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.linear(x).mean() * torch.arange(x.shape[0]).double().mean()


def first_rows(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.linear(x)[torch.arange(x.shape[0]) // 2].mean()


def written_elsewhere(m: Any, x: Tensor, y: Tensor) -> Tensor:
    order = torch.argsort(y)
    back = torch.zeros(2 * x.shape[0], CLASSES, dtype=x.dtype)
    back[order] = m.linear(x[order])
    return back.square().mean()


def crossed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(m.linear(x)[:, :1], x[:, 0], reduction="sum")


def read_off(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.linear(x).square().sum() / (y >= 0).sum().item()


def running_maximum(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.average.copy_(torch.maximum(m.average, x.amax(0)))
    return m.linear(x).square().mean()


FLAWS: dict[str, tuple[Body, str]] = {
    "contrastive": (contrastive, "aten."),
    "bags_of_others": (bags_of_others, "aten.embedding_bag"),
    "bags by frequency": (bags_by_frequency, "how often the whole batch has it"),
    "max": (lambda m, x, y: m.linear(x).amax(0).sum(), "aten.amax"),
    "softmax over samples": (lambda m, x, y: m.linear(x).softmax(0).square().sum(), "aten.softmax"),
    "variance": (lambda m, x, y: m.linear(x).var(0).sum(), "aten.var"),
    "cumulative": (lambda m, x, y: m.linear(x).cumsum(0).square().sum(), "aten.cumsum"),
    "function of a mean": (lambda m, x, y: m.linear(x).mean().exp(), "aten.exp"),
    "centred by outputs' mean": (
        lambda m, x, y: (m.linear(x) - m.linear(x).mean(0)).square().mean(),
        "depends on the parameters",
    ),
    "shuffled at random": (lambda m, x, y: m.linear(x[torch.randperm(x.shape[0])]).mean(), "aten.randperm"),
    "neighbours": (lambda m, x, y: (m.linear(x).roll(1, 0) * m.linear(x)).mean(), "aten.roll"),
    "reversed": (lambda m, x, y: (m.linear(x).flip(0) * m.linear(x)).mean(), "aten.flip"),
    "rows of both halves": (
        lambda m, x, y: m.linear(torch.cat([x, -x]).reshape(-1, 2 * WIDTH)[:, :WIDTH]).mean(),
        "combines different samples",
    ),
    "samples as vectors": (
        lambda m, x, y: F.triplet_margin_loss(m.linear(x).T, x[:, :CLASSES].T, m.linear(-x).T),
        "combines different samples",
    ),
    "without a rule": (lambda m, x, y: F.rrelu(m.linear(x)).mean(), "may combine different samples"),
    "first sample": (lambda m, x, y: (m.linear(x) - m.linear(x)[0]).square().mean(), "aten.select"),
    "broken permutation": (broken_permutation, "different orders"),
    "inverse of another": (inverse_of_another, "other rows"),
    "row numbers added": (counts_as_positions, "row numbers"),
    "row numbers averaged": (mean_of_positions, "row numbers"),
    "first rows": (first_rows, "row numbers"),
    "written across": (written_across, "writes what belongs to different samples"),
    "written elsewhere": (written_elsewhere, "count other rows"),
    "every pair compared": (crossed, "compares different samples"),
    "number read off": (read_off, "number that depends on the samples"),
    "running maximum": (running_maximum, "combines different samples"),
    "chain of totals": (
        lambda m, x, y: (m.linear(x) * (x - x.mean(0)).square().mean(0).sqrt().sum()).mean(),
        "depends on another",
    ),
}


@pytest.mark.parametrize("name", FLAWS)
def test_flaws_are_named_and_not_split(name: str) -> None:
    body, part = FLAWS[name]
    program = capture(build(body), (), data(), check_eval=False)
    split = split_batch(program, RULES)
    assert part in split.flaw, split.flaw
    # op, module and line
    assert re.match(r"aten\.\w+\.\w+ in the model \(\S+test_batch\.py:\d+\) |the output in the model ", split.flaw)
    assert split.graph is program.graph and split.totals is None
    assert split.combine == {"loss": ("same", 0, 1)}


def test_flaw_names_the_module() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.amax(0)

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Mixing(), nn.Linear(4, 4)))
    split = split_batch(capture(model, (torch.randn(4, 4),), check_eval=False), RULES)
    assert "aten.amax.default in 1.0 (" in split.flaw and "combines different samples" in split.flaw


def test_notes() -> None:
    split = split_of(lambda m, x, y: F.cross_entropy(m.linear(m.norm(x)), y))
    assert not split.flaw
    assert split.notes == ("batch norm's statistics are those of each microbatch on each replica",)


def test_outputs_are_joined_along_their_batch_dim() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            blocks = y.t().reshape(-1)
            penalty = self.linear.weight.sum()
            return {"rows": y, "turned": y.t(), "blocks": blocks, "penalty": penalty, "total": y.sum(0)}

    model, given = Several().double(), {"x": torch.randn(4, 3, dtype=torch.float64)}
    program = capture(model, (), given, check_eval=False)
    split = split_batch(program, RULES)
    joined = {"rows": ("cat", 0, 1), "turned": ("cat", 1, 1), "blocks": ("cat", 0, 3)}
    assert split.combine == {**joined, "penalty": ("same", 0, 1), "total": ("sum", 0, 1)}
    whole, _ = in_shares(program, split, model, given, 4, 2)
    for name, expected in model(**given).items():
        torch.testing.assert_close(whole[name], expected)


def masked_and_repeated(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A second name, a write through a mask of samples, ``1 - mask``, pieces, and rows repeated for every sample."""
    hidden = torch.multiply(x, 1 - (x > 0).double())
    hidden = hidden.clone()
    hidden[x > 1] = 0
    prompt = torch.arange(WIDTH, dtype=torch.float64).repeat(x.size(0), 1)
    left, right = (hidden + prompt).reshape(-1, 2, WIDTH // 2).unbind(1)
    return F.cross_entropy(m.linear(torch.cat([right, left], 1)), y.clamp(min=0))


def test_ops_of_real_models_split() -> None:
    split = split_of(masked_and_repeated)
    assert not split.flaw
    program = capture(build(masked_and_repeated), (), data(), check_eval=False)
    whole, ours = in_shares(program, split_batch(program, RULES), build(masked_and_repeated), data(), BATCH, 4)
    reference = build(masked_and_repeated)
    expected = reference(**data())["loss"]
    expected.backward()
    torch.testing.assert_close(whole["loss"], expected, rtol=1e-12, atol=0)
    close(ours, gradients(reference))
