"""FLOPs, memory traffic and saved activations of every op, as functions of the batch size.

Contractions count two FLOPs per multiply and add, from shapes. Everything else is bound by memory, so that its FLOPs
per element need only be of the right order. Bytes are what the op's kernels read and write: inputs and outputs once,
and more where eager PyTorch goes over a tensor several times (:mod:`autopart.passes.traffic`). All amounts are those of
the whole op on one device; sharding divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autopart.passes.amounts import ONE, ZERO, Amount, constant, numel, product, size, stored_bytes, tensor_bytes, total
from autopart.passes.arithmetic import arithmetic
from autopart.passes.graph import Value, inputs, is_op, outputs
from autopart.passes.saved import is_differentiated, needs_gradient, saved_inside, saved_values
from autopart.passes.storage import argument, is_view, op_name, storage_of
from autopart.passes.traffic import backward_traffic, forward_traffic, readings
from autopart.runtime.errors import PlanError


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one op costs as a function of the batch size (:class:`Amount`; ``at(b)`` gives numbers).

    flops: multiplications and additions. bytes: read and written. saved_bytes: kept from forward to backward by this op
    alone; ops that keep the same tensor both count it, :func:`autopart.passes.saved.saved_bytes` unites a region's.
    contraction: whether the FLOPs run at matrix-product rate. after_bytes: read and written by kernels behind the op's
    own backward. kernels: that are started. functions, drawn: of CPUs (:mod:`autopart.passes.arithmetic`). made: of
    these, the bytes of each new tensor.
    """

    flops_forward: Amount = ZERO
    flops_backward: Amount = ZERO
    bytes_forward: Amount = ZERO
    bytes_backward: Amount = ZERO
    saved_bytes: Amount = ZERO
    contraction: bool = False
    kernels_forward: int = 0
    kernels_backward: int = 0
    after_bytes: Amount = ZERO
    functions_forward: Amount = ZERO
    functions_backward: Amount = ZERO
    drawn: Amount = ZERO
    made_forward: tuple[Amount, ...] = ()
    made_backward: tuple[Amount, ...] = ()

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(
            self.flops_forward + other.flops_forward,
            self.flops_backward + other.flops_backward,
            self.bytes_forward + other.bytes_forward,
            self.bytes_backward + other.bytes_backward,
            self.saved_bytes + other.saved_bytes,
            self.contraction or other.contraction,
            self.kernels_forward + other.kernels_forward,
            self.kernels_backward + other.kernels_backward,
            self.after_bytes + other.after_bytes,
            self.functions_forward + other.functions_forward,
            self.functions_backward + other.functions_backward,
            self.drawn + other.drawn,
            self.made_forward + other.made_forward,
            self.made_backward + other.made_backward,
        )


# FLOPs per element of the largest tensor, where it is not one; of the right order only.
_PER_ELEMENT = {
    **dict.fromkeys(("gelu", "silu", "tanh", "sigmoid", "exp", "erf", "sin", "cos", "log", "pow", "mish"), 8),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "cross_entropy_loss", "logsumexp"), 10),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "var", "std"), 6),
    **dict.fromkeys(("dropout", "native_dropout", "addcmul", "addcdiv", "lerp", "rsqrt", "sqrt", "div"), 2),
    **dict.fromkeys(("embedding", "index", "index_select", "gather", "cat", "stack", "contiguous", "clone", "copy"), 0),
    **dict.fromkeys(("reshape", "flatten", "to", "arange", "full", "zeros", "ones", "pad", "constant_pad_nd"), 0),
    **dict.fromkeys(("new_ones", "new_zeros", "new_full", "zeros_like", "ones_like", "full_like", "empty_like"), 0),
}


def _last(value: torch.Tensor) -> Amount:
    return size(value.shape[-1])


def _fakes(node: fx.Node) -> list[torch.Tensor]:
    return [value.fake for value in inputs(node)]


def _output(node: fx.Node) -> torch.Tensor:
    return outputs(node)[0].fake


def _linear(node: fx.Node) -> Amount:
    return numel(_output(node)) * _last(_fakes(node)[0]) * 2


def _addmm(node: fx.Node) -> Amount:
    factor = argument(node, 1, "mat1").meta["val"]
    return numel(_output(node)) * _last(factor) * 2


def _convolution(node: fx.Node) -> Amount:
    """Each output element sums over (input channels / groups) x kernel: a weight's elements over its first dim."""
    kernel = product(_fakes(node)[1].shape[1:])
    transposed = "transpose" in op_name(node) or bool(argument(node, 6, "transposed", False) is True)
    return numel(_fakes(node)[0] if transposed else _output(node)) * kernel * 2


def _attention(node: fx.Node) -> Amount:
    """Scores and weighted values, ``2 b h q k (d + dv)``; a causal mask is not taken to save half."""
    query, key, value = _fakes(node)[:3]
    scores = product(query.shape[:-1]) * size(key.shape[-2])
    return scores * (_last(query) + _last(value)) * 2


def _grouped(node: fx.Node) -> Amount:
    """``(tokens, k) x (experts, k, n)``: every token meets one expert."""
    return numel(_output(node)) * _last(_fakes(node)[0]) * 2


def _einsum(node: fx.Node) -> Amount:
    """Operands contracted from left to right; each product runs over all labels of both."""
    equation, operands = node.args[0], _fakes(node)
    assert isinstance(equation, str)
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    sizes: dict[str, Amount] = {}
    for term, operand in zip(terms, operands, strict=True):
        for label, dim in zip(_labels(term, operand.dim()), operand.shape, strict=True):
            sizes.setdefault(label, size(dim))
            if sizes[label] == ONE:
                sizes[label] = size(dim)
    split = [_labels(term, operand.dim()) for term, operand in zip(terms, operands, strict=True)]
    kept_at_end = set(_labels(right, _output(node).dim())) if right else set()
    flops, current = ZERO, set(split[0])
    for position, labels in enumerate(split[1:], start=2):
        current |= set(labels)
        amount = constant(2)
        for label in sorted(current):
            amount = amount * sizes[label]
        flops = flops + amount
        later = kept_at_end.union(*split[position:])
        current &= later
    return flops


def _labels(term: str, dims: int) -> list[str]:
    """A term's labels, one per dim; the dims of ``...`` are numbered from the right."""
    if "..." not in term:
        return list(term)
    before, after = term.split("...")
    hidden = dims - len(before) - len(after)
    return [*before, *(f"...{hidden - 1 - i}" for i in range(hidden)), *after]


_CONTRACTIONS: dict[str, Callable[[fx.Node], Amount]] = {
    **dict.fromkeys(("linear", "mm", "bmm", "matmul", "mv", "dot"), _linear),
    **dict.fromkeys(("addmm", "baddbmm"), _addmm),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "_convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _convolution),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), _grouped),
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
}


def is_contraction(node: fx.Node) -> bool:
    """Whether the op is a sum of products: what tensor cores run."""
    return op_name(node) in _CONTRACTIONS


def contraction_flops(node: fx.Node) -> Amount:
    """Forward FLOPs of a contraction; 0 for every other op."""
    rule = _CONTRACTIONS.get(op_name(node))
    return rule(node) if rule is not None and is_op(node) else ZERO


def _factors(node: fx.Node) -> list[Value]:
    skip = 1 if op_name(node) in ("addmm", "baddbmm") else 0
    return inputs(node)[skip : skip + 2] if op_name(node) != "einsum" else inputs(node)


def _backward_flops(node: fx.Node, forward: Amount) -> Amount:
    if not is_differentiated(node):
        return ZERO
    if op_name(node) == "scaled_dot_product_attention":
        # Flash attention recomputes the scores: five products against two (Dao et al. 2022, algorithm 4).
        return forward * 5 // 2
    wanted = _factors(node) if is_contraction(node) else inputs(node)
    return forward * max(1, sum(map(needs_gradient, wanted)))


def op_cost(node: fx.Node, kind: str = "cuda") -> OpCost:
    """The costs of one node on devices of a kind ("cuda" or "cpu"); all zero for what is no op.

    A view costs nothing forward; back it may add up what its readers give it, or write what was read into zeros.
    """
    if not is_op(node):
        return OpCost()
    back = backward_traffic(node, kind)
    if is_view(node):
        return OpCost(bytes_backward=back.moved, kernels_backward=back.kernels, after_bytes=back.after)
    contraction = is_contraction(node)
    if contraction:
        forward = contraction_flops(node)
    else:
        tensors = [*inputs(node), *outputs(node)]
        largest = max((numel(value.fake) for value in tensors), key=lambda amount: amount.at(8), default=ZERO)
        forward = largest * _PER_ELEMENT.get(op_name(node), 1)
    kept = total(stored_bytes(value.fake) for value in saved_values([node], kind)) + saved_inside(node, kind)
    there, computed = forward_traffic(node, kind), arithmetic(node, kind)
    return OpCost(
        forward,
        _backward_flops(node, forward),
        there.moved,
        back.moved,
        kept,
        contraction,
        there.kernels,
        back.kernels,
        back.after,
        computed.forward,
        computed.backward,
        computed.drawn,
        *(_made(node) if kind == "cpu" else ()),
    )


_HANDS_ON = ("add", "sub", "rsub")
"""Ops back through which the gradient goes as it is."""


def _made(node: fx.Node) -> tuple[tuple[Amount, ...], tuple[Amount, ...]]:
    """Bytes of the tensors that an op makes, and of the gradients that its backward does."""
    forward = tuple(tensor_bytes(value.fake) for value in outputs(node))
    if not is_differentiated(node) or op_name(node) in _HANDS_ON:
        return forward, ()
    return forward, tuple(tensor_bytes(value.fake) for value in dict.fromkeys(inputs(node)) if needs_gradient(value))


def annotate(nodes: Iterable[fx.Node], kind: str = "cuda") -> dict[fx.Node, OpCost]:
    """The cost of every op among ``nodes`` (a graph's, say)."""
    known: dict[object, OpCost] = {}
    found: dict[fx.Node, OpCost] = {}
    for node in nodes:
        if is_op(node):
            alike = _alike(node)
            if alike not in known:
                known[alike] = op_cost(node, kind)
            found[node] = known[alike]
    return found


def _alike(node: fx.Node) -> object:
    """All that an op's cost follows from: equal for the ops of copied layers, which share their fake values."""
    constants = fx.node.map_aggregate(
        (node.args, node.kwargs), lambda item: "tensor" if isinstance(item, fx.Node) else item
    )
    values: dict[Value, int] = {}
    owners: dict[Value, int] = {}
    read = []
    for value in inputs(node):
        owner = storage_of(value)
        numbers = values.setdefault(value, len(values)), owners.setdefault(owner, len(owners))
        made_by = "" if owner.node.op == "placeholder" else op_name(owner.node)  # else its own name
        read.append((numbers, *_memory(value), *_memory(owner), made_by))
    made = [(id(value.fake), needs_gradient(value), readings(value)) for value in outputs(node)]
    return node.target, str(constants), tuple(read), tuple(made)


def _memory(value: Value) -> tuple[object, ...]:
    """What a tensor is in memory, by its sizes where these are numbers, as of parameters, else by its fake value."""
    fake, node = value.fake, value.node
    sizes = (*fake.shape, *fake.stride(), fake.dtype) if node.op == "placeholder" else (id(fake),)
    numbers = all(isinstance(size, int | torch.dtype) for size in sizes)
    return node.op, node.meta.get("role"), needs_gradient(value), *(sizes if numbers else (id(fake),))


_OPTIMIZER_TENSORS = {"none": 0, "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes that one parameter takes during training."""

    weight: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.optimizer


def parameter_bytes(
    shape: Iterable[int], dtype: torch.dtype, optimizer: str = "adamw", trainable: bool = True
) -> ParameterBytes:
    """Weight, gradient and optimizer state of a parameter; torch's optimizers keep their state in its dtype.

    Raises PlanError for unknown optimizers.
    """
    if optimizer not in _OPTIMIZER_TENSORS:
        raise PlanError(f"optimizer is one of {', '.join(_OPTIMIZER_TENSORS)}, not {optimizer!r}")
    weight = torch.Size(shape).numel() * dtype.itemsize
    if not trainable:
        return ParameterBytes(weight, 0, 0)
    return ParameterBytes(weight, weight, weight * _OPTIMIZER_TENSORS[optimizer])
