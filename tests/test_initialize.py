"""Models on meta that get their initial values shard by shard: those of a model built in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.precision import eager_in_float64, float64_throughout
from autopart.replay import values
from autopart.runtime.errors import InputError, PlanError
from autopart.verify.live_bytes import LiveBytes
from families import family
from launch import launch

STEPS = 3
ROWS = torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4) - 12


class Mixed(nn.Module):
    """Modules of torch with initializers of several kinds, and weights that the constructor makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16, padding_idx=0)
        self.position = nn.Parameter(torch.randn(12, 16) * 0.1)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 24, bias=False)
        nn.init.trunc_normal_(self.head.weight, std=1.0)
        self.head.weight.data.mul_(0.1)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(self.embedding(ids) + self.position)
        logits: Tensor = self.head(self.norm(self.conv(x.transpose(1, 2)).transpose(1, 2)) * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def built(name: str) -> nn.Module:
    """From the seed 0, in float64, without touching the random state around."""
    if name == "mixed":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Mixed().double()
    return family(name).build()


def batch_of(name: str) -> dict[str, Tensor]:
    if name == "mixed":
        return {"ids": torch.randint(24, (8, 12), generator=torch.Generator().manual_seed(1))}
    return family(name).inputs(8)


def trained(model: nn.Module, name: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        found = model(**batch_of(name))
        loss = found if isinstance(found, Tensor) else found["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def from_meta(name: str, limits: dict[str, Any]) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor], int, int]:
    """Initial weights, losses, weights after training; the most bytes held while weights were made, and those kept."""
    with autopart.parameters_on_meta():
        model = built(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    parallel: Any = autopart.parallelize(model, verbose=False, **limits)
    fill, most = parallel._callbacks.pop(), []

    def counted() -> None:
        with LiveBytes([*parallel.parameters(), *parallel.buffers()]) as live:
            fill()
        most.append(live.most)

    parallel.when_started(counted)
    with float64_throughout():
        parallel.start((), batch_of(name))
    held = sum(parameter.nbytes for parameter in parallel.parameters())
    initial = copy.deepcopy(parallel.state_dict())
    return initial, trained(parallel, name), parallel.state_dict(), most[0], held


# Where two stages are asked for: of models as small as these the fastest cut may leave one with little.
STAGES = {
    "llama-1": {"model.layers.0.self_attn": 0, "model.layers.0.mlp": 1},
    "gpt2-1": {"transformer.h.0.attn": 0, "transformer.h.0.mlp": 1},
    "mixed": {"encoder": 0, "conv": 1},
}
PLANS: list[dict[str, Any]] = [{"pp": 2}, {"tp": 2, "tensor_scheme": "1d"}, {"dp": 2, "zero": 3}]


ONE = [("llama-1", PLANS[0]), ("gpt2-1", PLANS[1]), ("mixed", PLANS[2])]
OTHERS = [(name, plan) for name in ("llama-1", "gpt2-1", "mixed") for plan in PLANS if (name, plan) not in ONE]


@pytest.mark.parametrize(
    ("name", "limits"), [*ONE, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)], ids=str
)
def test_each_rank_makes_its_share_of_what_one_process_draws(name: str, limits: dict[str, Any]) -> None:
    plain = built(name)
    expected = copy.deepcopy(plain.state_dict())
    with eager_in_float64(plain):
        losses = trained(plain, name)
    sizes = [parameter.nbytes for parameter in plain.parameters()]
    pins = {"pins": STAGES[name]} if "pp" in limits else {}
    for initial, found, after, most, held in launch(from_meta, 2, name, {**limits, **pins}):
        assert initial.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(initial[key], tensor), key
            torch.testing.assert_close(after[key], plain.state_dict()[key], rtol=1e-9, atol=1e-9)
        assert found == pytest.approx(losses, rel=1e-9)
        assert held <= 0.75 * sum(sizes)
        # one whole parameter at a time, and its copy of another type; trunc_normal_ has a mask and draws again
        assert most <= (4 if name == "mixed" else 2) * max(sizes)


class Own(nn.Module):
    """What constructors may do: seed, restore, read values, tie, copy, write parts, convert, register later."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.empty(17, 5))
        self.first, self.second = shared, shared
        nn.init.orthogonal_(shared)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.layers.append(copy.deepcopy(self.layers[0]))
        self.sparse = nn.Linear(5, 5)
        nn.init.sparse_(self.sparse.weight, 0.4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.seeded = nn.Parameter(torch.empty(33))
            self.seeded.data.uniform_()
        self.after = nn.Linear(4, 4)
        torch.manual_seed(7)
        self.again = nn.Linear(4, 4)
        torch.manual_seed(7)
        self.alike = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.register_buffer("average", self.after.weight.detach().clone())
        self.register_buffer("noise", torch.randn(4))
        self.spectral = nn.utils.spectral_norm(nn.Linear(63, 52))
        self.turned = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3))
        with torch.no_grad():
            self.after.weight[1] = self.after.weight[0] * 2
            if self.after.bias.sum() > 0:
                self.after.bias.neg_()
        self.narrow = nn.Linear(3, 3).to(torch.bfloat16)
        self.listed = nn.ParameterList([torch.rand(3), torch.tensor([1.0, 2.0])])


def test_what_constructors_do_is_done_again() -> None:
    torch.manual_seed(3)
    expected = Own()
    torch.manual_seed(3)
    with autopart.parameters_on_meta():
        model = Own()
    assert model.first is model.second
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    known = dict([*expected.named_parameters(remove_duplicate=False), *expected.named_buffers()])
    assert {name for name, _ in found} == known.keys()
    for name, tensor in found:
        assert torch.equal(values(tensor) if tensor.is_meta else tensor, known[name]), name
    # converted outside of the recording
    model.double()
    assert torch.equal(values(model.after.weight), known["after.weight"].double())


def test_the_generator_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with autopart.parameters_on_meta():
        nn.Linear(4, 4)
    assert torch.equal(torch.get_rng_state(), before) and torch.initial_seed() == 3


def test_modules_on_meta_have_their_own_initializers() -> None:
    """Alike where constructors draw in the order of the modules; running statistics and rotary frequencies too."""

    def plain() -> nn.Module:
        parts = [
            nn.Linear(3, 40),
            nn.LSTM(40, 8, 2),
            nn.MultiheadAttention(8, 2),
            nn.BatchNorm1d(3),
            nn.Conv2d(3, 4, 3),
        ]
        return nn.Sequential(*parts, nn.Embedding(5, 4, padding_idx=1), nn.GRU(3, 4), nn.LayerNorm(4))

    torch.manual_seed(3)
    expected = plain()
    torch.manual_seed(3)
    with torch.device("meta"):
        model = plain()
    with pytest.warns(UserWarning, match="not built under autopart.parameters_on_meta"):
        autopart.parallelize(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert torch.equal(values(tensor), expected.state_dict()[name]), name


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.scale).sum()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bare = Bare()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.bare(x)
        return found


@pytest.mark.parametrize("place", [autopart.parameters_on_meta, lambda: torch.device("meta")])
def test_a_module_without_initializer_is_named(place: Callable[[], Any]) -> None:
    def start(module: nn.Module) -> None:
        if isinstance(module, Bare):
            nn.init.normal_(module.scale)

    torch.manual_seed(3)
    with place():
        model = Outer()
    with pytest.raises(PlanError, match=r"nothing says how bare\.scale start \(in bare: Bare\).*init=function"):
        autopart.parallelize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel: Any = autopart.parallelize(model, init=start, example=[torch.ones(2, 4)], verbose=False)
    torch.manual_seed(3)
    expected = Outer().apply(start)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(parallel.state_dict()[name], tensor), name
    with pytest.raises(PlanError, match=r"has its values: call model\.apply"):
        autopart.parallelize(expected, init=start)


def test_values_for_parameters_without_memory_are_refused() -> None:
    with autopart.parameters_on_meta():
        model = nn.Linear(4, 4)
    state = nn.Linear(4, 4).state_dict()
    parallel: Any = autopart.parallelize(model, loss_fn=nn.MSELoss(), verbose=False)
    with pytest.raises(PlanError, match=r"the model is on meta.*assign=True"):
        parallel.load_state_dict(state)
    parallel.load_state_dict(state, assign=True)
    parallel(torch.ones(2, 4), targets=torch.ones(2, 4))
    for name, tensor in state.items():
        assert torch.equal(parallel.state_dict()[name], tensor), name


def test_without_initial_values_there_are_zeros() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Bare())
    parallel: Any = autopart.parallelize(model, init=False, example=[torch.ones(2, 4)], verbose=False)
    assert not any(tensor.any() for tensor in parallel.state_dict().values())


def test_a_generator_of_its_own_is_refused() -> None:
    with autopart.parameters_on_meta():
        model = nn.Linear(2, 2)
        nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(1))
    example = {"input": torch.ones(2, 2), "targets": torch.ones(2, 2)}
    with pytest.raises(InputError, match=r"normal_ draws from a generator of its own.*weights=folder"):
        autopart.parallelize(model, loss_fn=nn.MSELoss(), example=example, verbose=False)


class Uneven(nn.Module):
    """``torch.Tensor(size)`` makes a parameter with values beside those on meta; NumPy's numbers say where it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.token = nn.Parameter(torch.Tensor(4).uniform_())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).clone()
        hidden[torch.tensor(np.arange(3) > 1, device=hidden.device).expand(len(x), 3)] = self.token
        found: Tensor = self.second(torch.where(hidden > 0, hidden, self.token)).square().mean()
        return found


def trained_on_rows(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = model(ROWS + step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def from_partly_meta() -> list[float]:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = Uneven().double()
    assert model.first.weight.is_meta and not model.token.is_meta
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel: Any = autopart.parallelize(model, example=[ROWS], pp=2, verbose=False)
    return trained_on_rows(parallel)


def test_single_parameters_beside_those_on_meta_keep_their_values() -> None:
    model = Uneven().double()
    torch.manual_seed(3)
    with torch.device("meta"):
        token = Uneven().token
    # what is on meta starts as its modules make it, in their order, from the random state at that time
    for layer in (model.first, model.second):
        layer.reset_parameters()
    model.token.data.copy_(token)
    expected = trained_on_rows(model)
    for found in launch(from_partly_meta, 2):
        assert found == pytest.approx(expected, rel=1e-12)
