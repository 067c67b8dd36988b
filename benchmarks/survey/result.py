"""Measure all claims for one architecture with one attention implementation; lines that reproduce broken ones."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks.survey.architectures import VOCABULARY, Architecture
from saccade.auditing.audit import audit
from saccade.auditing.declared_rules import from_config, is_causal
from saccade.auditing.equivalence import Pair, check_equivalence
from saccade.auditing.finding import ClaimResult
from saccade.auditing.float64 import describe_error
from saccade.auditing.reproduction_script import claim_lines, run_lines
from saccade.masks import Causal, Full

_TOLD_BY_POSITIONS = ("packed", "packed, with a cache", "packed, with a mask of ones")


@dataclasses.dataclass(frozen=True)
class Broken:
    """A broken claim.

    Attributes:
        size: the largest effect where there should be none, by the root mean square of all outputs; None if it is
            infinite.
        where: the first pair or row.
        lines: lines that show it without this library, after the lines that make the model; empty if there are none.
        printed: the number that they print; None if they raise.
        is_held_by_ours: whether the same model holds it with saccade's kernel.
    """

    size: float | None
    where: str
    lines: tuple[str, ...] = ()
    printed: float | None = None
    is_held_by_ours: bool = False


@dataclasses.dataclass(frozen=True)
class Cell:
    """The results of all claims.

    Attributes:
        model: lines that make the model; empty if it could not be made.
        held: names of the claims that held.
        unanswered: reasons by names of claims; "runs" if the model could not be made.
        broken: broken claims by name.
    """

    model: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    unanswered: dict[str, str] = dataclasses.field(default_factory=dict)
    broken: dict[str, Broken] = dataclasses.field(default_factory=dict)


def measure(architecture: Architecture, implementation: str) -> Cell:
    """Measure all claims for one small model; an exception becomes a claim that was not answered.

    Cost: about 200 forward passes of a small model.
    """
    try:
        model = architecture.make(implementation)
        with torch.no_grad():
            model(input_ids=ids())
    except Exception as error:  # models may raise anything
        return Cell(unanswered={"runs": describe_error(error)})
    first, unanswered = tuple(model_lines(architecture, implementation, model)), dict[str, str]()
    found: list[ClaimResult | Pair] = []
    asked: dict[str, Callable[[nn.Module], Sequence[ClaimResult | Pair]]] = {"reach": _reach, "all others": _ways}
    for name, ask in asked.items():
        try:
            found += ask(model)
        except Exception as error:  # as above
            unanswered[name] = describe_error(error)
    unanswered |= {one.name: one.why for one in found if one.verdict == "not answered"}
    broken = {one.name: _shown(one, model, first) for one in found if one.verdict == "broken"}
    return Cell(first, tuple(one.name for one in found if one.verdict == "held"), unanswered, broken)


def _reach(model: nn.Module) -> list[ClaimResult]:
    known = from_config(model) is not None
    rule = None if known else Causal() if is_causal(model) else Full()
    further = ["states"] if is_causal(model) else []
    claims = audit(model, rule, inputs=ids(), claims=further, tests=6).claims
    # Without a declared rule for each layer, only what is hidden from all is known.
    return [claim for claim in claims if known or claim.name in ("reach", "states", "states between calls")]


def _ways(model: nn.Module) -> list[Pair]:
    pairs = check_equivalence(model, ids(), packed=LENGTHS, padded=True, cache=is_causal(model))
    # Masked language models do not claim to separate texts by positions.
    return [pair for pair in pairs if is_causal(model) or pair.name not in _TOLD_BY_POSITIONS]


def _shown(one: ClaimResult | Pair, model: nn.Module, first: tuple[str, ...]) -> Broken:
    if isinstance(one, ClaimResult):
        found = one.finding
        assert found is not None
        size, where = one.largest, f"{found.pair}, {found.module or 'no module found'}"
        where += f"; {one.why.rpartition('; ')[2]}" if one.name == "states" else ""
        lines = tuple(reach_lines(found.row, found.key)) if one.name == "reach" and found.key else ()
        if one.name == "states":
            lines = tuple(claim_lines("packed", model, ids(), LENGTHS))
    else:
        size, where = one.difference, "" if one.where is None else f"output {one.where[1]} of item {one.where[0]}"
        lines = tuple(claim_lines(one.name, model, ids(), LENGTHS))
    number = printed([*first, *lines]) if lines else math.nan
    return Broken(finite(size), where, lines, finite(number), isinstance(one, Pair) and bool(one.remedy))


def finite(number: float) -> float | None:
    return float(f"{number:.2g}") if math.isfinite(number) else None


LENGTHS = (9, 8, 7)
"""Lengths of the packed texts; the first is longer than the small models' windows of 8."""


def ids() -> Tensor:
    """Return two texts of 24 random tokens, none of them special."""
    return torch.randint(4, VOCABULARY, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


def model_lines(architecture: Architecture, implementation: str, model: nn.Module) -> list[str]:
    """Return lines that make the model and two texts, and two functions: one runs the model, one compares."""
    return [
        "import torch, transformers as T",
        "torch.manual_seed(0); torch.set_grad_enabled(False)",
        f"model = {architecture.expression()}.eval()",
        "drawn = (p for n, p in model.named_parameters() if p.dim() > 1 and p.requires_grad and 'embed' not in n)",
        "[torch.nn.init.xavier_normal_(p) for p in drawn]",
        *(["import saccade.integrations.transformers as ours; ours.install()"] if implementation == "saccade" else []),
        *([f'model.set_attn_implementation("{implementation}")'] if implementation != "eager" else []),
        f"ids = torch.randint(4, {VOCABULARY}, (2, {sum(LENGTHS)}))",
        *run_lines(model, ".logits"),
    ]


def reach_lines(row: tuple[int, int], key: tuple[int, int]) -> list[str]:
    """Return lines that change one token and compare an output that must not depend on it."""
    return [
        f"other = ids.clone(); other[{key[0]}, {key[1]}] = 3",
        f"off(run(other)[{row[0]}, {row[1]}], run(ids)[{row[0]}, {row[1]}])",
    ]


def printed(lines: Sequence[str]) -> float:
    """Run a script, and return the number that it prints last; NaN if it raises."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), torch.no_grad():
            exec("\n".join(lines), {})  # text of this module
        return float(out.getvalue().splitlines()[-1])  # packages print notes on import
    except Exception:  # models may raise anything; then the claim is not reproduced
        return math.nan
