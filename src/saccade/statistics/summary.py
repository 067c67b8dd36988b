"""Summary: every statistic that one sweep gives, beside what uniform attention would have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.engine.ingredients import Ingredients
from saccade.errors import unsupported
from saccade.statistics.block import Block
from saccade.statistics.distance import Distance
from saccade.statistics.entropy import Entropy
from saccade.statistics.fold import Fold, Outline
from saccade.statistics.information import PositionInformation
from saccade.statistics.logits import LargestLogit, LogitVariance
from saccade.statistics.masses import LagMass, LocalMass, SinkMass
from saccade.statistics.peaks import LargestWeight, SquaredNorm
from saccade.statistics.per_row import PerRow, Placing
from saccade.statistics.places import Placed, Places
from saccade.statistics.received import Received
from saccade.statistics.uniform import Near, Uniform, uniform_of_blocks, uniform_of_mask

__all__ = ["Measure", "Summary", "summary_of"]

_LOCAL = 16
_NEAR = (
    Near("first_mass", 0, 0, False),
    Near("first_4_mass", 0, 3, False),
    Near("self_mass", 0, 0, True),
    Near("previous_mass", 1, 1, True),
    Near("local_mass", -_LOCAL, _LOCAL, True),
)
_MANY = 8  # heads of all batch items from which on a table names the extremes instead of all


class Measure(NamedTuple):
    """One number a head.

    Attributes:
        name: what it is called in tables and files.
        unit: what it counts.
        meaning: what it says, in a few words.
        values: ``[batch, heads]``, NaN for a head in which no query attends to anything.
        uniform: the same of uniform attention over the same keys, ``[batch, heads]``; NaN where it has none.
    """

    name: str
    unit: str
    meaning: str
    values: Tensor
    uniform: Tensor


class Summary(NamedTuple):
    """Statistics of every head, beside those of uniform attention under the same mask.

    ``print`` gives a table; ``summary["entropy"]`` is one `Measure`.

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


class Questioned(Placed, Protocol):
    """What a summary needs of a `saccade.Matrix`."""

    @property
    def is_stochastic(self) -> bool:
        """Whether rows are distributions."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the products."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the ingredients are."""
        ...

    def ask(self, *folds: Fold[Any, Any]) -> tuple[Any, ...]:
        """Answers to several questions."""
        ...

    def blocks(self) -> Iterator[Block]:
        """Complete rows."""
        ...


class _RowSum(PerRow):
    """What each row holds: 1, 0 if it attends to nothing, less where a sink takes a share."""

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        return block.weights.sum(-1)


def summary_of(matrix: Questioned, given: Ingredients | None = None) -> Summary:
    """All statistics of one sweep.

    Args:
        matrix: what is asked.
        given: its ingredients, if it is a softmax; their mask says which keys are visible. Without them those are
            whose weight is not 0, and the largest logit is not told.

    Raises:
        UnsupportedError: rows that are not distributions, unless it is a sink that takes a share of them.
    """
    places = Places.of(matrix)
    folds = _folds(places, with_distributions=matrix.is_stochastic)
    if not matrix.is_stochastic and given is None:
        reason = f"the rows of this {type(matrix).__name__} do not sum to 1 (is_stochastic is False)"
        raise unsupported("Matrix.summary", "a summary", [reason], hint="A.topk and A.received need no distributions")
    with torch.no_grad():
        if given is not None:
            folds["largest_logit"] = LargestLogit()
        answers = dict(zip(folds, matrix.ask(*folds.values()), strict=True))
        if given is None:
            dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
            outline = Outline(matrix.shape, dtype, matrix.device)
            uniform = uniform_of_blocks(outline, matrix.blocks(), places, _NEAR)
        else:
            uniform = uniform_of_mask(given, places, _NEAR)
        return _made(answers, uniform)


def _folds(places: Places, *, with_distributions: bool) -> dict[str, Fold[Any, Any]]:
    folds: dict[str, Fold[Any, Any]] = {
        "largest_weight": LargestWeight(),
        "first_mass": SinkMass(1, places),
        "first_4_mass": SinkMass(4, places),
        "self_mass": LagMass(0, places),
        "previous_mass": LagMass(1, places),
        "local_mass": LocalMass(_LOCAL, places),
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
    seen = uniform.visible.expand(shape)
    sees = seen > 0
    visible = seen.clamp_min(1.0)
    received = answers["received"]
    expected = uniform.received.expand(received.shape)
    index = torch.where(expected > 0, received / expected.where(expected > 0, 1.0), 0.0)
    rows = {name: answer for name, answer in answers.items() if answer.shape == shape and name != "received"}
    if "entropy" in answers:
        rows["effective_tokens"] = answers["entropy"].exp().where(sees, 0.0)
    measures: list[Measure] = []

    def tell(name: str, unit: str, meaning: str, values: Tensor, even: Tensor, over: Tensor = sees) -> None:
        measures.append(Measure(name, unit, meaning, _mean(values, over), _mean(even, over)))

    if "entropy" in answers:
        entropy, chooses = answers["entropy"], seen > 1
        bound = visible.log()
        relative = entropy / bound.where(chooses, 1.0)
        tell("entropy", "nats", "over how many keys a query spreads", entropy, bound)
        tell("relative_entropy", "of log visible keys", "1 is even", relative, torch.ones_like(bound), chooses)
        tell("effective_tokens", "keys", "exp of the entropy", rows["effective_tokens"], visible)
    else:
        tell("given_mass", "share", "what the sink leaves", answers["given_mass"], torch.ones_like(visible))
    tell("largest_weight", "share", "of a query's strongest key", answers["largest_weight"], 1.0 / visible)
    for near, unit in zip(
        _NEAR, ("first token", "first 4", "own token", "token before", f"±{_LOCAL} tokens"), strict=True
    ):
        even = uniform.near[near.name].expand(shape) / visible
        tell(near.name, "share", f"given to the {unit}", answers[near.name], even)
    if "distance" in answers:
        tell("distance", "tokens", "mean, of what is looked at", answers["distance"], uniform.distance.expand(shape))
    measures += _of_columns(answers, uniform, received, sees)
    if "largest_logit" in answers:
        largest = answers["largest_logit"].where(sees, -torch.inf)
        values = largest.amax(-1) if largest.shape[-1] else largest.new_full(shape[:2], -torch.inf)
        nothing = torch.full_like(values, torch.nan)
        values = values.where(sees.any(-1), torch.nan)
        measures.append(Measure("largest_logit", "nats", "of all scores", values, nothing))
    if "logit_variance" in answers:
        variance = answers["logit_variance"]
        tell("logit_variance", "nats²", "of a query's scores", variance, torch.zeros_like(variance))
    return Summary(tuple(measures), rows, received, index, uniform)


def _of_columns(answers: dict[str, Tensor], uniform: Uniform, received: Tensor, sees: Tensor) -> Iterator[Measure]:
    """What is known of a head as a whole."""
    count = sees.sum(-1)
    some = count.clamp_min(1).to(received.dtype)
    expected = uniform.received.expand(received.shape)
    if received.shape[-1]:
        most, key = received.max(-1)
        even = expected.gather(-1, key[..., None])[..., 0]
    else:
        most = even = received.new_zeros(received.shape[:2])
    yield Measure(
        "most_received", "share of all", "got by the key that gets most", *_known(count, most / some, even / some)
    )
    if "position_information" in answers:
        visible = uniform.visible.expand(sees.shape).clamp_min(1.0)
        mean = torch.special.entr(expected / some[..., None]).sum(-1)
        even = (mean - (visible.log() * sees).sum(-1) / some).clamp_min(0.0)
        meaning = "what a query's place says about where it looks"
        yield Measure("position_information", "nats", meaning, *_known(count, answers["position_information"], even))
    norm = answers["squared_norm"].sum(-1).sqrt()
    even = ((1.0 / uniform.visible.clamp_min(1.0)).expand(sees.shape) * sees).sum(-1).sqrt()
    yield Measure("frobenius_norm", "1", "square root of the sum of all squares", *_known(count, norm, even))


def _known(count: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.where(count > 0, torch.nan) for one in values)


def _mean(values: Tensor, over: Tensor) -> Tensor:
    """Mean of the rows that count, in float64 on the way, so that a million rows lose nothing."""
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    count = over.sum(-1)
    mean = torch.where(over, values, 0.0).sum(-1, dtype=wide) / count
    return mean.to(values.dtype)  # 0 / 0 is NaN: no row counts


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
