"""Where gradients flow: from trainable tensors on, and back from the loss only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopart.analysis import analyze
from autopart.tracing import capture


class Picks(nn.Module):
    """Scores that only pick rows, and a value that is read for its shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.shape = nn.Linear(8, 1), nn.Linear(8, 8)
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        picked = self.scores(x).squeeze(-1).topk(2, dim=1).indices
        rows = x.gather(1, picked.unsqueeze(-1).expand(-1, -1, 8))
        rows = rows + self.shape(rows).new_zeros(rows.shape)
        return {"loss": self.body(rows).square().mean(), "scores": self.scores(x)}


def test_only_what_the_loss_is_differentiated_by() -> None:
    program = capture(Picks(), (torch.randn(4, 6, 8),), check_eval=False)
    for graph in (program.graph, analyze(program).split.graph):
        trained = {n.meta["name"] for n in graph.nodes if n.op == "placeholder" and n.meta.get("differentiable")}
        assert trained == {"body.weight", "body.bias"}
        layers = [node for node in graph.nodes if node.target == torch.ops.aten.linear.default]
        assert [node.meta["differentiable"] for node in layers] == [node.meta["path"] == "body" for node in layers]


def test_without_a_loss_all_outputs_are() -> None:
    class Scores(Picks):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"rows": super().forward(x)["scores"]}

    graph = capture(Scores(), (torch.randn(4, 6, 8),), check_eval=False).graph
    trained = {n.meta["name"] for n in graph.nodes if n.op == "placeholder" and n.meta.get("differentiable")}
    assert trained == {"scores.weight", "scores.bias"}


class FirstWithout(nn.Module):
    """Equal layers, the first of which are run without gradient (as recurrent models run all cycles but the last)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers[:2]:
                x = layer(x)
        for layer in self.layers[2:]:
            x = layer(x)
        return x.square().mean()


def test_layers_without_gradient_are_no_copies_of_others() -> None:
    analysis = analyze(capture(FirstWithout(), (torch.randn(4, 8),), check_eval=False))
    linear = [node for node in analysis.block_of if node.target == torch.ops.aten.linear.default]
    assert [bool(node.meta["differentiable"]) for node in linear] == [False, False, True, True]
    assert not {analysis.classes[node] for node in linear[:2]} & {analysis.classes[node] for node in linear[2:]}
