"""Small questions that normalization asks of exported nodes and of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autopart.passes.graph import may_have_gradient

aten = torch.ops.aten


def fakes(argument: Any) -> Any:
    """Nodes replaced by their fake values, inside nested lists and dicts."""
    if isinstance(argument, fx.Node):
        return argument.meta["val"]
    if isinstance(argument, tuple | list):
        return type(argument)(fakes(item) for item in argument)
    if isinstance(argument, dict):
        return {key: fakes(item) for key, item in argument.items()}
    return argument


def module_path(node: fx.Node) -> str:
    """Path of the module that made an exported node, '' where export does not say."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path: str = next(reversed(stack.values()))[0]
    return path.split("@")[0].removeprefix("L['self']").strip(".")


def origin(node: fx.Node) -> tuple[str, str]:
    """Module path and ``file:line`` of an exported node, '' where export does not say."""
    return module_path(node), _last_line(node.meta.get("stack_trace") or "")


def module_name(path: str) -> str:
    """A module's path as users know it: capture wraps the model."""
    return path.removeprefix("model.") if path not in ("", "model") else "(root)"


@functools.lru_cache(maxsize=1024)  # ops of copied layers have the same
def _last_line(trace: str) -> str:
    for line in reversed(trace.splitlines()):
        stripped = line.strip()
        if stripped.startswith("File "):
            file, number = stripped.split(", ")[:2]
            return f"{file[6:-1]}:{number.removeprefix('line ')}"
    return ""


def is_copy(target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the op makes a copy even where nothing changes."""
    names = [argument.name for argument in target._schema.arguments]
    asked = {**dict(zip(names, args, strict=False)), **kwargs}.get("copy", False)
    return target in (aten.lift_fresh_copy.default, aten._to_copy.default) or asked is True


def moved(rank: int, source: int, target: int) -> list[int]:
    """The permutation that moves one dim."""
    order = [dim for dim in range(rank) if dim != source % rank]
    order.insert(target % rank, source % rank)
    return order


def has_gradient(node: fx.Node, without: Collection[fx.Node]) -> bool:
    """Whether a trainable parameter reaches the node. without: results that autograd does not see."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        item = stack.pop()
        if item in seen or item in without or item.target is aten.detach.default:
            continue
        seen.add(item)
        value = item.meta.get("val")
        if isinstance(value, torch.Tensor) and not may_have_gradient(value.dtype):
            continue
        if item.op == "placeholder" and isinstance(value, torch.Tensor) and value.requires_grad:
            return True
        stack.extend(item.all_input_nodes)
    return False


def padded(sizes: Any, value: torch.Tensor) -> list[Any]:
    """The model's own size arguments, aligned to the result's dims from the right."""
    return [None] * (value.dim() - len(sizes)) + list(sizes)


def may_be_view(target: torch._ops.OpOverload) -> bool:
    """Whether the op's result may share storage with its first argument."""
    alias = target._schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def is_whole_slice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``aten.slice`` with these arguments returns all of its first argument."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    start = args[2] if len(args) > 2 else kwargs.get("start")
    end = args[3] if len(args) > 3 else kwargs.get("end")
    step = args[4] if len(args) > 4 else kwargs.get("step", 1)
    if start not in (None, 0) or step != 1:
        return False
    size = args[0].meta["val"].shape[dim]
    return end is None or (isinstance(end, int) and (end == 2**63 - 1 or (isinstance(size, int) and end >= size)))
