"""Roofline, ring formulas and transitions, against numbers worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from autopart.cluster import Cluster
from autopart.cost import communication as comm
from autopart.cost.compute import Efficiency, copy_seconds, op_seconds
from autopart.cost.devices import Device, Link
from autopart.runtime import transitions
from autopart.runtime.errors import ClusterError
from autopart.runtime.placement import BROADCAST, PARTIAL, REPLICATE, Kind, Placement, shard

IDEAL = Efficiency(1.0, 1.0, 1.0)
DEVICE = Device("d", "cuda", 2**30, {"float32": 100.0, "bfloat16": 400.0}, 10.0, 0.5)
LINK = Link("l", 8.0, 0.25)
CALL = comm.CALL_S


def test_roofline() -> None:
    assert op_seconds(DEVICE, 1000, 20, efficiency=IDEAL) == 10.5  # bound by arithmetic
    assert op_seconds(DEVICE, 1000, 200, efficiency=IDEAL) == 20.5  # bound by memory
    assert op_seconds(DEVICE, 1000, 20, "bfloat16", efficiency=IDEAL) == 3.0
    assert op_seconds(DEVICE, 0, 0) == 0  # a view
    assert op_seconds(DEVICE, 1, 0, launches=3, efficiency=IDEAL) == pytest.approx(1.51)
    assert copy_seconds(DEVICE, 20, Efficiency(memory=0.5)) == 4.0
    with pytest.raises(ValueError, match="efficiency"):
        Efficiency(memory=1.5)


def test_ring_formulas() -> None:
    # Four devices, 64 bytes: 16-byte pieces, 2 s each; steps take 2.25 s.
    assert comm.all_reduce_seconds(64, 4, LINK, IDEAL) == pytest.approx(CALL + 6 * 2.25)
    assert comm.all_gather_seconds(64, 4, LINK, IDEAL) == pytest.approx(CALL + 3 * 2.25)
    assert comm.reduce_scatter_seconds(64, 4, LINK, IDEAL) == pytest.approx(CALL + 3 * 2.25)
    assert comm.all_to_all_seconds(64, 4, LINK, IDEAL) == pytest.approx(CALL + 3 * 2.25)
    assert comm.send_seconds(64, LINK, IDEAL) == pytest.approx(CALL + 8.25)


def test_steps_of_an_all_reduce_may_be_shorter() -> None:
    quick = Link("l", 8.0, 0.25, sum_latency_s=0.125)
    assert comm.all_reduce_seconds(64, 4, quick, IDEAL) == pytest.approx(CALL + 6 * 2.125)
    for kind in (comm.ALL_GATHER, comm.REDUCE_SCATTER, comm.ALL_TO_ALL, comm.BROADCAST):
        assert comm.collective_seconds(kind, 64, 4, quick) == comm.collective_seconds(kind, 64, 4, LINK)
    for wrong in ({"sum_latency_s": -1.0}, {"switch_sums": 1.5}):
        with pytest.raises(ClusterError, match="sum_latency_s is not below zero, switch_sums from 0 to 1"):
            Link("l", 8.0, 0.25, **wrong)


def test_sums_in_a_switch_where_a_ring_sends_more() -> None:
    """Of two devices a ring sends the tensor once over, of four one and a half times."""
    link = Link("l", 8.0, 0.25, switch_sums=0.8)
    assert comm.all_reduce_seconds(64, 2, link, IDEAL) == comm.all_reduce_seconds(64, 2, LINK, IDEAL)
    assert comm.all_reduce_seconds(64, 4, link, IDEAL) == pytest.approx(CALL + comm.SWITCH_S + 10)
    assert comm.bucketed_all_reduce_seconds(64, 4, link, IDEAL) == pytest.approx(10)
    assert comm.all_gather_seconds(64, 4, link, IDEAL) == comm.all_gather_seconds(64, 4, LINK, IDEAL)
    nodes = Cluster.parse("2x8xH100")
    assert nodes.group_link(range(8)).switch_sums and not nodes.group_link(range(16)).switch_sums


def test_gloo_sums_whole_tensors_to_scatter_them() -> None:
    gloo = LINK.of_gloo()
    assert comm.reduce_scatter_seconds(64, 4, gloo, IDEAL) == comm.all_reduce_seconds(64, 4, gloo, IDEAL)
    assert comm.all_gather_seconds(64, 4, gloo, IDEAL) == comm.all_gather_seconds(64, 4, LINK, IDEAL)
    with pytest.raises(ClusterError, match="scatter_rounds is from 1 to 2"):
        Link("l", 8.0, 0.25, scatter_rounds=3)


@pytest.mark.parametrize("kind", [comm.ALL_REDUCE, comm.ALL_GATHER, comm.REDUCE_SCATTER, comm.ALL_TO_ALL])
def test_one_device_communicates_nothing(kind: str) -> None:
    assert comm.collective_seconds(kind, 10**9, 1, LINK) == 0.0


def test_rings_help_rings_only() -> None:
    wide = Link("l", 8.0, 0.25, rings=4)
    assert comm.all_reduce_seconds(64, 4, wide, IDEAL) == pytest.approx(CALL + 6 * (0.5 + 0.25))
    assert comm.all_to_all_seconds(64, 4, wide, IDEAL) == comm.all_to_all_seconds(64, 4, LINK, IDEAL)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for size, parts in itertools.product((0, 1, 1000, 2**30), (2, 3, 8)):
        halves = comm.all_gather_seconds(size, parts, LINK) + comm.reduce_scatter_seconds(size, parts, LINK)
        assert comm.all_reduce_seconds(size, parts, LINK) == pytest.approx(halves - CALL)


PLACEMENTS = [REPLICATE, PARTIAL, BROADCAST, shard(0), shard(1), shard(1, 3)]


@pytest.mark.parametrize(
    ("source", "target", "forward", "forward_bytes", "backward", "backward_bytes"),
    [
        ("R", "B", None, 0, "all_reduce", 64),
        ("R", "S0", None, 0, "all_gather", 64),
        ("R", "P", None, 0, None, 0),
        ("S0", "R", "all_gather", 64, None, 0),
        ("S0", "B", "all_gather", 64, "reduce_scatter", 64),
        ("S0", "S1", "all_to_all", 16, "all_to_all", 16),
        ("S1", "S1/3", "all_gather", 64, "all_gather", 64),
        ("S0", "P", None, 0, None, 0),
        ("P", "R", "all_reduce", 64, None, 0),
        ("P", "S0", "reduce_scatter", 64, "all_gather", 64),
        ("P", "B", "all_reduce", 64, "all_reduce", 64),
        ("B", "R", None, 0, None, 0),
        ("B", "S0", None, 0, None, 0),
        ("B", "P", None, 0, None, 0),
        ("S1", "S1", None, 0, None, 0),
    ],
)
def test_transitions(
    source: str, target: str, forward: str | None, forward_bytes: int, backward: str | None, backward_bytes: int
) -> None:
    found = comm.transition(Placement.parse(source), Placement.parse(target), 64, 4, LINK, DEVICE)
    assert (found.forward_kind, found.forward_bytes) == (forward, forward_bytes)
    assert (found.backward_kind, found.backward_bytes) == (backward, backward_bytes)
    for kind, size, seconds in (
        (forward, forward_bytes, found.forward_s),
        (backward, backward_bytes, found.backward_s),
    ):
        if kind is not None:
            assert seconds == comm.collective_seconds(kind, size, 4, LINK)


def _dual(placement: Placement) -> Placement:
    swapped = {Kind.PARTIAL: BROADCAST, Kind.BROADCAST: PARTIAL}
    return swapped.get(placement.kind, placement)


@pytest.mark.parametrize(("source", "target"), itertools.permutations(PLACEMENTS, 2))
def test_backward_is_the_forward_of_the_transpose(source: Placement, target: Placement) -> None:
    """The gradient goes from the target's dual to the source's dual."""
    there = comm.transition(source, target, 64, 4, LINK, DEVICE)
    back = comm.transition(_dual(target), _dual(source), 64, 4, LINK, DEVICE)
    assert (there.backward_kind, there.backward_bytes, there.backward_s) == (
        back.forward_kind,
        back.forward_bytes,
        back.forward_s,
    )


@pytest.mark.parametrize(("source", "target"), itertools.product(PLACEMENTS, repeat=2))
def test_transitions_charge_what_the_runtime_calls(source: Placement, target: Placement) -> None:
    call = transitions.transition(source, target)
    found = comm.transition(source, target, 64, 4, LINK, DEVICE)
    assert found.forward_kind == (call.forward if call else None)
    assert found.backward_kind == (call.backward if call else None)
    assert found.seconds == found.forward_s + found.backward_s
    # Every change but a change of name costs something: a collective or a copy.
    free = source == target or call is None
    assert (found.seconds == 0) == free


def test_no_gradient_and_one_part() -> None:
    found = comm.transition(shard(0), BROADCAST, 64, 4, LINK, DEVICE, differentiable=False)
    assert found.forward_kind == "all_gather"
    assert (found.backward_kind, found.backward_bytes, found.backward_s) == (None, 0, 0.0)
    alone = comm.transition(shard(0), REPLICATE, 64, 1, LINK, DEVICE)
    assert alone.seconds == 0 and alone.forward_kind is None


def test_copies_are_priced() -> None:
    found = comm.transition(REPLICATE, shard(0), 64, 4, LINK, DEVICE, efficiency=IDEAL)
    assert found.forward_s == pytest.approx(2 * 16 / 10 + 0.5)
    found = comm.transition(BROADCAST, REPLICATE, 64, 4, LINK, DEVICE, efficiency=IDEAL)
    assert found.forward_s == 0.0 and found.backward_s == pytest.approx(6.4 + 0.5)
