"""A rank of a verification on a GPU that all ranks share, over NCCL, which takes each rank for a host of its own."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from autopart.verify import rank


def train_and_compare(**arguments: Any) -> dict[str, Any]:
    """As :func:`autopart.verify.rank.train_and_compare`, on the GPU."""
    if dist.is_initialized():
        own, size = dist.get_rank(), dist.get_world_size()
        dist.barrier()
        dist.destroy_process_group()
        os.environ.update(NCCL_HOSTID=f"rank{own}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(0)
        store = f"file://{arguments['job']}/nccl"
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=own, world_size=size)
    return rank.train_and_compare(**arguments, device="cuda:0")
