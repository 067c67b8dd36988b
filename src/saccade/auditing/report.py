"""Report: what an audit says of a model, as a table, as JSON, as a picture."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.auditing.figure import drawn
from saccade.auditing.finding import Finding, Judged
from saccade.auditing.probe_sets import LONG, PULLED
from saccade.support.errors import value_error
from saccade.text import visible
from saccade.text.labels import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "saccade.audit/1"
"""Name and version of the form that `Report.to_json` returns."""
DRAWN = 64
"""Tokens up to which every pair is measured, for the picture."""
_TITLE = 200  # columns of text
_HEADS = ("claim", "verdict", "largest", "allowed", "first pair", "module", "passes")


@dataclasses.dataclass(frozen=True)
class Report:
    """What an audit says.

    Attributes:
        model: its class, or the function's name.
        rule: what was declared, layer by layer, as text; "assumed" stands before what the configuration says.
        claims: what came of each claim.
        shape: batch items and tokens of the input.
        dtype: in which the model ran.
        seed: of the input and of the changes.
        floor: changes of outputs up to this are noise; 0 where no row moved that must not, and it was not measured.
        tests: sets of tokens that were changed or pulled.
        covered: share of the forbidden pairs that a change could have shown; None where it was not counted.
        versions: of what ran.
        script: ten lines that show the first broken claim without this library, a leak before others; empty where there
            is none, or no way to write it down.
        declared, measured: who may influence whom, and who does, bool ``[length, length]`` of the first item; None
            where the input is too long.
    """

    model: str
    rule: str
    claims: tuple[Judged, ...]
    shape: tuple[int, int]
    dtype: str
    seed: int
    floor: float
    tests: int
    covered: float | None
    versions: dict[str, str]
    script: str = ""
    declared: Tensor | None = None
    measured: Tensor | None = None

    @property
    def ok(self) -> bool:
        """No claim is broken, and some claim was answered."""
        verdicts = [claim.verdict for claim in self.claims]
        return "broken" not in verdicts and "held" in verdicts

    @property
    def unanswered(self) -> tuple[Judged, ...]:
        """The claims that nothing could be said of; each has its reason."""
        return tuple(claim for claim in self.claims if claim.verdict == "not answered")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The counter-examples of all broken claims."""
        return tuple(claim.finding for claim in self.claims if claim.finding is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the claims."""
        return tuple(claim.name for claim in self.claims)

    def __getitem__(self, name: str) -> Judged:
        """What came of the claim of this name."""
        for claim in self.claims:
            if claim.name == name:
                return claim
        raise KeyError(f"Report: name must be that of a claim; got {name!r}. Claims: {', '.join(self.names)}")

    def __str__(self) -> str:
        rows = [_HEADS, *(_row(claim) for claim in self.claims)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
        lines = [f"{visible(self.model)}, {self.shape[0]} x {self.shape[1]} tokens, {self.dtype}, seed {self.seed}"]
        lines += [f"rule     {visible(self.rule)}", ""]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        told: dict[str, list[str]] = {}
        for claim in self.claims:
            told.setdefault(claim.why, []).append(claim.name)
        lines += [f"  {'; '.join(names)}: {visible(why)}" for why, names in told.items() if why]
        lines += ["", *self._honest()]
        return "\n".join(lines)

    def _honest(self) -> list[str]:
        pulled = f", {min(PULLED, self.tests)} of them by gradients too" if self.shape[1] > LONG else ""
        share = "" if self.covered is None else f"; changes covered {self.covered:.0%} of the forbidden pairs"
        missed = (
            f"a fault that shows in a share of rows above {3 / max(self.tests, 1):.0%} is missed in less than 1 of 20"
        )
        noise = (
            f"noise up to {self.floor:.1e} of the outputs"
            if self.floor
            else "nothing moved that must not, so noise was not measured"
        )
        return [
            f"{self.tests} sets of rows{pulled}{share}. Of what shows at random rows, {missed} audits.",
            f"{noise}; " + ", ".join(f"{k} {v}" for k, v in self.versions.items()),
        ]

    def picture(self) -> str:
        """The declared rule, and beside it what was measured: ``1`` as declared, ``#`` a leak, ``o`` a blind pair.

        Raises:
            ValueError: the input was longer than 64 tokens, or had no gradients: nothing was measured pair by pair.
        """
        lines = []
        for may, does in zip(*(each.tolist() for each in self._pairs("picture")), strict=True):
            left = " ".join("1" if one else "." for one in may)
            right = " ".join(_mark(a, b) for a, b in zip(may, does, strict=True))
            lines.append(f"{left}    {right}")
        return "\n".join(lines)

    def figure(self, title: str | None = None) -> Figure:
        """`picture` as a figure: grey is hidden, white allowed, and leaks and blind pairs have a colour each.

        Args:
            title: stands above it; the model and its rule when None.

        Returns:
            A figure that belongs to the caller: pyplot does not know it, nothing is shown. `viz.save` writes it.

        Raises:
            ValueError: as `picture`.
            ImportError: matplotlib is not installed.
        """
        told = shorten(f"{self.model}, {self.rule}", _TITLE) if title is None else title
        return drawn(*self._pairs("figure"), told)

    def _pairs(self, method: str) -> tuple[Tensor, Tensor]:
        if self.declared is None or self.measured is None:
            rule = f"have at most {DRAWN} tokens, and outputs with gradients"
            raise value_error("the input", rule, list(self.shape), hint="audit(..., length=48) has")
        return self.declared, self.measured

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, in the form that `SCHEMA` names."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "model": self.model,
            "rule": self.rule,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "seed": self.seed,
            "floor": self.floor,
            "tests": self.tests,
            "covered": self.covered,
            "miss": {"share": 3 / max(self.tests, 1), "confidence": 0.95},
            "versions": self.versions,
            "claims": [claim.to_json() for claim in self.claims],
            "script": self.script,
        }


def _row(claim: Judged) -> tuple[str, ...]:
    found = claim.finding
    verdict = claim.verdict.upper() if claim.verdict == "broken" else claim.verdict
    numbers = ("", "") if claim.verdict == "not answered" else (f"{claim.largest:.1e}", f"{claim.allowed:.1e}")
    if found is None:
        return (claim.name, verdict, *numbers, "", "", "")
    return (claim.name, verdict, *numbers, found.pair, visible(found.module), str(found.passes))


def _mark(may: bool, does: bool) -> str:
    return ("1" if does else "o") if may else ("#" if does else ".")


def reached_by_gradient(leaf: Tensor, out: Tensor, item: int = 0) -> Tensor:
    """Which tokens each output of one item depends on, by one backward pass for each, bool ``[length, length]``."""
    rows = []
    draw = torch.Generator().manual_seed(0)
    for place in range(out.shape[1]):
        weights = torch.randn(out[item, place].shape, generator=draw, dtype=torch.float64).to(out)
        (found,) = torch.autograd.grad(out[item, place], leaf, weights, retain_graph=True)
        rows.append(found[item].abs().flatten(1).amax(-1) > 0)
    return torch.stack(rows).cpu()
