"""Describe the measured reach of a module as a rule: `self`, `window(2, 0)`, `causal`, `documents & causal`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SeenRow(NamedTuple):
    """The tokens that one row of a module was measured to depend on.

    Attributes:
        row: batch item and position of the row.
        seen: bool ``[length]``.
    """

    row: tuple[int, int]
    seen: Tensor


def measured_rule(rows: Sequence[SeenRow], documents: Tensor) -> str:
    """Return the rule that all measured rows of a module follow, as a string.

    The string begins with "within" if the rows see fewer tokens than the smallest rule that contains them, as with a
    dilated convolution. The width of a window does not include the row's own key.

    Args:
        rows: the measured rows.
        documents: the document index of each token, int ``[batch, length]``; tokens with equal indices may reach each
            other.

    Returns:
        "self", "window(left, right)", "causal" or "full", preceded by "documents & " if there are several documents and
        no row sees a document other than its own.

    Example:
        >>> row = SeenRow((0, 3), torch.tensor([False, True, True, True, False]))
        >>> measured_rule([row], torch.zeros(1, 5))
        'window(2, 0)'
    """
    apart = all(bool((~one.seen | _same(one, documents)).all()) for one in rows)
    inside = apart and any(not bool(_same(one, documents).all()) for one in rows)
    ends = [_ends(one, documents if inside else torch.zeros_like(documents)) for one in rows]
    left, right = max(one.left for one in ends), max(one.right for one in ends)
    is_open = [all(one.left == one.left_most for one in ends), all(one.right == one.right_most for one in ends)]
    is_far = [left > 0 and is_open[0], right > 0 and is_open[1]]
    expected = [
        one.clipped(None if is_far[0] else left, None if is_far[1] else right, len(own.seen))
        for one, own in zip(ends, rows, strict=True)
    ]
    exact = all(
        torch.equal(own.seen, want | _itself(own)) or torch.equal(own.seen | _itself(own), want | _itself(own))
        for own, want in zip(rows, expected, strict=True)
    )
    text = _words(left, right, is_far)
    return ("" if exact else "within ") + ("documents & " if inside else "") + text


def grouped(rules: Mapping[str, str]) -> list[str]:
    """Return one line for each measured rule, with the names of the modules that follow it.

    Names that differ only in their numbers are merged.

    Example:
        >>> grouped({"layers.0.conv": "window(2, 0)", "layers.1.conv": "window(2, 0)", "layers.0.attn": "causal"})
        ['window(2, 0): layers.0,1.conv', 'causal: layers.0.attn']
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name, rule in rules.items():
        number = re.search(r"(?<![^.])\d+(?![^.])", name)
        shape = name if number is None else f"{name[: number.start()]}\0{name[number.end() :]}"
        found.setdefault(rule, {}).setdefault(shape, []).append("" if number is None else number[0])
    return [
        f"{rule}: " + ", ".join(shape.replace("\0", _run(numbers)) for shape, numbers in names.items())
        for rule, names in found.items()
    ]


class _Ends(NamedTuple):
    """On each side of a row, the number of tokens that the row sees, and the number of tokens in its document."""

    left: int
    right: int
    left_most: int
    right_most: int
    position: int

    def clipped(self, left: int | None, right: int | None, length: int) -> Tensor:
        """Return the tokens of a window within the row's document, bool ``[length]``; None means no limit."""
        back = self.left_most if left is None else min(left, self.left_most)
        ahead = self.right_most if right is None else min(right, self.right_most)
        at = torch.arange(length)
        return (at >= self.position - back) & (at <= self.position + ahead)


def _ends(measured: SeenRow, documents: Tensor) -> _Ends:
    item, position = measured.row
    same_document = (documents[item] == documents[item, position]).nonzero().flatten()
    seen = measured.seen.nonzero().flatten()
    first, last = (int(seen.min()), int(seen.max())) if len(seen) else (position, position)
    return _Ends(
        max(position - first, 0),
        max(last - position, 0),
        position - int(same_document.min()),
        int(same_document.max()) - position,
        position,
    )


def _same(measured: SeenRow, documents: Tensor) -> Tensor:
    item, position = measured.row
    return documents[item] == documents[item, position]


def _itself(measured: SeenRow) -> Tensor:
    return torch.arange(len(measured.seen)) == measured.row[1]


def _words(left: int, right: int, is_far: Sequence[bool]) -> str:
    if left == right == 0:
        return "self"
    if all(is_far):
        return "full"
    if is_far[0]:
        return "causal" if right == 0 else f"window(any, {right})"
    return f"window({left}, {'any' if is_far[1] else right})"


def _run(numbers: Sequence[str]) -> str:
    """Format the numbers in module names as a string: "0-3" if they are consecutive, otherwise "0,2,3"."""
    if not numbers or numbers == [""]:
        return "".join(numbers)
    given = [int(one) for one in numbers]
    if len(given) > 2 and given == list(range(given[0], given[0] + len(given))):
        return f"{given[0]}-{given[-1]}"
    return ",".join(dict.fromkeys(numbers))
