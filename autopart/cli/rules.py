"""``autopart rules``: what ops allow, tried by running them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopart.cli.arguments import add_json, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autopart.passes.rules import RuleBook
    from autopart.passes.rules.examples import Case

NAME = "rules"
HELP = "list the sharding rules of ops, or try one by running it"
DESCRIPTION = """Lists all rules; with OP, runs the op by every strategy of its rule and compares with the whole.

Each strategy is played through in one process, forward and backward, in float64: the operands are split as it says,
every rank's piece is run, the results are combined and compared. OP is a full name (aten.softmax.int,
mylib.gate.default) or the middle of one (softmax). It runs on the examples that come with autopart, or on ARGUMENTs:

    autopart rules aten.gather.default 4x6 1 i4x8

A rule of your own, for an op that PyTorch or you registered (with its custom_op), is one line of factors:

    from autopart.passes.rules import RULES, Annotation

    def rules():
        return RULES.extended({
            "mylib.gate.default": "*d, *d -> *d",                            # elementwise
            "mylib.mix.default": Annotation("*b k, n k -> *b n", linear=((0,), (1,))),
        })

Try it with --rules my_rules.py:rules, and plan with it: autopart.parallelize(model, rules=rules()), or
make_plan(program, cluster, rules=rules()) and emit(program, plan, directory, rules=rules()). An op without a
rule is replicated.
The notation: n a dim, *b a run of dims, (h d) a dim of two factors, ^n frozen, _ a frozen dim of its own, 1 a dim of
size one. Annotation adds what operands the op is linear in, and which are added (affine)."""
EXAMPLE = "autopart rules linear --parts 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="?", metavar="OP", help="the op to try (default: list all rules)")
    parser.add_argument(
        "operands",
        nargs="*",
        metavar="ARGUMENT",
        help="what to call the op with, in order: 4x6 or f4x6 a tensor of random floats (f6 of one dim), i4x6 one of "
        "integers 0 and 1, anything else as JSON (default: the examples that come with autopart)",
    )
    parser.add_argument("--parts", type=positive, default=2, metavar="N", help="ranks (default: %(default)s)")
    parser.add_argument("--rules", metavar="FILE.py:FUNCTION", help="a function that returns a RuleBook")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Status 1 when a strategy does not equal the whole. Raises RuleError, ModelError."""
    book = _book(arguments.rules)
    if arguments.op is None:
        listed = listing(book)
        print(json.dumps(listed) if arguments.json else _table(listed))
        return 0
    results = [result for case in _cases(arguments, book) for result in trial(case, arguments.parts, book)]
    failed = any(result["message"] for result in results)
    print(json.dumps(results) if arguments.json else _results(results))
    return 1 if failed else 0


def _book(spec: str | None) -> RuleBook:
    from autopart.models import load_function
    from autopart.passes.rules import RULES, RuleBook, RuleError

    if spec is None:
        return RULES
    path, _, function = spec.rpartition(":")
    if not path.endswith(".py"):
        raise RuleError(f"{spec!r} names no rules: write file.py:function")
    found = load_function(spec, Path(path), function)()
    if not isinstance(found, RuleBook):
        raise RuleError(f"{spec}: {function}() has to return a RuleBook (RULES.extended(...)), not {found!r}")
    return found


def listing(book: RuleBook) -> list[dict[str, Any]]:
    """One entry per op, the JSON of the command: op, rule, properties; the rule of an op that is annotated for its
    shapes is shown for its first example, whose shapes are then given, and None if there is none.
    """
    from autopart.passes.rules import Annotation
    from autopart.passes.rules.catalogue import cases

    examples: dict[str, Case] = {}
    for case in cases():
        examples.setdefault(case.op, case)
    entries = []
    for op, entry in sorted(book.entries.items()):
        shapes, rule = "", entry
        if callable(entry):
            rule, shapes = _annotated(examples.get(op), entry)
        annotation = Annotation(rule) if isinstance(rule, str) else rule
        assert annotation is None or isinstance(annotation, Annotation)
        entries.append(
            {
                "op": op,
                "rule": annotation.text if annotation is not None else None,
                "properties": _properties(annotation) if annotation is not None else [],
                "for_shapes": shapes or None,
            }
        )
    return entries


def _annotated(case: Case | None, entry: Any) -> tuple[Any, str]:
    """What an entry says for an example, and the example's shapes."""
    from autopart.passes.rules.examples import call, overload

    if case is None:
        return None, ""
    try:
        target = overload(case.op)
    except (ImportError, AttributeError):  # of a library that is not there
        return None, ""
    node, tensors = call(target, *case.args, **case.kwargs)
    return entry(node), ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)


def _properties(annotation: Any) -> list[str]:
    def operands(group: Sequence[int]) -> str:
        return " and ".join(map(str, group))

    found = [f"linear in {operands(group)}" for group in annotation.linear]
    found += [f"{operands(annotation.affine)} added"] if annotation.affine else []
    found += [f"product of {text}" for text in annotation.products]
    found += ["random"] if annotation.random else []
    return found


def _table(entries: Sequence[dict[str, Any]]) -> str:
    from tabulate import tabulate

    rows = [
        (
            entry["op"],
            entry["rule"] if entry["rule"] is not None else "by shapes",
            "; ".join(entry["properties"]),
            entry["for_shapes"] or "",
        )
        for entry in entries
    ]
    headers = ("op", "rule", "properties (operands from 0)", "as for shapes")
    return f"{tabulate(rows, headers=headers, disable_numparse=True)}\n\n{len(rows)} rules"


def _cases(arguments: argparse.Namespace, book: RuleBook) -> list[Case]:
    from autopart.passes.rules import RuleError
    from autopart.passes.rules.catalogue import cases
    from autopart.passes.rules.examples import Case

    name = arguments.op
    if name.count(".") == 2:
        names = [name]
    else:
        names = [op for op in sorted(book.entries) if op.split(".")[1] == name.removeprefix("aten.")]
        if not names:
            raise RuleError(f"no rule is for an op {name!r}; 'autopart rules' lists all; write a full name (a.b.c)")
    if arguments.operands:
        if len(names) > 1:
            raise RuleError(f"{name!r} is one of {', '.join(names)}; write which")
        return [Case(names[0], tuple(_argument(text) for text in arguments.operands))]
    found = [case for case in cases() if case.op in names]
    if not found:
        raise RuleError(f"{name} has no example; call it with arguments, such as: autopart rules {name} 4x6")
    return found


def _argument(text: str) -> Any:
    """A tensor of the shape that the text is, else what it means as JSON."""
    import torch

    from autopart.passes.rules import RuleError
    from autopart.passes.rules.examples import f, i

    if re.fullmatch(r"[fi](\d+(x\d+)*)?|\d+(x\d+)+", text):
        torch.manual_seed(len(text))
        shape = tuple(int(size) for size in re.findall(r"\d+", text))
        return i(2, *shape) if text.startswith("i") else f(*shape)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RuleError(f"the argument {text!r} is neither a shape (4x6, f6, i4x6) nor JSON: {error.msg}") from error


def trial(case: Case, parts: int, book: RuleBook) -> list[dict[str, Any]]:
    """One entry per strategy of a call: op, shapes, strategy, placements, what differs ('' if nothing)."""
    from autopart.passes.rules import RuleError
    from autopart.passes.rules.check import check
    from autopart.passes.rules.examples import call, overload

    try:
        target = overload(case.op)
    except (ImportError, AttributeError) as error:
        raise RuleError(f"PyTorch knows no op {case.op}; import its library (in the file of --rules)") from error
    try:
        node, tensors = call(target, *case.args, **case.kwargs)
    except (RuntimeError, TypeError, IndexError) as error:
        raise RuleError(f"{case.op} does not take these operands: {str(error).splitlines()[0]}") from error
    for index in case.constant:
        node.all_input_nodes[index].meta["differentiable"] = False
    shapes = ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors)
    return [
        {
            "op": case.op,
            "shapes": shapes,
            "strategy": result.name,
            "inputs": result.inputs,
            "outputs": result.outputs,
            "shapes_only": result.shapes_only,
            "message": result.message,
        }
        for result in check(node, parts, book, tensors)
    ]


def _results(results: Sequence[dict[str, Any]]) -> str:
    from tabulate import tabulate

    rows = [
        (
            result["op"],
            result["shapes"],
            result["strategy"],
            f"{', '.join(result['inputs'])} -> {', '.join(result['outputs'])}",
            result["message"] or ("same shapes (random)" if result["shapes_only"] else "equal"),
        )
        for result in results
    ]
    return tabulate(rows, headers=("op", "shapes", "strategy", "placements", "result"), disable_numparse=True)
