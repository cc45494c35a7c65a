"""Emitted stages: what they look like, and that they train as the plain model does."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.analysis import analyze
from autopart.passes.emit import expressions
from autopart.passes.emit.wrapping import wrapped
from autopart.precision import eager_in_float64, float64_throughout
from autopart.runtime import ParallelModule
from autopart.runtime.loading import import_file
from autopart.runtime.manifest import argument_name
from autopart.tracing import capture
from families import FAMILIES, Family, captured, family
from launch import launch
from programs import Compiled, compile_model, compile_program, tensors_of

BATCH = 8


def train(model: nn.Module, given: dict[str, Any], steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the first step's gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, first = [], {}
    for step in range(steps):
        result = model(**given)
        loss = result["loss"] if isinstance(result, dict) else result
        loss.backward()
        losses.append(loss.item())
        if not step:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def same_training(directory: Path, model: nn.Module, given: dict[str, Any], **options: Any) -> ParallelModule:
    """One process: the emitted program trains as the plain model does. Returns it."""
    compile_model(directory, model, given, **options)
    plain, original = copy.deepcopy(model), copy.deepcopy(model)
    parallel = ParallelModule(directory, tensors_of(original))
    expected, gradients = train(plain, given)
    losses, found = train(parallel, given)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    assert gradients.keys() <= found.keys() | {name for name, _ in plain.named_parameters()}
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    state = parallel.state_dict()
    assert set(state) == set(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
    return parallel


def sources(compiled: Compiled) -> list[str]:
    return [text for name, text in compiled.emitted.files.items() if name.startswith("stage_")]


@pytest.mark.parametrize("item", FAMILIES, ids=str)
def test_families_are_readable_and_deterministic(item: Family) -> None:
    def emit() -> Compiled:
        return compile_program(captured(item.name), pp=2)

    compiled, again = emit(), emit()
    assert compiled.emitted.files == again.emitted.files
    for text in sources(compiled):
        tree = ast.parse(text)
        assert ast.get_docstring(tree) and max(map(len, text.splitlines())) <= 120
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        assert names[-1] == "Stage" and len(names) == len(set(names))
        assert len(names) <= 6, names
    held = {spec.name for spec in compiled.emitted.manifest.parameters}
    assert held >= set(compiled.program.tensors)


def test_repeated_layers_are_one_class() -> None:
    compiled = compile_program(captured("gpt2"))
    (text,) = sources(compiled)
    assert re.findall(r"^class (\w+)", text, re.M) == ["TransformerH", "Stage"]
    assert "transformer.h.0 to transformer.h.3 (4 layers)" in text
    assert text.count("self.transformer.h[") >= 8  # made, then called


class Nested(nn.Module):
    """Nested inputs, one of them named like a variable of emitted code; the loss counts valid labels."""

    class_weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("class_weight", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, batch: dict[str, Any], b: Tensor, tp: Tensor) -> dict[str, Tensor]:
        logits = self.linear(batch["x"] + batch["more"][0] * b + tp)
        return {"loss": F.cross_entropy(logits, batch["labels"], weight=self.class_weight)}


def nested_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)

    def numbers() -> Tensor:
        return torch.randn(BATCH, 4, dtype=torch.float64, generator=generator)

    labels = torch.randint(3, (BATCH,), generator=generator)
    labels[[0, 1, 5]] = -100
    return {"batch": {"x": numbers(), "more": [numbers()], "labels": labels}, "b": numbers(), "tp": numbers()}


def nested_model() -> nn.Module:
    torch.manual_seed(3)
    return Nested().double()


def test_argument_names() -> None:
    paths = ["x", "batch.x", "batch_x", "batch.0", "b", "B", "class", "0", "a-b", "self", "checkpoint"]
    names = [argument_name(path) for path in paths]
    assert all(name.isidentifier() for name in names) and len(set(names)) == len(names)
    assert names[:2] == ["x", "batch__x"] and not set(names) & {"b", "B", "class", "self"}


def test_nested_inputs(tmp_path: Path) -> None:
    parallel = same_training(tmp_path, nested_model(), nested_inputs(), microbatches=4)
    assert parallel.manifest.totals_buffers == ("class_weight",)
    text = (tmp_path / "stage_0.py").read_text()
    assert "batch__more__0: Tensor" in text and "b_: Tensor" in text


class TakenNames(nn.Module):
    """Inputs by names of a program's own; a penalty takes the share of the samples, the mask a total."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, b: Tensor, total_0: Tensor, B: Tensor) -> dict[str, Tensor]:
        losses = F.cross_entropy(self.linear(b), total_0, reduction="none")
        return {"loss": (losses * B).sum() / B.sum() + self.linear.weight.square().sum()}


def test_inputs_by_names_of_the_program_s_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = {"b": torch.randn(BATCH, 4).double(), "total_0": torch.arange(BATCH) % 3, "B": torch.rand(BATCH).double()}
    parallel = same_training(tmp_path, TakenNames().double(), given, microbatches=4)
    assert parallel.manifest.stages[0].totals == ("total_1",)


def nested_in_two_stages(directory: str) -> tuple[list[float], dict[str, Tensor]]:
    parallel = ParallelModule(directory, tensors_of(nested_model()))
    losses, _ = train(parallel, nested_inputs())
    return losses, parallel.state_dict()


def test_nested_inputs_in_two_processes(tmp_path: Path) -> None:
    model = nested_model()
    compile_model(tmp_path, model, nested_inputs(), dp=2, microbatches=2)
    expected, _ = train(model, nested_inputs())
    for losses, state in launch(nested_in_two_stages, 2, str(tmp_path)):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(state[name], tensor)


class Odd(nn.Module):
    """Names that emitted classes or Python use themselves, nested lists, an unused parameter and buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = nn.Linear(4, 4)
        self.path = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.collectives = nn.Linear(4, 4)
        self.grid = nn.ModuleList(nn.ModuleList(Layer() for _ in range(2)) for _ in range(3))
        setattr(self, "class", nn.Linear(4, 4))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.ones(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = getattr(self, "class")(self.collectives(self.path(self.mesh(x))))
        for row in self.grid:
            assert isinstance(row, nn.ModuleList)
            for layer in row:
                y = layer(y)
        return {"loss": y.square().mean()}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.back = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.linear(x).chunk(2, -1)
        return x + self.back(left.tanh() * right)


def x_only(batch: int = BATCH) -> dict[str, Any]:
    return {"x": torch.randn(batch, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))}


@pytest.mark.parametrize("recompute", [False, True])
def test_odd_names_and_nested_lists(tmp_path: Path, recompute: bool) -> None:
    torch.manual_seed(0)
    same_training(tmp_path, Odd().double(), x_only(), microbatches=2, recompute=recompute)
    text = (tmp_path / "stage_0.py").read_text()
    assert text.count("class ") == 2, text
    assert "grid.0 to grid.2 (3 layers)" in text and ("checkpoint(" in text) == recompute


class Acting(nn.Module):
    def __init__(self, act: str) -> None:
        super().__init__()
        self.linear, self.back, self.act = nn.Linear(4, 8), nn.Linear(8, 4), act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(getattr(torch, self.act)(self.linear(x)))


class OddLists(nn.Module):
    """Lists of layers whose classes cannot be called as they are, and a module by a name of the runtime's."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.ModuleList(Acting("sin") for _ in range(2))
        self.none = nn.ModuleList(Acting("cos") for _ in range(2))
        self.by_size = nn.ModuleDict({"3x3-a": nn.ModuleList(Acting("tanh") for _ in range(2))})
        self.invariant = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.softmax(self.invariant(x), -1)
        for layer in (*self.f, *self.none, *self.by_size["3x3-a"]):  # type: ignore[misc]
            x = layer(x)
        return {"loss": F.mse_loss(x, torch.ones_like(x))}


def test_lists_by_names_that_no_class_may_have(tmp_path: Path) -> None:
    torch.manual_seed(0)
    same_training(tmp_path, OddLists().double(), x_only(), microbatches=2)
    text = (tmp_path / "stage_0.py").read_text()
    assert text.count("class ") == 4, text
    assert "class F_(" in text and "class None_(" in text and "class F(" not in text


class Plain(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def test_sequential(tmp_path: Path) -> None:
    torch.manual_seed(0)
    same_training(tmp_path, Plain(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(), x_only())


def test_layer_called_twice(tmp_path: Path) -> None:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=32,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = AlbertForMaskedLM(config).double().train()
    ids = torch.randint(32, (4, 8))
    given = {"input_ids": ids, "labels": ids.clone()}
    compiled = compile_model(tmp_path, model, given, microbatches=2)
    parallel = ParallelModule(tmp_path, tensors_of(copy.deepcopy(model)))
    expected, gradients = train(model, given)
    losses, found = train(parallel, given)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-9)
    assert len(compiled.program.tensors["albert.embeddings.word_embeddings.weight"].aliases) == 1


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropping() for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.whole = nn.Dropout1d(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        x = self.norm(self.whole(x.unsqueeze(1)).squeeze(1))
        return {"loss": x.square().mean() + x.abs().mean(), "x": x}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q = self.drop(self.linear(x)).unsqueeze(1)
        return x + F.scaled_dot_product_attention(q, q, q, dropout_p=0.3 if self.training else 0.0).squeeze(1)


@pytest.mark.parametrize("recompute", [False, True])
def test_random_numbers_and_evaluation(tmp_path: Path, recompute: bool) -> None:
    """In one process the same numbers are drawn as by the plain model; in evaluation none."""
    torch.manual_seed(0)
    model = Noisy().double()
    compile_model(tmp_path, model, x_only(), check_eval=True, recompute=recompute)
    parallel = ParallelModule(tmp_path, tensors_of(copy.deepcopy(model)))
    torch.manual_seed(7)
    expected, gradients = train(model, x_only())
    torch.manual_seed(7)
    losses, found = train(parallel, x_only())
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient)
    model.eval()
    parallel.eval()
    torch.testing.assert_close(parallel(**x_only())["x"], model(**x_only())["x"])
    text = (tmp_path / "stage_0.py").read_text()
    assert "F.dropout(" in text and "if self.training else 0.0" in text and "training=True" not in text


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_evaluation_of_families(tmp_path: Path, name: str) -> None:
    item = family(name, dropout=0.1)
    model, given = item.build(), item.inputs(4)
    with float64_throughout():
        compiled = compile_program(capture(model, (), given), microbatches=2)
    compiled.emitted.save(tmp_path)
    parallel = ParallelModule(tmp_path, tensors_of(item.build())).eval()
    with eager_in_float64(model.eval()), torch.no_grad():
        expected = model(**given)
    torch.testing.assert_close(parallel(**given).logits, expected.logits, rtol=1e-9, atol=1e-9)


def masks_of_ranks(directory: str) -> tuple[Tensor, list[float]]:
    torch.manual_seed(0)
    parallel = ParallelModule(directory, tensors_of(Masked().double()), outputs="all")
    result = parallel(**x_only())
    return result["mask"], [result["loss"].item()]


class Masked(nn.Module):
    """Returns which samples were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.dropout(self.linear(x), 0.5, self.training)
        return {"loss": y.square().mean(), "mask": y == 0}


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_masks_on_ranks(tmp_path: Path, axis: str) -> None:
    """Replicated values get the same mask; replicas' samples each their own."""
    options: dict[str, Any] = {"dp": 2} if axis == "dp" else {"axes": (("tp", 2),)}
    compile_model(tmp_path, Masked().double(), x_only(), **options)
    (left, loss), (right, other) = launch(masks_of_ranks, 2, str(tmp_path))
    assert torch.equal(left, right) and loss == other
    halves = left.chunk(2)
    assert 8 <= left.sum() <= 24
    assert not torch.equal(*halves)


def test_what_is_written_by_name_exists() -> None:
    assert all(hasattr(torch, name.split(".")[1]) for name in expressions._TORCH)
    assert all(hasattr(F, name.split(".")[1]) for name in expressions._FUNCTIONAL)
    assert all(hasattr(Tensor, name.split(".")[1]) for name in expressions._METHODS)


def test_wrapping() -> None:
    word = "value_with_a_long_name"
    call = f"result = torch.where({', '.join([word] * 6)}, other={word})"
    lines = wrapped([f"    {call}"])
    assert max(map(len, lines)) <= 120 and lines[0] == "    result = torch.where(" and lines[-1] == "    )"
    nested = f"return ({', '.join(f'function({word}, {word}, [{word}, {word}], {word}, {word})' for _ in range(2))})"
    added = f"x = ({' + '.join([word] * 4)}) * function({', '.join([word] * 5)})"
    quoted = f'with self._mesh.random("a (b, c", 3, over=("dp", "tp"), name="{word * 4}"):'
    for line in (call, nested, added, quoted):
        text = "\n".join(wrapped([line]))
        tail = "\n    pass" if line.startswith("with") else ""
        assert max(map(len, text.splitlines())) <= 120
        wrapper = "def f():\n" if line.startswith("return") else ""
        indented = "\n".join(f"    {part}" for part in text.splitlines()) if wrapper else text
        before = f"{wrapper}    {line}" if wrapper else line + tail
        assert ast.dump(ast.parse(before)) == ast.dump(ast.parse(f"{wrapper}{indented}{tail}"))


def test_save_keeps_other_files(tmp_path: Path) -> None:
    from autopart.runtime.errors import PlanError

    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(PlanError, match="holds other files"):
        compile_model(tmp_path, Masked().double(), x_only())
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("name", "text"), [("train.py", "years of work"), ("manifest.json", '{"name": "another program", "version": 3}')]
)
def test_other_files_beside_a_program_or_by_its_names_are_kept(tmp_path: Path, name: str, text: str) -> None:
    from autopart.runtime.errors import PlanError

    if name == "train.py":
        compile_model(tmp_path, Masked().double(), x_only())
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError, match=f"holds other files .{name}"):
        compile_model(tmp_path, Masked().double(), x_only())
    assert (tmp_path / name).read_text() == text


def test_a_folder_that_is_there_stays_and_its_program_is_replaced(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    number = folder.stat().st_ino
    compile_model(link, Masked().double(), x_only())
    first = sorted(path.name for path in folder.iterdir())
    (folder / "stage_7.py").write_text("of an earlier program")
    (folder / "__pycache__").mkdir()
    compile_model(link, Masked().double(), x_only())
    assert sorted(path.name for path in folder.iterdir()) == first
    assert link.is_symlink()
    assert folder.stat().st_ino == number


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"inner'$"):
        compile_model(tmp_path / "file" / "inner", Masked().double(), x_only())


class Level(nn.Module):
    """A list of modules inside a list of modules, with work of its own before and after."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Layer() for _ in range(2)])
        self.leave = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.leave(self.enter(x).tanh()).tanh() * x.tanh()
        for block in self.blocks:
            x = block(x)
        return x.tanh() * x.sigmoid()


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([Level(4), Level(6)])

    def forward(self, x: Tensor) -> Tensor:
        for level in self.levels:
            x = level(x)
        return x.square().mean()


def test_a_stage_may_begin_inside_nested_lists(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = capture(Levels().double(), (), x_only(), check_eval=False)
    blocks = len(analyze(program).blocks)
    assert blocks > 3
    for cut in range(1, blocks):
        compiled = compile_program(program, pp=2, boundaries=(0, cut, blocks))
        compiled.emitted.save(tmp_path / str(cut))
        for index, stage in enumerate(compiled.emitted.manifest.stages):
            with torch.device("meta"):
                module = import_file(tmp_path / str(cut) / stage.file).Stage(None)
            expected = {spec.name for spec in compiled.emitted.manifest.parameters if index in spec.stages}
            assert {name for name, _ in module.named_parameters()} == expected
