"""What ops' backwards make and hand on: which gradients are views, parts of one tensor, or tensors of their own."""

from __future__ import annotations

from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.einsum_memory import multiplies
from autopart.passes.graph import Value
from autopart.passes.program import Role
from autopart.passes.saved import scaled_by_torch
from autopart.passes.storage import is_view, op_name

# Tensors of an operand's size that the backward of an op makes on its way.
_BACKWARD_COPIES = {"cross_entropy_loss": 1, "pow": 2, "cumsum": 2}
# Ops whose backward makes an operand's gradient as large as the result, and adds it up where the operand was broadcast.
_BROADCASTING = ("mul", "div", "where", "maximum", "minimum")
# Views whose backward makes a tensor of the operand's size; that of the others is a view.
_MAKING = {
    *("split", "split_with_sizes", "chunk", "unbind", "select", "slice", "narrow", "tensor_split"),
    *("expand", "expand_as", "broadcast_tensors", "hsplit", "vsplit", "dsplit", "diagonal", "unfold", "real", "imag"),
}
# Ops whose operands' gradients are parts of the result's, or the result's seen in more dims.
SHARING = ("cat", "concat", "concatenate", "stack", "sum")
# Ops whose backward hands the result's gradient on as it is, where shapes agree.
PASSING = ("add", "sub", "clone", "contiguous", "alias")
# Local forms that compute in float32 on their way, in tensors of their first operand's size: forward, and backward
# besides gradients.
_FORM_COPIES = {"vocab_cross_entropy": (1, 0)}


def form_copies(node: fx.Node, size: float) -> tuple[float, float]:
    """Bytes that a local form makes on its way, forward and backward. size: bytes of its first operand."""
    for _, form in node.meta.get("forms", ()):
        there, back = copies_of_form(node, form.function)
        if there:
            return there * size, back * size
    return 0.0, 0.0


def copies_of_form(node: fx.Node, function: str) -> tuple[float, float]:
    """The same for each byte of the first operand, of a form's function by name."""
    if function not in _FORM_COPIES:
        return 0.0, 0.0
    there, back = _FORM_COPIES[function]
    narrow = 4 / graphs.inputs(node)[0].fake.dtype.itemsize
    return (there, back) if narrow <= 1 else ((there + 1) * narrow, narrow)


def backward_copies(node: fx.Node) -> int:
    """Tensors of its largest operand's size that an op's backward makes besides gradients."""
    return _BACKWARD_COPIES.get(op_name(node), 0)


def broadcast(value: Value, node: fx.Node) -> bool:
    """Whether an operand's gradient is first made as large as the op's result, and added up behind its backward."""
    name = op_name(node)
    if name in _BROADCASTING or multiplies(node) or scaled_by_torch(node):
        return True
    return scales_second(node) and value == graphs.inputs(node)[-1]


def passes_memory(node: fx.Node) -> bool:
    """Whether neither the op nor its backward makes a tensor."""
    return is_view(node) and op_name(node) not in _MAKING


def scales_second(node: fx.Node) -> bool:
    """Of an addition whether its second operand's gradient is a tensor of its own."""
    return op_name(node) in ("add", "sub") and (op_name(node) == "sub" or bool(node.kwargs.get("alpha", 1) != 1))


def is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta.get("role") is Role.PARAMETER


def parameter_read(value: Value, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The parameter that an op reads as a value, as it is or through views, and the op that reads it itself."""
    reader = node
    while passes_memory(value.node):
        reader, value = value.node, graphs.inputs(value.node)[0]
    return (value.node, reader) if is_parameter(value.node) else None


def carrier(value: Value) -> Value:
    """The value whose gradient the value's gradient is a view of."""
    while passes_memory(value.node):
        value = graphs.inputs(value.node)[0]
    return value
