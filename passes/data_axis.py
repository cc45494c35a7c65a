"""Parameters divided over the data axis (ZeRO): where they are cut, where a stage gathers them, what that exchanges.

A parameter's *level* says what is divided, see :mod:`autopart.runtime.data_weights`. It is cut in the first dim that
divides by the number of replicas in the share that the tensor axes leave; a parameter without one stays whole.

At level 3 the parameters that one layer reads form a *unit*, which one statement gathers; outside of layers every read
is a unit of its own, written where the op is, so that nothing is whole for longer than the op runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes.conversion import Axes
from autopart.passes.emit.layers import Run
from autopart.passes.graph import Value
from autopart.passes.kept import owner_of
from autopart.passes.program import Role, TensorInfo
from autopart.passes.saved import saved_tensors
from autopart.passes.shard import local_extents
from autopart.passes.storage import is_view, op_name, shares_memory
from autopart.runtime.buckets import tensor_bytes
from autopart.runtime.manifest import ParameterSpec
from autopart.runtime.placement import Placements

LEVELS = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class DataCut:
    """How a parameter is divided over the data axis: the level, and the dim that is cut."""

    level: int
    dim: int


def data_dim(info: TensorInfo, placements: Placements, axes: Axes, replicas: int) -> int | None:
    """The dim in which the replicas divide a parameter; None where none of its sizes divides."""
    shape = list(info.shape)
    for placement, (_, parts) in zip(placements, axes, strict=False):
        if placement.is_shard:
            shape[placement.dim] //= parts
    return next((dim for dim, size in enumerate(shape) if size and size % replicas == 0), None)


def cut_parameters(
    tensors: Mapping[str, TensorInfo],
    storage: Mapping[str, Placements],
    axes: Axes,
    replicas: int,
    levels: Mapping[str, int],
) -> dict[str, DataCut]:
    """The cuts of all parameters with a level above 0. On one replica nothing is divided."""
    cuts: dict[str, DataCut] = {}
    for name, level in levels.items():
        if level and replicas > 1:
            dim = data_dim(tensors[name], storage.get(name, ()), axes, replicas)
            assert dim is not None, f"{name} cannot be divided by {replicas}"
            cuts[name] = DataCut(level, dim)
    return cuts


@dataclass(frozen=True, slots=True)
class Gathering:
    """One statement that gathers: the parameters' placeholders, the ops that read them.

    recomputed: it runs again in the backward, with its layer.
    """

    parameters: tuple[fx.Node, ...]
    readers: tuple[fx.Node, ...]
    recomputed: bool = False

    @property
    def is_saved(self) -> bool:
        """Whether some op keeps one of the whole weights for its backward."""
        own = {Value(node) for node in self.parameters}
        nodes = [node for node in _with_views(self.readers) if "transition" not in node.meta]
        return any(owner_of(value) in own for node in nodes for value in kept_of(node))


def kept_of(node: fx.Node) -> list[Value]:
    """What an op keeps for its backward: of layer_norm the bias as well, which its formula does not read."""
    kept = saved_tensors(node)
    return [*kept, *(graphs.inputs(node)[1:] if kept and op_name(node) == "layer_norm" else ())]


def cut_of(node: fx.Node, cuts: Mapping[str, DataCut]) -> DataCut | None:
    """The cut of a parameter's placeholder; None for whole ones and for other nodes."""
    is_parameter = node.op == "placeholder" and node.meta["role"] is Role.PARAMETER
    return cuts.get(node.meta["name"]) if is_parameter else None


def gathered_by_layer(nodes: Sequence[fx.Node], cuts: Mapping[str, DataCut]) -> list[tuple[fx.Node, ...]]:
    """What a layer gathers, one statement for each level and dtype, in the order in which it reads them."""
    groups: dict[tuple[int, torch.dtype], dict[fx.Node, None]] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            cut = cut_of(source, cuts)
            if cut is not None:
                groups.setdefault((cut.level, source.meta["val"].dtype), {})[source] = None
    return [tuple(group) for group in groups.values()]


def gatherings(
    runs: Iterable[tuple[Run, bool]], cuts: Mapping[str, DataCut], recompute: Collection[str]
) -> list[Gathering]:
    """The statements in a stage's forward that gather, in order.

    runs: of the stage, with whether each is written as a layer. recompute: paths of layers.
    """
    found: list[Gathering] = []
    for run, is_layer in runs:
        if is_layer:
            again = run.path in recompute
            found += [Gathering(group, tuple(run.nodes), again) for group in gathered_by_layer(run.nodes, cuts)]
        else:
            read = [(source, node) for node in run.nodes for source in dict.fromkeys(node.all_input_nodes)]
            found += [Gathering((source,), (node,)) for source, node in read if cut_of(source, cuts) is not None]
    return found


def read_bytes(statement: Gathering, specs: Mapping[str, ParameterSpec], sizes: Sequence[int]) -> int:
    """Bytes of whole weights that a statement reads. specs: by name, of those that count. sizes: of the tensor axes."""
    own = (specs[node.meta["name"]] for node in statement.parameters if node.meta["name"] in specs)
    return sum(tensor_bytes(spec, sizes) for spec in own)


def units(found: Iterable[Gathering], cuts: Mapping[str, DataCut]) -> list[Gathering]:
    """Those of level 3, which send a message each."""
    return [item for item in found if cuts[item.parameters[0].meta["name"]].level == 3]


@dataclass(frozen=True, slots=True)
class UnitMessages:
    """What one statement of level 3 sends in a microbatch, in bytes of whole weights: gathered forward (0: it follows
    itself, and is in memory still) and in the backward, and its gradients summed. readers: the ops that read it.
    """

    readers: tuple[fx.Node, ...]
    gathered: int
    gathered_again: int
    summed: int


def unit_messages(
    found: Sequence[Gathering], reached: set[fx.Node], axes: Axes, summed: torch.dtype | None = None
) -> list[UnitMessages]:
    """Of statements of level 3, in order.

    reached: the ops through which gradients flow. summed: the type in which gradients are added up; None: their own.
    """
    messages = []
    for before, item in zip((None, *found), found, strict=False):
        whole = sum(_bytes(node, axes) for node in item.parameters)
        readers = [node for node in item.readers if node in reached]
        trained = [node for node in item.parameters if node.meta.get("trainable")]
        learning = [node for node in trained if any(node in reader.all_input_nodes for reader in readers)]
        messages.append(
            UnitMessages(
                item.readers,
                0 if before is not None and before.parameters == item.parameters else whole,
                whole if item.recomputed or item.is_saved else 0,
                sum(_bytes(node, axes, summed) for node in learning),
            )
        )
    return messages


def gathering_counts(messages: Iterable[UnitMessages]) -> dict[tuple[str, str], dict[str, list[int]]]:
    """What level 3 exchanges for one microbatch, as :func:`autopart.passes.shard.collective_counts` writes it."""
    counts: dict[tuple[str, str], dict[str, list[int]]] = {}

    def count(phase: str, operation: str, size: int) -> None:
        if size:
            entry = counts.setdefault(("dp", phase), {}).setdefault(operation, [0, 0])
            entry[0] += 1
            entry[1] += size

    for item in messages:
        count("forward", "all_gather", item.gathered)
        count("backward", "all_gather", item.gathered_again)
        count("backward", "reduce_scatter", item.summed)
    return counts


def _bytes(node: fx.Node, axes: Axes, dtype: torch.dtype | None = None) -> int:
    size = int((dtype or node.meta["val"].dtype).itemsize)
    for extent in local_extents(node.meta["val"], node.meta["placements"], axes):
        assert extent is not None
        size *= extent.coefficient
    return size


def _with_views(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes, and those that read what some of them only pass on."""
    found = dict.fromkeys(nodes)
    for node in list(found):
        if _passes_on(node):
            found.update(dict.fromkeys(_with_views(node.users)))
    return list(found)


def passed_on(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and the ops that only pass on what these make."""
    found = set(nodes)
    for node in list(found):
        found |= passed_on(filter(_passes_on, node.users))
    return found


def _passes_on(node: fx.Node) -> bool:
    """Whether what a node makes is memory that it reads, as each of the pieces of a split is."""
    if graphs.is_getitem(node):
        return is_view(node.all_input_nodes[0])
    return is_view(node) or shares_memory(node)
