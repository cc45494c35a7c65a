"""What stands for an output that is neither a tensor nor plain: None there would be taken for the model's own word."""

from __future__ import annotations

from typing import Any

from autopart.runtime.errors import NotHereError


class NotReturned:
    """Raises NotHereError, which says what to return instead, as soon as it is looked into.

    output: the leaf's name. kind: the object's class.
    """

    __slots__ = ("kind", "output")

    def __init__(self, output: str, kind: str) -> None:
        self.output = output
        self.kind = kind

    def __repr__(self) -> str:
        return (
            f"the model's output {self.output!r}, a {self.kind}, which a parallel program does not return, as it makes "
            "tensors, numbers and strings alone: let forward return the tensors that it holds (a distribution's "
            "parameters, say), and make the object of them in the script; what reads a cache computes from all tokens"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and libraries ask of any object
            raise AttributeError(name)
        raise NotHereError(f"{name} is asked of {self!r}")

    def __getitem__(self, item: Any) -> Any:
        raise NotHereError(f"an item is asked of {self!r}")

    def __iter__(self) -> Any:
        raise NotHereError(f"items are asked of {self!r}")

    def __len__(self) -> int:
        raise NotHereError(f"the length is asked of {self!r}")

    def __bool__(self) -> bool:
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotHereError(f"a call is made of {self!r}")
