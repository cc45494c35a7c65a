"""What torch's recurrent modules keep inside for their backward.

On the CPU torch runs an LSTM in float32 or bfloat16 layer by layer, and direction by direction, by oneDNN
(``aten::mkldnn_rnn_layer``), which keeps a workspace of all that its backward needs. For T steps of N samples, inputs
of I numbers, states of H, in s bytes each, with W = max(I, H) it has been found (torch 2.13; in float32 equal to what
is allocated for any sizes tried, in bfloat16 within 3 %) to be, but for pages of 4096 bytes,

    T N ld(4H) s  +  2 (T + 1) N (ld(W) s + 2 ld(W) 4 + H s + H 4)  +  T N ld(H) s

with ld(n) the next multiple of 64 bytes, and 64 bytes more where it is one of 256 numbers. Besides there are the
results of all layers but the last, each layer's last states, and the inputs in the order of the steps where they come
in the samples' order. The parts of the formula in bytes, with half a page each. What other kernels keep is not known.
"""

from __future__ import annotations

import torch
from torch import fx

from autopart.passes.amounts import ONE, ZERO, Amount, numel, size, total
from autopart.passes.graph import inputs
from autopart.passes.storage import argument

_PAGE, _LINE = 4096, 64


def recurrent_inside(node: fx.Node, kind: str) -> Amount:
    """Bytes beside inputs and results. node: of :data:`autopart.passes.graph.RECURRENT`. kind: of devices."""
    sequence, state = (value.fake for value in inputs(node)[:2])
    if kind != "cpu" or node.target is not torch.ops.aten.lstm.input:
        return ZERO
    if sequence.dtype not in (torch.float32, torch.bfloat16):
        return ZERO
    layers, directions = int(argument(node, 4, "num_layers")), 1 + bool(argument(node, 7, "bidirectional", False))
    first = bool(argument(node, 8, "batch_first", False))
    steps, samples = (size(sequence.shape[at]) for at in ((1, 0) if first else (0, 1)))
    entering, hidden, width = int(sequence.shape[-1]), int(state.shape[-1]), sequence.element_size()
    wide = [entering, *[hidden * directions] * (layers - 1)]
    kept = [_workspace(steps, samples, own, hidden, width) * directions for own in wide]
    between = steps * samples * (hidden * directions * width * (layers - 1))
    turned = numel(sequence) * width if first else ZERO
    return total([*kept, between, turned])


def _workspace(steps: Amount, samples: Amount, entering: int, hidden: int, width: int) -> Amount:
    """Of one layer in one direction. entering: numbers of its input. width: bytes of a number."""
    most = max(entering, hidden)
    moved, states = steps * samples, (steps + ONE) * samples * 2
    parts = [
        moved * (_leading(4 * hidden, width) * width),
        *(states * (_leading(most, size_) * size_) for size_ in (width, 4, 4)),
        *(states * (hidden * size_) for size_ in (width, 4)),
        moved * (_leading(hidden, width) * width),
    ]
    return total(parts) + ONE * (_PAGE // 2 * len(parts))


def _leading(numbers: int, width: int) -> int:
    """Numbers from one row to the next."""
    line = _LINE // width
    found = -(-numbers // line) * line
    return found + line if found % 256 == 0 else found
