"""Breaks long lines of source at the brackets of calls, as a formatter would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

LIMIT = 120
_OPEN, _CLOSE = "([{", ")]}"


def wrapped(lines: Iterable[str]) -> list[str]:
    """The lines, each of at most 120 characters where a bracket allows it."""
    return [part for line in lines for part in _wrap(line)]


def _wrap(line: str) -> list[str]:
    if len(line) <= LIMIT:
        return [line]
    found = _outermost(line)
    if found is None:
        return [line]
    start, end = found
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    head, inner, tail = line[: start + 1], line[start + 1 : end], line[end:]
    closing = f"{indent[:-4]}{tail}"
    items = list(_items(inner))
    is_call = start > 0 and (line[start - 1].isalnum() or line[start - 1] in "_)]") and line[start] == "("
    if len(indent) + len(inner) <= LIMIT or len(items) == 1:
        return [*_wrap(head), *_wrap(f"{indent}{inner}"), *_wrap(closing)]
    # a comma at the end turns a parenthesis around one expression into a tuple, and is fine elsewhere
    comma = "," if is_call or len(items) > 1 else ""
    parts = [f"{indent}{item}{',' if index < len(items) - 1 else comma}" for index, item in enumerate(items)]
    return [*_wrap(head), *(piece for part in parts for piece in _wrap(part)), *_wrap(closing)]


def _characters(text: str) -> Iterator[tuple[int, str, int]]:
    """Positions, characters and depths of brackets outside of strings; a bracket has the depth outside of it."""
    depth, quote = 0, ""
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _CLOSE:
            depth -= 1
            yield index, char, depth
        else:
            yield index, char, depth
            depth += char in _OPEN


def _outermost(line: str) -> tuple[int, int] | None:
    """The longest bracketed part at the outermost level: a call, a list, a parenthesis; not an index."""
    found: list[tuple[int, int]] = []
    start = None
    for index, char, depth in _characters(line):
        if depth:
            continue
        if char in _OPEN:
            is_index = char == "[" and index > 0 and (line[index - 1].isalnum() or line[index - 1] in '_)]"')
            start = None if is_index else index
        elif char in _CLOSE and start is not None:
            found.append((start, index))
            start = None
    pairs = [pair for pair in found if pair[1] - pair[0] > 1]
    return max(pairs, key=lambda pair: pair[1] - pair[0], default=None)


def _items(text: str) -> Iterator[str]:
    """The parts between commas at the outermost level."""
    start = 0
    for index, char, depth in _characters(text):
        if char == "," and not depth:
            yield text[start:index].strip()
            start = index + 1
    rest = text[start:].strip()
    if rest:
        yield rest
