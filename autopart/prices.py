"""Seconds and bytes of ops on one device for one microbatch, whole or as a strategy's share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopart.conversion_prices import TensorAxis
from autopart.cost.communication import collective_seconds
from autopart.cost.compute import causal_share, copy_seconds, narrow_rate, op_seconds, vector_seconds
from autopart.cost.devices import LARGE_BYTES, Device
from autopart.cost.products import backward_products, channels_of_group, forward_products, is_attention
from autopart.passes import graph as graphs
from autopart.passes.amounts import Amount, value_bytes
from autopart.passes.annotate import OpCost
from autopart.passes.rules import Strategy, local_forms
from autopart.passes.saved import is_unfused_attention
from autopart.passes.storage import argument
from autopart.runtime.placement import Placement

Chosen = tuple[Strategy, ...]
"""An op's strategies, one per tensor axis; none: the op is whole."""

# How often torch's optimizers, in the form that they take by themselves, go over tensors of a parameter's size. On CUDA
# op by op over all parameters (torch.optim.adam and others, _multi_tensor_*; 'adamw' reads and writes 20 times, which
# takes as long as 24 passes at full bandwidth, benchmarks/measured), after gradients were multiplied by the loss's. On
# CPUs parameter by parameter, which caches hold from op to op: each tensor is read once, and written if it changes.
_OPTIMIZER_PASSES = {
    "cuda": {"none": 2, "sgd": 5, "momentum": 10, "adagrad": 15, "rmsprop": 16, "adam": 24, "adamw": 26},
    "cpu": {"none": 0, "sgd": 4, "momentum": 6, "adagrad": 6, "rmsprop": 6, "adam": 8, "adamw": 8},
}
# What a CPU's optimizer takes for each parameter, whatever its size, in ops of training (measured: from 1.3 us of SGD
# to 20 us of AdamW, where an op takes 11.6); CUDA's kernels go over all parameters at once.
_OPTIMIZER_OPS = {"none": 0, "sgd": 0.1, "momentum": 0.4, "adagrad": 0.9, "rmsprop": 1.0, "adam": 1.5, "adamw": 1.7}
# Autograd reads a microbatch's gradient and the sum of those before, and writes the sum.
_ADDING_PASSES = 3


@dataclass(frozen=True, slots=True)
class FormSeconds:
    """Of what an op's local forms exchange. hidden_s: what passes unseen in the backward, by kind; not counted."""

    forward_s: float
    backward_s: float
    hidden_s: Mapping[str, float]


@dataclass(slots=True)
class Prices:
    """Prices on a device for microbatches of ``batch`` samples; ``costs`` are those of whole ops.

    first: the first of all ops that cost the same, for those that are not it; each cost is found once.
    """

    device: Device
    costs: Mapping[fx.Node, OpCost]
    batch: int
    first: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    optimizer: str = "adamw"
    _cache: dict[tuple[fx.Node, float, float], tuple[float, float]] = field(default_factory=dict)
    _sizes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    _shaped: dict[tuple[fx.Node, tuple[int, ...], tuple[int, ...]], tuple[float, float]] = field(default_factory=dict)

    def shares(self, node: fx.Node, chosen: Chosen, sizes: Sequence[int]) -> tuple[float, float]:
        """Shares of the op's FLOPs and of its bytes that one rank has."""
        flops = 1.0
        for strategy, parts in zip(chosen, sizes, strict=True):
            if any(placement.divides for placement in (*strategy.inputs, *strategy.outputs)):
                flops /= parts
        if flops == 1.0:
            return 1.0, 1.0
        if node not in self._sizes:
            values = [*graphs.inputs(node), *graphs.outputs(node)]
            self._sizes[node] = tuple(value_bytes(value).at(self.batch) for value in values)
        local = sum(
            size * share for size, share in zip(self._sizes[node], value_shares(node, chosen, sizes), strict=True)
        )
        return flops, local / (sum(self._sizes[node]) or 1)

    def op_seconds(self, node: fx.Node, chosen: Chosen = (), sizes: Sequence[int] = ()) -> tuple[float, float]:
        """Forward and backward seconds of one rank's part; matrix products by the shapes that it has.

        chosen: a strategy per tensor axis, of ``sizes`` ranks; none for the whole op.
        """
        node = self.first.get(node, node)
        # by identity: strategies are made once per axis size and kept, and hashing them costs more than pricing
        key = (node, tuple(map(id, chosen)), tuple(sizes))
        if key not in self._shaped:
            self._shaped[key] = self._shaped_seconds(node, chosen, sizes)
        return self._shaped[key]

    def _shaped_seconds(self, node: fx.Node, chosen: Chosen, sizes: Sequence[int]) -> tuple[float, float]:
        shares = self.shares(node, chosen, sizes)
        cost = self.costs.get(node)
        products = forward_products(node, self.batch, chosen, sizes) if cost is not None and cost.contraction else ()
        if cost is None or not products or not self.device.processors:
            return self.shared_seconds(node, *shares)
        dtype = str(graphs.outputs(node)[0].fake.dtype).removeprefix("torch.")
        moved = cost.bytes_forward.at(self.batch) * shares[1]
        forward = op_seconds(self.device, 0.0, moved, dtype, cost.kernels_forward, products=products)
        if not node.meta.get("differentiable"):
            return forward, 0.0
        moved = cost.bytes_backward.at(self.batch) * shares[1]
        gradients = backward_products(node, products)
        backward = op_seconds(self.device, 0.0, moved, dtype, cost.kernels_backward, products=gradients)
        return forward, backward + self._after(cost, shares[1])

    def _after(self, cost: OpCost, bytes_share: float) -> float:
        """Seconds of what adds up behind an op's own backward."""
        return copy_seconds(self.device, cost.after_bytes.at(self.batch) * bytes_share)

    def weight_seconds(self, node: fx.Node, chosen: Chosen = (), sizes: Sequence[int] = ()) -> float:
        """Of a product's backward the seconds of its weight's gradient: half, as the input's takes as many FLOPs."""
        return self.op_seconds(node, chosen, sizes)[1] / 2

    def shared_seconds(self, node: fx.Node, flops_share: float, bytes_share: float) -> tuple[float, float]:
        """Forward and backward seconds of a share of the op's FLOPs and bytes, whatever the shapes: no more than
        :meth:`op_seconds`.
        """
        node = self.first.get(node, node)
        key = (node, flops_share, bytes_share)
        if key not in self._cache:
            cost = self.costs.get(node)
            self._cache[key] = (0.0, 0.0) if cost is None else self._seconds(node, cost, flops_share, bytes_share)
        return self._cache[key]

    def _seconds(self, node: fx.Node, cost: OpCost, flops_share: float, bytes_share: float) -> tuple[float, float]:
        value = graphs.outputs(node)[0].fake
        dtype = str(value.dtype).removeprefix("torch.")
        # Outside contractions FLOPs run on vector units; what of it memory traffic does not hide is counted apart.
        there, back = self._arithmetic_shares(node, dtype) if cost.contraction else (0.0, 0.0)
        device, batch = self.device, self.batch
        drawn = cost.drawn.at(batch) * flops_share
        forward = op_seconds(
            device,
            cost.flops_forward.at(batch) * flops_share * there,
            cost.bytes_forward.at(batch) * bytes_share,
            dtype,
            cost.kernels_forward,
            vector_s=vector_seconds(device, cost.functions_forward.at(batch) * flops_share, drawn),
            mapped=self._mapped_bytes(cost.made_forward, bytes_share),
        )
        backward = 0.0
        if node.meta.get("differentiable"):
            backward = op_seconds(
                device,
                cost.flops_backward.at(batch) * flops_share * back,
                cost.bytes_backward.at(batch) * bytes_share,
                dtype,
                cost.kernels_backward,
                vector_s=vector_seconds(device, cost.functions_backward.at(batch) * flops_share, 0.0),
                mapped=self._mapped_bytes(cost.made_backward, bytes_share),
            )
            backward += self._after(cost, bytes_share)
        return forward, backward

    def _mapped_bytes(self, made: Sequence[Amount], share: float) -> float:
        """Of new tensors those of large ones, where a CPU takes longer for these."""
        if not self.device.mapped_s:
            return 0.0
        sizes = (amount.at(self.batch) * share for amount in made)
        return sum(size for size in sizes if size >= LARGE_BYTES)

    def _arithmetic_shares(self, node: fx.Node, dtype: str) -> tuple[float, float]:
        """What a contraction's FLOPs take at the matrix products' rate is times this, forward and back.

        Convolutions in narrow groups have a rate of their own. So has fused attention, which leaves out half of its
        FLOPs where it is causal. Of devices whose multiprocessors are known, for which it is priced by shapes, this is
        the least that it may take.
        """
        rate = self.device.product_rate(dtype)
        if (channels := channels_of_group(node)) is not None:
            slower = rate / narrow_rate(self.device, dtype, channels)
            return slower, slower
        if not is_attention(node) or is_unfused_attention(node, self.device.kind):
            return 1.0, 1.0
        products = forward_products(node, self.batch)
        there, back = (rate / self.device.attention_rate(dtype, back=back) for back in (False, True))
        if self.device.processors:
            slower = min((product.slower for product in products), default=1.0)
            return min(1.0, slower * there), min(1.0, slower * back)
        if self.device.kind == "cpu" and products and argument(node, 5, "is_causal", False):
            share = causal_share(products[0].n, products[0].m)
            return share * there, share * back
        return there, back

    def kernels(self, node: fx.Node) -> tuple[int, int]:
        """How many an op starts forward and back; those of transitions are not counted."""
        cost = self.costs.get(self.first.get(node, node))
        if cost is None:
            return 0, 0
        return cost.kernels_forward, cost.kernels_backward if node.meta.get("differentiable") else 0

    def form_seconds(self, node: fx.Node, chosen: Chosen, axes: Sequence[TensorAxis], beside: bool) -> FormSeconds:
        """What an op's local forms exchange, each along its axis.

        beside: the backward is in one piece, so that what may go on beside the weight's gradient does.
        """
        forward = backward = 0.0
        unseen: dict[str, float] = {}
        applied = [(strategy, axis.parts) for strategy, axis in zip(chosen, axes, strict=True)]
        for axis, form in zip(axes, local_forms(applied), strict=True):
            for message in form.messages if form is not None else ():
                payload = message.payload(axis.parts, self.batch)
                seconds = collective_seconds(message.operation, payload, axis.parts, axis.link)
                if message.phase == "forward":
                    forward += seconds
                elif node.meta.get("differentiable"):
                    backward += seconds
                    if beside and message.beside:
                        weight = self.weight_seconds(node, chosen, [axis.parts for axis in axes])
                        unseen[message.operation] = min(seconds, weight)
        return FormSeconds(forward, backward - sum(unseen.values()), unseen)

    def optimizer_seconds(self, weight_bytes: float) -> float:
        """Seconds of the optimizer's step over a parameter of that many bytes, and no more than that over several."""
        seconds = copy_seconds(self.device, _OPTIMIZER_PASSES[self.device.kind][self.optimizer] * weight_bytes)
        if self.device.kind == "cpu" and weight_bytes:
            seconds += _OPTIMIZER_OPS[self.optimizer] * self.device.launch_s
        return seconds

    def adding_seconds(self, gradient_bytes: float, microbatches: int) -> float:
        """Seconds of one of the microbatches in which its gradients are added to those before; the first's are kept."""
        return copy_seconds(self.device, _ADDING_PASSES * gradient_bytes) * (microbatches - 1) / microbatches


def share_of(placements: Sequence[Placement], sizes: Sequence[int]) -> float:
    """The part of a tensor that one rank holds on axes of ``sizes`` ranks."""
    share = 1.0
    for placement, parts in zip(placements, sizes, strict=True):
        share /= parts if placement.divides else 1
    return share


def value_shares(node: fx.Node, chosen: Chosen, sizes: Sequence[int]) -> list[float]:
    """The parts of an op's inputs and outputs, in this order, that one rank holds."""
    if not chosen:
        return [1.0] * (len(graphs.inputs(node)) + len(graphs.outputs(node)))
    shares = [1.0] * (len(chosen[0].inputs) + len(chosen[0].outputs))
    for strategy, parts in zip(chosen, sizes, strict=True):
        for index, placement in enumerate((*strategy.inputs, *strategy.outputs)):
            if placement.divides:
                shares[index] /= parts
    return shares
