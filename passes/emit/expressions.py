"""Ops as Python source: infix operators, tensor methods, ``torch`` and ``torch.nn.functional`` calls.

Each printer takes the op's argument texts and returns an expression. An op without a printer is written as the ATen
call itself, which is always right. Expressions carry their binding strength, so that parentheses appear only where
they are needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.rules.arguments import words
from autopart.passes.storage import op_name
from autopart.runtime import local_forms
from autopart.runtime.errors import PlanError

aten = torch.ops.aten

# Binding strengths, as in Python's grammar.
_ATOM, _UNARY, _PRODUCT, _SUM, _AND, _XOR, _OR, _COMPARE = 9, 8, 7, 6, 5, 4, 3, 2


@dataclass(frozen=True, slots=True)
class Text:
    """An expression and how strongly its outermost operator binds."""

    code: str
    strength: int = _ATOM

    def inside(self, strength: int) -> str:
        """The code as an operand of an operator of that strength."""
        return self.code if self.strength >= strength else f"({self.code})"


_INFIX: dict[Any, tuple[str, int]] = {
    aten.add.Tensor: ("+", _SUM),
    aten.add.Scalar: ("+", _SUM),
    aten.sub.Tensor: ("-", _SUM),
    aten.sub.Scalar: ("-", _SUM),
    aten.mul.Tensor: ("*", _PRODUCT),
    aten.mul.Scalar: ("*", _PRODUCT),
    aten.div.Tensor: ("/", _PRODUCT),
    aten.div.Scalar: ("/", _PRODUCT),
    aten.floor_divide.default: ("//", _PRODUCT),
    aten.bitwise_and.Tensor: ("&", _AND),
    aten.bitwise_and.Scalar: ("&", _AND),
    aten.bitwise_or.Tensor: ("|", _OR),
    aten.bitwise_or.Scalar: ("|", _OR),
    aten.bitwise_xor.Tensor: ("^", _XOR),
    aten.bitwise_xor.Scalar: ("^", _XOR),
    operator.add: ("+", _SUM),
    operator.sub: ("-", _SUM),
    operator.mul: ("*", _PRODUCT),
    operator.truediv: ("/", _PRODUCT),
    operator.floordiv: ("//", _PRODUCT),
    operator.mod: ("%", _PRODUCT),
    **{
        getattr(getattr(aten, name), overload): (sign, _COMPARE)
        for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
        for overload in ("Tensor", "Scalar")
    },
}

# Ops that are ``torch.<name>`` with the same arguments.
_TORCH = {
    f"aten.{name}"
    for name in words("""
abs.default addmm.default arange.default arange.start arange.start_step argsort.default baddbmm.default
bmm.default cat.default clamp.default clamp_min.default cos.default cumsum.default diff.default
einsum.default empty_like.default erf.default exp.default full.default full_like.default gather.default
log.default logical_and.default logical_not.default logical_or.default matmul.default maximum.default
minimum.default mm.default ones.default ones_like.default pow.Tensor_Scalar pow.Tensor_Tensor
reciprocal.default rsqrt.default sigmoid.default sin.default sort.default sqrt.default square.default
stack.default tanh.default topk.default tril.default triu.default where.self where.ScalarOther
where.ScalarSelf where.Scalar zeros.default zeros_like.default histc.default index_put.default
scatter.src select_scatter.default slice_scatter.default cosine_similarity.default
""")
}
# Ops that are ``torch.nn.functional.<name>`` with the same leading arguments.
_FUNCTIONAL = {
    f"aten.{name}.default"
    for name in words("""
linear relu silu softplus mish hardswish hardtanh elu leaky_relu conv1d conv2d conv3d conv_transpose2d
adaptive_avg_pool2d adaptive_avg_pool1d one_hot glu
""")
}
# Ops that are methods of their first argument, with the same further arguments.
_METHODS = {
    f"aten.{name}"
    for name in words("""
transpose.int permute.default unsqueeze.default squeeze.dim squeeze.dims contiguous.default clone.default
detach.default masked_fill.Scalar masked_fill.Tensor sum.default mean.default any.default all.default
flip.default roll.default repeat.default view_as.default new_zeros.default new_ones.default
amax.default max.default min.default unbind.int
""")
}
_SKIPPED_KEYWORDS = ("pin_memory", "layout", "memory_format")


class Printer:
    """Writes one node as an expression, given the texts of the nodes that it reads.

    device: the expression for the rank's device. training: the expression for training mode.
    """

    def __init__(self, device: str, training: str):
        self.device, self.training = device, training

    def text(self, node: fx.Node, names: Callable[[fx.Node], Text], later: str = "") -> Text:
        """The node's expression. later: what computes the product and puts its weight's gradient off."""
        arguments = _Arguments(node, names, self.device)
        target = node.target
        if later:
            return Text(f"{later}.{op_name(node)}({arguments.all()})")
        if target is operator.getitem:
            return Text(f"{arguments.at(0).inside(_ATOM)}[{arguments.code(1)}]")
        if target in _INFIX and len(node.args) == 2 and not node.kwargs:
            sign, strength = _INFIX[target]
            left, right = arguments.at(0), arguments.at(1)
            # left-associative; comparisons do not chain
            first = left.inside(strength + 1 if strength == _COMPARE else strength)
            return Text(f"{first} {sign} {right.inside(strength + 1)}", strength)
        if target is aten.neg.default:
            return Text(f"-{arguments.at(0).inside(_UNARY)}", _UNARY)
        if target is aten.bitwise_not.default:
            return Text(f"~{arguments.at(0).inside(_UNARY)}", _UNARY)
        special = _SPECIAL.get(target)
        if special is not None:
            found = special(arguments, self.training)
            if found is not None:
                return Text(found)
        name = str(target)
        if "transition" in node.meta:
            return Text(f"collectives.{node.meta['transition'][1].name}({arguments.all()})")
        if name in _TORCH:
            return Text(f"torch.{name.split('.')[1]}({arguments.all()})")
        if name in _FUNCTIONAL:
            return Text(f"F.{name.split('.')[1]}({arguments.all()})")
        if name in _METHODS:
            return Text(f"{arguments.at(0).inside(_ATOM)}.{name.split('.')[1]}({arguments.all(1)})")
        if isinstance(target, torch._ops.OpOverload):
            return Text(f"torch.ops.{target}({arguments.all()})")
        return Text(f"{_module(target)}.{target.__qualname__}({arguments.all()})")  # type: ignore[union-attr]

    def form(self, node: fx.Node, names: Callable[[fx.Node], Text], axes: Mapping[str, str]) -> str:
        """The call of an op's local form; ``axes``: by role the variable that holds the axis."""
        (_, form), *_ = node.meta["forms"]
        roles = ", ".join(f"{role}={axis}" for role, axis in sorted(axes.items(), reverse=True))
        arguments = _Arguments(node, names, self.device)
        attends = node.target is local_forms.query_sharded_attention
        text = _attention_arguments(arguments, f" if {self.training} else 0.0") if attends else arguments.all()
        return f"local_forms.{form.function}({text}, {roles})"

    def invariant(self, node: fx.Node, names: Callable[[fx.Node], Text], draw: str) -> str:
        """An op that draws random numbers, by the function of :mod:`autopart.runtime.invariant` that draws ``draw``.

        Raises PlanError for an op that has none.
        """
        a, end = _Arguments(node, names, self.device), f"draw={draw}"
        if node.target is aten.dropout.default:
            return f"invariant.dropout({a.code(0)}, {a.code(1)}, {self.training}, {end})"
        if node.target in (aten.scaled_dot_product_attention.default, local_forms.query_sharded_attention):
            return f"invariant.attention({_attention_arguments(a)}, training={self.training}, {end})"
        raise PlanError(
            f"{node.target} in {graphs.module_path(node) or 'the model'} ({graphs.source_line(node)}) draws random "
            'numbers of its own: dropout="invariant" knows dropout and attention only; use dropout="torch"'
        )


def _module(function: Any) -> str:
    """The module to call a function by; ``_operator``, where those of :mod:`operator` are from, is not for imports."""
    return str(function.__module__).removeprefix("_")


def size_modules(graph: fx.Graph) -> list[str]:
    """Python's modules of the functions that compute with sizes in a graph: ``math.ceil``, ``operator.pow``."""
    calls = (node.target for node in graph.nodes if node.op == "call_function" and node.target not in _INFIX)
    found = {_module(target) for target in calls if target is not operator.getitem and hasattr(target, "__module__")}
    return sorted(found & {"builtins", "math", "operator"})


class _Arguments:
    """An op's arguments as text."""

    def __init__(self, node: fx.Node, names: Callable[[fx.Node], Text], device: str):
        self.node, self.names, self.device = node, names, device

    def literal(self, value: Any) -> Text:
        if isinstance(value, fx.Node):
            return self.names(value)
        if isinstance(value, tuple | list):
            items = ", ".join(self.literal(item).code for item in value)
            return Text(f"[{items}]")
        if isinstance(value, torch.device):
            return Text(self.device)
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return Text(f'float("{value}")')
        if isinstance(value, float) and value != value:
            return Text('float("nan")')
        if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
            return Text(repr(value), _UNARY)
        if isinstance(value, str):
            return Text(f'"{value}"')
        return Text(str(value) if isinstance(value, torch.dtype) else repr(value))

    def get(self, index: int, name: str, default: Any = None) -> Any:
        """The argument itself, by position or name."""
        return self.node.args[index] if index < len(self.node.args) else self.node.kwargs.get(name, default)

    def at(self, index: int) -> Text:
        return self.literal(self.node.args[index])

    def code(self, index: int) -> str:
        return self.at(index).code

    def named(self, index: int, name: str, default: Any = None) -> str:
        return self.literal(self.get(index, name, default)).code

    def all(self, start: int = 0) -> str:
        """All arguments from ``start``; a tensor made from nothing is made on the rank's device."""
        parts = [self.code(index) for index in range(start, len(self.node.args))]
        keywords = {key: value for key, value in self.node.kwargs.items() if key not in _SKIPPED_KEYWORDS}
        for _, form in self.node.meta.get("forms", ()):
            keywords.pop(form.role, None)  # written by who knows the axis' variable
        makes = "transition" not in self.node.meta and not any(
            isinstance(item.meta.get("val"), torch.Tensor) for item in self.node.all_input_nodes
        )
        if not makes:
            keywords.pop("device", None)
        elif isinstance(self.node.meta.get("val"), torch.Tensor):
            keywords["device"] = torch.device("meta")
        parts += [f"{key}={self.literal(value).code}" for key, value in keywords.items()]
        return ", ".join(parts)

    def sizes(self, index: int) -> str:
        """A list of sizes as separate arguments."""
        return ", ".join(self.literal(item).code for item in self.node.args[index])  # type: ignore[union-attr]


def _method(name: str) -> Callable[[_Arguments, str], str | None]:
    """Methods that take sizes as separate arguments."""

    def text(a: _Arguments, _training: str) -> str | None:
        return None if a.node.kwargs or not a.node.args[1] else f"{a.at(0).inside(_ATOM)}.{name}({a.sizes(1)})"

    return text


def _slice(a: _Arguments, _training: str) -> str | None:
    dim, start, end, step = a.get(1, "dim", 0), a.get(2, "start"), a.get(3, "end"), a.get(4, "step", 1)
    value = a.node.meta["val"]
    first = "" if start in (0, None) else a.literal(start).code
    last = "" if end is None or end == 2**63 - 1 else a.literal(end).code
    stride = "" if step == 1 else f":{a.literal(step).code}"
    picks = [":"] * (dim % value.dim()) + [f"{first}:{last}{stride}"]
    return f"{a.at(0).inside(_ATOM)}[{', '.join(picks)}]"


def _select(a: _Arguments, _training: str) -> str | None:
    picks = [":"] * (a.get(1, "dim") % (a.node.meta["val"].dim() + 1)) + [a.named(2, "index")]
    return f"{a.at(0).inside(_ATOM)}[{', '.join(picks)}]"


def _index(a: _Arguments, _training: str) -> str | None:
    picks = [":" if item is None else a.literal(item).code for item in a.node.args[1]]  # type: ignore[union-attr]
    return f"{a.at(0).inside(_ATOM)}[{', '.join(picks)}]"


def _cast(a: _Arguments, _training: str) -> str | None:
    return f"{a.at(0).inside(_ATOM)}.to({a.code(1)})" if len(a.node.args) == 2 else None


def _reduce(name: str) -> Callable[[_Arguments, str], str | None]:
    def text(a: _Arguments, _training: str) -> str | None:
        keep = ", keepdim=True" if a.get(2, "keepdim", False) else ""
        dtype = f", dtype={a.node.kwargs['dtype']}" if a.node.kwargs.get("dtype") is not None else ""
        return f"{a.at(0).inside(_ATOM)}.{name}({a.named(1, 'dim')}{keep}{dtype})"

    return text


def _softmax(name: str) -> Callable[[_Arguments, str], str | None]:
    def text(a: _Arguments, _training: str) -> str | None:
        dtype = a.get(2, "dtype")
        return f"F.{name}({a.code(0)}, {a.named(1, 'dim')}{f', dtype={dtype}' if dtype is not None else ''})"

    return text


def _layer_norm(a: _Arguments, _training: str) -> str | None:
    weight, bias = a.named(2, "weight"), a.named(3, "bias")
    return f"F.layer_norm({a.code(0)}, {a.code(1)}, {weight}, {bias}, {a.named(4, 'eps', 1e-05)})"


def _dropout(a: _Arguments, training: str) -> str | None:
    return f"F.dropout({a.code(0)}, {a.code(1)}, {training if a.get(2, 'train') else 'False'})"


def _other_dropout(a: _Arguments, training: str) -> str | None:
    """Dropout of whole features, alpha dropout: ``torch`` has them by the op's name."""
    name = str(a.node.target).split(".")[1]
    return f"torch.{name}({a.code(0)}, {a.code(1)}, {training if a.get(2, 'train') else 'False'})"


def _attention_arguments(a: _Arguments, when: str = "") -> str:
    """``when`` follows the probability of dropout."""
    parts = [a.code(0), a.code(1), a.code(2)]
    if a.get(3, "attn_mask") is not None:
        parts.append(f"attn_mask={a.named(3, 'attn_mask')}")
    if a.get(4, "dropout_p", 0.0):
        parts.append(f"dropout_p={a.named(4, 'dropout_p')}{when}")
    if a.get(5, "is_causal", False):
        parts.append("is_causal=True")
    parts += [f"{key}={a.literal(a.node.kwargs[key]).code}" for key in ("scale", "enable_gqa") if key in a.node.kwargs]
    return ", ".join(parts)


def _attention(a: _Arguments, training: str) -> str | None:
    return f"F.scaled_dot_product_attention({_attention_arguments(a, f' if {training} else 0.0')})"


def _embedding(a: _Arguments, _training: str) -> str | None:
    padding = a.get(2, "padding_idx", -1)
    if a.get(3, "scale_grad_by_freq", False) or a.get(4, "sparse", False):
        return None
    return f"F.embedding({a.code(1)}, {a.code(0)}{f', padding_idx={padding}' if padding >= 0 else ''})"


def _cross_entropy(a: _Arguments, _training: str) -> str | None:
    parts = [a.code(0), a.code(1)]
    if a.get(2, "weight") is not None:
        parts.append(f"weight={a.named(2, 'weight')}")
    if isinstance(a.get(4, "ignore_index", -100), int) and a.get(4, "ignore_index", -100) != -100:
        parts.append(f"ignore_index={a.named(4, 'ignore_index')}")
    reduction = ("none", "mean", "sum")[a.get(3, "reduction", 1)]
    parts.append(f'reduction="{reduction}"')
    if a.get(5, "label_smoothing", 0.0):
        parts.append(f"label_smoothing={a.named(5, 'label_smoothing')}")
    return f"F.cross_entropy({', '.join(parts)})"


def _batch_norm(a: _Arguments, training: str) -> str | None:
    weight, bias, mean, variance = (a.code(index) for index in range(1, 5))
    mode = training if a.get(5, "training") else "False"
    if mean == "None":
        mode = "True"  # without running statistics it takes those of the batch, also where it is evaluated
    return (
        f"F.batch_norm({a.code(0)}, {mean}, {variance}, {weight}, {bias}, training={mode}, "
        f"momentum={a.code(6)}, eps={a.code(7)})"
    )


def _recurrent(a: _Arguments, training: str) -> str | None:
    """``torch.lstm(…)`` and its like; only dropout asks whether it is training."""
    name = str(a.node.target).split(".")[1]
    mode = training if a.get(5, "dropout") and a.get(6, "train") else str(a.get(6, "train"))
    return f"torch.{name}({', '.join([*(a.code(index) for index in range(6)), mode, a.code(7), a.code(8)])})"


def _gelu(a: _Arguments, _training: str) -> str | None:
    kind = a.get(1, "approximate", "none")
    return f"F.gelu({a.code(0)}{f', approximate={chr(34)}{kind}{chr(34)}' if kind != 'none' else ''})"


def _pad(a: _Arguments, _training: str) -> str | None:
    if str(a.node.target) == "aten.pad.default":
        mode, value = a.get(2, "mode", "constant"), a.get(3, "value")
        tail = (f', mode="{mode}"' if mode != "constant" else "") + (f", value={value!r}" if value is not None else "")
        return f"F.pad({a.code(0)}, {a.code(1)}{tail})"
    return f"F.pad({a.code(0)}, {a.code(1)}, value={a.named(2, 'value', 0)})"


def _max_pool(a: _Arguments, _training: str) -> str | None:
    return f"F.max_pool2d({a.all()})"


def _split(a: _Arguments, _training: str) -> str | None:
    return f"torch.split({a.code(0)}, {a.code(1)}, {a.named(2, 'dim', 0)})"


def _reversed_subtraction(a: _Arguments, _training: str) -> str | None:
    return f"({a.at(1).inside(_SUM)} - {a.at(0).inside(_PRODUCT)})" if len(a.node.args) == 2 else None


_SPECIAL: Mapping[Any, Callable[[_Arguments, str], str | None]] = {
    aten.reshape.default: _method("reshape"),
    aten.expand.default: _method("expand"),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.to.dtype: _cast,
    aten.sum.dim_IntList: _reduce("sum"),
    aten.mean.dim: _reduce("mean"),
    aten.softmax.int: _softmax("softmax"),
    aten.log_softmax.int: _softmax("log_softmax"),
    aten.layer_norm.default: _layer_norm,
    aten.dropout.default: _dropout,
    aten.feature_dropout.default: _other_dropout,
    aten.alpha_dropout.default: _other_dropout,
    aten.feature_alpha_dropout.default: _other_dropout,
    aten.scaled_dot_product_attention.default: _attention,
    aten.embedding.default: _embedding,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.batch_norm.default: _batch_norm,
    **dict.fromkeys((aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input), _recurrent),
    aten.gelu.default: _gelu,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.max_pool2d.default: _max_pool,
    aten.split_with_sizes.default: _split,
    aten.rsub.Scalar: _reversed_subtraction,
}
