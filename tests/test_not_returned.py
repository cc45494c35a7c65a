"""Objects that a model returns beside tensors: what stands for them says so, where None would pass for an answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import autopart
from autopart.runtime.errors import InputError, NotHereError


class Policy(nn.Module):
    """Returns a distribution, a value, a number and nothing; what an earlier call returned may be passed back."""

    def __init__(self) -> None:
        super().__init__()
        self.actions, self.value = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor, past: Any = None) -> dict[str, Any]:
        return {"policy": Categorical(logits=self.actions(x)), "value": self.value(x), "size": 4, "more": None}


def returned(training: bool) -> tuple[Any, dict[str, Any]]:
    model = autopart.parallelize(Policy(), pp=1, dp=1, tp=1, verbose=False)
    model.train(training)
    return model, model(torch.randn(2, 4))


@pytest.mark.parametrize("training", [True, False])
def test_an_object_is_missed_where_it_is_looked_into(training: bool) -> None:
    _, found = returned(training)
    assert found["value"].shape == (2, 1) and found["size"] == 4 and found["more"] is None
    assert not hasattr(found["policy"], "__deepcopy__") and not hasattr(found["policy"], "probs")
    ways: tuple[Any, ...] = (lambda it: it.log_prob(0), lambda it: it[0], lambda it: [*it], len, lambda it: it())
    for way in ways:
        with pytest.raises(NotHereError, match=r"output 'policy', a torch.distributions\.categorical.Cate"):
            way(found["policy"])


def test_what_stands_for_an_object_is_no_input() -> None:
    model, found = returned(training=False)
    with pytest.raises(InputError, match=r"input 'past' is the model's output 'policy', a torch.distributions"):
        model(torch.randn(2, 4), past=found["policy"])
