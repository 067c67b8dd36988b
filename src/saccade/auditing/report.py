"""The class `Report`: the results of an audit, printed as a table or converted to JSON or a picture."""

from __future__ import annotations

import dataclasses
import platform
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.measured_rules import grouped
from saccade.auditing.probe_sets import GRADIENT_SETS, LONG
from saccade.support.columns import display_width, left_aligned
from saccade.support.errors import value_error
from saccade.support.language import Message, joined, translated
from saccade.text import visible
from saccade.text.labels import shorten
from saccade.viz.canvas import HIDDEN, INK, INKS, PLAIN, blank
from saccade.viz.fonts import drawable_title
from saccade.viz.heatmaps import draw_cell_lines
from saccade.viz.ticks import name_columns, name_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA = "saccade.audit/1"
"""Name and version of the format that `Report.to_json` returns."""
DRAWN = 64
"""Largest number of tokens for which the audit measures every pair, to draw the picture."""
_TITLE = 200  # number of text columns
_HEADS = ("claim", "verdict", "largest", "allowed", "first pair", "module", "passes")
_LEGEND = "largest: effect where there should be none; allowed: effect of rounding; passes: model runs to find the pair"


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of an audit.

    Attributes:
        model: name of the model's class or of the function.
        rule: the declared rule of each layer, as a string. It begins with "assumed" if it comes from the configuration.
        claims: the result of each claim.
        shape: the number of batch items and the number of tokens of the input.
        dtype: dtype in which the model ran.
        seed: seed of the random input and of the random changes.
        floor: the largest output change due to noise; 0 if it was not measured because no forbidden change occurred.
        tests: number of sets of rows that were tested.
        covered: fraction of the forbidden pairs for which a change could have shown a leak; None if not counted.
        versions: versions of the packages.
        script: a short script that shows the first broken claim (preferably a leak) without this library; empty if no
            claim is broken or no script can show it.
        declared, measured: whether each output may depend on each token, and whether it does, for the first batch item,
            bool ``[length, length]``; None if the input is too long or there are no gradients.
        reaches: for each module that mixes tokens, the rule that it was measured to follow, as a string.
    """

    model: str
    rule: str
    claims: tuple[ClaimResult, ...]
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
    reaches: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the audit passed: at least one claim held and none is broken."""
        verdicts = [claim.verdict for claim in self.claims]
        return "broken" not in verdicts and "held" in verdicts

    @property
    def unanswered(self) -> tuple[ClaimResult, ...]:
        """The claims that were not answered, each with the reason."""
        return tuple(claim for claim in self.claims if claim.verdict == "not answered")

    @property
    def too_short(self) -> str:
        """Why the text is too short to distinguish the rule from one without a window; empty if it is long enough."""
        return next((claim.why for claim in self.claims if claim.name == "length"), "")

    @property
    def findings(self) -> tuple[CounterExample, ...]:
        """The counter-examples of all broken claims."""
        return tuple(claim.finding for claim in self.claims if claim.finding is not None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the audit's claims."""
        return tuple(claim.name for claim in self.claims)

    def __getitem__(self, name: str) -> ClaimResult:
        """Return the result of the claim called ``name``."""
        for claim in self.claims:
            if claim.name == name:
                return claim
        raise KeyError(f"Report: name must be the name of a claim; got {name!r}. Claims: {', '.join(self.names)}")

    def __str__(self) -> str:
        rows = [tuple(map(translated, _HEADS)), *(_row(claim) for claim in self.claims)]
        widths = [max(display_width(row[column]) for row in rows) for column in range(len(_HEADS))]
        about = {"model": visible(self._shown_model()), "dtype": self.dtype, "seed": self.seed}
        items, tokens = self.shape
        lines = [
            translated("{model}, {items} x {tokens} tokens, {dtype}, seed {seed}", items=items, tokens=tokens, **about)
        ]
        lines += [left_aligned(translated("rule"), 9) + visible(translated(self.rule))]
        lines += [left_aligned(translated("measured"), 9) + visible(line) for line in grouped(self.reaches)] + [""]
        lines += ["  ".join(map(left_aligned, row, widths)).rstrip() for row in rows]
        lines.append("  " + translated(_LEGEND))
        remarks: dict[str, list[str]] = {}
        for claim in self.claims:
            remarks.setdefault(claim.why, []).append(claim.name)
        lines += [
            "  " + translated("{names}: {why}", names=translated(joined(names)), why=visible(translated(why)))
            for why, names in remarks.items()
            if why
        ]
        lines += ["", *self._coverage()]
        return "\n".join(lines)

    __repr__ = __str__

    def _shown_model(self) -> str:
        """Return the model's name as shown: this library's descriptions are translated, class names are not."""
        return translated(self.model) if isinstance(self.model, Message) else self.model

    def _coverage(self) -> list[str]:
        tested = translated("{tests} sets of outputs were tested", tests=self.tests)
        if self.shape[1] > LONG:
            tested += translated(", {count} of them by gradients too", count=min(GRADIENT_SETS, self.tests))
        if self.covered is not None:
            words = "; together they cover {covered:.0%} of the pairs that must not interact"
            tested += translated(words, covered=self.covered)
        share = 3 / max(self.tests, 1)
        found = ". A fault in at least {share:.0%} of randomly chosen outputs is found in 19 of 20 audits."
        missed = translated(found, share=share) if share < 1 else "."
        noise = translated("no forbidden change was seen, so noise was not measured; ")
        if self.floor:
            noise = translated("noise up to {floor:.1e} of the outputs; ", floor=self.floor)
        return [tested + missed, noise + ", ".join(f"{k} {v}" for k, v in self.versions.items())]

    def picture(self) -> str:
        """Return a text picture of the pairs: ``1`` for an allowed pair, ``#`` for a leak, ``o`` for an ignored token.

        Each line is an output, and each column is a token.

        Raises:
            ValueError: pairs were not measured, because the input had more than 64 tokens or there were no gradients.
        """
        lines = []
        for may, does in zip(*(each.tolist() for each in self._pairs("picture")), strict=True):
            left = " ".join("1" if one else "." for one in may)
            right = " ".join(_mark(a, b) for a, b in zip(may, does, strict=True))
            lines.append(f"{left}    {right}")
        return "\n".join(lines)

    def figure(self, title: str | None = None) -> Figure:
        """Draw `picture` as a figure: forbidden pairs are grey, allowed pairs white, leaks and blind pairs coloured.

        Args:
            title: the title; the model and its rule when None.

        Returns:
            A figure that is neither registered with pyplot nor shown. `viz.save` writes it to a file.

        Raises:
            ValueError: as for `picture`.
            ImportError: matplotlib is not installed.
        """
        if title is None:
            words = translated("{model}, rule {rule}", model=self._shown_model(), rule=translated(self.rule))
            title = shorten(words, _TITLE)
        return drawn(*self._pairs("figure"), title)

    def _pairs(self, method: str) -> tuple[Tensor, Tensor]:
        if self.declared is None or self.measured is None:
            rule = f"have at most {DRAWN} tokens, and outputs with gradients"
            raise value_error("the input", rule, list(self.shape), hint="audit(..., length=48) has")
        return self.declared, self.measured

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values for JSON, in the format that `SCHEMA` names."""
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
            "reaches": dict(self.reaches),
            "script": self.script,
        }


def _row(claim: ClaimResult) -> tuple[str, ...]:
    finding = claim.finding
    verdict = translated(claim.verdict).upper() if claim.verdict == "broken" else translated(claim.verdict)
    numbers = ("", "") if claim.verdict == "not answered" else (f"{claim.largest:.1e}", f"{claim.allowed:.1e}")
    if finding is None:
        return (translated(claim.name), verdict, *numbers, "", "", "")
    return (
        translated(claim.name),
        verdict,
        *numbers,
        translated(finding.pair),
        visible(finding.module),
        str(finding.passes),
    )


def _mark(may: bool, does: bool) -> str:
    return ("1" if does else "o") if may else ("#" if does else ".")


def versions_of(model: object) -> dict[str, str]:
    """Return the versions of saccade, torch, Python and the model's package, as the audit reports them."""
    names = dict.fromkeys(("saccade", "torch", type(model).__module__.partition(".")[0]))
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    return {name: str(version) for name, version in versions.items() if version} | {"python": platform.python_version()}


def reached_by_gradient(leaf: Tensor, out: Tensor, item: int = 0) -> Tensor:
    """Return the tokens for which each output of one batch item has a nonzero gradient, bool ``[length, length]``.

    Cost: a backward pass for each output.
    """
    rows = []
    draw = torch.Generator().manual_seed(0)
    for position in range(out.shape[1]):
        weights = torch.randn(out[item, position].shape, generator=draw, dtype=torch.float64).to(out)
        (grad,) = torch.autograd.grad(out[item, position], leaf, weights, retain_graph=True)
        rows.append(grad[item].abs().flatten(1).amax(-1) > 0)
    return torch.stack(rows).cpu()


Kinds = npt.NDArray[np.int_]

COLOURS = {"allowed": "#ffffff", "hidden": HIDDEN, "leak": "#d55e00", "blind": INKS[0]}
"""Colours of an audit's figure. Only errors are coloured.

All colours differ in lightness, so that they can be distinguished in grey prints and by colour-blind readers.
"""
_ALLOWED, _HIDDEN, _LEAK, _BLIND = range(4)
_SIDE, _AROUND, _PAD = 3.6, (1.4, 1.6), 0.12  # inches: a panel, margins around both, space between elements
_COLUMNS = 90  # number of text columns in a line of the title


def drawn(declared: Tensor, measured: Tensor, title: str) -> Figure:
    """Draw the declared and the measured rule as two panels, with outputs as rows and tokens as columns.

    Args:
        declared, measured: the pairs of output and token, bool ``[length, length]``.
        title: title of the figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = blank().figure
    figure.clear()
    figure.set_size_inches(2 * _SIDE + _AROUND[0], _SIDE + _AROUND[1])
    figure.set_layout_engine("constrained", h_pad=_PAD, w_pad=_PAD)
    left, right = figure.subplots(1, 2)
    may, does = declared.numpy(), measured.numpy()
    rule = np.where(may, _ALLOWED, _HIDDEN)
    leaks, blind = does & ~may, may & ~does
    _draw(left, translated("declared"), rule)
    _draw(right, translated("measured by gradients"), np.where(leaks, _LEAK, np.where(blind, _BLIND, rule)))
    _explain(figure, int(leaks.sum()), int(blind.sum()))
    shown, families = drawable_title(title)
    figure.suptitle(textwrap.fill(shown, _COLUMNS), x=0.014, ha="left", size=11, family=families, **PLAIN)
    return figure


def _draw(axes: Axes, name: str, kinds: Kinds) -> None:
    from matplotlib.colors import ListedColormap  # noqa: PLC0415  matplotlib is optional

    length = len(kinds)
    axes.imshow(kinds, cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=3, interpolation="nearest")
    draw_cell_lines(axes, length, length)
    name_columns(axes, None, "token", length, _SIDE)
    name_rows(axes, None, "output", length, _SIDE)
    shown, families = drawable_title(name)
    axes.set_title(shown, loc="left", size=10, family=families, **PLAIN)


def _explain(figure: Figure, leaks: int, blind: int) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415  matplotlib is optional

    words = (
        translated("allowed"),
        translated("hidden"),
        translated("leak: hidden, but seen ({leaks:,})", leaks=leaks),
        translated("blind: allowed, but not seen ({blind:,})", blind=blind),
    )
    handles = [Patch(fc=ink, ec=INK, lw=0.5, label=word) for ink, word in zip(COLOURS.values(), words, strict=True)]
    font = {"family": drawable_title("".join(words))[1], "size": 9}
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, prop=font, labelcolor=INK)
