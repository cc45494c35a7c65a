"""Programs as the compiler would emit them, written by hand, with the plain models that they must equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopart.runtime.manifest import InputSpec, Manifest, OutputSpec, ParameterSpec, StageSpec, ValueSpec
from autopart.runtime.structure import flatten

WIDTH, CLASSES = 8, 4
DTYPE = "float64"


class Plain(nn.Module):
    """x, target -> {"loss", "logits"}; variants: a skip from the first to the last layer, a tied weight, dropout."""

    def __init__(self, skip: bool = False, tied: bool = False, user_loss: bool = False) -> None:
        super().__init__()
        self.skip, self.user_loss = skip, user_loss
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH if tied else CLASSES)
        if tied:
            self.third.weight = self.first.weight

    def forward(self, x: Tensor, target: Tensor) -> Any:
        a = torch.tanh(self.first(x))
        b = torch.tanh(self.second(a))
        logits = self.third(b + a if self.skip else b)
        if self.user_loss:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, target, reduction="sum") / x.shape[0], "logits": logits}


HEAD = """import torch
from torch import nn
from torch.nn import functional as F

from autopart.runtime import Namespace, collectives, parameter


class Stage(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
"""
FIRST = "a = torch.tanh(F.linear(x, self.first.weight, self.first.bias))"
SECOND = "v = torch.tanh(F.linear(a, self.second.weight, self.second.bias))"
THIRD = "logits = F.linear({}, self.third.weight, self.third.bias)"
LOSS = 'loss = F.cross_entropy(logits, target, reduction="sum") / B'


def stage_source(layers: dict[str, tuple[int, int]], arguments: str, body: list[str], returns: str) -> str:
    """A stage's file. layers: name -> (out, in)."""
    lines = [HEAD]
    for name, (out, width) in layers.items():
        lines.append(
            f"        self.{name} = Namespace(weight=parameter({out}, {width}, dtype=torch.{DTYPE}), "
            f"bias=parameter({out}, dtype=torch.{DTYPE}))\n"
        )
    lines.append(f"\n    def forward(self, *, b, B, {arguments}):\n")
    lines += [f"        {line}\n" for line in body]
    lines.append(f"        return ({returns},)\n")
    return "".join(lines)


def emit(
    directory: Path,
    cuts: int = 1,
    dp: int = 1,
    microbatches: int = 1,
    schedule: str = "1f1b",
    skip: bool = False,
    tied: bool = False,
    user_loss: bool = False,
) -> None:
    """Emits :class:`Plain` in ``cuts`` stages (1, 2 or 3), each on ``dp`` ranks."""
    assert cuts in (1, 2, 3)
    classes = WIDTH if tied else CLASSES
    sizes = {"first": (WIDTH, WIDTH), "second": (WIDTH, WIDTH), "third": (classes, WIDTH)}
    groups = {1: [["first", "second", "third"]], 2: [["first", "second"], ["third"]], 3: [[n] for n in sizes]}[cuts]
    owner = {name: index for index, names in enumerate(groups) for name in names}
    last = cuts - 1
    outputs = ("logits",) if user_loss else ("loss", "logits")
    body = {"first": FIRST, "second": SECOND, "third": THIRD.format("v + a" if skip else "v")}
    uses = {"first": [], "second": ["a"], "third": ["v", "a"] if skip else ["v"]}
    source = {"a": owner["first"], "v": owner["second"]}
    targets = {
        value: tuple(sorted({owner[n] for n in sizes if value in uses[n]} - {source[value]})) for value in source
    }
    values = tuple(ValueSpec(v, ("b", WIDTH), DTYPE, source[v], targets[v], True) for v in source if targets[v])
    stages = []
    for index, names in enumerate(groups):
        inputs = (("x",) if "first" in names else ()) + (("target",) if "third" in names and not user_loss else ())
        receives = tuple(v.name for v in values if index in v.targets)
        sends = tuple(v.name for v in values if v.source == index)
        outs = outputs if index == last else ()
        lines = [body[name] for name in names] + ([LOSS] if index == last and not user_loss else [])
        layers = {name: sizes[name] for name in names}
        text = stage_source(layers, ", ".join((*inputs, *receives)), lines, ", ".join((*sends, *outs)))
        if tied and cuts == 1:
            text = text.replace("\n    def forward", "        self.third.weight = self.first.weight\n\n    def forward")
        if tied and cuts > 1 and index == last:
            # The tied weight bears the name of its first use here as well.
            text = text.replace("weight=parameter(8, 8, dtype=torch.float64), bias", "bias")
            text = text.replace(
                "\n    def forward",
                f"        self.first = Namespace(weight=parameter(8, 8, dtype=torch.{DTYPE}))\n\n    def forward",
            ).replace("self.third.weight", "self.first.weight")
        (directory / f"stage_{index}.py").write_text(text)
        devices = tuple(range(index * dp, (index + 1) * dp))
        stages.append(StageSpec(f"stage_{index}.py", devices, (("dp", dp),), inputs, receives, (), sends, outs))
    parameters = []
    for name, (out, width) in sizes.items():
        if tied and name == "first":
            stages_of = tuple(sorted({0, last}))
            parameters.append(ParameterSpec("first.weight", (8, 8), DTYPE, stages_of, (), ("third.weight",)))
        elif not (tied and name == "third"):
            parameters.append(ParameterSpec(f"{name}.weight", (out, width), DTYPE, (owner[name],), ()))
        parameters.append(ParameterSpec(f"{name}.bias", (out,), DTYPE, (owner[name],), ()))
    example = dict.fromkeys(outputs, 0)
    output_specs = {
        "loss": OutputSpec("loss", last, "sum", (), DTYPE),
        "logits": OutputSpec("logits", last, "cat", ("b", classes), DTYPE, differentiable=user_loss),
    }
    Manifest(
        fingerprint="by hand",
        world_size=cuts * dp,
        schedule=schedule,
        microbatches=microbatches,
        stages=tuple(stages),
        values=values,
        inputs=(
            InputSpec("x", "tensor", ("b", WIDTH), DTYPE, 0),
            InputSpec("target", "tensor", ("b",), "int64", 0),
        ),
        outputs=tuple(output_specs[name] for name in outputs),
        parameters=tuple(parameters),
        parameter_order=tuple(spec.name for spec in parameters),
        input_names=("x", "target"),
        loss=None if user_loss else "loss",
        output_structure=flatten(example)[1],
    ).save(directory)


def data(batch: int = 8, classes: int = CLASSES, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs for :class:`Plain`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randint(classes, (batch,), generator=generator)


def plain(**variant: bool) -> Plain:
    """The plain model in float64, with the same weights on every rank."""
    torch.manual_seed(0)
    return Plain(**variant).double()
