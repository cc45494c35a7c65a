"""What a model returns and its program does not: objects, and in training all but the loss. Errors there say so."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import autopart
from autopart.runtime.errors import InputError, NotHereError
from clusters import ideal
from launch import launch


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


class Classifier(nn.Module):
    """Returns its loss with what it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


def shown(script: Callable[[], Any]) -> str:
    """What a script that ends in an error prints."""
    with pytest.raises((AttributeError, TypeError, KeyError)) as caught:
        script()
    with redirect_stderr(io.StringIO()) as found:
        sys.excepthook(caught.type, caught.value, caught.tb)
    return found.getvalue()


def test_outputs_that_training_leaves_out_are_told() -> None:
    model = autopart.parallelize(Classifier(), pp=1, dp=1, tp=1, verbose=False)
    found = model(torch.randn(2, 4), torch.tensor([0, 2]))
    scripts: list[Callable[[], Any]] = [
        lambda: found["logits"].argmax(-1),
        lambda: found["logits"][0],
        lambda: {"loss": found["loss"]}["logits"],
    ]
    for script in scripts:
        found_note = re.search(r"its loss alone, and None for .*; parallelize\(model, outputs=\"all\"\)", shown(script))
        assert found_note and "'logits'" in found_note.group()  # beside those of models that other tests left
    other = shown(lambda: {"loss": 1}["other"])
    assert "returns its loss alone" not in other


def local() -> None:
    model = autopart.parallelize(
        nn.Linear(4, 3), cluster=ideal(2), batch="local", pp=1, dp=2, tp=1, microbatches=1, verbose=False
    )
    with pytest.warns(UserWarning, match=r"the outputs \(output\) are those of the samples of all 2 replicas"):
        assert model(torch.randn(2, 4)).shape == (4, 3)
    model.eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(torch.randn(2, 4))


def test_outputs_of_other_replicas_are_told() -> None:
    launch(local, 2)
