"""What torch's recurrent modules keep inside for their backward.

On the CPU torch runs an LSTM in float32 or bfloat16 layer by layer, and direction by direction, by oneDNN
(``aten::mkldnn_rnn_layer``), which keeps a workspace of all that its backward needs. For T steps of N samples, inputs
of I numbers, states of H, in s bytes each, with W = max(I, H) it has been found (torch 2.13; in float32 equal to what
is allocated for any sizes tried, in bfloat16 within 3 %) to be

    T N ld(4H) s  +  2 (T + 1) N (ld(W) s + 2 ld(W) 4 + H s + H 4)  +  T N ld(H) s

each of the seven in whole pages of 4096 bytes, with ld(n) the next multiple of 64 bytes, and 64 bytes more where it is
one of 256 numbers. Besides there are the results of all layers but the last, and the inputs in the order of the steps
where they come in the samples' order. What other kernels keep is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopart.passes.amounts import ZERO, Amount, constant, size
from autopart.passes.graph import RECURRENT, Value, inputs, value_of
from autopart.passes.storage import argument, op_name

_CELLS = ("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell")
_PAGE, _LINE = 4096, 64
_FEW, _MANY = 1024, 2048
"""Samples between which pages do not show."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One layer of a recurrent op in one direction, which autograd goes back through by itself.

    weights: that it reads. kept: bytes inside of the op that are let go behind it, or 1 of each where they are equal.
    beside: how many gradients of the layer's inputs are there by then, those of directions that went back before.
    """

    layer: int
    weights: tuple[Value, ...]
    kept: int
    beside: int


def stretches(node: fx.Node, kind: str, batch: int) -> list[Stretch]:
    """Of a recurrent op, for so many samples, in the order of the forward; none of other ops, and of kernels that go
    back through all layers at once, as cuDNN's.
    """
    if str(node.target) not in RECURRENT or kind != "cpu":
        return []
    layers, directions = _depth(node)
    kept = _kept(node, batch) if is_known(node, kind) else [1] * (layers * directions)
    listed = node.args[2]
    assert isinstance(listed, list | tuple)
    weights = [Value(item) for item in listed if isinstance(item, fx.Node)]
    each = len(weights) // len(kept)
    return [
        Stretch(
            index // directions,
            tuple(weights[each * index : each * (index + 1)]),
            size,
            directions - 1 - index % directions,
        )
        for index, size in enumerate(kept)
    ]


def _depth(node: fx.Node) -> tuple[int, int]:
    """Layers, and directions."""
    return int(argument(node, 4, "num_layers")), 1 + bool(argument(node, 7, "bidirectional", False))


def cell_weights(node: fx.Node) -> tuple[Value, ...]:
    """Of a cell, the weights of the product with its input, back through which autograd goes behind that with its
    state; none of other ops.
    """
    if op_name(node) not in _CELLS:
        return ()
    weights = [item for item in node.args[2:] if isinstance(item, fx.Node)]
    return tuple(map(value_of, weights[::2]))


def recurrent_inside(node: fx.Node, kind: str) -> Amount:
    """Bytes beside inputs and results, pages aside. node: of :data:`autopart.passes.graph.RECURRENT`."""
    if not is_known(node, kind):
        return ZERO
    if len(_samples(node).coefficients) < 2:
        return constant(recurrent_bytes(node, kind, 1))
    slope = (recurrent_bytes(node, kind, _MANY) - recurrent_bytes(node, kind, _FEW)) // (_MANY - _FEW)
    return Amount((max(0, recurrent_bytes(node, kind, 8) - 8 * slope), slope))


def recurrent_bytes(node: fx.Node, kind: str, batch: int) -> int:
    """The same for so many samples."""
    return sum(_kept(node, batch)) if is_known(node, kind) else 0


def _kept(node: fx.Node, batch: int) -> list[int]:
    """Bytes of each layer in each direction: its workspace, and with the first direction what enters the layer, if
    nothing else holds that.
    """
    sequence, state = (value.fake for value in inputs(node)[:2])
    layers, directions = _depth(node)
    first = bool(argument(node, 8, "batch_first", False))
    steps, samples = int(sequence.shape[1 if first else 0]), _samples(node).at(batch)
    entering, hidden, width = int(sequence.shape[-1]), int(state.shape[-1]), sequence.element_size()
    found: list[int] = []
    for own in [entering, *[hidden * directions] * (layers - 1)]:
        held = steps * samples * own * width if found or first else 0
        found += [_workspace(steps, samples, own, hidden, width) + (0 if way else held) for way in range(directions)]
    return found


def is_known(node: fx.Node, kind: str) -> bool:
    """Whether oneDNN runs a recurrent op."""
    if kind != "cpu" or node.target is not torch.ops.aten.lstm.input:
        return False
    sequence, state, cell = (value.fake for value in inputs(node)[:3])
    projected = state.shape[-1] != cell.shape[-1]
    return sequence.dtype in (torch.float32, torch.bfloat16) and not projected


def _samples(node: fx.Node) -> Amount:
    return size(inputs(node)[0].fake.shape[0 if argument(node, 8, "batch_first", False) else 1])


def _workspace(steps: int, samples: int, entering: int, hidden: int, width: int) -> int:
    """Of one layer in one direction. entering: numbers of its input. width: bytes of a number."""
    most = max(entering, hidden)
    moved, states = steps * samples, 2 * (steps + 1) * samples
    parts = [
        moved * _leading(4 * hidden, width) * width,
        *(states * _leading(most, size_) * size_ for size_ in (width, 4, 4)),
        *(states * hidden * size_ for size_ in (width, 4)),
        moved * _leading(hidden, width) * width,
    ]
    return sum(-(-part // _PAGE) * _PAGE for part in parts)


def _leading(numbers: int, width: int) -> int:
    """Numbers from one row to the next."""
    line = _LINE // width
    found = -(-numbers // line) * line
    return found + line if found % 256 == 0 else found
