"""What is said of a plan that was made for another program: in what the two differ, as far as the plan tells."""

from __future__ import annotations

from autopart.passes.program import Program
from autopart.plan import Plan
from autopart.runtime.manifest import MIXED


def other_model(program: Program, plan: Plan) -> str:
    """In what the program is not the plan's, and what to do."""
    precision, named = program.computes_in, plan.model == program.name
    if precision == plan.dtype and named:
        return (
            f"the plan is for another model called {plan.model}: its fingerprint is {plan.fingerprint}, that of "
            f"this one is {program.fingerprint}; plan it again with 'autopart plan'"
        )
    if precision == plan.dtype:
        return (
            f"the plan is for another model: it was made for {plan.model} (fingerprint {plan.fingerprint}), this one "
            f"is {program.name} ({program.fingerprint}); give the model that was planned, or plan this one with "
            "'autopart plan'"
        )
    instead = "" if named else "give the model that was planned, and if this is it "
    made = "the plan was made" if named else f"the plan is for another model: it was made for {plan.model}"
    this = "this model is" if named else f"this one is {program.name}"
    return (
        f"{made} in {plan.dtype}, {this} in {precision}; {instead}{_as_planned(program, plan)}, or plan this one with "
        "'autopart plan'"
    )


def _as_planned(program: Program, plan: Plan) -> str:
    """How a program is had in the precision of the plan."""
    if plan.dtype in MIXED:
        return f"capture it with precision={plan.dtype!r}"
    steps = [f"leave out precision={program.precision!r}"] if program.precision else []
    if str(program.dtype) != f"torch.{plan.dtype}":
        steps.append(f"add --dtype {plan.dtype} (or dtype={plan.dtype} to an hf: name, or convert the model)")
    return " and ".join(steps)
