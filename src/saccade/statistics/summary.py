"""Summary: every statistic that one sweep gives, beside what uniform attention would have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.statistics.concentration import LargestWeight, SquaredNorm
from saccade.statistics.distance import Distance
from saccade.statistics.entropy import Entropy
from saccade.statistics.fold import Fold, Outline
from saccade.statistics.fused_sweep import Quantity
from saccade.statistics.logit_statistics import LargestLogit, LogitVariance
from saccade.statistics.mass_breakdown import PARTS, Parts
from saccade.statistics.per_row import PerRow, Placing
from saccade.statistics.places import Places
from saccade.statistics.position_information import PositionInformation
from saccade.statistics.protocol import MatrixLike
from saccade.statistics.received import Received
from saccade.statistics.row_block import Block
from saccade.statistics.summary_measures import NEAR, Measure, effective_tokens, measures_of, measures_of_parts
from saccade.statistics.uniform_baseline import (
    Uniform,
    even_rows_of_blocks,
    even_rows_of_mask,
    uniform_of_blocks,
    uniform_of_mask,
)
from saccade.support.errors import unsupported
from saccade.support.validation import check_type

__all__ = ["Summary", "plain_statistics", "summary_of"]

_MANY = 8  # heads of all batch items from which on a table names the extremes instead of all


class Summary(NamedTuple):
    """Statistics of every head, beside those of uniform attention under the same mask.

    ``print`` gives a table; ``summary.named("entropy")`` is one `Measure`.

    Attributes:
        measures: one number a head each.
        rows: by name, the answers of all queries that means were taken of, ``[batch, heads, q_len]`` each.
        received: attention that each key gets, ``[batch, heads, kv_len]``, in whole queries.
        received_index: the same divided by that of uniform attention, ``[batch, heads, kv_len]``: above 1 a key gets
            more than its place under the mask explains; 0 where no query sees the key.
        uniform: what every query and key would have under uniform attention.
    """

    measures: tuple[Measure, ...]
    rows: dict[str, Tensor]
    received: Tensor
    received_index: Tensor
    uniform: Uniform

    def named(self, name: str) -> Measure:
        """One measure.

        Raises:
            KeyError: there is none of this name; the message lists all.
        """
        for measure in self.measures:
            if measure.name == name:
                return measure
        known = ", ".join(measure.name for measure in self.measures)
        raise KeyError(f"Summary: name must be one of {known}; got {name}.")

    def __str__(self) -> str:
        return "\n".join(_lines(self.measures))


class _RowSum(PerRow):
    """What each row holds: 1, 0 if it attends to nothing, less where a sink takes a share."""

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        return block.weights.sum(-1)

    def quantity(self, placing: Placing) -> Quantity | None:
        return "held"


def summary_of(matrix: MatrixLike, inputs: AttentionInputs | None = None, parts: Parts | None = None) -> Summary:
    """All statistics of one sweep.

    Args:
        matrix: what is asked.
        inputs: its ingredients, if it is a softmax; their mask says which keys are visible. Without them those are
            whose weight is not 0, and the largest logit is not told.
        parts: which parts of the attention to tell too, which costs passes over the weights; none when None. Tokens
            stand where the matrix says, unless the parts say it.

    Raises:
        TypeError: ``parts`` are none.
        UnsupportedError: rows that are not distributions, unless it is a sink that takes a share of them.
    """
    check_type("parts", parts, (Parts, type(None)), "be Parts or None", hint="statistics.Parts()")
    places = Places.of(matrix)
    folds = _folds(places, with_distributions=matrix.is_stochastic)
    if not matrix.is_stochastic and inputs is None:
        reason = f"the rows of this {type(matrix).__name__} do not sum to 1 (is_stochastic is False)"
        raise unsupported("a summary", [reason], hint="A.topk and A.received need no distributions")
    with torch.no_grad():
        if inputs is not None:
            folds["largest_logit"] = LargestLogit()
        answers = dict(zip(folds, matrix.ask(*folds.values()), strict=True))
        if inputs is None:
            uniform = uniform_of_blocks(Outline.of(matrix), matrix.blocks(), places, NEAR)
        else:
            uniform = uniform_of_mask(inputs, places, NEAR)
        summary = _made(answers, uniform)
        return summary if parts is None else _with_parts(summary, matrix, inputs, parts, places)


def _with_parts(
    summary: Summary, matrix: MatrixLike, inputs: AttentionInputs | None, parts: Parts, places: Places
) -> Summary:
    """A summary that tells the parts too, beside those of uniform attention."""
    asked = parts if parts.places is not None else dataclasses.replace(parts, places=places)
    if inputs is None:
        even = even_rows_of_blocks(Outline.of(matrix), matrix.blocks(), asked)
    else:
        even = even_rows_of_mask(inputs, places, asked)
    values = matrix.ask(asked)[0]
    rows = {**summary.rows, **{f"{name}_part": values[..., place] for place, name in enumerate(PARTS)}}
    measures = (*summary.measures, *measures_of_parts(parts, values, even, summary.uniform.visible))
    return summary._replace(measures=measures, rows=rows)


def plain_statistics(matrix: MatrixLike) -> dict[str, Tensor]:
    """Those statistics of queries and keys that make sense for weights of any sign, by name.

    They are ``[batch, heads, q_len]``, and "received" ``[batch, heads, kv_len]``; there is nothing uniform beside them.
    """
    folds = _folds(Places.of(matrix), with_distributions=False)
    return dict(zip(folds, matrix.ask(*folds.values()), strict=True))


def _folds(places: Places, *, with_distributions: bool) -> dict[str, Fold[Any, Any]]:
    folds: dict[str, Fold[Any, Any]] = {
        "largest_weight": LargestWeight(),
        **{near.name: near.fold(places) for near in NEAR},
        "squared_norm": SquaredNorm(),
        "received": Received(),
    }
    if with_distributions:
        folds |= {
            "entropy": Entropy(),
            "distance": Distance(places),
            "logit_variance": LogitVariance(),
            "position_information": PositionInformation(),
        }
    else:
        folds["given_mass"] = _RowSum()
    return folds


def _made(answers: dict[str, Tensor], uniform: Uniform) -> Summary:
    shape = answers["largest_weight"].shape
    received = answers["received"]
    expected = uniform.received.expand(received.shape)
    index = torch.where(expected > 0, received / expected.where(expected > 0, 1.0), 0.0)
    rows = {name: answer for name, answer in answers.items() if answer.shape == shape and name != "received"}
    if "entropy" in answers:
        rows["effective_tokens"] = effective_tokens(answers["entropy"], uniform.visible.expand(shape))
    return Summary(measures_of(answers, uniform), rows, received, index, uniform)


def _lines(measures: tuple[Measure, ...]) -> Iterator[str]:
    batch, heads = measures[0].values.shape
    names = [f"b{b} h{h}" if batch > 1 else f"h{h}" for b in range(batch) for h in range(heads)]
    few = len(names) <= _MANY
    head = ["", "unit", *([*names, "uniform"] if few else ["least", "", "mean", "most", "", "uniform"])]
    table = [head]
    for measure in measures:
        values, even = measure.values.flatten(), measure.uniform.flatten()
        if few:
            cells = [_number(value) for value in values.tolist()]
        else:
            known = [(value, name) for value, name in zip(values.tolist(), names, strict=True) if not math.isnan(value)]
            (least, where), (most, there) = (min(known), max(known)) if known else [(math.nan, "")] * 2
            mean = sum(value for value, _ in known) / max(1, len(known))
            cells = [_number(least), where, _number(mean), _number(most), there]
        even = even[~even.isnan()]
        table.append([measure.name, measure.unit, *cells, _number(float(even.mean())) if len(even) else "–"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"
