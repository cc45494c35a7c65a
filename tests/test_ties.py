"""Sums of a tied parameter's gradient over stages: ranks of a stage with equal ones sum a share each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_unlike_planning import ROOMY, plan_of, subject_of, unlike

from autopart.cluster import Cluster
from autopart.cost.communication import all_gather_seconds, bucketed_all_reduce_seconds
from autopart.runtime.collectives import sum_of_copies
from autopart.runtime.mesh import Axis, gather_single
from autopart.runtime.ties import Copies, copies_in, tied_copies
from autopart.runtime.traffic import Traffic
from launch import launch


def test_which_ranks_have_copies() -> None:
    assert (tied_copies([(4, 1), (4, 1)]), copies_in([(4, 1), (4, 1)])) == (Copies.REPLICAS, 4)
    assert copies_in([(2, 2), (2, 2), (2, 2)]) == 2  # tensor ranks have parts of their own
    assert (tied_copies([(4, 1), (2, 2)]), copies_in([(4, 1), (2, 2)])) == (Copies.RANKS, 4)
    assert (tied_copies([(3, 1), (2, 1)]), copies_in([(3, 1), (2, 1)])) == (Copies.NONE, 1)


def summed(size: int, dtype: torch.dtype = torch.float32) -> tuple[list[complex], dict[str, int]]:
    """Ranks 0 and 1 have one gradient, 2 and 3 another."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, traffic = dist.get_rank(), Traffic()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    axis = Axis("stage", 2, rank // 2, groups[rank % 2], traffic)
    copies = Axis("dp", 2, rank % 2, groups[2 + rank // 2], traffic)
    message = torch.arange(float(size)).to(dtype) * (1 if rank < 2 else 10)
    found = sum_of_copies(message, axis, copies, "update").tolist()
    return found, {operation: count.bytes for (operation, *_), count in traffic.counts().items()}


@pytest.mark.parametrize("size", [8, 7, 1])
def test_copies_sum_shares_and_gather(size: int) -> None:
    share = -(-size // 2)
    for found, sent in launch(summed, 4, size):
        assert found == [11.0 * number for number in range(size)]
        assert sent == {"all_reduce": 4 * share, "all_gather": 8 * share}


def summed_as_by_nccl(size: int) -> list[complex]:
    """Which gathers no complex numbers."""

    def real(whole: torch.Tensor, share: torch.Tensor, **options: Any) -> None:
        assert not whole.is_complex() and not share.is_complex()
        gather_single(whole, share, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopart.runtime.collectives.gather_single", real)
        return summed(size, torch.complex64)[0]


def test_complex_gradients_are_gathered_as_real_numbers() -> None:
    for found in launch(summed_as_by_nccl, 4, 5):
        assert found == [11.0 * number for number in range(5)]


def test_a_plan_counts_what_shares_take() -> None:
    """Two stages of two replicas, whose nodes have one port each."""
    cluster: Cluster = unlike((2, 1.0, ROOMY), (2, 0.5, ROOMY))
    plan = plan_of("gpt2", cluster, pp=2, dp=2, tp=1, microbatches=1, zero=0)
    _, analysis = subject_of("gpt2")
    (size,) = {info.dtype.itemsize * math.prod(info.shape) for info in analysis.program.parameters if info.aliases}
    between, inside = cluster.link(0, 2, 2), cluster.group_link([0, 1])
    gathered = all_gather_seconds(size, 2, inside) - all_gather_seconds(0, 2, inside)
    assert plan.tied_s == pytest.approx(bucketed_all_reduce_seconds(size / 2, 2, between) + gathered)
