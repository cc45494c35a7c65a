"""What a user meets: errors that name the cause, evaluation, failures that end the job, and light imports."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import autopart
from autopart.runtime import Namespace, ParallelModule, buffer, parameter
from autopart.runtime.errors import ClusterError, InputError, PlanError
from autopart.runtime.manifest import InputSpec, Manifest
from autopart.runtime.structure import flatten, rebuild
from emitted import WIDTH, data, emit, plain
from launch import ChildFailure, launch


def model_in(directory: Path, **options: Any) -> ParallelModule:
    return ParallelModule(directory, dict(plain().named_parameters()), **options)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((), {}, InputError, "'x' is missing; expected is a tensor float64.*single calls"),
        (data(), {"mask": torch.ones(2)}, InputError, "'mask' .a tensor torch.float32"),
        ((*data(), 3), {}, InputError, "3 positional inputs"),
        (data(), {"x": torch.ones(2)}, InputError, "'x' is given twice"),
        ((data()[0][:0], data()[1][:0]), {}, InputError, r"\[0, 8\]; expected is \[b, 8\]; it has no samples"),
        ((data()[0][:, :5], data()[1]), {}, InputError, r"'x' has the shape \[8, 5\]; expected is \[b, 8\]"),
        (
            (data()[0][:4], data()[1]),
            {},
            InputError,
            r"'target' .* \[8\]; expected is \[b\] with b = 4.*batch_dims",
        ),
        ((data()[0].float(), data()[1]), {}, InputError, "'x' has the dtype torch.float32; expected is torch.float64"),
        ((data()[0].clone().requires_grad_(), data()[1]), {}, InputError, "detach it"),
        (([1.0], data()[1]), {}, InputError, r"'x.0' \(1.0\) was not there"),
    ],
)
def test_wrong_inputs(tmp_path: Path, arguments: Any, keywords: Any, error: type, message: str) -> None:
    emit(tmp_path, microbatches=4)
    with pytest.raises(error, match=message):
        model_in(tmp_path)(*arguments, **keywords)


def test_constants_have_to_stay(tmp_path: Path) -> None:
    emit(tmp_path)
    manifest = Manifest.load(tmp_path)
    constants = (InputSpec("flag", "constant", constant=True), InputSpec("cache", "constant", constant=None))
    dataclasses.replace(manifest, inputs=(*manifest.inputs, *constants)).save(tmp_path)
    model = model_in(tmp_path)
    model(*data(), flag=True, cache=None)
    model(*data(), flag=True)
    for wrong in ({"flag": False}, {"flag": 1}, {}, {"flag": True, "cache": 3}):
        with pytest.raises(InputError, match="when the model was captured and is now"):
            model(*data(), **wrong)
    with pytest.raises(InputError, match=r"'cache' is a numpy.ndarray, .*torch.from_numpy"):
        model(*data(), flag=True, cache=np.arange(8))


def test_numbers_that_change_are_told_to_be_tensors(tmp_path: Path) -> None:
    emit(tmp_path)
    manifest = Manifest.load(tmp_path)
    constants = (InputSpec("scale", "constant", constant=0.5), InputSpec("file", "constant", constant="a.png"))
    dataclasses.replace(manifest, inputs=(*manifest.inputs, *constants)).save(tmp_path)
    model = model_in(tmp_path)
    model(*data(), scale=np.float64(0.5), file="a.png")
    with pytest.raises(InputError, match=r"'scale' was 0.5 .* is now 0.25; .* as a tensor, torch.tensor"):
        model(*data(), scale=0.25, file="a.png")
    with pytest.raises(InputError, match=r"'file' was 'a.png' .* is now 'b.png'; .* leave out what forward does not"):
        model(*data(), scale=0.5, file="b.png")


def test_a_job_of_another_size(tmp_path: Path) -> None:
    emit(tmp_path, 2, 2)
    with pytest.raises(ClusterError, match=r"plan is for 4 ranks, but this job has 1.*--nproc-per-node=4.*again for 1"):
        model_in(tmp_path)


def test_files_that_contradict(tmp_path: Path) -> None:
    emit(tmp_path)
    originals = dict(plain().named_parameters())
    originals["first.weight"] = torch.nn.Parameter(torch.zeros(3, 3).double())
    with pytest.raises(PlanError, match=r"first.weight has the shape \[3, 3\], the plan was made for \[8, 8\]"):
        ParallelModule(tmp_path, originals)
    file = tmp_path / "stage_0.py"
    text = file.read_text()
    file.write_text(text.replace("(loss, logits,)", "(loss,)"))
    with pytest.raises(PlanError, match="tuple of 0 values to send"):
        model_in(tmp_path)(*data())
    file.write_text(text.replace("self.second", "self.zweite"))
    with pytest.raises(PlanError, match=r"'zweite.weight' that the manifest lacks"):
        model_in(tmp_path)
    file.unlink()
    with pytest.raises(PlanError, match="is missing; emit"):
        model_in(tmp_path)


def test_training_returns_the_loss_or_everything(tmp_path: Path) -> None:
    emit(tmp_path, microbatches=2)
    expected = plain()(*data())
    out = model_in(tmp_path)(*data())
    assert out["logits"] is None and out["loss"].requires_grad
    out = model_in(tmp_path, outputs="all")(*data())
    torch.testing.assert_close(out, expected)
    assert not out["logits"].requires_grad


def test_backward_scales_accumulates_and_runs_once(tmp_path: Path) -> None:
    emit(tmp_path, microbatches=2)
    model, reference = model_in(tmp_path), plain()
    for factor in (3.0, -0.5):
        (factor * model(*data())["loss"]).backward()
        (factor * reference(*data())["loss"]).backward()
    for name, parameter_ in reference.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, parameter_.grad)
    loss = model(*data())["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(InputError, match="handed out already"):
        loss.backward()


def test_frozen_parameters_get_no_gradient(tmp_path: Path) -> None:
    emit(tmp_path, microbatches=2)
    original = plain()
    original.first.requires_grad_(False)
    model = ParallelModule(tmp_path, dict(original.named_parameters()))
    model(*data())["loss"].backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} == {"first.weight", "first.bias"}


def test_what_was_frozen_when_captured_cannot_be_trained() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).requires_grad_(True)
    model[0].requires_grad_(False)
    parallel, x = autopart.parallelize(model, verbose=False), torch.randn(8, 4)
    parallel(x).sum().backward()
    model[0].requires_grad_(True)
    with pytest.raises(
        InputError, match=r"'0\.weight' requires a gradient, but was frozen when the model was captured"
    ):
        parallel(x).sum().backward()
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    parallel(x).sum().backward()


def test_a_norm_without_statistics_is_evaluated_by_those_of_the_batch() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, track_running_stats=False))
    parallel, x = autopart.parallelize(model, verbose=False), torch.randn(8, 4)
    expected = model(x)
    torch.testing.assert_close(parallel(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(parallel.eval()(x), expected)


def _evaluate(directory: str, sizes: list[int]) -> None:
    model, reference = model_in(Path(directory)).eval(), plain().eval()
    for size in sizes:
        out = model(*data(size))
        torch.testing.assert_close(out, reference(*data(size)))
        assert not out["loss"].requires_grad
    model.train()
    with torch.no_grad():
        torch.testing.assert_close(model(*data()), reference(*data()))


def test_evaluation_takes_any_batch(tmp_path: Path) -> None:
    emit(tmp_path, 2, 2, 4)
    launch(_evaluate, 4, str(tmp_path), [16, 12, 10, 7, 1])


def _reload(directory: str) -> None:
    reference = plain(tied=True)
    model = ParallelModule(directory)
    assert all(not p.any() for p in model.parameters())
    model.load_state_dict(reference.state_dict())
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    state = reference.state_dict()
    del state["third.weight"]
    model.load_state_dict(state)
    del state["first.weight"]
    with pytest.raises(InputError, match=r"missing \['first.weight'\]"):
        model.load_state_dict(state)
    missing, unexpected = model.load_state_dict({"x": torch.ones(1)}, strict=False)
    assert "first.weight" in missing and unexpected == ["x"]


def test_state_goes_in_and_out(tmp_path: Path) -> None:
    emit(tmp_path, 2, tied=True)
    launch(_reload, 2, str(tmp_path))


def _step(directory: str) -> None:
    model_in(Path(directory))(*data())


def test_a_wrong_value_on_its_way_is_named(tmp_path: Path) -> None:
    emit(tmp_path, 2)
    file = tmp_path / "stage_0.py"
    file.write_text(file.read_text().replace("return (v,)", "return (v[:, :3],)"))
    with pytest.raises(ChildFailure) as failure:
        launch(_step, 2, str(tmp_path), timeout=120)
    assert f"stage 0 sends 'v' as torch.float64 [8, 3], the manifest says float64 [8, {WIDTH}]" in str(failure.value)


SCRIPT = """
import sys
import torch
from autopart.runtime import ParallelModule

model = ParallelModule(sys.argv[1])
x = torch.zeros(8, 8, dtype=torch.float64)
for _ in range(2):
    loss = model(x, torch.zeros(8, dtype=torch.int64))["loss"]
    loss.backward()
sys.stdout.write(f"done {loss.item() > 0}\\n")  # as one piece: two ranks write to one pipe
"""


def torchrun(directory: Path, processes: int) -> tuple[int, str]:
    """Return code and output of a job under torchrun, which has to end within two minutes; a hang lasts longer."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
            *(str(script), str(directory)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.mark.slow  # the test below starts torchrun as well
def test_torchrun(tmp_path: Path) -> None:
    emit(tmp_path, 2, microbatches=2)
    code, output = torchrun(tmp_path, 2)
    assert code == 0 and output.count("done True") == 2, output


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_rank_that_fails_ends_the_job(ranks: int, tmp_path: Path) -> None:
    """The second of them: the last, or one that others wait for on both sides."""
    emit(tmp_path, ranks, microbatches=4)
    file = tmp_path / "stage_1.py"
    head, made, body = file.read_text().rpartition("        return ")
    file.write_text(f"{head}        1 / 0  # boom\n{made}{body}")
    code, output = torchrun(tmp_path, ranks)
    assert code != 0
    assert "rank 1 (stage 1) failed: Traceback" in output and "1 / 0  # boom" in output and "stage_1.py" in output


def test_imports_are_light() -> None:
    code = (
        "import pkgutil, sys, importlib, autopart.runtime as r\n"
        "names = [m.name for m in pkgutil.iter_modules(r.__path__)]\n"
        "assert 'executor' in names, names\n"
        "for name in names: importlib.import_module('autopart.runtime.' + name)\n"
        "heavy = {'ortools', 'networkx', 'tabulate', 'transformers', 'autopart.passes'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    # torch imports networkx itself where it is installed, for its compiler; without it installed that must not matter.
    block = "import sys\nfor n in ('ortools', 'networkx', 'tabulate', 'transformers'): sys.modules[n] = None\n"
    check = code.replace("& set(sys.modules)", "& {n for n, m in sys.modules.items() if m is not None}")
    subprocess.run([sys.executable, "-c", block + check], check=True)


Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any = None


class Output(OrderedDict[str, Any]):
    pass


def test_structures_come_back() -> None:
    value = {
        "a": [1, (2, None)],
        "b": Point(3, {"c": 4}),
        5: Pair(6),
        "o": Output(z=7),
        "empty": [],
    }
    leaves, structure = flatten(value)
    assert leaves == {"a.0": 1, "a.1.0": 2, "b.x": 3, "b.y.c": 4, "5.left": 6, "o.z": 7}
    import json

    again = rebuild(json.loads(json.dumps(structure)), leaves)
    assert again == value and type(again["o"]) is Output and type(again["b"]) is Point
    assert rebuild(structure, {})["a"] == [None, (None, None)]
    assert flatten(3)[0] == {"output": 3} and rebuild(flatten(3)[1], {"output": 4}) == 4


def test_model_outputs_come_back() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutputWithPast(loss=torch.ones(()), logits=torch.ones(2))
    leaves, structure = flatten(value)
    again = rebuild(structure, {"loss": leaves["loss"]})
    assert type(again) is type(value) and again.loss is value.loss and again.logits is None


def test_named_tuples_that_forward_makes() -> None:
    """One of which another object of its module has the name, too."""

    class Local(NamedTuple):
        early: int
        late: list[int]

    Features = namedtuple("Features", ["early", "late"])
    Other = namedtuple("Output", ["early", "late"])  # type: ignore[name-match]
    for value in (Local(1, [2]), Features(1, [2]), Other(1, [2])):
        leaves, structure = flatten(value)
        again = rebuild(structure, leaves)
        assert again == value and (again.early, again._fields) == (1, ("early", "late"))
        assert type(again) is type(rebuild(structure, leaves)) and type(again).__name__ == type(value).__name__


def test_a_class_that_cannot_be_imported() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(PlanError, match="cannot be imported here"):
        rebuild(flatten(Local(1))[1], {})


def test_namespaces_keep_names() -> None:
    root: Any = Namespace(h=Namespace())
    root.h["0"] = Namespace(weight=parameter(2, 3), type=Namespace(bias=parameter(2, trainable=False)))
    root.h["0"]["mean"] = buffer(2)
    root.h["0"]["positions"] = buffer(4, dtype=torch.int64, persistent=False)
    assert [n for n, _ in root.named_parameters()] == ["h.0.weight", "h.0.type.bias"]
    assert [n for n, _ in root.named_buffers()] == ["h.0.mean", "h.0.positions"]
    assert "h.0.positions" not in root.state_dict() and "h.0.mean" in root.state_dict()
    assert root.h["0"]["type"].bias.is_meta and not root.h["0"]["type"].bias.requires_grad
    assert "0" in root.h and "1" not in root.h
    with pytest.raises(KeyError, match="no member '1'; it has"):
        root.h["1"]


def _statistics(directory: str) -> tuple[Any, Any]:
    mean = torch.zeros(WIDTH, dtype=torch.float64)
    model = ParallelModule(directory, {**dict(plain().named_parameters()), "mean": mean})
    model(*data())["loss"].backward()
    trained = dict(model.named_buffers())["mean"].clone()
    model.eval()
    return trained, model.state_dict()["mean"]


def test_running_statistics_are_averaged_over_replicas(tmp_path: Path) -> None:
    from autopart.runtime.manifest import ParameterSpec

    emit(tmp_path, 1, 2)
    file = tmp_path / "stage_0.py"
    text = file.read_text().replace("import Namespace", "import Namespace, buffer")
    text = text.replace(
        "\n    def forward", '        self.register_buffer("mean", buffer(8, dtype=torch.float64))\n\n    def forward'
    ).replace("        a =", "        self.mean.mul_(0.5).add_(0.5 * x.mean(0))\n        a =")
    file.write_text(text)
    manifest = Manifest.load(tmp_path)
    mean = ParameterSpec("mean", (WIDTH,), "float64", (0,), (), buffer=True, mutated=True)
    dataclasses.replace(manifest, parameters=(*manifest.parameters, mean)).save(tmp_path)
    for trained, gathered in launch(_statistics, 2, str(tmp_path)):
        torch.testing.assert_close(trained, 0.5 * data()[0].mean(0))
        assert torch.equal(trained, gathered)
