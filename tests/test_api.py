"""``parallelize`` as a training script uses it, over real processes."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.runtime.errors import CaptureError, ClusterError, InputError, PlanError
from launch import ChildFailure, launch


class Regression(nn.Module):
    """Two layers and a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8}
        self.first, self.drop, self.second = nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.second(self.drop(torch.tanh(self.first(x))))
        return {"loss": nn.functional.mse_loss(output, y), "output": output}


def build() -> Regression:
    torch.manual_seed(0)
    return Regression().double()


def batch(samples: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(samples, 6, generator=generator, dtype=torch.float64),
        "y": torch.randn(samples, 3, generator=generator, dtype=torch.float64),
    }


def train(model: nn.Module, steps: int = 3) -> list[float]:
    """The optimizer is made before the first call, as an ordinary script does."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(**batch())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_parallel(limits: dict[str, Any], disagree: bool = False) -> tuple[list[float], dict[str, Tensor], Tensor]:
    model = build()
    if disagree and torch.distributed.get_rank() > 0:
        nn.init.normal_(model.first.weight)
    parallel = autopart.parallelize(model, verbose=False, **limits)
    losses = train(parallel)
    state = parallel.state_dict()
    parallel.eval()
    return losses, state, parallel(**batch())["output"]


@pytest.mark.parametrize(
    ("processes", "limits"),
    [
        (1, {}),
        (2, {"pp": 2, "microbatches": 2}),
        (2, {"dp": 2}),
        (2, {"tp": 2}),
        pytest.param(4, {}, marks=pytest.mark.slow),
    ],
)
def test_a_script_with_one_more_line(processes: int, limits: dict[str, Any]) -> None:
    plain = build()
    expected = train(plain)
    for losses, state, output in launch(in_parallel, processes, limits):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert state.keys() == plain.state_dict().keys()
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(output, plain.eval()(**batch())["output"], rtol=1e-9, atol=1e-12)


class Around(nn.Module):
    """Holds a model, and a scale of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, **given: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(**given)["loss"] * self.scale}


def around_in_parallel(limits: dict[str, Any]) -> tuple[list[float], list[str], list[str], dict[str, Tensor]]:
    around = Around(autopart.parallelize(build(), verbose=False, **limits))
    names = [name for name, _ in around.named_parameters()]
    losses = train(around)
    return losses, names, [name for name, _ in around.named_parameters()], around.state_dict()


@pytest.mark.parametrize(("processes", "limits"), [(1, {}), (2, {"dp": 2, "zero": 3}), (2, {"tp": 2})])
def test_a_module_that_holds_the_model_has_its_parameters(processes: int, limits: dict[str, Any]) -> None:
    plain = Around(build())
    expected, names = train(plain), [name for name, _ in plain.named_parameters()]
    for losses, before, after, state in launch(around_in_parallel, processes, limits):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert sorted(before) == sorted(after) == sorted(names)
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


def test_a_copy_is_one_until_it_is_planned() -> None:
    parallel = autopart.parallelize(build(), verbose=False)
    other = copy.deepcopy(parallel)
    train(parallel)
    assert train(other) == pytest.approx(train(build()), rel=1e-12)
    with pytest.raises(PlanError, match="parts in other processes"):
        copy.deepcopy(parallel)
    with pytest.raises(PlanError, match=r"cannot be pickled: save its state_dict\(\)"):
        torch.save(parallel, io.BytesIO())


def test_ranks_start_from_the_first_ranks_weights() -> None:
    expected = train(build())
    for losses, _, _ in launch(in_parallel, 2, {"dp": 2}, True):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_before_the_first_call_it_is_the_original() -> None:
    model = build()
    parallel = autopart.parallelize(model, verbose=False)
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert parallel.config == {"width": 8}
    before = {id(parameter) for parameter in parallel.parameters()}
    parallel(**batch())
    assert {id(parameter) for parameter in parallel.parameters()} == before, "the optimizer's own objects"
    with pytest.raises(AttributeError):
        parallel.first  # noqa: B018


def test_gradients_accumulate_and_scale() -> None:
    plain, parallel = build(), autopart.parallelize(build(), verbose=False)
    for model in (plain, parallel):
        for factor in (0.25, 3.0):
            (model(**batch())["loss"] * factor).backward()
    for (name, expected), (other, found) in zip(plain.named_parameters(), parallel.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)


class Ended(nn.Module):
    """Ends in modules without parameters, which are a stage of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.scores = nn.Linear(6, 3).double(), nn.GELU(), nn.LogSoftmax(-1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.nll_loss(self.scores(self.act(self.linear(x))), target)


def trained_after_planning(parallel: bool) -> tuple[list[float], list[int]]:
    """Losses with an optimizer that is made when it is known which parameters this rank has; and their sizes."""
    torch.manual_seed(0)
    model: nn.Module = Ended()
    data = {"x": batch()["x"], "target": torch.arange(8) % 3}
    if parallel:
        model = autopart.parallelize(model, verbose=False, example=data, pp=2, pins={"linear": 0, "scores": 1})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(**data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.numel() for parameter in model.parameters()]


def test_a_rank_that_trains_nothing_has_the_others_parameters_empty() -> None:
    expected, _ = trained_after_planning(False)
    (losses, sizes), (others, nothing) = launch(trained_after_planning, 2, True)
    assert losses == others == pytest.approx(expected, rel=1e-12)
    assert (sizes, nothing) == ([18, 3], [0, 0])


class Tabled(nn.Module):
    """Multiplies by a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(6, 3).double(), torch.arange(1.0, 4.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table * torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64)


def test_tensors_that_no_state_dict_holds() -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.arange(1.0, 4.0, dtype=torch.float64))
    data, target, model = batch(), torch.arange(8) % 3, Tabled()
    expected = weighted(model(data["x"]), target)
    parallel = autopart.parallelize(model, loss_fn=weighted, verbose=False)
    assert parallel(data["x"], targets=target).loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_hooks_on_parameters_see_what_is_handed_out() -> None:
    seen: list[Tensor] = []
    plain, original = build(), build()
    for model in (plain, original):
        model.first.weight.register_hook(lambda gradient: 2.0 * gradient)
        model.first.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    parallel = autopart.parallelize(original, verbose=False)
    for trained in (plain, parallel):
        for _ in range(2):
            trained(**batch())["loss"].backward()
    torch.testing.assert_close(original.first.weight.grad, plain.first.weight.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(seen[2:], seen[:2], rtol=1e-9, atol=1e-12)
    assert len(seen) == 4


def test_a_model_is_converted_before_it_is_planned() -> None:
    parallel = autopart.parallelize(build().float(), verbose=False).double()
    parallel(**batch())["loss"].backward()
    assert parallel.to("cpu") is parallel
    with pytest.raises(PlanError, match="convert the model before it is planned"):
        parallel.half()


def test_a_separate_loss() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    data, plain = batch(), make()
    parallel = autopart.parallelize(make(), loss_fn=nn.MSELoss(), verbose=False)
    result = parallel(data["x"], targets=data["y"])
    expected = nn.functional.mse_loss(plain(data["x"]), data["y"])
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    expected.backward()
    result.loss.backward()
    for one, two in zip(plain.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-9, atol=1e-12)


def users_loss(limits: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    parallel = autopart.parallelize(model, verbose=False, **limits)
    data = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = parallel(data["x"])
    # mixes samples: only the whole batch's outputs give this
    loss = (output - data["y"]).square().mean() + output.std(0).sum()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()
    return loss.item(), parallel.state_dict()


@pytest.mark.parametrize("limits", [{"dp": 2, "microbatches": 2}, {"pp": 2, "microbatches": 2}, {"tp": 2}])
def test_a_loss_that_the_script_computes_from_the_outputs(limits: dict[str, Any]) -> None:
    loss, state = users_loss({})
    for other, found in launch(users_loss, 2, limits):
        assert other == pytest.approx(loss, rel=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


class Noisy(nn.Module):
    """Computes something else in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3).double()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.linear(x * 2.0 if self.training else x)
        return {"loss": nn.functional.mse_loss(output, y)}


def test_a_model_that_branches_on_training_is_not_evaluated_silently() -> None:
    parallel = autopart.parallelize(Noisy(), verbose=False)
    parallel(**batch())["loss"].backward()
    parallel.eval()
    with pytest.raises(InputError, match="evaluation mode"):
        parallel(**batch())


def test_wrong_inputs_are_named() -> None:
    parallel = autopart.parallelize(build(), verbose=False)
    parallel(**batch())
    data = batch()
    with pytest.raises(InputError, match=r"x \[b, 5\] instead of \[b, 6\]: cannot capture module first"):
        parallel(x=data["x"][:, :5], y=data["y"])
    with pytest.raises(InputError, match="y"):
        parallel(data["x"])


def call_with(limits: dict[str, Any], samples: int = 8) -> None:
    autopart.parallelize(build(), verbose=False, **limits)(**batch(samples))


def trained_on_odd(parallel: bool) -> tuple[list[float], dict[str, Tensor]]:
    """A first batch that replicas cannot share evenly, then others."""
    model: Any = build()
    if parallel:
        model = autopart.parallelize(model, verbose=False, dp=2)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for samples in (7, 8, 7, 1, 2):
        loss = model(**batch(samples))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert not parallel or model.data_shares == (4, 3)
    return losses, model.state_dict()


def test_a_batch_that_does_not_divide() -> None:
    expected, state = trained_on_odd(False)
    for losses, found in launch(trained_on_odd, 2, True):
        assert losses == pytest.approx(expected, rel=1e-10, abs=0)
        for name, tensor in state.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
    with pytest.raises(ChildFailure, match="batch of 7 does not divide"):
        launch(call_with, 2, {"dp": 2, "meshes": "equal"}, 7)
    with pytest.raises(ChildFailure, match="batch of 1 does not divide"):
        launch(call_with, 2, {"dp": 2}, 1)


def evaluated_first(parallel: bool, samples: int) -> list[float]:
    """Losses of a first batch that is evaluated, and of batches that are trained on after that."""
    model: nn.Module = build()
    if parallel:
        model = autopart.parallelize(model, verbose=False, dp=2, microbatches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        losses = [model.eval()(**batch(samples))["loss"].item()]
    model.train()
    for size in (8, 8, 7):
        loss = model(**batch(size))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("samples", [1, 7])
def test_a_first_batch_that_is_only_evaluated_need_not_divide(samples: int) -> None:
    expected = evaluated_first(False, samples)
    for losses in launch(evaluated_first, 2, True, samples):
        assert losses == pytest.approx(expected, rel=0, abs=1e-9)


class Counting(Regression):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return super().forward(x, y) | {"rows": len(x), "numbers": x.numel(), "width": x.shape[1]}


def counted(batch_mode: Any) -> list[list[int]]:
    model = autopart.parallelize(Counting().double(), verbose=False, dp=2, outputs="all", batch=batch_mode)
    calls = [model(**batch(samples)) for samples in (8, 6)] + [model.eval()(**batch(4))]
    return [[found[name] for name in ("rows", "numbers", "width")] for found in calls]


@pytest.mark.parametrize(("mode", "times"), [("global", 1), ("local", 2)])
def test_numbers_that_go_with_the_batch_are_returned(mode: str, times: int) -> None:
    for found in launch(counted, 2, mode):
        assert found == [[samples * times, samples * times * 6, 6] for samples in (8, 6, 4)]


def test_a_cluster_of_another_size() -> None:
    with pytest.raises(ClusterError, match="4 devices, but this job has 1"):
        call_with({"cluster": "cpu:4"})


def test_a_plan_for_another_number_of_ranks(tmp_path: Any) -> None:
    program = autopart.capture(build(), (), batch())
    plan = autopart.make_plan(program, autopart.Cluster.local(8), pp=1, dp=8)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ChildFailure, match="plan is for 8 ranks, but this job has 2"):
        launch(call_with, 2, {"plan": str(tmp_path / "plan.json")})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch": "Local"}, InputError, "batch is one of 'global', 'local', not 'Local'"),
        ({"outputs": "logits"}, InputError, "outputs is one of 'loss', 'all'"),
        ({"plan": "plan.json", "tp": 2}, PlanError, "says all that tp would"),
        ({"plan": "plan.json", "cluster": "cpu:1"}, PlanError, "says all that cluster would"),
        ({"microbatch": 2}, PlanError, "no option 'microbatch': did you mean microbatches"),
        ({"example_inputs": ()}, PlanError, "no option 'example_inputs': a plan takes pp, microbatches, "),
        ({"cluster": 2, "example": batch()}, ClusterError, "cluster is a Cluster or its text"),
    ],
)
def test_what_parallelize_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        autopart.parallelize(build(), **options)


def test_a_model_without_sizes_is_refused_before_it_is_called() -> None:
    for lazy in (nn.Sequential(nn.LazyLinear(4)), nn.Sequential(nn.LazyBatchNorm1d(affine=False))):
        with pytest.raises(CaptureError, match=r"has no size yet.*before it is parallelized"):
            autopart.parallelize(lazy)


def test_local_batches_need_the_number_of_replicas() -> None:
    with pytest.raises(PlanError, match="dp="):
        call_with({"batch": "local"})


def local_batches() -> list[float]:
    parallel = autopart.parallelize(build(), verbose=False, batch="local", dp=2)
    rank, whole = torch.distributed.get_rank(), batch()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = parallel(**{name: tensor[4 * rank : 4 * rank + 4] for name, tensor in whole.items()})["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_local_batches_make_the_same_step() -> None:
    expected = train(build())
    for losses in launch(local_batches, 2):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_what_cannot_be_planned_fails_on_every_rank() -> None:
    with pytest.raises(ChildFailure) as caught:
        launch(call_with, 2, {"pp": 3})
    assert set(caught.value.failures) == {0, 1}
    assert all("pp=3" in text for text in caught.value.failures.values())


def test_emit_then_load(tmp_path: Any) -> None:
    program = autopart.capture(build(), (), batch())
    plan = autopart.make_plan(program, autopart.Cluster.local(1))
    autopart.emit(program, plan, tmp_path / "program")
    assert autopart.Plan.load(tmp_path / "program" / "plan.json") == plan
    loaded = autopart.load(tmp_path / "program")
    loaded.load_state_dict(build().state_dict())
    assert train(loaded) == pytest.approx(train(build()), rel=1e-9)
    with pytest.raises(PlanError, match=r"'first\.weight' is a parameter of the program that was not given"):
        autopart.load(tmp_path / "program", nn.Linear(6, 8).double())
    with pytest.raises(PlanError, match=r"first\.weight is torch\.float32, the plan was made for float64"):
        autopart.load(tmp_path / "program", build().float())
    with pytest.raises(InputError, match="batch is one of"):
        autopart.load(tmp_path / "program", build(), batch="replica")
    with pytest.raises(PlanError, match="other files"):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine.txt").write_text("")
        autopart.emit(program, plan, tmp_path / "full")
    with pytest.raises(PlanError, match="is no folder"):
        autopart.emit(program, plan, tmp_path / "full" / "mine.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "program"]


def test_the_original_is_untouched_by_capture() -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    model.eval()
    autopart.capture(model, (), batch())
    assert not model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_wrapped_models_are_told_to_be_unwrapped() -> None:
    model = build()
    with pytest.raises(PlanError, match=r"wrapped \(OptimizedModule\): give it model._orig_mod"):
        autopart.parallelize(torch.compile(model))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"wrapped \(DataParallel\): give it model.module"):
        autopart.parallelize(nn.DataParallel(model))
    with pytest.raises(PlanError, match="parallelized already"):
        autopart.parallelize(autopart.parallelize(model, verbose=False))
