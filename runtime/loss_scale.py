"""Loss scaling for programs that compute in float16, with torch.amp.GradScaler as it is.

A call runs the backward before the script's ``scaler.scale(loss).backward()`` says by what the loss is scaled. So the
backward is seeded with the scale that is expected; if the script's is far off, the call is run again with it, which
happens at the first step at most unless the scale jumps. And the scaler looks at this rank's gradients alone: an
overflow anywhere is made one everywhere, so that all ranks skip the step and change the scale together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.runtime.mesh import Mesh

Gradients = Sequence[Tensor | None]
# What GradScaler begins with, and what it multiplies by after an overflow.
FIRST_SCALE, BACKOFF = 2.0**16, 0.5
# Scales up to so many times the script's give the same gradients but for the rarest of values.
_NEAR = 4.0


class LossScale:
    """``seed``: what the gradient of the loss is to be in the next backward."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.seed = FIRST_SCALE

    def settle(
        self, found: Gradients, seed: float, incoming: Tensor, again: Callable[[float], Gradients]
    ) -> list[Tensor | None]:
        """The gradients under the script's scale. All ranks call it, with equal scales.

        found: gradients of a backward seeded with ``seed``. incoming: the loss's gradient in the script's backward.
        again: runs the call anew with another seed.
        """
        wanted = float(incoming)
        overflown = self._overflown(found)
        near = wanted / _NEAR <= seed <= wanted * _NEAR if wanted > 0 else wanted == 0
        if not near or (overflown and seed > wanted):
            found, seed = again(wanted), wanted
            overflown = self._overflown(found)
        if seed != wanted:
            found = [None if g is None else g.mul_(wanted / seed) for g in found]
        self.announce(found, overflown)
        if wanted > 0:
            self.seed = wanted * BACKOFF if overflown else wanted
        return list(found)

    def agree(self, found: Gradients) -> None:
        """Makes an overflow on one rank one on all. All ranks call it."""
        self.announce(found, self._overflown(found))

    def announce(self, found: Gradients, overflown: bool) -> None:
        if overflown:
            for gradient in found:
                if gradient is not None and gradient.numel():
                    gradient[(0,) * gradient.dim()] = torch.inf
                    return

    def _overflown(self, found: Gradients) -> bool:
        flag = torch.zeros((), device=self._mesh.device)
        for gradient in found:
            if gradient is not None:
                flag = torch.maximum(flag, 1 - torch.isfinite(gradient).all().to(flag.dtype))
        if self._mesh.world_size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
