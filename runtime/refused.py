"""Outputs that have a gradient in the original and none here: a backward through them says so.

A script's backward would leave these gradients out in silence, if such outputs were like any without a gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from autopart.runtime.attach import refuse
from autopart.runtime.inputs import Division
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


class LeftOut:
    """Losses beside the one that a call returns and goes back from: None, which a script may take for a number."""

    def __init__(self) -> None:
        self._told = False

    def tell(self, specs: Sequence[OutputSpec], loss: str) -> tuple[str, ...]:
        """Warns once, where there are such. Returns the names of all outputs but the loss."""
        others = [spec.name for spec in specs if spec.differentiable and not spec.shape and spec.name != loss]
        if others and not self._told:
            warnings.warn(
                f"in training a call goes back from {loss!r} and returns that alone: {', '.join(map(repr, others))} "
                "is None here. What is to be trained as well has to be added to it inside the model; "
                'parallelize(model, outputs="all") returns the rest to be looked at',
                stacklevel=2,
            )
        self._told = True
        return tuple(spec.name for spec in specs if spec.name != loss)


def tell_of_loss_outside(specs: Iterable[OutputSpec], division: Division, stages: int) -> None:
    """Warns of what a loss that the script computes of these outputs costs, and what it has to be of."""
    if division.microbatches > 1 or stages > 1:
        warnings.warn(
            "the loss is computed outside the model, so every stage keeps the activations of all "
            f"{division.microbatches} microbatches until backward(), and each rank receives all outputs; "
            "autopart.parallelize(model, loss_fn=...) moves the loss inside and avoids both, and so does a forward "
            "that returns one scalar called 'loss'",
            stacklevel=5,
        )
    whole = [spec.name for spec in specs if spec.combine == "cat"]
    if division.is_local and division.replicas > 1 and whole:
        warnings.warn(
            f'with batch="local" the outputs ({", ".join(whole)}) are those of the samples of all {division.replicas} '
            "replicas, in their order, and the same on every rank: a loss that the script computes has to be of all of "
            "them, with the targets of all replicas. autopart.parallelize(model, loss_fn=...) computes it inside, of "
            "each replica's own targets",
            stacklevel=5,
        )
