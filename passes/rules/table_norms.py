"""Rules of normalisations and softmax: what is normalised over is sharded by local forms alone."""

from __future__ import annotations

from torch import fx

from autopart.passes.rules.arguments import argument, dims_of, names, operands, rank_of, wide_bytes
from autopart.passes.rules.book import Entry
from autopart.passes.rules.notation import Annotation, LocalForm, Message
from autopart.passes.sizes import Extent


def _normalised(function: str, rows: tuple[str, ...], bytes_per_row: int, gathers: bool = True) -> LocalForm:
    """A local form that sends some bytes per row each way, forward by an all-gather or an all-reduce."""
    forward = Message("all_gather" if gathers else "all_reduce", "forward", rows, bytes_per_row)
    backward = Message("all_reduce", "backward", rows, bytes_per_row)
    return LocalForm(function, messages=(forward, backward), several=not gathers)


def _softmax(node: fx.Node) -> Annotation:
    """Forward the largest number and the sum of exponentials per row, backward one number."""
    (dim,) = dims_of(node, 1, "dim")
    terms = names(rank_of(node))
    rows, size = tuple(term for index, term in enumerate(terms) if index != dim), wide_bytes(node)
    messages = (Message("all_gather", "forward", rows, 2 * size), Message("all_reduce", "backward", rows, size))
    function = "sharded_log_softmax" if "log" in str(node.target) else "sharded_softmax"
    line = " ".join(terms)
    return Annotation(f"{line} -> {line}", forms={terms[dim]: LocalForm(function, messages=messages)} if terms else {})


def _layer_norm(node: fx.Node) -> Annotation:
    """layer_norm and rms_norm: weights have exactly the normalised dims."""
    normal = names(len(argument(node, 1, "normalized_shape")), "n")
    line = " ".join(normal)
    text = ", ".join([f"*b {line}", *[line] * (operands(node) - 1)]) + f" -> *b {line}"
    size = wide_bytes(node)
    if "rms" in str(node.target):
        form = _normalised("sharded_rms_norm", ("*b",), size, gathers=False)
    else:
        form = _normalised("sharded_layer_norm", ("*b",), 2 * size)
    return Annotation(text, forms=dict.fromkeys(normal, form))


def _group_norm(node: fx.Node) -> Annotation:
    """Groups are independent of each other."""
    space = names(rank_of(node) - 2, "s")
    data = " ".join(["b", "(g c)", *(f"^{name}" for name in space)])
    text = ", ".join([data, *["(g c)"] * (operands(node) - 1)]) + f" -> {data}"
    form = _normalised("sharded_group_norm", ("b", "g"), 2 * wide_bytes(node))
    return Annotation(text, sizes={"g": Extent(argument(node, 1, "num_groups"))}, forms={"c": form})


def _batch_norm(node: fx.Node) -> str:
    """Channels are independent, running statistics included. In training the batch and space are one sample."""
    training = bool(argument(node, 5, "training"))
    data = "^b c ^*s" if training else "b c *s"
    return ", ".join([data, *["c"] * (operands(node) - 1)]) + f" -> {data}"


def _instance_norm(node: fx.Node) -> str:
    """Each channel of each sample by itself; running statistics, which it updates, are of all samples."""
    own, running = bool(argument(node, 5, "use_input_stats")), argument(node, 3, "running_mean") is not None
    data = f"{'^' * (own and running)}b c {'^' * own}*s"
    return ", ".join([data, *["c"] * (operands(node) - 1)]) + f" -> {data}"


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    return {
        "aten.softmax.int": _softmax,
        "aten.log_softmax.int": _softmax,
        "aten.layer_norm.default": _layer_norm,
        "aten.rms_norm.default": _layer_norm,
        "aten.group_norm.default": _group_norm,
        "aten.batch_norm.default": _batch_norm,
        "aten.instance_norm.default": _instance_norm,
    }
