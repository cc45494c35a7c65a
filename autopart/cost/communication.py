"""Seconds of collectives, and what a change of placement costs forward and backward.

Ring algorithms with n devices, payload B bytes, link bandwidth W, step latency a (Patarasu and Yuan: Bandwidth optimal
all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009; Thakur, Rabenseifner, Gropp, 2005)::

    all_reduce       2 (n-1)/n B / W + 2 (n-1) a'      B: bytes of the tensor; a': the link's sum_step_s
    all_gather         (n-1)/n B / W +   (n-1) a       B: bytes of the gathered result
    reduce_scatter   r (n-1)/n B / W + r (n-1) a       B: bytes of the input; r: the link's scatter_rounds, 1 of a ring
    all_to_all         (n-1)/n B / W +   (n-1) a       B: bytes of the local tensor
    broadcast                B / W + (n-1) a       B: bytes of the tensor, passed on in pieces
    reduce                   B / W + (n-1) a       B: bytes of the tensor, summed on its way
    send                     B / W +         a       B: bytes sent

An all-reduce takes ``B / (bandwidth switch_sums) + SWITCH_S`` instead where the link's switch adds up (NVLink SHARP)
and that passes more bytes in a second.

W is the link's bandwidth times its ``efficiency``. A group over several nodes is one ring through all of its devices:
:meth:`autopart.cluster.Cluster.group_link` gives the narrowest link, how many such rings run beside each other on the
nodes' ports, and the mean latency of a step. Groups beside each other share a node's ports evenly. Gloo sums the whole
tensor to scatter it (PyTorch's ProcessGroupGloo.cpp, reduce_scatter_tensor_coalesced), which takes two rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopart.cost.compute import Efficiency, copy_seconds
from autopart.cost.devices import Device, Link
from autopart.runtime import transitions
from autopart.runtime.placement import Placement

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
ALL_TO_ALL = "all_to_all"
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
BROADCAST = "broadcast"
REDUCE = "reduce"
SEND = "send"

CALL_S = 6.6e-6
"""Seconds that one collective takes on empty tensors (baseLat of a ring in NCCL's src/graph/tuning.cc)."""


SWITCH_S = 40e-6
"""Seconds of sums in a switch beside their bytes, set by hand to nccl-tests' published runs (docs/cost-model.md)."""


def all_reduce_seconds(num_bytes: float, parts: int, link: Link, efficiency: Efficiency | None = None) -> float:
    ring = _ring_seconds(2, num_bytes, parts, link, efficiency, link.sum_step_s)
    if link.switch_sums * 2 * (parts - 1) <= _share(link, efficiency) * parts * link.rings:
        return ring
    return CALL_S + SWITCH_S + num_bytes / (link.bandwidth * link.switch_sums)


def bucketed_all_reduce_seconds(
    num_bytes: float, parts: int, link: Link, efficiency: Efficiency | None = None
) -> float:
    """Share of a tensor in an all-reduce of large buckets: its bytes alone, without a call's latency."""
    return all_reduce_seconds(num_bytes, parts, link, efficiency) - all_reduce_seconds(0, parts, link, efficiency)


def all_gather_seconds(num_bytes: float, parts: int, link: Link, efficiency: Efficiency | None = None) -> float:
    return _ring_seconds(1, num_bytes, parts, link, efficiency, link.latency_s)


def reduce_scatter_seconds(num_bytes: float, parts: int, link: Link, efficiency: Efficiency | None = None) -> float:
    return _ring_seconds(link.scatter_rounds, num_bytes, parts, link, efficiency, link.latency_s)


def all_to_all_seconds(num_bytes: float, parts: int, link: Link, efficiency: Efficiency | None = None) -> float:
    """Every device sends to every other, so that rings beside each other do not help: each has its own link only."""
    if parts == 1:
        return 0.0
    return CALL_S + (parts - 1) * (num_bytes / parts / (link.bandwidth * _share(link, efficiency)) + link.latency_s)


def chain_seconds(num_bytes: float, parts: int, link: Link, efficiency: Efficiency | None = None) -> float:
    """From one device through all others, or back: a broadcast or a sum for one device."""
    if parts == 1:
        return 0.0
    return CALL_S + num_bytes / (link.ring_bandwidth * _share(link, efficiency)) + (parts - 1) * link.latency_s


def send_seconds(num_bytes: float, link: Link, efficiency: Efficiency | None = None) -> float:
    return CALL_S + num_bytes / (link.bandwidth * _share(link, efficiency)) + link.latency_s


def _share(link: Link, efficiency: Efficiency | None) -> float:
    return efficiency.network if efficiency else link.efficiency


def _ring_seconds(
    rounds: float, num_bytes: float, parts: int, link: Link, efficiency: Efficiency | None, latency_s: float
) -> float:
    if parts == 1:
        return 0.0
    step = num_bytes / parts / (link.ring_bandwidth * _share(link, efficiency)) + latency_s
    return CALL_S + rounds * (parts - 1) * step


_SECONDS = {
    ALL_REDUCE: all_reduce_seconds,
    ALL_GATHER: all_gather_seconds,
    REDUCE_SCATTER: reduce_scatter_seconds,
    ALL_TO_ALL: all_to_all_seconds,
    BROADCAST: chain_seconds,
    REDUCE: chain_seconds,
}
KINDS = tuple(_SECONDS)


def collective_seconds(
    kind: str, num_bytes: float, parts: int, link: Link, efficiency: Efficiency | None = None
) -> float:
    """Seconds of a collective by its name; payload as in the module's table. KeyError for other names."""
    return _SECONDS[kind](num_bytes, parts, link, efficiency)


def counted_seconds(counts: Mapping[str, Mapping[str, int]], parts: int, link: Link) -> dict[str, float]:
    """Seconds by kind of so many calls with so many bytes in all, as plans count them; exact, as both are linear."""
    return {
        kind: count["calls"] * collective_seconds(kind, count["bytes"] / count["calls"], parts, link)
        for kind, count in counts.items()
        if count["calls"]
    }


@dataclass(frozen=True, slots=True)
class Transition:
    """What takes a value from one placement to another, and its gradient back.

    forward_kind, backward_kind: the collective, None where nothing is sent (identity, slice, zeroing).
    forward_bytes, backward_bytes: its payload by the module's table. forward_s, backward_s: with local copies.
    """

    forward_kind: str | None
    backward_kind: str | None
    forward_bytes: int
    backward_bytes: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def transition(
    source: Placement,
    target: Placement,
    num_bytes: int,
    parts: int,
    link: Link,
    device: Device,
    differentiable: bool = True,
    efficiency: Efficiency | None = None,
) -> Transition:
    """The cost of using a value placed as ``source`` where ``target`` is needed, and of its gradient's way back.

    num_bytes: of the value as one rank would hold it without this axis' sharding (all other axes applied).
    parts: size of the axis. differentiable: False for integers and values without gradient: nothing backward.
    The collectives are those that :mod:`autopart.runtime.transitions` calls.
    """
    call = transitions.transition(source, target) if parts > 1 else None
    if call is None:
        return Transition(None, None, 0, 0, 0.0, 0.0)
    share = num_bytes // parts
    # A slice reads and writes one share, padding reads a share and writes the whole, zeroing writes the whole.
    slices, pads = 2 * share, num_bytes + share
    copied_forward, copied_backward = {
        "split": (slices, 0),
        "keep_on_first": (num_bytes, 0),
        "all_gather": (0, slices),
        "pad": (pads, slices),
        "keep_gradients_on_first": (0, num_bytes),
        "split_pad_gradients": (slices, pads),
        "keep_all_on_first": (num_bytes, num_bytes),
    }.get(call.name, (0, 0))

    def one_way(kind: str | None, copied: int) -> tuple[int, float]:
        """Payload and seconds of one direction."""
        local = copy_seconds(device, copied, efficiency) + device.launch_s if copied else 0.0
        if kind is None:
            return 0, local
        payload = share if kind == ALL_TO_ALL else num_bytes
        return payload, local + collective_seconds(kind, payload, parts, link, efficiency)

    forward_bytes, forward_s = one_way(call.forward, copied_forward)
    if not differentiable:
        return Transition(call.forward, None, forward_bytes, 0, forward_s, 0.0)
    backward_bytes, backward_s = one_way(call.backward, copied_backward)
    return Transition(call.forward, call.backward, forward_bytes, backward_bytes, forward_s, backward_s)
