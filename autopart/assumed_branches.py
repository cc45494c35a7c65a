"""Branches that a model takes by the values of its inputs, such as ``if mask.all():``, which export cannot trace.

The branch of the example inputs is assumed. What was asked becomes a further output of the traced graph, and of the
part of the graph that leads to it a function of the inputs is made. It has to give on the example inputs what was
assumed, and at run time every rank computes it of the whole batch before a step
(:mod:`autopart.runtime.assumptions`). Nothing is assumed of what parameters, buffers or random numbers decide.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode

from autopart.capture_errors import depends_on_data
from autopart.capture_place import Where, own_frame
from autopart.passes import graph as graphs
from autopart.passes.blocks import is_random
from autopart.passes.emit.totals import conditions_source
from autopart.passes.program import Assumption, Program, Role
from autopart.runtime.errors import CaptureError
from autopart.runtime.manifest import argument_name

_MOST_TRACES = 32


class Decisions(TorchFunctionMode):
    """Answers what a traced model asks of tensors: as given, and yes to what comes after that."""

    def __init__(self, given: Sequence[bool]) -> None:
        super().__init__()
        self.where: Where | None = None
        self._given = given
        self.conditions: list[Tensor] = []
        self.assumptions: list[Assumption] = []

    def begin(self) -> None:
        """The model's forward runs anew."""
        self.conditions, self.assumptions = [], []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        asks = function is Tensor.__bool__ or (function is Tensor.item and args[0].dtype is torch.bool)
        if not (asks and args[0].dim() == 0 and is_fake(args[0])):
            return function(*args, **(kwargs or {}))
        number = len(self.assumptions)
        answer = self._given[number] if number < len(self._given) else True
        self.conditions.append(args[0].detach().clone())
        self.assumptions.append(Assumption(answer, self._place()))
        return answer

    def _place(self) -> str:
        frame = own_frame(traceback.extract_stack())
        line = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}" if frame else "a branch"
        path = self.where.path if self.where is not None else ""
        return f"{path}: {line}" if path else line


def settle(
    trace: Callable[[Decisions | None], Program],
    leaves: Mapping[str, Any],
    dims: Mapping[str, int | None],
    batch: int,
) -> Program:
    """Traces the model; where it branches by its inputs, until all that was assumed is so on the example inputs.

    leaves: these by path, of which dims hold ``batch`` samples. Raises CaptureError.
    """
    try:
        return trace(None)
    except CaptureError as error:
        if not depends_on_data(error.__cause__):
            raise
        failure = error
    known: list[bool] = []  # answers that the example inputs give
    given: list[bool] = []
    for _ in range(_MOST_TRACES):
        decisions = Decisions(given)
        try:
            program = trace(decisions)
        except CaptureError as error:
            failure = error
            # A guess may have led there, as into an assertion, or code that needs numbers from tensors: the last that
            # has not been tried both ways.
            answers = [assumption.value for assumption in decisions.assumptions]
            while len(answers) > len(known) and not answers[-1]:
                answers.pop()
            if len(answers) <= len(known):
                break
            given = [*answers[:-1], False]
            continue
        found = _evaluated(program, leaves, dims, batch)
        assumed = [assumption.value for assumption in program.assumptions]
        if found == assumed:
            return program
        first = next(index for index, value in enumerate(found) if value != assumed[index])
        if first < len(known):
            break
        given = known = found[: first + 1]
    raise failure


def conditions_graph(
    graph: fx.Graph,
    conditions: Sequence[fx.Node],
    assumptions: Sequence[Assumption],
    constants: Mapping[str, Tensor],
) -> fx.Graph:
    """The part of a program's graph that computes these values.

    constants: tensors by name that no step changes, of which single numbers are written into it. Raises CaptureError
    if the values need more than these and inputs.
    """
    new = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    needed: set[fx.Node] = set()
    numbers: dict[fx.Node, Tensor] = {}
    for condition, assumption in zip(conditions, assumptions, strict=True):
        stack = [condition]
        while stack:
            node = stack.pop()
            stack.extend(source for source in node.all_input_nodes if source not in needed)
            needed.add(node)
            held = node.op == "placeholder" and node.meta["role"] in (Role.PARAMETER, Role.BUFFER)
            value = constants.get(node.meta["name"]) if held else None
            if value is not None and value.numel() == 1:
                numbers[node] = value
            elif held or (graphs.is_op(node) and is_random(node)):
                what = f"the {node.meta['role'].value} {node.meta['name']}" if held else "random numbers"
                raise CaptureError(
                    f"the model branches on a value that depends on {what}, which can change with every step: "
                    f"{assumption.text}; replace it with torch.where, or decide it from the configuration"
                )
    for node in graph.nodes:
        if node in numbers:
            value = numbers[node]
            env[node] = new.call_function(
                torch.ops.aten.full.default, (list(value.shape), value.item()), {"dtype": value.dtype}
            )
            env[node].meta = {key: known for key, known in node.meta.items() if key not in ("role", "name")}
        elif node in needed:
            env[node] = new.node_copy(node, lambda argument: env[argument])
    new.output(tuple(env[condition] for condition in conditions))
    return new


def _evaluated(program: Program, leaves: Mapping[str, Any], dims: Mapping[str, int | None], batch: int) -> list[bool]:
    """What the conditions are on the example inputs. Raises CaptureError where these have no values."""
    if program.conditions is None:
        return []
    given: dict[str, Tensor] = {}
    for node in program.conditions.nodes:
        if node.op == "placeholder" and node.meta["role"] is Role.INPUT:
            path = node.meta["name"]
            leaf, dim = leaves[path], dims[path]
            if leaf.is_meta or is_fake(leaf):
                raise CaptureError(
                    f"the model branches on values of its input {path!r}, which have to be known: "
                    f"{program.assumptions[0].text}; capture it with real inputs"
                )
            given[argument_name(path)] = leaf if dim is None else leaf.narrow(dim, 0, batch)
    scope: dict[str, Any] = {}
    exec(conditions_source(program.conditions), scope)
    return [bool(value) for value in scope["conditions"](b=batch, B=batch, **given)]
