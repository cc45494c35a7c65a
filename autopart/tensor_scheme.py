"""Published schemes of tensor sharding by name, and the tensor axes that each is for."""

from __future__ import annotations

import enum


class TensorScheme(enum.Enum):
    """A scheme; of ``AUTO`` everything is the solver's choice.

    1d      weights by columns or rows on one axis, activations between them whole (Megatron-LM, arXiv 1909.08053)
    sp      the same with activations between them sharded on the sequence (arXiv 2205.05198)
    2d      products panel by panel on q x q (Optimus, arXiv 2104.05343)
    2.5d    the same on q x q with rows sharded on a third axis of d as well (arXiv 2110.14883)
    3d      rows, what is summed over and columns each on an axis of q x q x q (arXiv 2105.14450)
    """

    AUTO = "auto"
    MEGATRON = "1d"
    SEQUENCE = "sp"
    SQUARE = "2d"
    DEPTH = "2.5d"
    CUBE = "3d"

    @property
    def shape(self) -> str:
        """How it lays devices on axes, for people."""
        return {"1d": "p", "sp": "p", "2d": "q x q", "2.5d": "q x q x d", "3d": "q x q x q"}.get(self.value, "any")

    def fits(self, axes: tuple[int, ...]) -> bool:
        """Whether it is for tensor axes of these sizes."""
        if self is TensorScheme.AUTO:
            return True
        if 1 in axes or len(axes) != {"1d": 1, "sp": 1, "2d": 2}.get(self.value, 3):
            return False
        return len(set(axes if self is TensorScheme.CUBE else axes[:2])) == 1
