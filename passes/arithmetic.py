"""What CPUs compute besides matrix products, where that can take longer than what an op reads and writes.

Vector units take a function of each element; counted in exponentials, forward and back (:data:`FUNCTIONS`). What is not
listed is hidden behind the bytes, as all of it is on GPUs. Random numbers are counted apart: torch's generator of the
CPU draws one after another, on one thread. The counts are nanoseconds of an element over those of an exponential in the
cache (0.16), on one core of a Xeon with AVX-512 under PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from autopart.passes.amounts import ZERO, Amount, numel
from autopart.passes.blocks import is_random
from autopart.passes.graph import inputs, outputs
from autopart.passes.saved import attention_scores, is_differentiated
from autopart.passes.storage import argument, is_view, op_name
from autopart.passes.traffic import bias_of

FUNCTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "gelu": (3, 9),
        "gelu_tanh": (10, 13),
        "silu": (2, 5),
        "mish": (23, 30),
        "softplus": (9, 4),
        **dict.fromkeys(("elu", "celu", "selu"), (7, 4)),
        "erf": (3, 13),
        **dict.fromkeys(("sin", "cos"), (2, 7)),
        "pow": (14, 14),
        **dict.fromkeys(("softmax", "_softmax"), (5, 4)),
        **dict.fromkeys(("log_softmax", "_log_softmax", "cross_entropy_loss"), (5, 5)),
        **dict.fromkeys(("layer_norm", "native_layer_norm"), (5, 5)),
        "group_norm": (2, 4),
        "batch_norm": (8, 4),
        "rms_norm": (2, 25),
        "max_pool2d": (27, 4),
        "avg_pool2d": (10, 11),
        "cumsum": (3, 9),
        "scaled_dot_product_attention": (5, 10),
    }
)
"""Exponentials that take as long as an element, forward and back; of attention as a score, besides its products."""
_PRODUCTS, _BIAS = ("linear", "addmm", "baddbmm"), 2
"""The same of an element of a product's result, into which a bias is written first; convolutions do without that."""
_ATTENTION = "scaled_dot_product_attention"
_PLAIN_EXPONENTS = (0.0, 0.5, 1.0, 2.0, 3.0, -0.5, -1.0, -2.0)
"""Powers that are computed by products and roots."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """forward, backward: exponentials' worth of functions of elements; drawn: random numbers, in the forward."""

    forward: Amount = ZERO
    backward: Amount = ZERO
    drawn: Amount = ZERO


def arithmetic(node: fx.Node, kind: str) -> Arithmetic:
    """Of an op on devices of a kind ("cuda" or "cpu"); nothing on GPUs."""
    if kind != "cpu" or is_view(node):
        return Arithmetic()
    if op_name(node) in _PRODUCTS and bias_of(node) is not None:
        return Arithmetic(numel(outputs(node)[0].fake) * _BIAS)
    there, back = FUNCTIONS.get(_function(node), (0, 0))
    elements = ZERO
    if there:
        elements = attention_scores(node) if op_name(node) == _ATTENTION else numel(inputs(node)[0].fake)
    backward = elements * back if is_differentiated(node) else ZERO
    return Arithmetic(elements * there, backward, _drawn(node))


def _function(node: fx.Node) -> str:
    name = op_name(node)
    if name == "gelu" and argument(node, 1, "approximate", "none") == "tanh":
        return "gelu_tanh"
    if name == "pow" and argument(node, 1, "exponent") in _PLAIN_EXPONENTS:
        return ""
    return name


def _drawn(node: fx.Node) -> Amount:
    if not is_random(node):
        return ZERO
    return attention_scores(node) if op_name(node) == _ATTENTION else numel(outputs(node)[0].fake)
