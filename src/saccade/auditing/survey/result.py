"""One architecture by one implementation of attention: what came of each claim."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from saccade.auditing.audit import audit
from saccade.auditing.declared_rules import from_config, is_causal
from saccade.auditing.equivalence import Pair, sameness
from saccade.auditing.equivalence_script import claim_lines
from saccade.auditing.finding import Judged
from saccade.auditing.float64 import said
from saccade.auditing.survey.architectures import Architecture
from saccade.auditing.survey.reproduce import LENGTHS, ids, model_lines, printed, reach_lines
from saccade.masks import Causal, Full

_TOLD_BY_POSITIONS = ("packed", "packed, with a cache", "packed, with a mask of ones")


@dataclasses.dataclass(frozen=True)
class Broken:
    """A broken claim.

    Attributes:
        size: of the largest effect where there should be none, by the root mean square of all outputs; None if it is
            infinite.
        where: the first pair or row.
        lines: what shows it without this library, behind the lines that make the model; empty for a claim of reach.
        printed: what they print; None where they raise.
        is_held_by_ours: whether the same model holds it with our kernel.
    """

    size: float | None
    where: str
    lines: tuple[str, ...] = ()
    printed: float | None = None
    is_held_by_ours: bool = False


@dataclasses.dataclass(frozen=True)
class Cell:
    """What came of all claims.

    Attributes:
        model: lines that make the model; empty where it could not be made.
        held: names of claims.
        unanswered: why, by names of claims; "runs" where the model could not be made.
        broken: by names of claims.
    """

    model: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    unanswered: dict[str, str] = dataclasses.field(default_factory=dict)
    broken: dict[str, Broken] = dataclasses.field(default_factory=dict)


def measure(architecture: Architecture, implementation: str) -> Cell:
    """All claims of one small model; what it raises is a claim that was not answered.

    Cost: about 200 forward passes of a small model.
    """
    try:
        model = architecture.make(implementation)
        with torch.no_grad():
            model(input_ids=ids())
    except Exception as error:  # whatever so many models may raise
        return Cell(unanswered={"runs": said(error)})
    first, unanswered = tuple(model_lines(architecture, implementation, model)), dict[str, str]()
    found: list[Judged | Pair] = []
    asked: dict[str, Callable[[nn.Module], Sequence[Judged | Pair]]] = {"reach": _reach, "all others": _ways}
    for name, ask in asked.items():
        try:
            found += ask(model)
        except Exception as error:  # as above
            unanswered[name] = said(error)
    unanswered |= {one.name: one.why for one in found if one.verdict == "not answered"}
    broken = {one.name: _shown(one, model, first) for one in found if one.verdict == "broken"}
    return Cell(first, tuple(one.name for one in found if one.verdict == "held"), unanswered, broken)


def _reach(model: nn.Module) -> list[Judged]:
    known = from_config(model) is not None
    rule = None if known else Causal() if is_causal(model) else Full()
    claims = audit(model, rule, inputs=ids(), tests=6).claims
    return [claim for claim in claims if known or claim.name == "reach"]  # what else a layer sees is not declared


def _ways(model: nn.Module) -> list[Pair]:
    pairs = sameness(model, ids(), packed=LENGTHS, padded=True, cache=is_causal(model))
    # What fills in words is never said to tell texts apart by positions.
    return [pair for pair in pairs if is_causal(model) or pair.name not in _TOLD_BY_POSITIONS]


def _shown(one: Judged | Pair, model: nn.Module, first: tuple[str, ...]) -> Broken:
    if isinstance(one, Judged):
        found = one.finding
        assert found is not None
        size, where = one.largest, f"{found.pair}, {found.module or 'no module found'}"
        lines = tuple(reach_lines(found.row, found.key)) if one.name == "reach" and found.key else ()
    else:
        size, where = one.difference, "" if one.where is None else f"output {one.where[1]} of item {one.where[0]}"
        lines = tuple(claim_lines(one.name, model, ids(), LENGTHS))
    number = printed([*first, *lines]) if lines else math.nan
    return Broken(_finite(size), where, lines, _finite(number), isinstance(one, Pair) and bool(one.remedy))


def _finite(number: float) -> float | None:
    return float(f"{number:.2g}") if math.isfinite(number) else None
