"""Recurrent modules and cells: one op each, whose samples are independent, so that the batch may be split."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart
import autopart.verify
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.runtime.errors import CaptureError
from autopart.tracing import capture
from autopart.verify import compare_emitted, prepare
from clusters import ideal
from launch import run_kept_job


class Recurrent(nn.Module):
    """Two LSTM layers that read both ways, a GRU with times first, a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(16, 8)
        self.cell = nn.LSTMCell(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        hidden, last = self.gru(hidden.transpose(0, 1))
        state = self.cell(hidden[-1], (last[0], torch.zeros_like(last[0])))
        return nn.functional.cross_entropy(self.head(state[0]), y)


@pytest.mark.parametrize("limits", [{"pp": 2, "tp": 1, "dp": 1}, {"pp": 1, "tp": 1, "dp": 2}], ids=["pp2", "dp2"])
def test_equal(limits: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)
    torch.manual_seed(0)
    subject = prepare(Recurrent(), (torch.randn(8, 5, 6), torch.randint(4, (8,))))
    plan = make_plan(subject.program, ideal(2), batch=8, microbatches=2, **limits)
    emitted = realize(subject.program, plan)
    assert "torch.lstm(" in emitted.files["stage_0.py"]
    emitted.save(tmp_path / "program")
    result = compare_emitted(tmp_path / "program", subject, plan=plan)
    assert result.equal, result


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(x)
        return hidden[-1].square().mean()


def test_last_states_are_captured_or_refused() -> None:
    """torch 2.11 and 2.12 export them with a dim too many, which must not be taken for theirs."""
    try:
        program = capture(LastState(), (torch.randn(4, 5, 6),), check_eval=False)
    except CaptureError as error:
        assert torch.__version__ < "2.13" and "lstm" in str(error) and "later version" in str(error)
        return
    (node,) = [node for node in program.graph.nodes if node.target is torch.ops.aten.lstm.input]
    assert [value.dim() for value in node.meta["val"]] == [3, 3, 3]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()


def test_layers_that_drop_run() -> None:
    model, x = Dropping().double(), torch.randn(8, 5, 6).double()
    plain = copy.deepcopy(model).eval()
    parallel = autopart.parallelize(model, cluster=ideal(1), verbose=False, microbatches=2)
    first, second = parallel(x), parallel(x)
    assert first != second, "numbers are drawn anew in each step"
    second.backward()
    assert all(parameter.grad is not None for parameter in parallel.parameters())
    parallel.eval()
    torch.testing.assert_close(parallel(x).detach(), plain(x).detach())
