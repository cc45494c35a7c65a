"""Normalization: equal to eager bit by bit, and what may stand in a normalized graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopart.passes.default_dtype import default_dtype
from autopart.passes.program import Program
from autopart.precision import eager_in_float64, float64_throughout
from autopart.runtime.errors import CaptureError
from autopart.tracing import capture
from families import Family, unlike_first
from programs import gradients, outputs_by_name, run_graph

BATCH = 4


def spellings(program: Program) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


def check_vocabulary(program: Program) -> None:
    """No writes, aliases, wrappers, guards, or second spellings of one meaning."""
    banned = {
        "aten.view.default", "aten._unsafe_view.default", "aten.flatten.using_ints", "aten.t.default",
        "aten.alias.default", "aten.lift_fresh_copy.default", "aten.split.Tensor", "aten.chunk.default",
        "aten.to.device", "aten.to.dtype_layout", "aten._to_copy.default", "aten.type_as.default",
        "aten.view_as.default", "aten.narrow.int", "aten.__and__.Tensor", "aten.movedim.int", "aten._conj.default",
        "aten.mH.default", "aten.adjoint.default",
    }  # fmt: skip
    for node in program.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output"), node
        if node.op != "call_function":
            continue
        assert not isinstance(node.target, torch._ops.HigherOrderOperator), node
        if isinstance(node.target, torch._ops.OpOverload):
            mutates = node.target._schema.is_mutable and "batch_norm" not in str(node.target)
            assert not mutates, node
            assert str(node.target) not in banned, node
            assert not any(word in str(node.target) for word in ("_assert", "constrain", "_guards")), node
        if node.target is torch.ops.aten.to.dtype:
            assert node.args[0].meta["val"].dtype != node.args[1], f"{node} casts to what it is"


@pytest.mark.parametrize("family", unlike_first())
def test_families_bit_by_bit(family: Family) -> None:
    """Loss and gradients equal eager's. (With several threads, products may differ in the last bit from run to run.)"""
    model, given = family.build(), family.inputs(BATCH)
    with float64_throughout():
        program = capture(model, (), given, check_eval=False)
    check_vocabulary(program)
    reference = family.build()
    with eager_in_float64(reference):
        expected = reference(**given)
    expected.loss.backward()
    found = outputs_by_name(program, run_graph(program, program.graph, model, given, BATCH))
    found["loss"].backward()
    ours, theirs = gradients(model), gradients(reference)
    assert ours.keys() == theirs.keys()
    # Eagerly mixtral's experts are a loop over experts, captured one grouped product: the sums have another order.
    tolerance = 1e-12 if family.name == "mixtral" else 0.0
    assert abs(found["loss"] - expected.loss) <= tolerance
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= tolerance, name
    torch.testing.assert_close(found["logits"], expected.logits, rtol=0, atol=tolerance)


class Writer(nn.Module):
    """Applies a function that writes into what it is given, to a value that has a gradient."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 6, dtype=torch.float64))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x * self.weight, y)


def first_column(x: Tensor, y: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


def slice_and_row(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1:3] = y[:, :2]
    x[0] += 3
    return x.sin()


def transposed(x: Tensor, y: Tensor) -> Tensor:
    x.t().add_(1)
    return x * x


def chunks(x: Tensor, y: Tensor) -> Tensor:
    left, right = x.clone().reshape(-1, 2, 3).unbind(1)[0], x[:, 3:]
    right.mul_(2)
    return torch.cat([left, x, right], 1)


def alias_then_write(x: Tensor, y: Tensor) -> Tensor:
    z = x.add_(1)
    before = z.exp()
    x.mul_(3)
    z[:, 1] += y[:, 0]
    return before + x + z


def views_of_views(x: Tensor, y: Tensor) -> Tensor:
    inner = x.view(-1, 2, 3).transpose(1, 2)[:, 1]
    inner.copy_(y[:, :2])
    outer = x.unsqueeze(0)
    outer.mul_(2)
    return inner * 2 + x[:, :2]


def filled(x: Tensor, y: Tensor) -> Tensor:
    x.masked_fill_(y > 0, 2.0)
    x[:, 2].zero_()
    x[:, 3].fill_(1.5)
    x[:, 4].fill_(y[0, 0])
    return x


def put(x: Tensor, y: Tensor) -> Tensor:
    x[torch.tensor([0, 2]), torch.tensor([1, 3])] = y[0, :2]
    x.index_put_((torch.tensor([1, 1]),), y[:2], accumulate=True)
    return x


def copied(x: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z.copy_(y[0])
    z[:, 0].copy_(y[:, 0].float())
    half = torch.empty_like(x)
    half.copy_(x)
    x.add_(1)
    half.mul_(2)
    return x * z + half


def copy_goes_its_own_way(x: Tensor, y: Tensor) -> Tensor:
    flat = x.t().reshape(-1)  # a copy: the transposed tensor cannot be viewed
    flat.add_(10)
    same = x.contiguous()  # the tensor itself
    same.mul_(2)
    moved = x.t().contiguous()  # a copy
    moved.zero_()
    literal = torch.tensor([1.0, 2.0], dtype=x.dtype)
    literal.add_(1)
    twin = x.to(x.dtype, copy=True)
    twin.zero_()
    return x + flat.sum() + literal.sum() + twin


def narrowed(x: Tensor, y: Tensor) -> Tensor:
    x.narrow(1, 2, 2).mul_(3)
    x.movedim(1, 0)[0].add_(1)
    x.swapaxes(0, 1)[5].sub_(2)
    return x


def diagonal(x: Tensor, y: Tensor) -> Tensor:
    square = x[:, :4].clone().reshape(-1, 2, 2)
    square.diagonal(dim1=1, dim2=2).fill_(7)
    x.fill_diagonal_(3)
    return square.sum((1, 2)).unsqueeze(1) * x + (x.t() @ y).fill_diagonal_(0)[:4]


def integers(x: Tensor, y: Tensor) -> Tensor:
    codes = (y > 0).long()
    first, second = codes.split(3, 1)
    first += 2
    second[second == 0] = 5
    one, *_ = codes.unbind(1)
    one.mul_(3)
    return x * codes


def activations(x: Tensor, y: Tensor) -> Tensor:
    z = torch.nn.functional.relu(x, inplace=True)
    return torch.nn.functional.silu(z * y, inplace=True).clamp_(max=1.0).sigmoid_()


def complex_pieces(x: Tensor, y: Tensor) -> Tensor:
    found, made = torch.fft.rfft(x), torch.fft.rfft(y)
    made[..., :2] = found[..., 1:3] * 2
    made[..., -1] = found[..., 0]
    made[1] *= 3
    return torch.fft.irfft(made, n=6)


def adjoints(x: Tensor, y: Tensor) -> Tensor:
    z = torch.complex(x, y)
    turned = z.mH @ z + z.adjoint() @ z.conj() + z.H @ z
    return x + torch.view_as_real(turned).sum((0, 2)) + (x.mH @ y).sum(0)


WRITES = [
    first_column, slice_and_row, transposed, chunks, alias_then_write, views_of_views, filled, put, copied,
    copy_goes_its_own_way, narrowed, diagonal, integers, activations,
    complex_pieces, adjoints,
]  # fmt: skip


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_writes(function: Callable[..., Tensor]) -> None:
    model = Writer(function)
    generator = torch.Generator().manual_seed(1)
    given = {name: torch.randn(BATCH, 6, dtype=torch.float64, generator=generator) for name in ("x", "y")}
    program = capture(model, (), given, check_eval=False)
    check_vocabulary(program)
    (found,) = run_graph(program, program.graph, model, given, BATCH)
    expected = model(**given)
    assert torch.equal(found, expected)
    seed = torch.randn(expected.shape, dtype=expected.dtype, generator=generator)
    (ours,) = torch.autograd.grad(found, [model.weight], seed)
    (theirs,) = torch.autograd.grad(expected, [model.weight], seed)
    # pieces are put together in another order, so sums of gradients may differ in the last bit
    torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=1e-15)


def refuses(function: Callable[..., Tensor], match: str) -> None:
    given = {name: torch.randn(BATCH, 6, dtype=torch.float64) for name in ("x", "y")}
    with pytest.raises(CaptureError, match=match) as raised:
        capture(Writer(function), (), given)
    assert "test_normalize.py:" in str(raised.value)


def test_writes_that_a_graph_cannot_say() -> None:
    def without_gradient(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x

    def behind_detach(x: Tensor, y: Tensor) -> Tensor:
        x.detach().mul_(2)
        return x

    def overlapping(x: Tensor, y: Tensor) -> Tensor:
        z = y.clone()
        z.unfold(1, 2, 2).mul_(2)
        return x + z

    refuses(without_gradient, "writes without gradient")
    refuses(behind_detach, "writes without gradient")
    refuses(overlapping, "written through")


def test_region_without_gradient_is_detached() -> None:
    def region(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.exp()
            table = torch.zeros_like(y)
            table[:, 0] = 2
        return x * scale + table

    test_writes(region)
    given = {name: torch.randn(BATCH, 6, dtype=torch.float64) for name in ("x", "y")}
    program = capture(Writer(region), (), given, check_eval=False)
    assert "aten.detach.default" in spellings(program)


def test_sparse_gradients_are_refused() -> None:
    tokens = torch.zeros(BATCH, 3, dtype=torch.int64)
    with pytest.raises(CaptureError, match=r"sparse=True in module 0 .* leave sparse away"):
        capture(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)), (tokens,), check_eval=False)
    with pytest.raises(CaptureError, match=r"sparse=True in module 0 .* leave sparse away"):
        capture(nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True), nn.Linear(4, 2)), (tokens,), check_eval=False)


def test_writes_of_what_is_made_without_gradient() -> None:
    def inside(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            most = x.abs().amax(-1, keepdim=True).clamp_min_(1e-3)
            most[0].mul_(2)
        return x / most

    def into_out(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.empty_like(y)
            torch.div(x, 3, out=scale)
            torch.nn.functional.normalize(y + scale, dim=-1, out=scale)
        return x * scale

    def of_another_shape(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            torch.add(x, 1, out=(row := torch.empty(0, dtype=x.dtype)))
        return x * row

    test_writes(inside)
    test_writes(into_out)
    refuses(of_another_shape, "another shape")


@pytest.mark.parametrize("normalized", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_spectral_norm(normalized: Callable[[nn.Module], nn.Module]) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(normalized(nn.Linear(6, 5)), nn.GELU(), nn.Linear(5, 1)).double()

    model, reference, x = made(), made(), torch.randn(BATCH, 6, dtype=torch.float64)
    program = capture(model, (x,), check_eval=False)
    check_vocabulary(program)
    (found, *_) = run_graph(program, program.graph, model, {"input": x}, BATCH)
    expected = reference(x)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    found.sum().backward()
    expected.sum().backward()
    theirs = gradients(reference)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-12, atol=1e-14)


def test_disabled_autocast_is_inlined() -> None:
    def disabled(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x * y + 1

    test_writes(disabled)


def test_sizes_are_expressions_in_the_batch_size() -> None:
    def sizes(x: Tensor, y: Tensor) -> Tensor:
        flat = x.view(-1, 3) * y.size(0)
        return flat.expand(2, -1, 3).unflatten(1, (x.shape[0], 2)).flatten(2)

    given = {name: torch.randn(BATCH, 6, dtype=torch.float64) for name in ("x", "y")}
    model = Writer(sizes)
    program = capture(model, (), given, check_eval=False)
    check_vocabulary(program)
    assert not any("sym_size" in name for name in spellings(program))
    for batch in (2, 5):
        other = {name: torch.randn(batch, 6, dtype=torch.float64) for name in ("x", "y")}
        assert torch.equal(run_graph(program, program.graph, model, other, batch)[0], model(**other))


def test_custom_and_unusual_ops_stay() -> None:
    def unusual(x: Tensor, y: Tensor) -> Tensor:
        return torch.special.bessel_j0(x) + torch.cdist(x, y).sum(1, keepdim=True)

    test_writes(unusual)


def test_modules_and_lines_are_kept() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    program = capture(model, (torch.randn(2, 4),), check_eval=False)
    paths = [node.meta["path"] for node in program.graph.nodes if node.op == "call_function"]
    assert paths == ["0", "1.0", "1.1"]
    assert all(":" in node.meta["source"] for node in program.graph.nodes if node.op == "call_function")


class Spellings(nn.Module):
    """Second names of ops, and a write through a mask."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.multiply(x, 2).clip(-1, 1).subtract(torch.concat([y, y], 1)[:, :6].absolute()).negative()
        z = z.divide(3).where(torch.greater(x, 0), x)
        masked = z.clone()
        masked[z > 0.5] = 0.25
        rows = z.clone()
        rows[z[:, 0] > 0] = -1
        added = z.index_put([z > 0], torch.tensor(1.0, dtype=z.dtype), accumulate=True)
        return masked + rows.sin() + added


def test_second_names_and_masked_writes_have_one_spelling() -> None:
    given = {"x": torch.randn(4, 6, dtype=torch.float64), "y": torch.randn(4, 6, dtype=torch.float64)}
    program = capture(Spellings(), (), given, check_eval=False)
    check_vocabulary(program)
    found = outputs_by_name(program, run_graph(program, program.graph, Spellings(), given, 4))
    assert torch.equal(next(iter(found.values())), Spellings()(**given))
    names = spellings(program)
    assert not names & {"aten.multiply.Tensor", "aten.clip.default", "aten.subtract.Tensor", "aten.concat.default"}
    assert "aten.where.self" in names
    # Only the write that adds is left one.
    assert [str(node.target) for node in program.graph.nodes].count("aten.index_put.default") == 1


class Squeezes(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        last = x[:, :1].squeeze() + y[:, :1].squeeze(0).squeeze(-1)
        return last.unsqueeze(0).unsqueeze(2).squeeze((0, 2)).squeeze(0) * 2


def test_squeezes_keep_a_batch_of_one() -> None:
    """What the model's own code would lose in a microbatch of one sample."""
    given = {"x": torch.randn(4, 6, dtype=torch.float64), "y": torch.randn(4, 6, dtype=torch.float64)}
    program = capture(Squeezes(), (), given, check_eval=False)
    assert not {"aten.squeeze.default", "aten.squeeze.dim"} & spellings(program)
    (expected,) = outputs_by_name(program, run_graph(program, program.graph, Squeezes(), given, 4)).values()
    assert torch.equal(expected, Squeezes()(**given))
    one = {name: value[:1] for name, value in given.items()}
    (found,) = outputs_by_name(program, run_graph(program, program.graph, Squeezes(), one, 1)).values()
    assert torch.equal(found, expected[:1])


class WholeNumbers(nn.Module):
    """Results that are of torch's default type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        kept = (1.0 - mask) * torch.finfo(self.layer.weight.dtype).min
        ramp = torch.arange(4, device=x.device) / 3 + torch.where(mask > 0, 0.1, 0.2) + torch.full((), 0.3)
        return torch.softmax(self.layer(x) + kept, -1) * ramp


def test_another_default_type_is_written_out() -> None:
    model = WholeNumbers().double()
    inputs = (torch.randn(3, 4, dtype=torch.float64), torch.tensor([[1, 1, 0, 1]]).repeat(3, 1))
    with default_dtype(torch.float64):
        expected = model(*inputs)
        program = capture(model, inputs, check_eval=False)
    assert torch.get_default_dtype() is torch.float32 and bool(expected.isfinite().all())
    found = run_graph(program, program.graph, model, dict(zip(("x", "mask"), inputs, strict=True)), 3)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Drawn(nn.Module):
    """Noise in a tensor of its own, as scripts draw it."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return (hidden * self.draw(hidden)).sum()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.empty_like(x).normal_(),
        lambda x: x.new_empty((x.shape[0], 1)).normal_(1.0, 0.5),
        lambda x: x.new_empty((x.shape[0], 1)).bernoulli_(0.9),
        lambda x: torch.empty_like(x).uniform_(0.5, 1.5),
    ],
)
def test_numbers_are_drawn_into_new_tensors(draw: Callable[[Tensor], Tensor]) -> None:
    model, x = Drawn(draw), torch.randn(BATCH, 4)
    program = capture(model, (x,), check_eval=False)
    torch.manual_seed(0)
    plain = model(x)
    torch.manual_seed(0)
    assert torch.equal(run_graph(program, program.graph, model, {"x": x}, BATCH)[0], plain)


class Moved(nn.Module):
    """A bilinear form of what lies otherwise in memory than exported, so that its value is found anew."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(4, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = x.transpose(0, 1).contiguous().transpose(0, 1) * 2
        return self.form(turned, x).square().mean()


def test_a_bilinear_form_of_a_symbolic_batch() -> None:
    model, x = Moved(), torch.randn(BATCH, 5, 4)
    program = capture(model, (x,), check_eval=False)
    assert program.static_batch == ""
    assert torch.equal(run_graph(program, program.graph, model, {"x": x}, BATCH)[0], model(x))
