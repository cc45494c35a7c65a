"""Levels of ZeRO whose exchange is hidden: in every microbatch it passes beside ops, so that memory costs little.

All parameters that can be are at level 1 at least, whose exchange is at the step's end. With F and B the seconds of a
microbatch's forward and backward, g_p and s_p those in which parameter p's replicas gather it and sum its gradient,

    level 2 of parameters P:   sum over P of s_p  <=  B
    level 3 of parameters Q:   sum over Q of g_p  <=  F,   sum over P + Q of s_p + sum over Q of g_p  <=  B

Equal parameters have equal levels. Classes of them are taken in the order of the bytes that they free for the seconds,
level 2 first, as long as they pass; what frees next to nothing is left, as a message takes a while by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from autopart.data_prices import held_bytes, offered_levels
from autopart.folding import FoldedGraph, is_stored
from autopart.passes.annotate import parameter_bytes
from autopart.passes.program import TensorInfo
from autopart.tensor_choice import Setting, TensorChoice

_LEAST = 0.01
"""Of all bytes that a level could free: a class that frees less is left."""
Exchange = Callable[[fx.Node, int], tuple[float, float]]
"""Seconds in which replicas exchange a parameter at a level in a microbatch's forward and backward."""


def hidden_levels(
    folded: FoldedGraph,
    tensors: Mapping[str, TensorInfo],
    choice: TensorChoice,
    setting: Setting,
    exchange: Exchange,
    forward_s: float,
    backward_s: float,
    optimizer: str,
) -> dict[str, int]:
    """By parameter, those above 0; empty where no dim divides.

    choice: how parameters are stored. forward_s, backward_s: of a microbatch's ops, in seconds, that hide an exchange.
    """
    levels: dict[str, int] = {}
    classes: list[tuple[tuple[fx.Node, ...], TensorInfo]] = []
    for nodes in folded.classes:
        info = tensors[nodes[0].meta["name"]] if is_stored(nodes[0]) else None
        if info is None or not info.trainable:
            continue
        if 3 in offered_levels(info, choice.storage.get(info.name, ()), setting.named_sizes, setting.dp):
            classes.append((nodes, info))
            levels.update({node.meta["name"]: 1 for node in nodes})
    left = [forward_s, backward_s]
    for level in (2, 3):
        found = []
        for nodes, info in classes:
            own, before = (
                [sum(seconds) for seconds in zip(*(exchange(node, at) for node in nodes), strict=True)]
                for at in (level, level - 1)
            )
            more = [there - known for there, known in zip(own, before, strict=True)]
            whole = parameter_bytes(info.shape, info.dtype, optimizer, True)
            freed = held_bytes(whole, level - 1, setting.dp).total - held_bytes(whole, level, setting.dp).total
            found.append((freed * len(nodes), more, nodes))
        least = _LEAST * sum(freed for freed, *_ in found)
        for freed, more, nodes in sorted(found, key=lambda item: -item[0] / (sum(item[1]) or 1.0)):
            passes = all(seconds <= room for seconds, room in zip(more, left, strict=True))
            if freed >= least and passes and levels[nodes[0].meta["name"]] == level - 1:
                left = [room - seconds for seconds, room in zip(more, left, strict=True)]
                levels.update({node.meta["name"]: level for node in nodes})
    return levels
