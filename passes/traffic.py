"""What an op's kernels read and write in eager PyTorch, forward and back, and how many of them are started.

A kernel at least reads its inputs and writes its outputs once. Beyond that, of tensors of so many bytes (measured on
H100 with PyTorch 2.11, benchmarks/measured; autograd's formulas are the same on every device, and what is marked * is
of CUDA's kernels alone: a CPU's caches hold the rows that are read again):

==========================  ==========================================================================================
op                          besides
==========================  ==========================================================================================
softmax of long rows *      rows of more than 1,024 elements are read three times, and back twice with their gradient
cross_entropy_loss *        softmax and its result; back a gradient of zeros is made first
layer_norm, rms_norm, ... * the input is read three times; back the sums over rows for weight and bias, below
batch_norm *                the input is read twice, first for the statistics; back it and the gradient are, first for
                            their sums, which are the learned ones' gradients
sums over rows *            a bias's, or of what was broadcast: a kernel that adds up columns takes three times as
                            long as one that reads rows
casts *                     are not vectorized, which costs half as much again
pow                         back by three kernels: a power, and two products
mul, div of repeated ones   back a gradient is made for each repetition, and these are added up
add, sub                    nothing back where nothing was broadcast but a change of sign: the gradient is passed on
split, unbind               back their parts are put together
slice, select, narrow       back zeros are made, and the part is written into them
expand                      back the copies are added up
attention of CPUs that is   its scores, which the formula goes over 18 times with dropout and 12 without, back 12 and 9
not fused                   times: products, mask, softmax, a search for rows that are all masked, dropout
==========================  ==========================================================================================

A value that n ops read gets n gradients, which autograd adds up one by one: n - 1 times two are read and one written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from autopart.passes.amounts import ZERO, Amount, stored_bytes, tensor_bytes, total
from autopart.passes.graph import Value, inputs, outputs
from autopart.passes.saved import (
    attention_scores,
    is_differentiated,
    is_unfused_attention,
    least_width,
    needs_gradient,
    saved_inside,
    saved_values,
)
from autopart.passes.sizes import extent, extents
from autopart.passes.storage import argument, is_view, op_name

_PICKS = {"embedding", "index", "index_select", "gather", "_unsafe_index", "take_along_dim"}
"""Ops that read only the rows they pick from their first argument."""
_SOFTMAXES = {"softmax", "_softmax", "log_softmax", "_log_softmax"}
_NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "native_layer_norm"}
_LONG_ROW = 1024
_COLUMNS = 3
"""Times as long as reading rows takes for sums over them."""
_SCORES, _SCORES_DROPPED = (12, 9), (18, 12)
"""Passes over the scores of attention by its formula, forward and back: without and with dropout."""
_SCORES_KERNELS = 10


@dataclass(frozen=True, slots=True)
class Traffic:
    """moved: bytes that the op's own kernels read and write; after: those of kernels behind them, which add up.

    kernels: that are started.
    """

    moved: Amount = ZERO
    kernels: int = 0
    after: Amount = ZERO

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.moved + other.moved, self.kernels + other.kernels, self.after + other.after)


def forward_traffic(node: fx.Node, kind: str) -> Traffic:
    """Of an op that is no view. kind: of devices, "cuda" or "cpu"."""
    name, written = op_name(node), _bytes(outputs(node))
    read = list(dict.fromkeys(inputs(node)))
    if name in _PICKS:
        return Traffic(written * 2 + _bytes(read[1:]), 1)
    moved = written + _bytes(read)
    if is_unfused_attention(node, kind):
        return Traffic(moved + _scores(node)[0], _SCORES_KERNELS)
    if kind != "cuda":
        return Traffic(moved, 1)
    if name in _SOFTMAXES and _has_long_rows(read[0]):
        moved = moved + _bytes(read[:1]) * 2
    elif name == "cross_entropy_loss":
        moved = moved + _bytes(read[:1]) * 3
    elif name in _NORMS:
        moved = moved + _bytes(read[:1]) * (1 if name == "batch_norm" else 2)
    elif _is_cast(node):
        moved = moved * 3 // 2
    return Traffic(moved, 2 if name == "cross_entropy_loss" else 1)


def backward_traffic(node: fx.Node, kind: str) -> Traffic:
    """Of an op, or of a view. kind: of devices, "cuda" or "cpu"."""
    if not is_differentiated(node):
        return Traffic()
    found = _own_backward(node, kind)
    if kind == "cuda":  # sums are over columns
        found = replace(found, after=found.after * _COLUMNS)
    return found + _added_up(node)


def readings(value: Value) -> int:
    """How many ops give the value a gradient: an op that reads it twice gives it two."""
    found = 0
    for user in value.node.users:
        if user.op != "output" and is_differentiated(user):
            found += inputs(user).count(value)
    return found


def _added_up(node: fx.Node) -> Traffic:
    found = Traffic()
    for value in outputs(node):
        more = readings(value) - 1
        if needs_gradient(value) and more > 0:
            found += Traffic(ZERO, more, stored_bytes(value.fake) * (3 * more))
    return found


def _own_backward(node: fx.Node, kind: str) -> Traffic:
    name, read = op_name(node), list(dict.fromkeys(inputs(node)))
    made = [value for value in outputs(node) if needs_gradient(value)]
    wanted = [value for value in read if needs_gradient(value)]
    given, results = _bytes(made), _bytes(wanted)
    if is_view(node):
        return _of_view(name, made, given, results)
    if name in ("add", "sub", "rsub") and made:
        broadcast = [value for value in wanted if _is_repeated(value, made[0])]
        if argument(node, 2, "alpha", 1) != 1:
            made_anew = len(wanted)
        else:  # the gradient of what is taken away changes its sign
            made_anew = int(name == "rsub" or (name == "sub" and len(wanted) > 1))
        return Traffic(given * (2 * made_anew), made_anew) + _summed(given, len(broadcast))
    if is_unfused_attention(node, kind):
        return Traffic(given + results + _bytes(read) + _scores(node)[1], _SCORES_KERNELS)
    kept = _bytes(saved_values([node], kind, skip_placeholders=False)) + saved_inside(node, kind)
    moved, reread = given + results + kept, kind == "cuda"
    if reread and name in _SOFTMAXES and _has_long_rows(read[0]):
        return Traffic(moved + given, 1)
    if name == "cross_entropy_loss":
        return Traffic(moved + results * (3 if reread else 1), 3)
    if name == "batch_norm" and reread:
        return Traffic(moved + given + _bytes(read[:1]), 2)
    if name in _NORMS:
        learned = [value for value in wanted if value is not read[0]]
        return Traffic(moved, 1) + _summed(_bytes(read[:1]) * (2 * bool(learned)), bool(learned))
    if name == "pow":
        return Traffic(results * 7, 3)
    if reread and _is_cast(node):
        return Traffic(moved * 3 // 2, 1)
    if name in ("mul", "div") and wanted and any(_is_repeated(value, made[0]) for value in read):
        return _of_broadcast(read, wanted, made[0])
    bias = _bias(node, given)
    return Traffic(moved, max(1, len(wanted) - bias.kernels)) + bias


def _scores(node: fx.Node) -> tuple[Amount, Amount]:
    """Bytes that attention by its formula reads and writes of its scores, forward and back."""
    scores = attention_scores(node) * least_width(inputs(node)[0].fake)
    there, back = _SCORES_DROPPED if argument(node, 4, "dropout_p", 0.0) else _SCORES
    return scores * there, scores * back


def _of_broadcast(read: list[Value], wanted: list[Value], made: Value) -> Traffic:
    """A product of which one tensor is repeated along some dims, back: that gradient is made whole, then added up."""
    whole, found = tensor_bytes(made.fake), Traffic()
    for value in wanted:
        others = _bytes([other for other in read if other is not value])
        found += Traffic(whole * 2 + others, 1)
        if _is_repeated(value, made):
            kept_last = value.fake.dim() > 0 and extent(value.fake.shape[-1]) == extent(made.fake.shape[-1])
            found += _summed(whole, 1) if kept_last else Traffic(whole, 1)
    return found


def _is_repeated(value: Value, made: Value) -> bool:
    """Whether an operand has other sizes than the result; symbols are not compared, which would fix the batch size."""
    return extents(value.fake) != extents(made.fake)


def _of_view(name: str, made: list[Value], given: Amount, results: Amount) -> Traffic:
    if name in ("split_with_sizes", "split", "chunk", "unbind"):
        return Traffic(given * 2, 1)
    if name in ("slice", "select", "narrow"):
        return Traffic(results + given * 2, 2)
    if name == "expand":
        return Traffic(total(tensor_bytes(value.fake) for value in made) + results, 1)
    return Traffic()


def bias_of(node: fx.Node) -> object:
    """What a product or a convolution adds to its result; None of other ops."""
    name = op_name(node)
    if name in ("addmm", "baddbmm"):
        return argument(node, 0, "input")
    return argument(node, 2, "bias") if name == "linear" or "conv" in name else None


def _bias(node: fx.Node, given: Amount) -> Traffic:
    """The sum over rows for a product's bias."""
    bias = bias_of(node)
    wanted = isinstance(bias, fx.Node) and any(value.node is bias and needs_gradient(value) for value in inputs(node))
    return _summed(given, 1) if wanted else Traffic()


def _summed(size: Amount, count: int) -> Traffic:
    """So many sums over the rows of a tensor of so many bytes."""
    return Traffic(ZERO, int(count), size * int(count))


def _has_long_rows(value: Value) -> bool:
    shape = value.fake.shape
    return bool(shape) and isinstance(shape[-1], int) and shape[-1] > _LONG_ROW


def _is_cast(node: fx.Node) -> bool:
    """Whether elements change their type: other casts are copies."""
    found = inputs(node)
    return op_name(node) in ("to", "_to_copy") and found[0].fake.dtype != outputs(node)[0].fake.dtype


def _bytes(values: list[Value]) -> Amount:
    return total(stored_bytes(value.fake) for value in values)
