"""Saves that go on in the background, are killed or stop: the checkpoint is whole, or the one before it is."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import compare, found_state, small_step
from torch import Tensor, nn

from autopart.runtime import ParallelModule, checkpoint, checkpoint_folder
from autopart.runtime.errors import CheckpointError
from emitted import emit, plain
from launch import ChildFailure, launch


def small(program: str) -> tuple[nn.Module, Any]:
    model: nn.Module = ParallelModule(program, dict(plain(tied=True).named_parameters()))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def small_states(end: int) -> list[dict[str, Tensor]]:
    """Of the plain model, after each step."""
    model = plain(tied=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    states = []
    for step in range(end):
        states.append({n: v for n, (_, v) in found_state(model, optimizer).items()})
        small_step(model, optimizer, step)
    return states


def small_load(folder: Path) -> tuple[int, dict[str, Any]]:
    """What the plain model and its optimizer are after loading and one more step; and that step."""
    model = plain(tied=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = checkpoint.load(folder, model, optimizer).step
    small_step(model, optimizer, step)
    return step + 1, found_state(model, optimizer)


def save_in_the_background(program: str, folder: str) -> list[str]:
    model, optimizer = small(program)
    for step in range(5):
        small_step(model, optimizer, step)
        saving = checkpoint.save(folder, model, optimizer, asynchronous=True, keep=2)
        # trains on at once, and communicates while it is being written
    path = saving.wait()
    assert saving.done and path.name == "step-00000005"
    return sorted(item.name for item in Path(folder).iterdir())


def test_saving_in_the_background(tmp_path: Path) -> None:
    emit(tmp_path, 2, 1, 2, tied=True)
    folder = tmp_path / "checkpoints"
    for names in launch(save_in_the_background, 2, str(tmp_path), str(folder)):
        assert names == ["latest", "step-00000004", "step-00000005"]
    states = small_states(7)
    step, found = small_load(folder)
    assert step == 6
    compare(found, states[6], whole=True)
    step, found = small_load(folder / "step-00000004")
    compare(found, states[5], whole=True)


def save_until_killed(program: str, folder: str, victim: int, delay: float) -> None:
    model, optimizer = small(program)
    rank = torch.distributed.get_rank()
    for step in range(1000):
        if step == 2 and rank == victim:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        small_step(model, optimizer, step)
        checkpoint.save(folder, model, optimizer, asynchronous=step % 2 == 0)


@pytest.mark.parametrize("moment", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
def test_killed_while_saving(tmp_path: Path, moment: int) -> None:
    """At a random moment of one of many saves, in the background or not, each rank in turn."""
    emit(tmp_path, 2, 1, 2, tied=True)
    folder = tmp_path / "checkpoints"
    with pytest.raises(ChildFailure):
        launch(save_until_killed, 2, str(tmp_path), str(folder), moment % 2, random.uniform(0.0, 0.5))
    for path in checkpoint_folder.complete(folder):
        step, found = small_load(path)
        compare(found, small_states(step + 1)[step], whole=True)
    assert small_load(folder)[0] >= 3, "the save of step 2 was complete"


class Stopped(BaseException):
    """The process is no more."""


def stop_after(patch: pytest.MonkeyPatch, calls: int) -> None:
    """From then on nothing on the disk changes: what a kill after so many calls would leave."""
    left = [calls]

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Stopped
            return function(*args, **kwargs)

        return call

    for owner, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree")):
        patch.setattr(owner, name, counted(getattr(owner, name)))


def test_a_save_that_stops_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain(tied=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    states = small_states(4)
    checkpoint.save(tmp_path / "before", model, optimizer, step=0)
    small_step(model, optimizer, 0)
    steps = []
    for calls in itertools.count():
        folder = tmp_path / str(calls)
        shutil.copytree(tmp_path / "before", folder)
        with monkeypatch.context() as patch:
            stop_after(patch, calls)
            try:
                checkpoint.save(folder, model, optimizer, step=1, keep=1)
                finished = True
            except (Stopped, CheckpointError):
                finished = False
        step, found = small_load(folder)
        compare(found, states[step], whole=True)
        steps.append(step)
        if finished:
            break
        checkpoint.save(folder, model, optimizer, step=1, keep=1)
        assert small_load(folder)[0] == 2
        assert len(list(folder.iterdir())) == 2, "what was left is cleared: the pointer and one checkpoint"
    assert steps == sorted(steps) and len(steps) > 8 and set(steps) == {1, 2}
