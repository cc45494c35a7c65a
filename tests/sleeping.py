"""An emitted program, written by hand, whose stages sleep for known times: they overlap even on one core."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopart.runtime.manifest import InputSpec, Manifest, OutputSpec, ParameterSpec, StageSpec, ValueSpec
from autopart.runtime.structure import flatten
from autopart.simulate import StageTimes

STAGE = """import time

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

from autopart.runtime import parameter


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


def sleep(x, forward_s, backward_s):
    # Seen by who intercepts torch's functions, as its own ops are: of a weight, the backward belongs to W.
    if has_torch_function((x,)):
        return handle_torch_function(sleep, (x,), x, forward_s, backward_s)
    return Sleep.apply(x, forward_s, backward_s)


class Stage(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.scale{index} = parameter(1, dtype=torch.float64)

    def forward(self, *, b, B, {argument}):
        scale = sleep(self.scale{index}, 0.0, {weight_s})
        y = sleep({argument} * scale, {forward_s}, {input_s})
        return ({result},)
"""


def emit_sleeping(
    directory: Path,
    times: Sequence[StageTimes],
    microbatches: int,
    schedule: str,
    warmup: tuple[int, ...] = (),
    places: Sequence[int] | None = None,
) -> None:
    """Writes a chain of stages, each of which multiplies by its parameter.

    times: how long each sleeps; weight_s on the way to its parameter's gradient. places: the rank of each stage; None:
    each has its own.
    """
    places = range(len(times)) if places is None else places
    last = len(times) - 1
    stages = []
    for index, own in enumerate(times):
        argument = f"v{index - 1}" if index else "x"
        text = STAGE.format(
            index=index,
            argument=argument,
            forward_s=own.forward_s,
            input_s=own.backward_s - own.weight_s,
            weight_s=own.weight_s,
            result="y.sum() / B" if index == last else "y",
        )
        (directory / f"stage_{index}.py").write_text(text)
        stages.append(
            StageSpec(
                file=f"stage_{index}.py",
                devices=(places[index],),
                mesh=(("dp", 1),),
                inputs=() if index else ("x",),
                receives=(argument,) if index else (),
                totals=(),
                sends=() if index == last else (f"v{index}",),
                outputs=("loss",) if index == last else (),
            )
        )
    names = tuple(f"scale{index}" for index in range(len(times)))
    Manifest(
        fingerprint="by hand",
        world_size=1 + max(places),
        schedule=schedule,
        microbatches=microbatches,
        stages=tuple(stages),
        values=tuple(ValueSpec(f"v{i}", ("b", 1), "float64", i, (i + 1,), True) for i in range(last)),
        inputs=(InputSpec("x", "tensor", ("b", 1), "float64", 0),),
        outputs=(OutputSpec("loss", last, "sum", (), "float64"),),
        parameters=tuple(ParameterSpec(name, (1,), "float64", (i,), ()) for i, name in enumerate(names)),
        parameter_order=names,
        input_names=("x",),
        loss="loss",
        output_structure=flatten({"loss": 0})[1],
        warmup=warmup,
    ).save(directory)
