"""What most ranks of tests load: imported by the process that they are forked from, so that they find it there."""

import importlib

import torch

for _name in (
    "torch.distributed.fsdp",
    "torch.export",
    "transformers.generation",
    "autopart.planner",
    "autopart.verify",
):
    importlib.import_module(_name)

# Optimizers load torch's compiler when the first of them takes its first step, which takes seconds.
_parameter = torch.nn.Parameter(torch.zeros(1))
_parameter.grad = torch.zeros(1)
torch.optim.AdamW([_parameter]).step()
