"""Whether a script's autocast is the one that a program was captured under."""

from __future__ import annotations

import torch

from autopart.runtime.errors import InputError
from autopart.runtime.manifest import MIXED, Manifest


def check_autocast(manifest: Manifest, kind: str) -> None:
    """Raises InputError when the script's autocast is not what the program was planned with. kind: of device."""
    if not torch.is_autocast_enabled(kind):
        return
    dtype = torch.get_autocast_dtype(kind)
    if MIXED.get(manifest.precision) != dtype:
        raise InputError(
            f"called under torch.autocast({kind!r}, {dtype}), but the program was captured "
            f"{f'in {manifest.precision}' if manifest.precision else 'without it'}; make the first call "
            "under the same autocast as all others, or say precision= instead"
        )


def computes_in_float16(manifest: Manifest) -> bool:
    return manifest.precision == "fp16-mixed" or any(spec.dtype == "float16" for spec in manifest.parameters)
