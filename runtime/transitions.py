"""The table of transitions between placements: which function of :mod:`collectives`, with which arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from autopart.runtime import collectives
from autopart.runtime.mesh import Axis
from autopart.runtime.placement import Kind, Placement
from autopart.runtime.traffic import Operation

# (from, to) -> function's name, operation counted forward, operation counted backward
_TABLE: dict[tuple[str, str], tuple[str, Operation | None, Operation | None]] = {
    ("R", "S"): ("split", None, "all_gather"),
    ("R", "B"): ("sum_gradients", None, "all_reduce"),
    ("R", "P"): ("keep_on_first", None, None),
    ("S", "R"): ("all_gather", "all_gather", None),
    ("S", "B"): ("all_gather_scatter_gradients", "all_gather", "reduce_scatter"),
    ("S", "P"): ("pad", None, None),
    ("S", "S"): ("all_to_all", "all_to_all", "all_to_all"),
    ("P", "R"): ("all_reduce", "all_reduce", None),
    ("P", "S"): ("reduce_scatter", "reduce_scatter", "all_gather"),
    ("P", "B"): ("all_reduce_sum_gradients", "all_reduce", "all_reduce"),
    ("B", "R"): ("keep_gradients_on_first", None, None),
    ("B", "S"): ("split_pad_gradients", None, None),
    ("B", "P"): ("keep_all_on_first", None, None),
}


@dataclass(frozen=True, slots=True)
class Transition:
    """One call that moves a tensor between placements on an axis.

    name: of the function in :mod:`autopart.runtime.collectives`.
    arguments: its keyword arguments besides ``x`` and ``axis``, as source text in terms of the local batch size ``b``.
    forward, backward: the operations that it counts as :mod:`autopart.runtime.traffic`; None: no communication.
    """

    name: str
    source: Placement
    target: Placement
    arguments: tuple[tuple[str, str], ...]
    forward: Operation | None
    backward: Operation | None

    def call(self, x: str, axis: str) -> str:
        """The call as source text, such as ``collectives.all_gather(x, tp, dim=1)``."""
        return f"collectives.{self.name}({', '.join((x, axis, *(f'{k}={v}' for k, v in self.arguments)))})"

    def __call__(self, x: Tensor, axis: Axis, batch: int = 1) -> Tensor:
        """Runs it; ``batch`` is the local batch size."""
        function: Callable[..., Tensor] = getattr(collectives, self.name)
        return function(x, axis, **_keywords(self.source, self.target, lambda p: p.blocks(batch)))


def exists(source: Placement, target: Placement) -> bool:
    """Whether there is a way from one placement to the other: routed rows have none."""
    return source == target or not (source.is_routed or target.is_routed)


def transition(source: Placement, target: Placement) -> Transition | None:
    """How to get from one placement to another; None where nothing needs to be done. The way :func:`exists`."""
    if source == target:
        return None
    name, forward, backward = _TABLE[source.kind.value, target.kind.value]
    if source.is_shard and target.is_shard and source.dim == target.dim:
        forward = backward = "all_gather"
    keywords = _keywords(source, target, _blocks_text)
    arguments = tuple((key, str(value)) for key, value in keywords.items() if "outer" not in key or value != "1")
    return Transition(name, source, target, arguments, forward, backward)


def _keywords(source: Placement, target: Placement, blocks: Callable[[Placement], int | str]) -> dict[str, int | str]:
    if source.is_shard and target.is_shard:
        return {"dim": source.dim, "to_dim": target.dim, "outer": blocks(source), "to_outer": blocks(target)}
    end = source if source.is_shard else target
    return {"dim": end.dim, "outer": blocks(end)} if end.kind is Kind.SHARD else {}


def _blocks_text(placement: Placement) -> str:
    if not placement.batched:
        return str(placement.outer)
    return "b" if placement.outer == 1 else f"{placement.outer} * b"
