"""Weights of ``F.l1_loss``, which torch leaves out where functions are overridden: in traces, and under own modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.nn import functional


@contextmanager
def weights_kept() -> Iterator[None]:
    """Inside, overrides of ``F.l1_loss`` are given its ``weight``, which is among what torch looks for overrides in.

    For all threads: the name is torch's own. A model may have imported the function itself, which is as it was.
    """
    before: Callable[..., Any] = vars(functional)["handle_torch_function"]  # imported there, not exported

    def handle(public_api: Any, relevant: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if public_api is functional.l1_loss and len(relevant) == 3 and relevant[2] is not None:
            kwargs.setdefault("weight", relevant[2])
        return before(public_api, relevant, *args, **kwargs)

    with mock.patch.object(functional, "handle_torch_function", handle):
        yield
