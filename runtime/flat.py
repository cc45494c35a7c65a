"""Several tensors in one flat message for collectives on the data axis: shares side by side, wholes rank by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class FlatShares:
    """How the shares of several tensors of one dtype lie in one message.

    shapes: of this rank's shares. dims: the dim of each in which the ranks' shares follow each other. A *share
    message* has the shares one behind the other, ``[total]``; a *whole message* has every rank's share message,
    ``[ranks, total]``.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dims: Sequence[int], ranks: int) -> None:
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.dims = list(dims)
        self.ranks = ranks
        self.sizes = [shape.numel() for shape in self.shapes]
        self.total = sum(self.sizes)

    def message(self, shares: Sequence[Tensor]) -> Tensor:
        """The share message of these shares; a view of the only one where it is contiguous."""
        if len(shares) == 1:
            return shares[0].detach().contiguous().view(-1)
        return torch.cat([share.detach().reshape(-1) for share in shares])

    def shares(self, message: Tensor) -> list[Tensor]:
        """The shares in a share message, as views of it."""
        parts = message.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def wholes(self, message: Tensor) -> list[Tensor]:
        """The whole tensors from a whole message: copies, but for an only tensor cut in its first dim."""
        if len(self.shapes) == 1 and self.dims == [0]:
            return [message.view(self._whole(0))]
        made = []
        for index in range(len(self.shapes)):
            whole = message.new_empty(self._whole(index))
            self.fill(message, index, whole)
            made.append(whole)
        return made

    def fill(self, message: Tensor, index: int, whole: Tensor) -> None:
        """Copies one tensor out of a whole message into its own memory."""
        self._ranks_of(whole, index).copy_(self._part(message, index))

    def whole_message(self, wholes: Sequence[Tensor]) -> Tensor:
        """The whole message of whole tensors (such as gradients that are to be summed and divided)."""
        if len(self.shapes) == 1 and self.dims == [0] and wholes[0].is_contiguous():
            return wholes[0].detach().view(self.ranks, self.total)
        message = wholes[0].new_empty((self.ranks, self.total))
        for index, whole in enumerate(wholes):
            self._part(message, index).copy_(self._ranks_of(whole.detach(), index))
        return message

    def _whole(self, index: int) -> torch.Size:
        shape = list(self.shapes[index])
        shape[self.dims[index]] *= self.ranks
        return torch.Size(shape)

    def _part(self, message: Tensor, index: int) -> Tensor:
        """One tensor's part of a whole message, ``[ranks, *share]``."""
        start = sum(self.sizes[:index])
        return message[:, start : start + self.sizes[index]].view(self.ranks, *self.shapes[index])

    def _ranks_of(self, whole: Tensor, index: int) -> Tensor:
        """A whole tensor seen as ``[ranks, *share]``."""
        dim = self.dims[index]
        return whole.unflatten(dim, (self.ranks, self.shapes[index][dim])).movedim(dim, 0)
