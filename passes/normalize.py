"""Normalization: an exported training graph becomes a functional graph in a small op vocabulary.

Afterwards the graph has

- no higher-order wrappers: regions without gradient are inlined and their results detached, regions of autocast with
  the casts written out, as are casts to a default type other than float32;
- no guards, asserts or sizes read off tensors: a size is a number or an expression in the batch size ``b``;
- no in-place ops and no aliases that matter: an op that wrote into a tensor makes a new one, views of it are taken
  again, and a buffer that was written is listed in :attr:`Normalized.buffer_updates`;
- one spelling per meaning: every reshaping is ``aten.reshape`` with explicit sizes, every split
  ``aten.split_with_sizes``, every cast ``aten.to.dtype``, every bitwise operator ``aten.bitwise_*``.

Values are unchanged bit by bit: no op is replaced by one that computes differently.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopart.passes import graph as graphs
from autopart.passes import synonyms
from autopart.passes.autocast import Autocast, casts_of, operands, type_of
from autopart.passes.default_dtype import is_made_by_default, promotions
from autopart.passes.exported import (
    fakes,
    has_gradient,
    is_copy,
    is_whole_slice,
    may_be_view,
    module_name,
    moved,
    origin,
    padded,
)
from autopart.passes.functional import functional_overload, writes_out
from autopart.passes.rewriting import Rewriting
from autopart.passes.sizes import extent
from autopart.passes.strided import memory_views
from autopart.passes.synonyms import first_name, masked_write, squeezed
from autopart.runtime.errors import CaptureError

aten = torch.ops.aten

# Checks that export leaves behind; they hold for the captured sizes and have no value.
_DROPPED = ("_assert", "sym_constrain", "_guards", "assert_tensor_metadata", "constrain_range", "_record_function")
# Where look-ups are told to make sparse gradients.
_SPARSE = {aten.embedding.default: 4, aten.embedding_bag.default: 5, aten.embedding_bag.padding_idx: 5}


@dataclass(slots=True)
class Normalized:
    """A functional graph. Its placeholders are those of the exported graph, preceded by ``b``, the batch size."""

    graph: fx.Graph
    batch: fx.Node
    buffer_updates: dict[str, fx.Node]


class _Normalizer(Rewriting):
    def __init__(
        self, root: fx.GraphModule, names: Mapping[str, str], batch_symbol: torch.SymInt | None, autocast: Autocast
    ):
        super().__init__(root, batch_symbol)
        self.root = root
        self.autocast = autocast
        self.known_casts: dict[str, list[torch.dtype]] = {}
        self.names = names
        self.without_grad = False
        self.made_without_grad: set[fx.Node] = set()
        self.default = torch.get_default_dtype()
        # Which results are copies matters only where something is written.
        self.writes = any(
            isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
            for module in root.modules()
            if isinstance(module, fx.GraphModule)
            for node in module.graph.nodes
        )

    def run(self) -> Normalized:
        for node in self.root.graph.nodes:
            if node.op == "placeholder":
                new = self.graph.placeholder(self.names.get(node.name, node.name))
                new.meta.update(val=node.meta["val"], path="", source="", exported=node.name)
                self.env[node] = new
            elif node.op == "output":
                self.graph.output(self.look(node.args[0]))
            else:
                self.one(node, self.root)
        updates = self.aliases.updates()
        graphs.prune(self.graph, {*updates.values()})
        for conjugated in self.graph.find_nodes(op="call_function", target=aten._conj.default):
            # by now no view: what marks a tensor to be read as conjugated is lost where it is sent
            conjugated.target = aten.conj_physical.default
        return Normalized(self.graph, self.batch, {node.meta["exported"]: new for node, new in updates.items()})

    def one(self, node: fx.Node, root: fx.GraphModule) -> None:
        if node.op == "get_attr":
            self.env[node] = getattr(root, str(node.target))
            return
        if node.op == "call_module":
            assert str(node.target).startswith("_guards"), f"module call {node.target} in an exported graph"
            return
        name = str(node.target)
        if any(part in name for part in _DROPPED):
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self.region(node)
            return
        if str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            path, source = origin(node)
            raise CaptureError(
                f"a transformation of torch.func, such as vmap, in module {module_name(path)} ({source}) cannot be "
                "partitioned; write it with plain tensor ops (of vmap: with one more dim)"
            )
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            self.env[node] = self.symbolic(node, value)
            return
        if isinstance(value, torch.SymBool | torch.SymFloat | bool | float):
            args, kwargs = self.look(node.args), self.look(dict(node.kwargs))
            self.env[node] = self.emit(graphs.called(node), args, kwargs, node)
            return
        if self.autocast:
            self.cast = self.casts(node)
        elif self.default is not torch.float32 and isinstance(node.target, torch._ops.OpOverload):
            args, kwargs = fakes(node.args), fakes(dict(node.kwargs))
            if is_made_by_default(node.target, args, kwargs, value):
                named = {**self.look(dict(node.kwargs)), "dtype": self.default}
                self.env[node] = self.emit(node.target, self.look(node.args), named, node)
                return
            if node.target is aten.where.Scalar and isinstance(value, torch.Tensor) and value.dtype == self.default:
                numbers = [self.emit(aten.full.default, ([], n), {"dtype": self.default}, node) for n in node.args[1:]]
                self.env[node] = self.emit(aten.where.self, (self.look(node.args[0]), *numbers), {}, node)
                return
            dtypes = promotions(node.target, args, kwargs, value, self.fake_mode)
            self.cast = self.cast_to(node, operands((args, kwargs)), dtypes) if dtypes else {}
        self.env[node] = self.op(node)
        self.cast = {}
        self.note_layout(node)

    def casts(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """The operands of an op that autocast casts, cast."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable or target in synonyms.CASTS:
            return {}
        given = operands(fakes((node.args, dict(node.kwargs))))
        if not any(tensor.is_floating_point() for tensor in given):
            return {}
        # What is cast follows from the types alone.
        plain = fx.node.map_aggregate(
            (node.args, dict(node.kwargs)), lambda item: type_of(item) if isinstance(item, fx.Node) else item
        )
        key = f"{target}{plain}{self.autocast}"
        try:
            if key not in self.known_casts:
                self.known_casts[key] = casts_of(
                    target, fakes(node.args), fakes(dict(node.kwargs)), self.autocast, self.fake_mode
                )
            dtypes = self.known_casts[key]
        except CaptureError as error:
            path, source = origin(node)
            raise CaptureError(f"{error} (module {module_name(path)}, {source})") from None
        return self.cast_to(node, given, dtypes)

    def cast_to(self, node: fx.Node, given: list[torch.Tensor], dtypes: list[torch.dtype]) -> dict[fx.Node, fx.Node]:
        """The operands of an op that have other types than these, cast. given: their fake values, in the same order."""
        found: dict[fx.Node, fx.Node] = {}
        wanted = {id(tensor): dtype for tensor, dtype in zip(given, dtypes, strict=True) if tensor.dtype != dtype}
        for operand in node.all_input_nodes:
            dtype = wanted.get(id(operand.meta.get("val")))
            if dtype is not None:
                found[operand] = self.emit(aten.to.dtype, (self.look(operand), dtype), {}, node)
        return found

    def symbolic(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, int) or extent(value) is not None:
            return self.size(value)
        if node.target is aten.sym_size.int:
            new = self.graph.call_function(aten.sym_size.int, self.look(node.args))
        else:
            new = self.graph.call_function(graphs.called(node), self.look(node.args), self.look(dict(node.kwargs)))
        new.meta["val"] = value
        self.describe(new, node)
        return new

    def region(self, node: fx.Node) -> None:
        """Inlines a higher-order wrapper: grad mode switched, autocast entered."""
        name = node.target.name()  # type: ignore[union-attr]
        args: list[Any] = list(node.args)
        autocast = self.autocast
        if name == "wrap_with_set_grad_enabled":
            detach, body, given = args[0] is False, args[1], args[2:]
        elif name == "wrap_with_autocast":
            device, dtype, enabled = args[:3]
            detach, body, given = False, args[4], args[5:]
            autocast = {**self.autocast, device: dtype or torch.get_autocast_dtype(device)}
            if not enabled:
                del autocast[device]
        else:
            path, source = origin(node)
            raise CaptureError(
                f"the higher-order op {name} in module {module_name(path)} ({source}) cannot be partitioned; "
                "rewrite it with plain tensor ops"
            )
        sub = self.env[body] if isinstance(body, fx.Node) else body
        assert isinstance(sub, fx.GraphModule)
        formals = [inner for inner in sub.graph.nodes if inner.op == "placeholder"]
        for formal, operand in zip(formals, given, strict=True):
            self.env[formal] = self.look(operand)
        saved, (path, source) = self.region_meta, origin(node)
        self.region_meta = {"path": path, "source": source} if path else saved
        outside, self.without_grad = self.without_grad, self.without_grad or detach
        around, self.autocast = self.autocast, autocast
        for inner in sub.graph.nodes:
            if inner.op == "output":
                result = self.look(inner.args[0])
                self.env[node] = self.returned(result, node) if detach else result
            elif inner.op != "placeholder":
                self.one(inner, sub)
        self.region_meta, self.without_grad, self.autocast = saved, outside, around

    def describe(self, node: fx.Node, like: fx.Node) -> None:
        super().describe(node, like)
        if self.without_grad:
            self.made_without_grad.add(node)

    def detached(self, tensor: fx.Node) -> fx.Node:
        node = self.graph.call_function(aten.detach.default, (tensor,))
        node.meta.update(tensor.meta)
        return node

    def returned(self, result: Any, like: fx.Node) -> Any:
        """What a region without gradients returns."""
        if isinstance(result, tuple | list):
            return type(result)(self.returned(item, like) for item in result)
        if isinstance(result, fx.Node) and isinstance(result.meta.get("val"), torch.Tensor):
            node = self.detached(result)
            if self.writes and self.aliases.is_view(result):
                self.aliases.view(node, result, aten.detach.default, (result,), {})
            elif self.writes and result.op != "placeholder":
                self.aliases.write(result, node, self.replay)  # the same storage, which a later region may write
            return node
        return result

    def op(self, node: fx.Node) -> Any:
        target = node.target
        if target is operator.getitem:
            source = self.look(node.args[0])
            if isinstance(source, tuple | list):
                return source[graphs.arguments(node)[1]]
            new = self.emit(operator.getitem, (source, node.args[1]), {}, node)
            if self.aliases.is_view(source):
                self.aliases.view(new, source, operator.getitem, new.args, {})
            return new
        if not isinstance(target, torch._ops.OpOverload):
            return self.emit(graphs.called(node), self.look(node.args), self.look(dict(node.kwargs)), node)
        if target is aten.detach_.default:
            return self.view(node, aten.detach.default, self.look(node.args), {})
        if target._schema.is_mutable and not target.name().startswith("aten::batch_norm"):
            return self.write(node, target)
        args, kwargs = self.look(node.args), self.look(dict(node.kwargs))
        kwargs.pop("pin_memory", None)
        kwargs.pop("layout", None)
        value = node.meta["val"]
        if self.writes and is_copy(target, args, kwargs) and value.dtype == fakes(args[0]).dtype:
            return self.emit(aten.clone.default, (args[0],), {}, node)
        if target in synonyms.COPIES or (target is aten.slice.Tensor and is_whole_slice(args, kwargs)):
            return args[0]
        if target in synonyms.CASTS:
            if value.dtype == fakes(args[0]).dtype:
                return args[0]
            return self.emit(aten.to.dtype, (args[0], value.dtype), {}, node)
        if target in synonyms.RESHAPES:
            sizes = self.shape(node, args)
            if self.copies(node):
                return self.emit(aten.reshape.default, (args[0], sizes), {}, node)
            return self.view(node, aten.reshape.default, (args[0], sizes), {})
        if target is aten.contiguous.default:
            if self.copies(node):
                return self.emit(target, args, kwargs, node)
            if not self.writes:
                # Strides differ between devices, values do not: a graph must not depend on where it was captured.
                return args[0]
        if target is aten.narrow.default:
            dim, start, length = args[1:]
            if isinstance(start, int) and start >= 0:
                end = start + length if isinstance(length, int) else self.size(fakes(graphs.arguments(node)[2]) + start)
                return self.view(node, aten.slice.Tensor, (args[0], dim, start, end), {})
        if target in (aten.expand.default, aten.broadcast_to.default):
            sizes = [
                self.size(size, original)
                for size, original in zip(value.shape, padded(node.args[1], value), strict=True)
            ]
            return self.view(node, aten.expand.default, (args[0], sizes), kwargs)
        if target in synonyms.SPLITS:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
            sizes = [piece.shape[dim] for piece in value]
            if all(isinstance(size, int) for size in sizes):
                return self.view(
                    node, aten.split_with_sizes.default, (args[0], sizes, dim % args[0].meta["val"].dim()), {}
                )
        if target is aten.expand_as.default:
            return self.expanded(node, args[0], value)
        if target is aten.broadcast_tensors.default:
            return [self.expanded(node, item, piece) for item, piece in zip(args[0], value, strict=True)]
        if target in synonyms.BITWISE:
            return self.emit(synonyms.BITWISE[target], args, kwargs, node)
        if target in synonyms.SQUEEZES:
            # Those that were removed, by number: a batch of one sample keeps its dim.
            dims = squeezed(fakes(args[0]).shape, args[1:])
            return self.view(node, aten.squeeze.dims, (args[0], dims), {}) if dims else args[0]
        if target in synonyms.SWAPS:
            return self.view(node, aten.transpose.int, args, {})
        if target in (aten.movedim.int, aten.moveaxis.int):
            return self.view(node, aten.permute.default, (args[0], moved(value.dim(), args[1], args[2])), {})
        if target in synonyms.TRANSPOSES and value.dim() >= 2:
            turned = (args[0], *synonyms.TRANSPOSES[target])
            if target not in synonyms.ADJOINTS or not value.is_complex():
                return self.view(node, aten.transpose.int, turned, {})
            source = self.view(node, aten.transpose.int, turned, {}, whole=False)
            return self.view(node, aten._conj.default, (source,), {}, whole=False)
        if target is aten.as_strided.default:
            source = args[0]
            for step, more in memory_views(node):
                source = self.view(node, step, (source, *self.look(more)), {}, whole=False)
            return source
        if target is aten.tile.default:
            return self.emit(aten.repeat.default, (args[0], synonyms.tiles(args[1], value.dim())), {}, node)
        if target is aten.rot90.default:
            return self.turned(node, *args)
        if (place := _SPARSE.get(target)) is not None and (kwargs.get("sparse") or any(args[place : place + 1])):
            path, source = origin(node)
            raise CaptureError(
                f"an embedding with sparse=True in module {module_name(path)} ({source}) makes sparse gradients, which "
                "ranks cannot add up; leave sparse away"
            )
        if target._schema.returns and may_be_view(target):
            return self.view(node, target, args, kwargs)
        if target is aten.index_put.default:
            return self.placed(node, args)
        return self.emit(first_name(target) or target, args, kwargs, node)

    def placed(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """``index_put``; through a mask, what each place knows the value of is a choice per element."""
        masked = masked_write(args, node.meta["val"])
        if masked is None:
            return self.emit(aten.index_put.default, args, {}, node)
        mask, written, missing = masked
        for _ in range(missing):
            mask = self.emit(aten.unsqueeze.default, (mask, -1), {}, node)
        return self.emit(aten.where.self, (mask, written, args[0]), {}, node)

    def turned(self, node: fx.Node, source: fx.Node, times: int = 1, dims: Sequence[int] = (0, 1)) -> fx.Node:
        """``rot90``: dims flipped, and exchanged where the turns are odd."""
        flipped = {1: [dims[1]], 2: list(dims), 3: [dims[0]]}.get(times % 4)
        if flipped is None:
            return self.emit(aten.clone.default, (source,), {}, node)
        new = self.emit(aten.flip.default, (source, flipped), {}, node, times % 4 == 2)
        if times % 2:
            new = self.view(node, aten.transpose.int, (new, *dims), {}, whole=False)
        return new

    def shape(self, node: fx.Node, args: tuple[Any, ...]) -> list[Any]:
        """Explicit sizes of a reshape; what the batch size does not describe stays as the model wrote it."""
        value = node.meta["val"]
        sizes = [self.size(size) for size in value.shape]
        if sizes.count(-1) > 1:
            if node.target not in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
                path, source = origin(node)
                raise CaptureError(
                    f"{node.target} in module {module_name(path)} ({source}) makes several dims whose sizes are no "
                    "multiple of the batch size; write the sizes out with reshape"
                )
            return list(args[1])
        return sizes

    def view(
        self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = True
    ) -> fx.Node:
        """Adds a view: an exported op under another name, or if not ``whole`` a step of one."""
        known = fakes(args[0]) is fakes(graphs.arguments(like)[0]) if whole else False
        node = self.emit(target, args, kwargs, like, known)
        self.aliases.view(node, args[0], target, args, kwargs)
        return node

    def write(self, node: fx.Node, target: torch._ops.OpOverload) -> fx.Node:
        """An op that writes into its first argument, or into ``out``, becomes one that returns the new value."""
        args, kwargs = self.look(node.args), self.look(dict(node.kwargs))
        written = kwargs.pop("out") if writes_out(target) else args[0]
        assert isinstance(written, fx.Node)
        apart = self.without_grad or self.aliases.is_detached(written)
        if apart and has_gradient(self.aliases.base(written), self.made_without_grad):
            path, source = origin(node)
            raise CaptureError(
                f"{target} writes without gradient into a tensor that has one (module {module_name(path)}, {source}); "
                "a graph cannot say that: compute a new tensor instead"
            )
        if target is aten.fill_diagonal_.default and written.meta["val"].dim() == 2 and args[2:] in ((), (False,)):
            return self.aliases.write(written, self.diagonal_filled(node, written, args[1]), self.replay)
        functional = functional_overload(node, target)
        if functional is aten.fill.Scalar:
            new = self.emit(aten.full_like.default, (written, args[1]), {}, node)
        elif functional in (aten.copy.default, aten.fill.Tensor):
            new = self.copied(node, args)
        elif functional is aten.index_put.default:
            new = self.placed(node, args)
        else:
            new = self.emit(first_name(functional) or functional, args, kwargs, node)
            made, there = ([extent(size) for size in item.meta["val"].shape] for item in (new, written))
            if made != there:  # torch gives ``out`` another shape, with a warning
                path, source = origin(node)
                raise CaptureError(
                    f"{target} writes a tensor into one of another shape (module {module_name(path)}, {source}); leave "
                    "out= away"
                )
            if new.meta["val"].dtype != written.meta["val"].dtype:
                new = self.emit(aten.to.dtype, (new, written.meta["val"].dtype), {}, node)
        if self.without_grad and self.aliases.is_view(written):
            new = self.detached(new)  # what it is a view of is read outside of the region as it is
        return self.aliases.write(written, new, self.replay)

    def diagonal_filled(self, node: fx.Node, matrix: fx.Node, number: Any) -> fx.Node:
        """A matrix with a number on its diagonal, of which torch has only the op that writes it."""
        value = matrix.meta["val"]
        sizes = tuple(self.size(size) for size in value.shape)
        diagonal = self.emit(aten.eye.m, sizes, {"dtype": torch.bool, "device": value.device}, node)
        return self.emit(aten.masked_fill.Scalar, (matrix, diagonal, number), {}, node)

    def copies(self, node: fx.Node) -> bool:
        """Whether a reshaping of the exported graph made a copy, which later writes do not reach."""
        if not self.writes or node.target not in synonyms.MAY_COPY:
            return False
        source, value = fakes(graphs.arguments(node)[0]), node.meta["val"]
        if node.target is aten.contiguous.default:
            return not source.is_contiguous()
        try:
            with self.fake_mode, torch.no_grad():
                source.view(value.shape)
        except (RuntimeError, ValueError):
            return True
        return False

    def expanded(self, like: fx.Node, source: fx.Node, value: torch.Tensor) -> fx.Node:
        if source.meta["val"].shape == value.shape:
            return source
        sizes = [self.size(size) for size in value.shape]
        return self.view(like, aten.expand.default, (source, sizes), {}, whole=False)

    def copied(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        target_fake, source = args[0].meta["val"], args[1]
        if source.meta["val"].dtype != target_fake.dtype:
            source = self.emit(aten.to.dtype, (source, target_fake.dtype), {}, node)
        if source.meta["val"].shape != target_fake.shape:
            sizes = [self.size(size) for size in target_fake.shape]
            source = self.emit(aten.expand.default, (source, sizes), {}, node)
        # never the source itself: it goes on holding its own value
        return self.emit(aten.clone.default, (source,), {}, node) if source is args[1] else source


def normalize(
    root: fx.GraphModule,
    names: Mapping[str, str],
    batch_symbol: torch.SymInt | None,
    autocast: Autocast | None = None,
) -> Normalized:
    """The functional form of an exported training graph.

    names: new names of its placeholders. batch_symbol: the size that export left symbolic, None when it is fixed.
    autocast: what was on around the model when it was exported.
    Raises CaptureError for higher-order ops, and for writes and autocast that have no functional form.
    """
    return _Normalizer(root, names, batch_symbol, autocast or {}).run()
