"""Grouped products of which each rank has the weights of some of the groups: the experts of a mixture."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from autopart.runtime.mesh import Axis


def own_experts_product(x: Tensor, weight: Tensor, offs: Tensor, *, axis: Axis) -> Tensor:
    """This rank's summand of the product of rows, sorted by expert, with their experts' matrices.

    x: ``[t, k]``, whole. weight: ``[experts / ranks, k, n]``, those of the rank. offs: ``[experts]``, where the rows of
    each of all experts end. Returns ``[t, n]``, zero but in the rows of the rank's own experts. Nothing is exchanged;
    x's gradient is a partial sum, zero but in these rows too. Where they lie is read from the device, once.
    """
    first = axis.index * weight.size(0)
    ends = [0, *offs.tolist()][first : first + weight.size(0) + 1]
    pieces = [x[start:end] @ matrix for start, end, matrix in zip(ends[:-1], ends[1:], weight, strict=True)]
    return F.pad(torch.cat(pieces), (0, 0, ends[0], x.size(0) - ends[-1]))
