"""What autograd keeps for the backward pass, op by op.

The rules restate for each op what torch's ``derivatives.yaml`` saves, under eager execution: which of its inputs and
outputs (:func:`saved_tensors`), and what it allocates besides, such as a dropout mask (:func:`saved_inside`). A tensor
that several ops keep, or that is kept through views, is in memory once: :func:`saved_values` unites them.

What an op without a rule keeps is found on the meta device (:mod:`autopart.passes.op_memory`); of one that does not run
there every input and output, which errs towards more memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from autopart.passes.amounts import ZERO, Amount, numel, product, stored_bytes, tensor_bytes, total
from autopart.passes.einsum_memory import copied_operands
from autopart.passes.graph import RECURRENT, Value, inputs, is_op, is_tensor, may_have_gradient, outputs, value_of
from autopart.passes.op_memory import keeping
from autopart.passes.program import Role
from autopart.passes.saved_recurrent import is_known, recurrent_inside
from autopart.passes.storage import argument, concrete, is_view, merges_leading_dims, op_name, storage_of

_NOTHING = {
    *("add", "sub", "rsub", "neg", "sum", "mean", "cat", "stack", "concat", "constant_pad_nd", "clone"),
    *("contiguous", "reshape", "flatten", "_unsafe_view", "to", "type_as", "_to_copy", "cumsum", "roll", "flip"),
    *("repeat", "tril", "triu", "floor", "ceil", "round", "sign", "fill", "zeros_like", "ones_like", "full_like"),
    *("empty_like", "new_ones", "new_zeros", "new_full", "arange", "full", "zeros", "ones", "masked_select"),
    *("pixel_shuffle", "pixel_unshuffle", "upsample_nearest2d", "upsample_bilinear2d", "logical_not", "ravel"),
    *("im2col", "col2im", "alias", "slice_scatter", "select_scatter", "where_self", "reshape_as", "hstack", "vstack"),
    *("repeat_interleave", "complex", "partial_mean"),
}
_INPUT = {
    *("gelu", "silu", "mish", "hardswish", "hardtanh", "hardsigmoid", "leaky_relu", "elu", "selu", "celu", "softplus"),
    *("softshrink", "hardshrink", "relu6", "threshold", "clamp", "clamp_min", "clamp_max", "abs", "sin", "cos", "log"),
    *("log2", "log10", "log1p", "erf", "log_sigmoid", "glu", "var", "square", "pow_scalar", "avg_pool1d", "atan"),
    *("avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "acos", "asin"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
}
_OUTPUT = {
    *("relu", "tanh", "sigmoid", "exp", "exp2", "expm1", "sqrt", "rsqrt", "reciprocal", "softmax", "log_softmax"),
    *("_softmax", "_log_softmax", "tan", "special_softmax", "sharded_softmax", "sharded_log_softmax"),
}
_BOTH = {
    *("amax", "amin", "logsumexp", "norm", "linalg_vector_norm", "std", "prod", "cumprod", "max_full", "min_full"),
    "sharded_logsumexp",
}
_PRODUCTS = {"mul", "mm", "bmm", "matmul", "dot", "mv", "outer", "einsum", "linear", "addmm", "baddbmm", "addbmm"}
_CONVOLUTIONS = {
    *("conv1d", "conv2d", "conv3d", "convolution", "_convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}
_GROUPED = {"_grouped_mm", "grouped_mm", "grouped_mm_fallback"}
_LOSSES = {
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "nll_loss", "nll_loss_nd"),
    *("binary_cross_entropy_with_logits", "soft_margin_loss"),
}
# Ops whose backward needs where values went: positions of their index arguments, and of what it asks for sizes.
_INDEXED = {
    "embedding": (1,),
    "vocab_embedding": (1,),
    "gather": (0, 2),
    "index_select": (2,),
    "index_add": (2, 3),
    "scatter": (2,),
    "scatter_add": (2,),
    "masked_fill": (1,),
    "masked_scatter": (1,),
}
WHOLE_INSIDE = {"sharded_layer_norm", "sharded_rms_norm", "sharded_group_norm", "vocab_cross_entropy"}
"""Local forms that keep numbers of each row beside their operands, which every rank of their axis has."""
_ATTENTION = {"scaled_dot_product_attention", "query_sharded_attention"}
_SAMPLES = 8
"""For which, and for twice as many, ops are run on the meta device."""
_POOLS = {"max_pool1d": 8, "max_pool2d": 8, "max_pool3d": 8, "adaptive_max_pool2d": 8}


def needs_gradient(value: Value) -> bool:
    """Whether gradients flow to the value: ``meta["differentiable"]`` of its producer, else any floating point."""
    marked = value.node.meta.get("differentiable")
    possible = may_have_gradient(value.fake.dtype)
    return possible if marked is None else bool(marked) and possible


def is_differentiated(node: fx.Node) -> bool:
    """Whether the op has a backward: a differentiable output made from a differentiable input."""
    return any(map(needs_gradient, outputs(node))) and any(map(needs_gradient, inputs(node)))


def _operand(node: fx.Node, position: int, name: str = "") -> Value | None:
    found = argument(node, position, name)
    return value_of(found) if isinstance(found, fx.Node) and is_tensor(found) else None


def _operands(node: fx.Node) -> list[Value]:
    """The factors of a product: what is added to it (bias) or only says where groups end is left out."""
    name = op_name(node)
    if name in ("addmm", "baddbmm", "addbmm"):
        found = [_operand(node, 1, "mat1"), _operand(node, 2, "mat2")]
    elif name == "linear" or name in _CONVOLUTIONS or name in _GROUPED:
        found = [_operand(node, 0, "input"), _operand(node, 1, "weight")]
    else:
        found = list(inputs(node))
    return [value for value in found if value is not None]


def _copied(node: fx.Node) -> list[Value]:
    """Operands of a product that it copies first: of matmul those with more than three dims whose batch dims do not
    merge, of linear an input whose rows do not, where the copy is of use for the weight's gradient.
    """
    name = op_name(node)
    if name == "matmul":
        return [value for value in _operands(node) if value.fake.dim() > 3 and not merges_leading_dims(value)]
    if name == "linear":
        rows, weight = _operands(node)
        return [rows] if rows.fake.dim() > 2 and needs_gradient(weight) and not merges_leading_dims(rows, 1) else []
    return copied_operands(node)


def _saved_factors(node: fx.Node) -> list[Value]:
    """Each factor of a product is kept for the gradients of the others."""
    factors = _operands(node)
    kept = []
    for index, factor in enumerate(factors):
        others = factors[:index] + factors[index + 1 :]
        if any(map(needs_gradient, others)):
            kept.append(factor)
    copied = _copied(node)
    return [factor for factor in kept if factor not in copied]


def _first(node: fx.Node) -> list[Value]:
    return inputs(node)[:1]


def _saved_div(node: fx.Node) -> list[Value]:
    above, below = _operand(node, 0), _operand(node, 1)
    if above is None or below is None:
        return []
    return [above, below] if needs_gradient(below) else [below]


def _saved_pow(node: fx.Node) -> list[Value]:
    of_number = not isinstance(node.args[0], fx.Node)
    return [*inputs(node), *outputs(node)] if len(inputs(node)) > 1 or of_number else _first(node)


def _saved_pad(node: fx.Node) -> list[Value]:
    return [] if argument(node, 2, "mode", "constant") in ("constant", "circular") else _first(node)


def _saved_lerp(node: fx.Node) -> list[Value]:
    return inputs(node) if isinstance(argument(node, 2, "weight"), fx.Node) else []


def _saved_pool(node: fx.Node) -> list[Value]:
    """Of one that returns positions as well these, else they are kept inside."""
    return [*_first(node), *outputs(node)[1:]]


def _saved_where(node: fx.Node) -> list[Value]:
    return _first(node)


def _saved_index(node: fx.Node) -> list[Value]:
    return inputs(node)[1:]


def _saved_index_put(node: fx.Node) -> list[Value]:
    indices = argument(node, 1, "indices", ())
    return [value_of(item) for item in indices if isinstance(item, fx.Node)]


def _saved_chosen(node: fx.Node) -> list[Value]:
    """sort, topk, max over a dim: the positions, their second output."""
    found = outputs(node)
    return found[1:2] if len(found) > 1 else [*inputs(node), *found]


def _saved_norm(node: fx.Node) -> list[Value]:
    weight = _operand(node, {"batch_norm": 1, "instance_norm": 1}.get(op_name(node), 2), "weight")
    return _first(node) + ([weight] if weight is not None else [])


def _saved_attention(node: fx.Node) -> list[Value]:
    mask = _operand(node, 3, "attn_mask")
    kept = [*inputs(node)[:3], *outputs(node)]
    return [*kept, mask] if mask is not None and mask.fake.dtype != torch.bool else kept


def _saved_cross_entropy(node: fx.Node) -> list[Value]:
    return inputs(node)[1:]


def _saved_nothing(node: fx.Node) -> list[Value]:
    return []


def _rules() -> dict[str, Callable[[fx.Node], list[Value]]]:
    rules: dict[str, Callable[[fx.Node], list[Value]]] = {}
    rules.update(dict.fromkeys(_NOTHING, _saved_nothing))
    rules.update(dict.fromkeys(_INPUT, _first))
    rules.update(dict.fromkeys(_OUTPUT, lambda node: outputs(node)[:1]))
    rules.update(dict.fromkeys(_BOTH, lambda node: [*_first(node), *outputs(node)[:1]]))
    rules.update(dict.fromkeys(_PRODUCTS | _GROUPED, _saved_factors))
    rules.update(dict.fromkeys(_CONVOLUTIONS, _operands))  # both, whichever has a gradient
    rules.update(dict.fromkeys(_LOSSES, lambda node: inputs(node)[:2]))
    rules.update(dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"), _saved_norm))
    rules.update(dict.fromkeys(("sharded_layer_norm", "sharded_rms_norm", "sharded_group_norm"), _saved_norm))
    rules.update(dict.fromkeys(("sort", "topk", "max", "min", "median", "kthvalue", "mode"), _saved_chosen))
    rules.update(dict.fromkeys(("index_put", "_unsafe_index_put"), _saved_index_put))
    rules.update(dict.fromkeys(("index", "_unsafe_index"), _saved_index))
    rules.update(dict.fromkeys(_POOLS, _saved_pool))
    rules["_weight_norm"] = inputs
    rules.update(
        div=_saved_div,
        pow=_saved_pow,
        pad=_saved_pad,
        lerp=_saved_lerp,
        where=_saved_where,
        dropout=_saved_nothing,
        native_dropout=_saved_nothing,
        **dict.fromkeys(_ATTENTION, _saved_attention),
        cross_entropy_loss=_saved_cross_entropy,
    )
    for name, positions in _INDEXED.items():
        rules[name] = _positions(positions)
    return rules


def _positions(positions: tuple[int, ...]) -> Callable[[fx.Node], list[Value]]:
    def rule(node: fx.Node) -> list[Value]:
        found = (node.args[position] for position in positions if position < len(node.args))
        return [value_of(item) for item in found if isinstance(item, fx.Node) and is_tensor(item)]

    return rule


_RULES = _rules()


def _rule_name(node: fx.Node) -> str:
    """In-place ops keep what their functional form keeps."""
    name = op_name(node)
    return name[:-1] if name.endswith("_") and not name.endswith("__") and name not in _RULES else name


def has_rule(node: fx.Node) -> bool:
    return is_view(node) or _rule_name(node) in _RULES


def saved_tensors(node: fx.Node, kind: str = "cuda", form: str = "") -> list[Value]:
    """The inputs and outputs that an op keeps for its backward on devices of a kind ("cuda" or "cpu").

    form: the local form that it is to run by, if any. Nothing for views and for ops without a backward.
    """
    if not is_op(node) or is_view(node) or not is_differentiated(node):
        return []
    if is_unfused_attention(node, kind):
        return [] if _copies_values(node) else inputs(node)[2:3]
    rule = _RULES.get(form or _rule_name(node))
    if rule is not None and (form or not _is_found(node, kind)):
        return list(dict.fromkeys(rule(node)))
    given, made = inputs(node), outputs(node)
    found = keeping(node, _SAMPLES, _learning(node)) if not form and _is_found(node, kind) else None
    if found is None:
        return list(dict.fromkeys([*given, *made]))
    return list(dict.fromkeys([*(given[place] for place in found.operands), *(made[place] for place in found.results)]))


def saved_inside(node: fx.Node, kind: str = "cuda", form: str = "") -> Amount:
    """Bytes that an op keeps besides its inputs and outputs; kind, form: as in :func:`saved_tensors`."""
    if not is_op(node) or is_view(node) or not is_differentiated(node):
        return ZERO
    name = form or _rule_name(node)
    if not form and _is_found(node, kind):
        return _found_inside(node)
    if name in ("dropout", "native_dropout"):
        # CUDA keeps one byte per element, the CPU multiplies by scaled noise of the input's type.
        return numel(node.meta["val"]) if kind == "cuda" else tensor_bytes(node.meta["val"])
    if name in _POOLS:
        return numel(outputs(node)[0].fake) * _POOLS[name] if len(outputs(node)) == 1 else ZERO
    if name == "cross_entropy_loss" or (name == "log_sigmoid" and kind == "cpu"):  # also what its kernel computed
        return tensor_bytes(inputs(node)[0].fake)
    if name in ("matmul", "linear", "einsum"):
        return total(size for _, size in copied_inside(node, kind, form))
    if name in ("layer_norm", "rms_norm", "sharded_layer_norm", "sharded_rms_norm"):
        normalized = _number(node, 1, "normalized_shape")
        rows = product(node.meta["val"].shape[: node.meta["val"].dim() - len(normalized)])
        return rows * (8 if name.endswith("layer_norm") else 4)
    if name in ("group_norm", "sharded_group_norm"):
        return product(node.meta["val"].shape[:1]) * int(_number(node, 1, "num_groups")) * 8
    if name == "_weight_norm":
        return _weight_norm_inside(node)
    if name == "vocab_cross_entropy":  # a normaliser, where the label is, and whether it is here or counts
        return numel(inputs(node)[1].fake) * 14
    if name == "instance_norm":
        return product(node.meta["val"].shape[:2]) * 8
    if name == "batch_norm":
        return product(node.meta["val"].shape[1:2]) * 8
    if name in _ATTENTION:
        return _attention_inside(node, kind, name)
    if str(node.target) in RECURRENT:
        return recurrent_inside(node, kind)
    return ZERO


def _is_found(node: fx.Node, kind: str) -> bool:
    """Whether what an op keeps is found on the meta device: without a rule, or where torch writes it out."""
    if str(node.target) in RECURRENT:
        return kind == "cpu" and not is_known(node, kind)
    match op_name(node):
        case "rms_norm":
            return kind == "cpu"
        case "einsum":
            return len(inputs(node)) > 2
        case "matmul":
            return _is_broadcast(node)
    return not has_rule(node)


def _is_broadcast(node: fx.Node) -> bool:
    """Whether one operand of a product of several matrices is there once for several of the other's."""
    many = [value.fake.shape[:-2] for value in inputs(node) if value.fake.dim() > 2]
    return len(many) == 2 and concrete(many[0], _SAMPLES) != concrete(many[1], _SAMPLES)


def _found_inside(node: fx.Node) -> Amount:
    """Bytes besides inputs and outputs, from two numbers of samples."""
    few, many = (keeping(node, samples, _learning(node)) for samples in (_SAMPLES, 2 * _SAMPLES))
    if few is None or many is None:
        return ZERO
    slope = int(many.inside - few.inside) // _SAMPLES
    return Amount((max(0, int(few.inside) - _SAMPLES * slope), slope))


def _learning(node: fx.Node) -> list[Value]:
    return list(filter(needs_gradient, inputs(node)))


def scaled_by_torch(node: fx.Node) -> bool:
    """Whether a weight norm is no kernel, but written out by torch: one of neither the first nor the last dim."""
    return op_name(node) == "_weight_norm" and argument(node, 2, "dim", 0) not in (0, inputs(node)[0].fake.dim() - 1)


def _weight_norm_inside(node: fx.Node) -> Amount:
    """Norms, in float32 at least; written out also what they scale by, and where dims are exchanged for it a copy."""
    direction, scale = (value.fake for value in inputs(node))
    if not scaled_by_torch(node):
        return numel(scale) * max(4, direction.element_size())
    turned = tensor_bytes(direction) if argument(node, 2, "dim", 0) > 0 else ZERO
    return 2 * tensor_bytes(scale) + turned


def _number(node: fx.Node, position: int, name: str) -> Any:
    """An argument that is no tensor, which local forms are given by name."""
    return node.kwargs[name] if name in node.kwargs else argument(node, position, name)


def is_unfused_attention(node: fx.Node, kind: str) -> bool:
    """The CPU's fused kernel has neither dropout nor a gradient of the mask."""
    if kind != "cpu" or op_name(node) not in _ATTENTION:
        return False
    mask = _operand(node, 3, "attn_mask")
    return bool(argument(node, 4, "dropout_p", 0.0)) or (mask is not None and needs_gradient(mask))


def attention_scores(node: fx.Node) -> Amount:
    """How many scores attention has: a number for each query and key of each head."""
    query, key = (value.fake for value in inputs(node)[:2])
    return product(query.shape[:-1]) * product(key.shape[-2:-1])


def _copies_values(node: fx.Node) -> bool:
    """Whether attention's own formula copies its values; queries and keys it scales, in new tensors."""
    values = inputs(node)[2]
    return values.fake.element_size() < 4 or not merges_leading_dims(values)


def _attention_inside(node: fx.Node, kind: str, name: str) -> Amount:
    """Log-sum-exp per query in float32, and copies: of operands, and of a boolean mask as an additive one."""
    query = inputs(node)[0].fake
    copies = total(size for _, size in copied_inside(node, kind, name))
    if not is_unfused_attention(node, kind):
        return product(query.shape[:-1]) * 4 + copies
    # probabilities, with dropout also the noise and their product
    return attention_scores(node) * ((3 if argument(node, 4, "dropout_p", 0.0) else 1) * least_width(query)) + copies


def least_width(query: torch.Tensor) -> int:
    """Bytes of a number in which attention's own formula computes."""
    return max(4, query.element_size())


def copied_inside(node: fx.Node, kind: str = "cuda", form: str = "") -> list[tuple[Value, Amount]]:
    """Of :func:`saved_inside` the copies of operands, each of which a rank has as it has the operand.

    Of attention also the boolean mask that it turns into an additive one of as many numbers.
    """
    name = form or _rule_name(node)
    if name in ("matmul", "linear", "einsum"):
        return [] if _is_found(node, kind) else [(value, tensor_bytes(value.fake)) for value in _copied(node)]
    if name not in _ATTENTION:
        return []
    query, key, _ = operands = inputs(node)[:3]
    if is_unfused_attention(node, kind):
        return [(item, numel(item.fake) * least_width(query.fake)) for item in operands[: 2 + _copies_values(node)]]
    if name == "query_sharded_attention":
        # where kernels know of no such mask one is made, whose rows are the rank's queries
        pairs = product(query.fake.shape[-2:-1]) * product(key.fake.shape[-2:-1])
        return [(query, pairs * query.fake.element_size())] if kind == "cpu" else []
    mask = _operand(node, 3, "attn_mask")
    additive = mask is not None and mask.fake.dtype == torch.bool
    return [(mask, numel(mask.fake) * query.fake.element_size())] if mask is not None and additive else []


def saved_values(nodes: Iterable[fx.Node], kind: str = "cuda", skip_placeholders: bool = True) -> list[Value]:
    """The distinct values in memory until the backward of ``nodes``: each owner of a kept view once, in order.

    skip_placeholders: leave out parameters, buffers and inputs, which are in memory anyway; what a stage receives from
    another is in memory for its sake, and stays.
    """
    kept: dict[Value, None] = {}
    for node in nodes:
        for value in saved_tensors(node, kind):
            owner = storage_of(value)
            stays = owner.node.op == "call_function" or owner.node.meta.get("role") is Role.RECEIVED
            if stays or not skip_placeholders:
                kept[owner] = None
    return list(kept)


def saved_bytes(nodes: Iterable[fx.Node], kind: str = "cuda", skip_placeholders: bool = True) -> Amount:
    """Bytes kept until the backward of ``nodes``, each storage once."""
    listed = list(nodes)
    kept = total(stored_bytes(value.fake) for value in saved_values(listed, kind, skip_placeholders))
    return kept + total(saved_inside(node, kind) for node in listed)
