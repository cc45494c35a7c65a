"""Seconds and bytes of ops on one device for one microbatch, whole or as a strategy's share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopart.cost.communication import collective_seconds
from autopart.cost.compute import copy_seconds, op_seconds
from autopart.cost.devices import Device, Link
from autopart.cost.products import backward_products, forward_products
from autopart.passes import graph as graphs
from autopart.passes.amounts import value_bytes
from autopart.passes.annotate import OpCost
from autopart.passes.rules import Strategy
from autopart.passes.shard import Axes, Placements

# AdamW reads weight, gradient and two moments and writes weight and moments; zeroing writes the gradient.
_OPTIMIZER_PASSES = 8


@dataclass(slots=True)
class Prices:
    """Prices on a device for microbatches of ``batch`` samples; ``costs`` are those of whole ops."""

    device: Device
    costs: Mapping[fx.Node, OpCost]
    batch: int
    _cache: dict[tuple[fx.Node, float, float], tuple[float, float]] = field(default_factory=dict)
    _sizes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    _shaped: dict[tuple[fx.Node, int, int], tuple[float, float]] = field(default_factory=dict)

    def shares(self, node: fx.Node, strategy: Strategy | None, parts: int) -> tuple[float, float]:
        """Shares of the op's FLOPs and of its bytes that one rank has."""
        if strategy is None or parts == 1:
            return 1.0, 1.0
        if not any(placement.is_shard for placement in (*strategy.inputs, *strategy.outputs)):
            return 1.0, 1.0
        if node not in self._sizes:
            values = [*graphs.inputs(node), *graphs.outputs(node)]
            self._sizes[node] = tuple(value_bytes(value).at(self.batch) for value in values)
        sizes = self._sizes[node]
        placements = [*strategy.inputs, *strategy.outputs]
        local = sum(
            size / parts if placement.is_shard else size for size, placement in zip(sizes, placements, strict=True)
        )
        return 1 / parts, local / (sum(sizes) or 1)

    def op_seconds(self, node: fx.Node, strategy: Strategy | None = None, parts: int = 1) -> tuple[float, float]:
        """Forward and backward seconds; matrix products by the shapes that one rank has."""
        # by identity: strategies are made once per axis size and kept, and hashing them costs more than pricing
        key = (node, id(strategy), parts)
        if key not in self._shaped:
            self._shaped[key] = self._shaped_seconds(node, strategy, parts)
        return self._shaped[key]

    def _shaped_seconds(self, node: fx.Node, strategy: Strategy | None, parts: int) -> tuple[float, float]:
        shares = self.shares(node, strategy, parts)
        cost = self.costs.get(node)
        products = forward_products(node, self.batch, strategy, parts) if cost is not None and cost.contraction else ()
        if cost is None or not products or not self.device.processors:
            return self.shared_seconds(node, *shares)
        dtype = str(graphs.outputs(node)[0].fake.dtype).removeprefix("torch.")
        moved = cost.bytes_forward.at(self.batch) * shares[1]
        forward = op_seconds(self.device, 0.0, moved, dtype, products=products)
        if not node.meta.get("differentiable"):
            return forward, 0.0
        moved = cost.bytes_backward.at(self.batch) * shares[1]
        gradients = backward_products(node, products)
        return forward, op_seconds(self.device, 0.0, moved, dtype, launches=2, products=gradients)

    def shared_seconds(self, node: fx.Node, flops_share: float, bytes_share: float) -> tuple[float, float]:
        """Forward and backward seconds of a share of the op's FLOPs and bytes, whatever the shapes: no more than
        :meth:`op_seconds`.
        """
        key = (node, flops_share, bytes_share)
        if key not in self._cache:
            cost = self.costs.get(node)
            self._cache[key] = (0.0, 0.0) if cost is None else self._seconds(node, cost, flops_share, bytes_share)
        return self._cache[key]

    def _seconds(self, node: fx.Node, cost: OpCost, flops_share: float, bytes_share: float) -> tuple[float, float]:
        value = graphs.outputs(node)[0].fake
        dtype = str(value.dtype).removeprefix("torch.")
        # Outside contractions FLOPs run on vector units, whose rate the memory traffic hides.
        counted = flops_share if cost.contraction else 0.0
        forward = op_seconds(
            self.device,
            cost.flops_forward.at(self.batch) * counted,
            cost.bytes_forward.at(self.batch) * bytes_share,
            dtype,
        )
        backward = 0.0
        if node.meta.get("differentiable"):
            backward = op_seconds(
                self.device,
                cost.flops_backward.at(self.batch) * counted,
                cost.bytes_backward.at(self.batch) * bytes_share,
                dtype,
                launches=2 if cost.contraction else 1,
            )
        return forward, backward

    def form_seconds(self, node: fx.Node, strategy: Strategy | None, parts: int, link: Link) -> tuple[float, float]:
        """Forward and backward seconds of what an op's local form exchanges."""
        forward = backward = 0.0
        for message in strategy.form.messages if strategy is not None and strategy.form is not None else ():
            value = graphs.inputs(node)[message.operand]
            size = value_bytes(value).at(self.batch) // value.fake.element_size() * message.element_bytes
            seconds = collective_seconds(message.operation, size, parts, link)
            if message.phase == "forward":
                forward += seconds
            elif node.meta.get("differentiable"):
                backward += seconds
        return forward, backward

    def optimizer_seconds(self, weight_bytes: float) -> float:
        """Seconds of one AdamW step over parameters of that many bytes."""
        return copy_seconds(self.device, _OPTIMIZER_PASSES * weight_bytes)


def share_of(placements: Placements, axes: Axes) -> float:
    """The part of a tensor that one rank holds."""
    share = 1.0
    for placement, (_, parts) in zip(placements, axes, strict=True):
        share /= parts if placement.is_shard else 1
    return share
