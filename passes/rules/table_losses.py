"""Rules of losses: samples are summed, or frozen where their mean is taken; classes run by a local form."""

from __future__ import annotations

from torch import fx

from autopart.passes.rules.arguments import argument, names, operands, rank_of, wide_bytes
from autopart.passes.rules.book import Entry
from autopart.passes.rules.notation import Annotation, LocalForm, Message
from autopart.runtime import ctc

_NONE, _MEAN = 0, 1


def _cross_entropy(node: fx.Node) -> Annotation:
    """Samples are summed, or frozen where their mean is taken over the valid ones; classes run by a local form."""
    reduction = argument(node, 3, "reduction", _MEAN)
    text = _class_loss(node, reduction)
    rank = rank_of(node)
    numbered = rank > 1 and rank_of(node, 1) == rank - 1
    if not numbered or operands(node) > 2 or not isinstance(argument(node, 4, "ignore_index", -100), int):
        return Annotation(text)
    size = wide_bytes(node)
    sums = 3 if argument(node, 5, "label_smoothing", 0.0) else 2
    samples = tuple(f"s{index}" for index in range(rank - 2))
    messages = tuple(Message("all_reduce", "forward", ("t", *samples), count * size) for count in (1, sums))
    form = LocalForm("vocab_cross_entropy", whole=True, messages=messages, several=True)
    return Annotation(text.replace("^c", "c"), forms={"c": form})


def _class_loss(node: fx.Node, reduction: int) -> str:
    """``[n, c, …]`` or ``[c]`` scores; targets are class numbers without c, or probabilities with it."""
    rank = rank_of(node)
    mark = "^" if reduction == _MEAN else ""
    lead = f"{mark}t" if rank > 1 else ""
    rest = " ".join(f"{mark}s{index}" for index in range(rank - 2))
    scores = f"{lead} ^c {rest}"
    target = scores if rank_of(node, 1) == rank else f"{lead} {rest}"
    weights = ", ^c" * (operands(node) - 2)
    output = f"{lead} {rest}" if reduction == _NONE else ""
    return f"{scores}, {target}{weights} -> {output}"


def _nll(node: fx.Node) -> Annotation:
    """Picks one log-probability per sample: linear in them."""
    return Annotation(_class_loss(node, argument(node, 3, "reduction", _MEAN)), linear=((0,),))


def _elementwise_loss(position: int) -> Entry:
    """A loss of two tensors and weights, element by element, then ``reduction`` (the argument at ``position``)."""

    def build(node: fx.Node) -> str:
        reduction = argument(node, position, "reduction", _MEAN)
        mark = "^" if reduction == _MEAN else ""
        return ", ".join([f"{mark}*d"] * operands(node)) + (f" -> {mark}*d" if reduction == _NONE else " -> ")

    return build


def _row_loss(position: int) -> Entry:
    """One loss of each row ``[…, c]``, of which labels have a number, then ``reduction`` (the argument there)."""

    def build(node: fx.Node) -> str:
        reduction, rank = argument(node, position, "reduction", _MEAN), rank_of(node)
        row = " ".join(f"{'^' * (reduction == _MEAN)}{name}" for name in names(rank - 1, "n"))
        given = [f"{row} ^c" if rank_of(node, operand) == rank else row for operand in range(operands(node))]
        return f"{', '.join(given)} -> {row if reduction == _NONE else ''}"

    return build


def _multi_margin(node: fx.Node) -> str:
    """As nll_loss, but classes are weighted inside each sample's loss, whose mean is over all."""
    return _class_loss(node, argument(node, 5, "reduction", _MEAN))


def _ctc(node: fx.Node) -> str:
    """One loss per sample; times, classes and a target's places are whole."""
    return "^t n ^c, n ^u, n ^u, n, n -> n"


def table() -> dict[str, Entry]:
    """The rules of this file by op name."""
    return {
        "aten.cross_entropy_loss.default": _cross_entropy,
        "aten.nll_loss.default": _nll,
        "aten.nll_loss_nd.default": _nll,
        "aten.mse_loss.default": _elementwise_loss(2),
        "aten.l1_loss.default": _elementwise_loss(2),
        "aten.smooth_l1_loss.default": _elementwise_loss(2),
        "aten.huber_loss.default": _elementwise_loss(2),
        "aten.kl_div.default": _elementwise_loss(2),
        "aten.soft_margin_loss.default": _elementwise_loss(2),
        "aten.hinge_embedding_loss.default": _elementwise_loss(3),
        "aten.margin_ranking_loss.default": _elementwise_loss(4),
        "aten.poisson_nll_loss.default": _elementwise_loss(5),
        "aten.cosine_embedding_loss.default": _row_loss(4),
        "aten.triplet_margin_loss.default": _row_loss(7),
        "aten.multilabel_margin_loss.default": _row_loss(2),
        "aten.multi_margin_loss.default": _multi_margin,
        "aten.binary_cross_entropy.default": _elementwise_loss(3),
        "aten.binary_cross_entropy_with_logits.default": _elementwise_loss(4),
        f"{ctc.NAME.replace('::', '.')}.default": _ctc,
    }
