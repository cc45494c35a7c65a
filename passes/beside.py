"""Which products put their weights' gradients off, to compute them beside a collective of the backward.

Products with weights that read a transition whose gradient goes over a mesh axis, as it is, cast or reshaped, in the
function that the transition is written in (:mod:`autopart.runtime.later`). Weights are parameters, cast or as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.emit.segments import segments_of
from autopart.passes.program import Role
from autopart.passes.storage import is_view, op_name

# where a product has what it multiplies with a weight, and the weight
_OPERANDS = {"linear": (0, 1), "mm": (0, 1), "addmm": (1, 2)}
WITH_LATER = frozenset(
    {"split", "sum_gradients", "all_gather_scatter_gradients", "reduce_scatter", "all_reduce_sum_gradients"}
)
"""Functions of :mod:`autopart.runtime.collectives` that take ``later``."""


def products_beside(graph: fx.Graph, recompute: Collection[str] = ()) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """By transition of a rank's graph the products whose weights' gradients are computed beside its gradient's
    collective. recompute: paths of layers and of modules in them, which are functions of their own.
    """
    parts = [part for _, _, own in segments_of(graph, recompute) for part in own]
    run_of = {node: index for index, part in enumerate(parts) for node in part.nodes}
    found = {}
    for node in graph.nodes:
        if "transition" not in node.meta or not node.meta.get("differentiable"):
            continue
        if node.meta["transition"][1].name in WITH_LATER:
            products = tuple(dict.fromkeys(_products(node, run_of)))
            if products:
                found[node] = products
    return found


def operand_of(node: fx.Node) -> fx.Node | None:
    """What a product multiplies with a trained weight; None for other nodes."""
    if not graphs.is_op(node) or "forms" in node.meta or node.kwargs or op_name(node) not in _OPERANDS:
        return None
    operand, weight = node.args[_OPERANDS[op_name(node)][0]], weight_of(node)
    if is_cast(weight):
        (weight,) = weight.all_input_nodes
    is_trained = weight.op == "placeholder" and weight.meta["role"] is Role.PARAMETER and weight.meta.get("trainable")
    return operand if is_trained and isinstance(operand, fx.Node) else None


def is_cast(node: fx.Node) -> bool:
    """Whether the node is one tensor in another type."""
    return graphs.is_op(node) and op_name(node) == "to" and len(node.all_input_nodes) == 1


def products_reading(value: graphs.Value) -> Iterator[fx.Node]:
    """The products that multiply a value of a whole graph with trained weights, as it is or cast."""
    for node in value.node.users:
        if graphs.is_getitem(node) and graphs.value_of(node) == value:
            yield from _reading(node)
    if graphs.is_tensor(value.node):
        yield from _reading(value.node)


def weight_of(product: fx.Node) -> fx.Node:
    """The weight, as the product reads it."""
    weight = product.args[_OPERANDS[op_name(product)][1]]
    assert isinstance(weight, fx.Node)
    return weight


def _reading(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_cast(user):
            yield from _reading(user)
        elif operand_of(user) is node:
            yield user


def _products(value: fx.Node, run_of: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    for user in value.users:
        if run_of.get(user) != run_of.get(value) or {"transition", "forms"} & user.meta.keys():
            continue
        if graphs.is_op(user) and (op_name(user) == "to" or is_view(user)):
            yield from _products(user, run_of)
        elif operand_of(user) is value:
            yield user
