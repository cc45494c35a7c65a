"""Random numbers that agree on ranks which hold the same values and differ where they hold different shares."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from the text of ``parts``: the same on every machine and in every process."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch's random functions use on this device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Random functions inside the block follow ``seed``; afterwards the generator goes on as if nothing had run."""
    generator = default_generator(device)
    with resumed(device, generator.get_state()):
        generator.manual_seed(seed)
        yield


@contextmanager
def resumed(device: torch.device, state: torch.Tensor) -> Iterator[None]:
    """Inside, random functions go on from ``state``; afterwards the generator goes on as if nothing had run."""
    generator = default_generator(device)
    outside = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(outside)
