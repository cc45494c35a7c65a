"""Entries of the plan cache that something damaged are made anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_plan import example

from autopart import cache
from autopart.kept_plans import found_or_made


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[" * 100_000, '{"a":' * 100_000, '{"plans": 3}', '{"plans": []}', '{"plans": [3]}', "two"],
)
def test_damaged_entries_are_made_anew(text: str, tmp_path: Path) -> None:
    plan = example()
    path = tmp_path / "ab" / "abc.json"
    path.parent.mkdir()
    answer = {"plans": [plan.to_json()] * 2} if text == "two" else json.loads(text) if text[-1:] == "}" else None
    path.write_text(text if answer is None else cache.signed(answer))
    assert found_or_made(tmp_path, "abc", lambda: [plan], count=1) == ([plan], False)
    assert found_or_made(tmp_path, "abc", list, count=1) == ([plan], True)
