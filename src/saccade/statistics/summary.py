"""Summary: a table of statistics for every head, compared with uniform attention."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.positions.token_positions import Positions
from saccade.statistics.concentration import Entropy, LargestWeight, SquaredNorm
from saccade.statistics.distance import Distance
from saccade.statistics.logit_statistics import LargestLogit, LogitVariance
from saccade.statistics.mass import PARTS, Parts
from saccade.statistics.per_row import CheckedPair, PerRow, positions_of
from saccade.statistics.received import PositionInformation, Received
from saccade.statistics.row_block import Block
from saccade.statistics.statistic import MatrixInfo, MatrixLike, Quantity, Statistic
from saccade.statistics.uniform_baseline import (
    Near,
    Uniform,
    uniform_of_blocks,
    uniform_of_mask,
    uniform_rows_of_blocks,
    uniform_rows_of_mask,
)
from saccade.support.errors import unsupported
from saccade.support.numerics import widest_dtype
from saccade.support.validation import check_type

_MAX_COLUMNS = 8  # with more heads (over all batch items), a table lists only the extremes and the mean
_LOCAL = 16
NEAR = (
    Near("first_mass", "first token", 0, 0, False),
    Near("first_4_mass", "first 4", 0, 3, False),
    Near("self_mass", "own token", 0, 0, True),
    Near("previous_mass", "token before", 1, 1, True),
    Near("local_mass", f"±{_LOCAL} tokens", -_LOCAL, _LOCAL, True),
)


class Measure(NamedTuple):
    """A statistic in a summary: one number per head, with a name, a unit and a uniform baseline.

    Attributes:
        name: name in tables and files.
        unit: unit of the values.
        meaning: a short description.
        values: ``[batch, heads]``; NaN for a head whose queries attend to nothing.
        uniform: the same statistic for uniform attention under the mask, ``[batch, heads]``; NaN if undefined.
    """

    name: str
    unit: str
    meaning: str
    values: Tensor
    uniform: Tensor


class Summary(NamedTuple):
    """A table of statistics for every head, compared with uniform attention under the same mask.

    ``print`` shows the table; ``summary.named("entropy")`` returns a single `Measure`.

    Attributes:
        measures: the statistics with one number per head.
        rows: statistics of all queries by name, each ``[batch, heads, q_len]``.
        received: attention that each key receives, ``[batch, heads, kv_len]``; 1 is the total attention of one query.
        received_index: `received` divided by its value for uniform attention, ``[batch, heads, kv_len]``. Above 1,
            the key receives more than the mask explains. The index is 0 if no query sees the key.
        uniform: the statistics of uniform attention.
    """

    measures: tuple[Measure, ...]
    rows: dict[str, Tensor]
    received: Tensor
    received_index: Tensor
    uniform: Uniform

    def named(self, name: str) -> Measure:
        """Return the summary's measure with the given name.

        Raises:
            KeyError: the name is unknown; the message lists all names.
        """
        for measure in self.measures:
            if measure.name == name:
                return measure
        known = ", ".join(measure.name for measure in self.measures)
        raise KeyError(f"Summary: name must be one of {known}; got {name}.")

    def __str__(self) -> str:
        return "\n".join(_table_lines(self.measures))

    def __repr__(self) -> str:
        return str(self)


class _RowSum(PerRow):
    """The sum of each row, for the summary: 1, less than 1 if a sink logit takes a share, or 0 for an empty row."""

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        return block.weights.sum(-1)

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        return "held"


def summary_of(matrix: MatrixLike, inputs: AttentionInputs | None = None, parts: Parts | None = None) -> Summary:
    """Compute the summary of a matrix: all statistics that one pass over the matrix provides.

    Args:
        matrix: an attention matrix from any mechanism.
        inputs: the inputs that produced the matrix, if it is a softmax; their mask determines which keys are visible.
            When None, a key counts as visible if its weight is not 0, and the largest logit is not computed.
        parts: `Parts` of the attention to add, at the cost of more passes over the weights. If they have no positions,
            the positions of the matrix are used.

    Raises:
        TypeError: ``parts`` is not a `Parts`.
        UnsupportedError: the rows are not distributions (a sink logit may take a share of a row).
    """
    check_type("parts", parts, (Parts, type(None)), "be Parts or None", hint="statistics.Parts()")
    positions = positions_of(matrix)
    statistics = _statistics(positions, with_distributions=matrix.is_stochastic)
    if not matrix.is_stochastic and inputs is None:
        reason = f"the rows of this {type(matrix).__name__} do not sum to 1 (is_stochastic is False)"
        raise unsupported("a summary", [reason], hint="A.topk and A.received need no distributions")
    with torch.no_grad():
        if inputs is not None:
            statistics["largest_logit"] = LargestLogit()
        answers = dict(zip(statistics, matrix.compute(*statistics.values()), strict=True))
        if inputs is None:
            uniform = uniform_of_blocks(MatrixInfo.of(matrix), matrix.blocks(), positions, NEAR)
        else:
            uniform = uniform_of_mask(inputs, positions, NEAR)
        summary = summary_of_results(answers, uniform)
        return summary if parts is None else _with_parts(summary, matrix, inputs, parts, positions)


def _with_parts(
    summary: Summary,
    matrix: MatrixLike,
    inputs: AttentionInputs | None,
    parts: Parts,
    positions: CheckedPair,
) -> Summary:
    """Add the `Parts` of the attention to a summary, together with the parts of uniform attention."""
    placed = parts if parts.positions is not None else dataclasses.replace(parts, positions=positions)
    if inputs is None:
        baseline = uniform_rows_of_blocks(MatrixInfo.of(matrix), matrix.blocks(), placed)
    else:
        baseline = uniform_rows_of_mask(inputs, positions, placed)
    values = matrix.compute(placed)[0]
    rows = {**summary.rows, **{f"{name}_part": values[..., index] for index, name in enumerate(PARTS)}}
    measures = (*summary.measures, *_measures_of_parts(parts, values, baseline, summary.uniform.visible))
    return summary._replace(measures=measures, rows=rows)


def plain_statistics(matrix: MatrixLike) -> dict[str, Tensor]:
    """Compute the statistics that are defined for weights with any sign, by name and without a uniform baseline.

    Each is ``[batch, heads, q_len]``, except "received", which is ``[batch, heads, kv_len]``.
    """
    statistics = _statistics(positions_of(matrix), with_distributions=False)
    return dict(zip(statistics, matrix.compute(*statistics.values()), strict=True))


def _statistics(positions: CheckedPair, *, with_distributions: bool) -> dict[str, Statistic[Any, Any]]:
    statistics: dict[str, Statistic[Any, Any]] = {
        "largest_weight": LargestWeight(),
        **{near.name: near.statistic(positions) for near in NEAR},
        "squared_norm": SquaredNorm(),
        "received": Received(),
    }
    if with_distributions:
        statistics |= {
            "entropy": Entropy(),
            "distance": Distance(positions),
            "logit_variance": LogitVariance(),
            "position_information": PositionInformation(),
        }
    else:
        statistics["given_mass"] = _RowSum()
    return statistics


def index_of_received(received: Tensor, expected: Tensor) -> Tensor:
    """Divide received attention by its value for uniform attention; return 0 for keys that no query sees."""
    return torch.where(expected > 0, received / expected.where(expected > 0, 1.0), 0.0)


def summary_of_results(answers: dict[str, Tensor], uniform: Uniform) -> Summary:
    """Build a summary from the statistics of a matrix by name, and from those of uniform attention."""
    shape = answers["largest_weight"].shape
    received = answers["received"]
    expected = uniform.received.expand(received.shape)
    index = index_of_received(received, expected)
    rows = {name: answer for name, answer in answers.items() if answer.shape == shape and name != "received"}
    if "entropy" in answers:
        rows["effective_tokens"] = _effective_tokens(answers["entropy"], uniform.visible.expand(shape))
    return Summary(_measures_of(answers, uniform), rows, received, index, uniform)


def _measures_of(answers: dict[str, Tensor], uniform: Uniform) -> tuple[Measure, ...]:
    """Return the measures of a summary from the results of one pass over the matrix.

    Args:
        answers: results by name, for queries (``[batch, heads, q_len]``), keys and heads.
        uniform: the results for uniform attention.
    """
    num_visible = uniform.visible.expand(answers["largest_weight"].shape)
    return (
        *_measures_of_rows(answers, uniform, num_visible),
        *_measures_of_heads(answers, uniform, num_visible),
        *_measures_of_logits(answers, num_visible),
    )


def _measures_of_parts(parts: Parts, values: Tensor, baseline: Tensor, num_visible: Tensor) -> Iterator[Measure]:
    """Yield the summary measures for the shares of `Parts`.

    Args:
        parts: the statistic.
        values: the result of the statistic, ``[batch, heads, q_len, 4]``.
        baseline: the result for uniform attention; the sizes of batch and heads may be 1.
        num_visible: number of visible keys of each query; the sizes of batch and heads may be 1.
    """
    has_keys = (num_visible > 0).expand(values.shape[:3])
    meanings = (
        f"given to the first {parts.sink} tokens" if parts.sink != 1 else "given to the first token",
        f"to tokens less than {parts.local} away",
        f"to the {parts.anchor} strongest blocks of {parts.block_size} among the others",
        "to all others",
    )
    for index, (name, meaning) in enumerate(zip(PARTS, meanings, strict=True)):
        measured, uniform = (_mean(x.expand(values.shape)[..., index], has_keys) for x in (values, baseline))
        yield Measure(f"{name}_part", "share", meaning, measured, uniform)


def _effective_tokens(entropy: Tensor, num_visible: Tensor) -> Tensor:
    """Return the effective number of keys of each query, ``exp(entropy)``; 0 if the query sees no keys."""
    return entropy.exp().where(num_visible > 0, 0.0)


def _measures_of_rows(answers: dict[str, Tensor], uniform: Uniform, num_visible: Tensor) -> Iterator[Measure]:
    """Yield the summary measures that are means over the queries with visible keys."""
    has_keys, visible = num_visible > 0, num_visible.clamp_min(1.0)

    def mean(name: str, unit: str, meaning: str, values: Tensor, baseline: Tensor, over: Tensor = has_keys) -> Measure:
        return Measure(name, unit, meaning, _mean(values, over), _mean(baseline, over))

    if "entropy" in answers:
        entropy, bound, has_choice = answers["entropy"], visible.log(), num_visible > 1
        relative = entropy / bound.where(has_choice, 1.0)
        yield mean("entropy", "nats", "over how many keys a query spreads", entropy, bound)
        yield mean("relative_entropy", "of log visible keys", "1 is even", relative, torch.ones_like(bound), has_choice)
        tokens = _effective_tokens(entropy, num_visible)
        yield mean("effective_tokens", "keys", "exp of the entropy", tokens, visible)
    else:
        yield mean(
            "given_mass", "share", "given to keys other than the sink", answers["given_mass"], torch.ones_like(visible)
        )
    yield mean("largest_weight", "share", "of a query's strongest key", answers["largest_weight"], 1.0 / visible)
    for near in NEAR:
        baseline = uniform.near[near.name].expand(num_visible.shape) / visible
        yield mean(near.name, "share", f"given to the {near.what}", answers[near.name], baseline)
    if "distance" in answers:
        baseline = uniform.distance.expand(num_visible.shape)
        yield mean("distance", "tokens", "mean, weighted by attention", answers["distance"], baseline)


def _measures_of_heads(answers: dict[str, Tensor], uniform: Uniform, num_visible: Tensor) -> Iterator[Measure]:
    """Yield the summary measures that describe an entire head instead of averaging over queries."""
    has_keys, visible, received = num_visible > 0, num_visible.clamp_min(1.0), answers["received"]
    count = has_keys.sum(-1)
    num_queries = count.clamp_min(1).to(received.dtype)
    expected = uniform.received.expand(received.shape)
    if received.shape[-1]:
        most, key = received.max(-1)
        baseline = expected.gather(-1, key[..., None])[..., 0]
    else:
        most = baseline = received.new_zeros(received.shape[:2])

    def head_measure(name: str, unit: str, meaning: str, values: Tensor, baseline: Tensor) -> Measure:
        return Measure(name, unit, meaning, *(x.where(count > 0, torch.nan) for x in (values, baseline)))

    yield head_measure(
        "most_received",
        "share of all",
        "received by the key that receives most",
        most / num_queries,
        baseline / num_queries,
    )
    if "position_information" in answers:
        mean = torch.special.entr(expected / num_queries[..., None]).sum(-1)
        baseline = (mean - (visible.log() * has_keys).sum(-1) / num_queries).clamp_min(0.0)
        meaning = "mutual information of query position and attended key"
        yield head_measure("position_information", "nats", meaning, answers["position_information"], baseline)
    norm, baseline = answers["squared_norm"].sum(-1).sqrt(), (has_keys / visible).sum(-1).sqrt()
    yield head_measure("frobenius_norm", "1", "square root of the sum of all squares", norm, baseline)


def _measures_of_logits(answers: dict[str, Tensor], num_visible: Tensor) -> Iterator[Measure]:
    """Yield the summary measures of the scores from which softmax computes the weights."""
    has_keys = num_visible > 0
    if "largest_logit" in answers:
        largest = answers["largest_logit"].where(has_keys, -torch.inf)
        values = largest.amax(-1) if largest.shape[-1] else largest.new_full(largest.shape[:2], -torch.inf)
        values, nothing = values.where(has_keys.any(-1), torch.nan), torch.full_like(values, torch.nan)
        yield Measure("largest_logit", "nats", "of all scores", values, nothing)
    if "logit_variance" in answers:
        values = _mean(answers["logit_variance"], has_keys)
        baseline = _mean(torch.zeros_like(answers["logit_variance"]), has_keys)
        yield Measure("logit_variance", "nats²", "of a query's scores", values, baseline)


def _mean(values: Tensor, over: Tensor) -> Tensor:
    """Return the mean of a statistic over selected rows, summed in the widest dtype to avoid rounding."""
    mean = torch.where(over, values, 0.0).sum(-1, dtype=widest_dtype(values.device)) / over.sum(-1)
    return mean.to(values.dtype)  # if no row is selected, 0 / 0 is NaN


def _table_lines(measures: tuple[Measure, ...]) -> Iterator[str]:
    batch, heads = measures[0].values.shape
    names = [f"b{b} h{h}" if batch > 1 else f"h{h}" for b in range(batch) for h in range(heads)]
    lists_all = len(names) <= _MAX_COLUMNS
    head = ["", "unit", *([*names, "uniform"] if lists_all else ["least", "", "mean", "most", "", "uniform"])]
    table = [head]
    for measure in measures:
        values, baseline = measure.values.flatten(), measure.uniform.flatten()
        if lists_all:
            cells = [_number_text(value) for value in values.tolist()]
        else:
            known = [(value, name) for value, name in zip(values.tolist(), names, strict=True) if not math.isnan(value)]
            (least, least_head), (most, most_head) = (min(known), max(known)) if known else [(math.nan, "")] * 2
            mean = sum(value for value, _ in known) / max(1, len(known))
            cells = [_number_text(least), least_head, _number_text(mean), _number_text(most), most_head]
        baseline = baseline[~baseline.isnan()]
        table.append(
            [measure.name, measure.unit, *cells, _number_text(float(baseline.mean())) if len(baseline) else "–"]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _number_text(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"
