"""What an optimizer's step makes for a while, besides parameters, gradients and state: torch's own optimizers.

Of parameters with p_1, p_2, ... bytes on a rank, in the optimizer's order, with the options that torch has by default
but for the learning rate, the momentum and the decay of AdamW's weights. Where ``foreach`` and ``fused`` are left to
torch (``torch.optim.optimizer._default_to_fused_or_foreach``), on the CPU each parameter is updated by itself, and the
last one's denominator is still there; on CUDA all are at once:

=============  =======================  ==================  ======================================================
optimizer      CPU: the largest of      CUDA: all of        which is
=============  =======================  ==================  ======================================================
adam, adamw    2 p_i + p_(i - 1)        p                   sqrt(v), that over its correction (CUDA: in place)
rmsprop        p_i + p_(i - 1)          p                   sqrt(v)
adagrad        p_i + p_(i - 1)          2 p                 sqrt(v); on CUDA also the gradients times the rate
sgd, momentum  0                        0                   all is done in place
=============  =======================  ==================  ======================================================

(``torch.optim.adam``, ``rmsprop``, ``adagrad``, ``sgd``: ``_single_tensor_*`` and ``_multi_tensor_*``.) Fused
optimizers make nothing. Activations are gone by then, so a rank holds at its peak the larger of a step's forwards and
backwards and of this. Parameters are taken to be in one group; in several each group has its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Temporaries:
    """How often a parameter's bytes are made. own, before: one after the other, of it and of the one before it.

    together: all at once.
    """

    own: int = 0
    before: int = 0
    together: int = 0


_MADE = {
    "adam": Temporaries(2, 1, 1),
    "adamw": Temporaries(2, 1, 1),
    "rmsprop": Temporaries(1, 1, 1),
    "adagrad": Temporaries(1, 1, 2),
    **dict.fromkeys(("none", "sgd", "momentum"), Temporaries()),
}

OPTIMIZERS = tuple(_MADE)


def temporaries(optimizer: str) -> Temporaries:
    """optimizer: as :func:`autopart.passes.annotate.parameter_bytes` knows it."""
    return _MADE[optimizer]


def at_once(kind: str) -> bool:
    """Whether torch updates all parameters together on devices of a kind, "cuda" or "cpu"."""
    return kind == "cuda"


def temporary_bytes(optimizer: str, sizes: Sequence[float], kind: str) -> float:
    """The most of an optimizer's step. sizes: bytes of a rank's trained parameters, in order. kind: of devices."""
    made = temporaries(optimizer)
    if at_once(kind):
        return made.together * sum(sizes)
    pairs = itertools.pairwise([0.0, *sizes])
    return max((made.own * size + made.before * before for before, size in pairs), default=0.0)
