"""One architecture by one implementation of attention: what came of each claim."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from torch import nn

from saccade.auditing.audit import audit
from saccade.auditing.declared import from_config, is_causal
from saccade.auditing.finding import Verdict
from saccade.auditing.float64 import said
from saccade.auditing.sameness import sameness
from saccade.auditing.survey.architectures import Architecture
from saccade.auditing.survey.reproduce import LENGTHS, claim_lines, ids, model_lines, printed
from saccade.masks import Causal, Full

__all__ = ["Outcome", "measure"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one claim.

    Attributes:
        verdict: as of an audit.
        size: of the largest effect where there should be none, by the root mean square of all outputs; None where
            nothing was measured or it is infinite.
        printed: what the lines print that reproduce it; None where there are none, or they raise.
        why: what was not answered, or where it broke.
    """

    verdict: Verdict
    size: float | None = None
    printed: float | None = None
    why: str = ""


def measure(architecture: Architecture, implementation: str) -> dict[str, Outcome]:
    """All claims of one small model; what it raises is a claim that was not answered.

    Cost: about 200 forward passes of a small model.
    """
    try:
        model = architecture.make(implementation)
    except Exception as error:  # whatever so many models may raise
        return {"runs": Outcome("not answered", why=said(error))}
    found = _answered("reach", lambda: _reach(model)) | _answered("ways", lambda: _ways(model))
    first = model_lines(architecture, implementation, model)
    for name, outcome in found.items():
        if outcome.verdict == "broken":
            number = printed([*first, *lines]) if (lines := claim_lines(name, model)) else math.nan
            found[name] = dataclasses.replace(outcome, printed=number if math.isfinite(number) else None)
    return found


def _answered(name: str, ask: Callable[[], dict[str, Outcome]]) -> dict[str, Outcome]:
    try:
        return ask()
    except Exception as error:  # as above
        return {name: Outcome("not answered", why=said(error))}


def _reach(model: nn.Module) -> dict[str, Outcome]:
    known = from_config(model) is not None
    rule = None if known else Causal() if is_causal(model) else Full()
    report = audit(model, rule, inputs=ids(), tests=6)
    names = ("reach", "sight", "by layer") if known else ("reach",)  # what else a layer sees, its configuration says
    found: dict[str, Outcome] = {}
    for name in names:
        claim = report[name]
        pair = claim.finding
        why = claim.why if pair is None else f"{pair.pair}, {pair.module or 'no module found'}"
        found[name] = Outcome(claim.verdict, claim.largest, why=why)
    return found


def _ways(model: nn.Module) -> dict[str, Outcome]:
    pairs = sameness(model, ids(), packed=LENGTHS, padded=True, cache=is_causal(model))
    if not is_causal(model):  # what fills in words is never said to tell texts apart by positions
        pairs = [
            pair for pair in pairs if pair.name not in ("packed", "packed, with a cache", "packed, with a mask of ones")
        ]
    return {pair.name: _outcome(pair) for pair in pairs}


def _outcome(pair: Any) -> Outcome:
    where = "" if pair.where is None else f"; first at output {pair.where[1]} of item {pair.where[0]}"
    return Outcome(pair.verdict, pair.difference if math.isfinite(pair.difference) else None, why=pair.why + where)
