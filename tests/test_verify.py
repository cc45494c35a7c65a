"""``verify``: finds equal what is equal, notices what is not, and brings a failing job down with its own traceback."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopart.verify
from autopart.cluster import Cluster
from autopart.local_job import JobError, run_local_job
from autopart.planner import make_plan
from autopart.realize import realize
from autopart.runtime.errors import PlanError
from autopart.verify import Subject, VerifyError, compare_emitted, disable_dropout, prepare, verify
from families import BATCH, family
from launch import run_kept_job


@pytest.fixture(scope="module")
def subject() -> Subject:
    gpt2 = family("gpt2", dropout=0.1, dtype=torch.float32)
    return prepare(gpt2.build(), (), gpt2.inputs(BATCH))


@pytest.fixture(scope="module")
def emitted(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verify") / "stages"
    plan = make_plan(subject.program, Cluster.parse("cpu:2"), pp=2, microbatches=2)
    realize(subject.program, plan).save(directory)
    return directory


@pytest.mark.slow  # the command, which does the same, is a default test
def test_two_stages_are_equal(subject: Subject, emitted: Path) -> None:
    found = compare_emitted(emitted, subject)
    assert found.equal and found.ranks == 2 and len(found.losses) == len(found.reference_losses) == 3
    assert max(found.loss_difference, found.gradient_difference, found.parameter_difference) < 1e-10
    groups = {item.group: item for item in found.groups}
    assert groups["transformer.h.*.mlp.c_fc.weight"].tensors == 4
    assert all(item.gradient is not None for item in found.groups)
    assert any("dropout is set to 0" in note for note in found.notes)
    # The subject is left as it came: comparing again gives the same.
    assert compare_emitted(emitted, subject, steps=1).reference_losses == found.reference_losses[:1]


@pytest.fixture
def kept_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run in processes that tests share: those of a job's own, which take seconds to start, are another's."""
    monkeypatch.setattr(autopart.verify, "run_local_job", run_kept_job)


@pytest.mark.usefixtures("kept_jobs")
def test_a_wrong_program_is_not_equal(subject: Subject, emitted: Path, tmp_path: Path) -> None:
    broken = tmp_path / "stages"
    broken.mkdir()
    for path in emitted.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    file = broken / "stage_1.py"
    text = file.read_text()
    assert "0.044715" in text  # a constant of the activation, off by one part in a million
    file.write_text(text.replace("0.044715", "0.04471505"))
    found = compare_emitted(broken, subject, steps=1)
    assert not found.equal
    assert 1e-9 < found.gradient_difference < 1e-3
    # Its own layers differ, and through the gradient so do those of the stage before.
    assert all(item.gradient for item in found.groups if "c_fc" in item.group)


@pytest.mark.slow
def test_a_failing_rank_ends_the_job(subject: Subject, emitted: Path, tmp_path: Path) -> None:
    broken = tmp_path / "stages"
    broken.mkdir()
    for path in emitted.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    file = broken / "stage_1.py"
    text = file.read_text()
    head, call, rest = text.partition("def forward(self")
    assert call
    cut = rest.rindex("        return ")
    file.write_text(f"{head}{call}{rest[:cut]}        raise RuntimeError('the disk is on fire')\n{rest[cut:]}")
    with pytest.raises(JobError, match="rank 1 failed: RuntimeError: the disk is on fire") as caught:
        compare_emitted(broken, subject)
    assert "stage_1.py" in caught.value.details and "Traceback" in caught.value.details


@pytest.mark.slow
def test_a_plan_in_another_precision(tmp_path: Path) -> None:
    from autopart.tracing import capture

    gpt2 = family("gpt2", dtype=torch.float32)
    model, inputs = gpt2.build(), gpt2.inputs(BATCH)
    plan = make_plan(capture(model, (), inputs, check_eval=False), Cluster.parse("cpu:2"), pp=2, microbatches=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert verify(model, (), inputs, plan=plan, steps=1).equal
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(PlanError, match="another model"):
        verify(family("llama").build(), (), inputs, plan=plan)


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).relu())
        return out


@pytest.mark.parametrize(
    "limits", [{"dp": 2, "microbatches": 2}, pytest.param({"pp": 2, "microbatches": 2}, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("kept_jobs")
def test_batch_norm_and_a_loss_outside(limits: dict[str, Any]) -> None:
    torch.manual_seed(0)
    data = {"targets": torch.randint(4, (8,))}
    cluster = Cluster.parse("cpu:2")
    x = torch.randn(8, 8)
    found = verify(WithNorm(), (x,), data, cluster=cluster, limits=limits, loss_fn=nn.functional.cross_entropy)
    assert found.equal, found
    assert any("batch norm" in note for note in found.notes)
    # On one replica the running statistics are compared as well.
    assert ("norm.running_mean" in {item.group for item in found.groups}) == ("pp" in limits)


class Complex(nn.Module):
    """A filter of complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.filter, n=8)
        return self.last(filtered).square().mean()


@pytest.mark.usefixtures("kept_jobs")
def test_complex_weights_are_compared() -> None:
    torch.manual_seed(0)
    found = verify(Complex(), (torch.randn(8, 8),), cluster=Cluster.parse("cpu:2"), limits={"pp": 2, "microbatches": 2})
    assert found.equal and found.gradient_difference < 1e-12, found
    assert "filter" in {item.group for item in found.groups}


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) + torch.rand_like(x)).mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:The tensor attribute:UserWarning")
@pytest.mark.parametrize("dim", [0, None])
def test_weights_that_hooks_compute(dim: int | None) -> None:
    """As torch's older weight norm does, with one size for each output or for all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6), dim=dim), nn.Tanh(), nn.Linear(6, 2))  # type: ignore[arg-type]
    found = verify(model, (torch.randn(4, 4),), cluster=Cluster.parse("cpu:1"), steps=1)
    assert found.equal and any("weight_g" in group.group for group in found.groups)


def test_what_cannot_be_compared() -> None:
    cluster = Cluster.parse("cpu:1")
    with pytest.raises(VerifyError, match="draws random numbers"):
        verify(Noisy(), (torch.randn(4, 4),), cluster=cluster)
    with pytest.raises(VerifyError, match="either a plan or a cluster"):
        verify(nn.Linear(4, 4), (torch.randn(4, 4),))
    with pytest.raises(VerifyError, match="not finite"):
        verify(nn.Linear(4, 4), (torch.full((4, 4), math.inf),), cluster=cluster)


def test_dropout_is_switched_off_everywhere() -> None:
    model = family("bert", dropout=0.1).build()
    assert disable_dropout(model) > 0
    inputs = family("bert").inputs(2)
    assert torch.equal(model(**inputs).loss, model(**inputs).loss)


def fail_on_one(rank: int, how: str) -> int:
    import os

    import torch.distributed as dist

    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(9)
        time.sleep(200)
    dist.barrier()
    return dist.get_rank()


@pytest.mark.slow
def test_local_jobs(tmp_path: Path) -> None:
    function = f"{__name__}:fail_on_one"
    assert run_local_job(function, 2, {"rank": -1, "how": ""}, tmp_path) == [0, 1]
    with pytest.raises(JobError, match="rank 1 failed: the process died without a word"):
        run_local_job(function, 2, {"rank": 1, "how": "exit"}, tmp_path, timeout_s=120)
    with pytest.raises(JobError, match="did not finish within 8 s"):
        run_local_job(function, 2, {"rank": 1, "how": "hang"}, tmp_path, timeout_s=8)


@pytest.mark.usefixtures("kept_jobs")
@pytest.mark.parametrize("limits", [{"pp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "microbatches": 2}], ids=str)
def test_gradients_that_come_a_step_late_are_equal_to_such(
    subject: Subject, limits: dict[str, Any], tmp_path: Path
) -> None:
    devices = limits.get("pp", 1) * limits.get("dp", 1)
    plan = make_plan(subject.program, Cluster.parse(f"cpu:{devices}"), schedule="2bw", tp=1, **limits)
    realize(subject.program, plan).save(tmp_path)
    found = compare_emitted(tmp_path, subject, plan=plan)
    assert found.equal and len(found.losses) == len(found.reference_losses) == 3
    assert found.losses[0] == pytest.approx(found.losses[1], rel=1e-12), "no gradient is there in the first step"
    assert found.losses[2] < found.losses[1] and any("one step late" in note for note in found.notes)
    assert all(stage.as_planned for stage in found.traffic), found.traffic
