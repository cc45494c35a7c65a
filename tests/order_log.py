"""Products, and collectives that are begun and waited for, in the order of their calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopart.runtime import collectives


class _Noted:
    """A collective on its way that notes when it is waited for."""

    def __init__(self, work: Any, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()


class Log(TorchDispatchMode):
    """Products and collectives in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.events.append("mm")
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._messages = {name: getattr(collectives, name) for name in ("sum_message", "scatter_message")}

        def sum_message(*args: Any) -> Any:
            self.events.append("start")
            return _Noted(self._messages["sum_message"](*args), self.events)

        def scatter_message(*args: Any) -> Any:
            self.events.append("start")
            work, own = self._messages["scatter_message"](*args)
            return _Noted(work, self.events), own

        collectives.sum_message, collectives.scatter_message = sum_message, scatter_message  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for name, function in self._messages.items():
            setattr(collectives, name, function)
        super().__exit__(*error)
