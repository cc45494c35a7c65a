"""Test settings: one thread per process, because the tests themselves run in several (pytest -n, gloo ranks)."""

import os

# Before torch is imported, and inherited by the ranks that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What was measured or solved on this machine before does not reach into tests.
os.environ["AUTOPART_CACHE"] = "off"

import pytest
import torch

from autopart.update_memory import Temporaries

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on CPUs, also where there is a GPU, but for those of ``make test-cuda``."""
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count no memory of messages, as of models that are so large that these are next to nothing, nor of the
    optimizer's step, as of optimizers that make nothing in it. Their code, which has both, is not walked over.
    """
    monkeypatch.setattr("autopart.overfull.MOST_OPS", 0)
    monkeypatch.setattr("autopart.solver.stages_passing.message_bytes", lambda *_: 0.0)
    monkeypatch.setattr("autopart.solver.stages_passing.arriving_bytes", lambda *_: 0.0)
    monkeypatch.setattr("autopart.parameter_prices.temporaries", lambda optimizer: Temporaries())
    monkeypatch.setattr("autopart.parameter_prices.staying_bytes", lambda *_: 0.0)
    monkeypatch.setattr("autopart.parameter_prices.single_bytes", lambda *_: 0.0)
