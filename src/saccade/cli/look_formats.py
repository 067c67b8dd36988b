"""The statistics of ``saccade look`` as JSON or CSV."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from enum import Enum

from saccade.matrix import Matrix
from saccade.statistics import Parts, Summary
from saccade.text import visible

PARTS_OF_A_TEXT = Parts(sink=1, local=4, anchor=2, block_size=4)
"""Parts that distinguish heads even in a single sentence, where all tokens are fewer than 16 positions apart."""
SCHEMA = "saccade.look/1"
"""Name and version of the output fields. Fields may be added within a version, but never changed or removed."""
_Row = tuple[str, str, float | None, float | None]  # name, unit, value, and the value for uniform attention


class Format(Enum):
    """The output format of the statistics of ``saccade look``."""

    JSON = "json"
    CSV = "csv"


def format_statistics(matrices: Sequence[Matrix], model: str, form: Format, window: int, *, is_cross: bool) -> str:
    """Format the statistics of all layers and heads as JSON or CSV; missing numbers are null or empty cells.

    Args:
        matrices: one matrix for each layer, for one batch item.
        model: the model's name.
        form: JSON (an object with a list of heads) or CSV (a line for each number).
        window: the index of the window.
        is_cross: whether the attention is between two texts.
    """
    summaries = [matrix.summary(PARTS_OF_A_TEXT) for matrix in matrices]
    return (_as_json if form is Format.JSON else _as_csv)(summaries, matrices, visible(model), window, is_cross)


def _as_json(summaries: Sequence[Summary], matrices: Sequence[Matrix], model: str, window: int, is_cross: bool) -> str:
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
            "window": window,
            "queries": matrices[0].shape[2],
            "keys": matrices[0].shape[3],
            "measures": [{"name": one.name, "unit": one.unit, "meaning": one.meaning} for one in summaries[0].measures],
            "heads": heads,
        },
        ensure_ascii=False,
        indent=1,
        allow_nan=False,
    )


def _as_csv(summaries: Sequence[Summary], matrices: Sequence[Matrix], model: str, window: int, is_cross: bool) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["schema", "model", "attention", "layer", "head", "measure", "unit", "value", "uniform", "window"])
    # A spreadsheet would evaluate a cell that begins like a formula.
    safe = f"'{model}" if model[:1] in ("=", "+", "-", "@") else model
    for layer, head, rows in _heads(summaries):
        for name, unit, value, even in rows:
            numbers = ["" if number is None else number for number in (value, even)]
            kind = "cross" if is_cross else "self"
            table.writerow([SCHEMA, safe, kind, layer, head, name, unit, *numbers, window])
    return out.getvalue().rstrip("\n")


def _heads(summaries: Sequence[Summary]) -> Iterator[tuple[int, int, list[_Row]]]:
    for layer, summary in enumerate(summaries):
        for head in range(summary.measures[0].values.shape[1]):
            rows = [
                (
                    one.name,
                    one.unit,
                    _round_statistic(one.values[0, head].item()),
                    _round_statistic(one.uniform[0, head].item()),
                )
                for one in summary.measures
            ]
            yield layer, head, rows


def _round_statistic(value: float) -> float | None:
    """Round a statistic to the seven digits of float32; return None if it is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
