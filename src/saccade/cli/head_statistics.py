"""Statistics of every head as JSON or CSV, for other programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from enum import Enum

from saccade.matrix import Matrix
from saccade.statistics import Summary
from saccade.text import visible

__all__ = ["SCHEMA", "Format", "written"]

SCHEMA = "saccade.look/1"
"""Names the fields and their meaning. Fields may be added under the same number; none changes or goes."""
_Row = tuple[str, str, float | None, float | None]  # name, unit, value, and what uniform attention has


class Format(Enum):
    """How statistics are written."""

    JSON = "json"
    CSV = "csv"


def written(matrices: Sequence[Matrix], model: str, form: Format, *, is_cross: bool) -> str:
    """Statistics of all layers and heads, over tokens; a missing number is null, or an empty cell.

    Args:
        matrices: one for each layer, of one batch item.
        model: its name.
        form: JSON, an object with a list of heads; or CSV, a line for each number.
        is_cross: between two texts.
    """
    summaries = [matrix.summary() for matrix in matrices]
    return (_as_json if form is Format.JSON else _as_csv)(summaries, matrices, visible(model), is_cross)


def _as_json(summaries: Sequence[Summary], matrices: Sequence[Matrix], model: str, is_cross: bool) -> str:
    heads = [
        {
            "layer": layer,
            "head": head,
            "values": {name: value for name, _, value, _ in rows},
            "uniform": {name: even for name, _, _, even in rows},
        }
        for layer, head, rows in _heads(summaries)
    ]
    return json.dumps(
        {
            "schema": SCHEMA,
            "model": model,
            "attention": "cross" if is_cross else "self",
            "queries": matrices[0].shape[2],
            "keys": matrices[0].shape[3],
            "measures": [{"name": one.name, "unit": one.unit, "meaning": one.meaning} for one in summaries[0].measures],
            "heads": heads,
        },
        ensure_ascii=False,
        indent=1,
        allow_nan=False,
    )


def _as_csv(summaries: Sequence[Summary], matrices: Sequence[Matrix], model: str, is_cross: bool) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["schema", "model", "attention", "layer", "head", "measure", "unit", "value", "uniform"])
    # A spreadsheet would run what begins like a formula.
    safe = f"'{model}" if model[:1] in ("=", "+", "-", "@") else model
    for layer, head, rows in _heads(summaries):
        for name, unit, value, even in rows:
            numbers = ["" if number is None else number for number in (value, even)]
            table.writerow([SCHEMA, safe, "cross" if is_cross else "self", layer, head, name, unit, *numbers])
    return out.getvalue().rstrip("\n")


def _heads(summaries: Sequence[Summary]) -> Iterator[tuple[int, int, list[_Row]]]:
    for layer, summary in enumerate(summaries):
        for head in range(summary.measures[0].values.shape[1]):
            rows = [
                (one.name, one.unit, _number(one.values[0, head].item()), _number(one.uniform[0, head].item()))
                for one in summary.measures
            ]
            yield layer, head, rows


def _number(value: float) -> float | None:
    """A number with seven digits, as many as float32 has; None where it is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
