"""The rooms: imports point one way, the runtime needs torch alone, and every package is shipped."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Folder -> the rooms that its files may import from.
ALLOWED = {
    "runtime": {"autopart.runtime"},
    "passes": {"autopart.passes", "autopart.runtime"},
}


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} imports relatively"
            yield node.module or ""


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        for name in imported(file):
            if name.split(".")[0] == "autopart":
                assert any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED[room]), (file, name)


def test_the_runtime_imports_torch_alone() -> None:
    for file in sorted((ROOT / "runtime").rglob("*.py")):
        for name in imported(file):
            top = name.split(".")[0]
            assert top in {"torch", "autopart", "__future__"} or top in sys.stdlib_module_names, (file, name)


def test_the_runtime_loads_neither_solvers_nor_graph_libraries() -> None:
    code = (
        "import sys, autopart.runtime\n"
        "heavy = {'ortools', 'networkx', 'tabulate', 'transformers', 'torch._dynamo'}\n"
        "print(sorted({part for name in sys.modules for part in (name, name.split('.')[0])} & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_package_is_shipped() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    homes = {"autopart": "autopart", "passes": "autopart.passes", "runtime": "autopart.runtime"}
    found = set()
    for folder, package in homes.items():
        for marker in (ROOT / folder).rglob("__init__.py"):
            inner = marker.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inner)))
    assert found == set(settings["packages"])
