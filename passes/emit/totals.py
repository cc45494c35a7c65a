"""``totals.py`` and ``assumptions.py``: what is computed of the whole batch before a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.emit.expressions import Text, size_modules
from autopart.passes.emit.functions import Function, Names
from autopart.passes.emit.wrapping import wrapped
from autopart.runtime.manifest import argument_name


def totals_source(graph: fx.Graph, names: Sequence[str]) -> str:
    """``totals.py``: the function that computes the whole batch's totals from its inputs and buffers."""
    heading = "Values of the whole batch that every stage divides by: computed once per step, from the inputs."
    return _source("totals", graph, heading, f"Returns {', '.join(names)} of a batch of b samples.")


def conditions_source(graph: fx.Graph) -> str:
    """``assumptions.py``: the function that computes what the model's branches depend on, from the inputs."""
    heading = "What branches of the model depend on: computed before every step, from the inputs."
    return _source("conditions", graph, heading, "Returns the conditions for a batch of b samples.")


def _source(name: str, graph: fx.Graph, heading: str, text: str) -> str:
    arguments = [node for node in graph.nodes if node.op == "placeholder" and graphs.is_tensor(node)]
    taken = Names()
    for node in arguments:
        taken.fresh(argument_name(node.meta["name"]))
    device = f"{argument_name(arguments[0].meta['name'])}.device" if arguments else '"cpu"'
    function = Function((), taken, "    ", device)
    for node in arguments:
        function.texts[node] = Text(argument_name(node.meta["name"]))
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    function.scope = set(nodes)
    for node in nodes:
        function.statement(node)
    codes = [function.name(node).code for node in graphs.results(graph)]
    function.lines.append(f"return ({', '.join(codes)},)")
    signature = ", ".join(["b: int", "B: int", *(f"{function.texts[node].code}: Tensor" for node in arguments)])
    modules = size_modules(graph)
    return "\n".join(
        [
            f'"""{heading}"""',
            "",
            *([*(f"import {module}" for module in modules), ""] if modules else []),
            "import torch",
            "import torch.nn.functional as F",
            "from torch import Tensor",
            "",
            "",
            f"def {name}(*, {signature}) -> tuple[Tensor, ...]:",
            f'    """{text}"""',
            *wrapped(function.body()),
            "",
        ]
    )
