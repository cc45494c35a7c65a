"""Outputs that have a gradient in the original and none here: a backward through them says so.

A script's backward would leave these gradients out in silence, if such outputs were like any without a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from autopart.runtime.attach import refuse
from autopart.runtime.manifest import OutputSpec

_IN_EVALUATION = (
    "has no gradient here: in evaluation mode a call runs forward alone; call model.train(), and eval() of single "
    "modules that are to stay so before the first call, or detach() it, or call the model under torch.no_grad()"
)
_BESIDE = (
    "has no gradient here: in training a call goes back from {loss!r} alone, before it returns; add this output to the "
    "loss inside the model, or detach() it"
)


def refused(specs: Iterable[OutputSpec], values: Mapping[str, Tensor], loss: str = "") -> dict[str, Tensor]:
    """Of these outputs those that have a gradient in the original, by name, such that a backward raises InputError.

    loss: the output that a call in training goes back from; empty in evaluation.
    """
    why = _BESIDE.format(loss=loss) if loss else _IN_EVALUATION
    return {spec.name: refuse(values[spec.name], f"{spec.name!r} {why}") for spec in specs if spec.differentiable}
