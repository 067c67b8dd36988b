"""Measure all claims for one model of a package, with lines that reproduce broken ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.survey.package_models import LENGTH, PackageModel
from benchmarks.survey.result import Broken, Cell, finite, printed
from saccade.auditing.audit import audit
from saccade.auditing.finding import ClaimResult
from saccade.auditing.float64 import describe_error
from saccade.auditing.reproduction_script import cuts_of, training_lines
from saccade.auditing.runner import Runner, Side, Unanswered


class CalledModel(nn.Module):
    """A model with the expression that calls it, so that ``self(x)`` gives its rows.

    Args:
        entry: the model's expressions.
        names: the names that the expressions use; ``model`` is replaced by this module's copy.
    """

    def __init__(self, entry: PackageModel, names: dict[str, Any]):
        super().__init__()
        self.model, self.entry, self.names = names["model"], entry, _Shared(names)
        self.train(self.model.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.evaluate(self.entry.run, x=x)

    def evaluate(self, expression: str, **names: Any) -> Any:
        """Evaluate one of the entry's expressions for this model."""
        return eval(expression, {**self.names, "model": self.model, **names})  # text of the table


class _Shared(dict[str, Any]):
    """The names of an expression: modules and functions, which copies of a model share."""

    def __deepcopy__(self, memo: object) -> _Shared:
        return self


class CallingRunner(Runner):
    """Runner for a `CalledModel`: padding and states if its entry has expressions for them."""

    model: CalledModel

    def padded(self, ids: Tensor, side: Side, pad: int) -> Tensor:
        if not self.model.entry.padded:
            raise Unanswered("it is not called with padding")
        extra = ids.new_zeros(len(ids), pad)
        wide = torch.cat([extra, ids] if side == "left" else [ids, extra], 1)
        mask = torch.cat([extra.bool(), ids >= 0] if side == "left" else [ids >= 0, extra.bool()], 1)
        rows = self._rows(self.model.evaluate(self.model.entry.padded, x=wide, mask=mask), wide)
        return rows[:, pad:] if side == "left" else rows[:, : ids.shape[1]]

    def start(self) -> Any:
        if not self.model.entry.step:
            raise Unanswered("it is not called with a state")

    def more(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        rows, state = self.model.evaluate(self.model.entry.step, x=ids, state=state)
        return self._rows(rows, ids), state

    def forked(self, state: Any) -> Any:
        return copy.deepcopy(state)


def measure_package(entry: PackageModel) -> Cell:
    """Measure all claims for one small model; an exception becomes a claim that was not answered.

    Cost: about 100 forward passes of a small model.
    """
    first, names = entry.lines(), dict[str, Any]()
    try:
        exec("\n".join(first), names)  # text of the table
        model, x = CalledModel(entry, names), names["x"]
        model(x)
    except Exception as error:  # packages may raise anything, or may not be installed
        return Cell(unanswered={"runs": describe_error(error)})
    torch.set_grad_enabled(True)
    try:
        found = _audited(model, x)
    except Exception as error:  # as above
        return Cell(unanswered={"runs": describe_error(error)})
    unanswered = {one.name: one.why for one in found if one.verdict == "not answered"}
    broken = {one.name: _shown(one, entry, first) for one in found if one.verdict == "broken"}
    return Cell(tuple(first), tuple(one.name for one in found if one.verdict == "held"), unanswered, broken)


def _audited(model: CalledModel, x: Tensor) -> list[ClaimResult]:
    if x.is_floating_point():
        claims = ("batch",) if x.shape[1] == 1 else ("batch", "training", "states")
        found = audit(model, model.entry.rule, inputs=x, claims=claims, tests=6).claims
    else:
        runner, claims = CallingRunner(model), ("batch", "training", "states")
        found = audit(runner, model.entry.rule, inputs=x, padded=True, cache=True, claims=claims, tests=6).claims
    return [one for one in found if not model.entry.is_bound or one.name not in ("sight", "by layer")]


def _shown(one: ClaimResult, entry: PackageModel, first: Sequence[str]) -> Broken:
    found = one.finding
    assert found is not None
    where = f"{found.pair}, {found.module or 'no module found'}"
    lines = _claim_lines(one.name, entry)
    if one.name in ("reach", "under autocast") and found.key:
        lines = _reach_lines(found.row, found.key)
    if one.name == "under autocast" and lines:
        lines = [lines[0], 'with torch.autocast("cpu", torch.bfloat16):', "    " + lines[1]]
    return Broken(finite(one.largest), where, tuple(lines), finite(printed([*first, *lines])) if lines else None)


def _reach_lines(row: tuple[int, int], key: tuple[int, int]) -> list[str]:
    return [
        f"other = x.clone(); other[{key[0]}, {key[1]}] = 3",
        f"off(run(other)[{row[0]}, {row[1]}], run(x)[{row[0]}, {row[1]}])",
    ]


def _claim_lines(claim: str, entry: PackageModel) -> list[str]:
    """Return lines that run the model in the two ways that a claim compares; [] for other claims."""
    if claim in ("batch", "one by one = in a batch"):
        return ["off(torch.cat([run(one) for one in x.split(1)]), run(x))"]
    if claim == "in training, without dropout":
        return training_lines("model.train().modules()", "x")
    if claim.startswith("padded"):
        ends, real = (("x", "0 * x[:, :8]"), f":{LENGTH}") if claim.endswith("right") else (("0 * x[:, :8]", "x"), "8:")
        return [
            f"want = run(x); wide = torch.cat([{', '.join(ends)}], 1); mask = wide > 0",
            f"padded = lambda x, mask: {entry.padded}",
            f"off(padded(wide, mask)[:, {real}], want)",
        ]
    if claim.startswith("steps"):
        return [
            f"step = lambda x, state: {entry.step}; state, rows = None, []",
            f"for piece in x.tensor_split({cuts_of(claim, LENGTH)}, 1):",
            "    out, state = step(piece, state); rows.append(out)",
            "off(torch.cat(rows, 1), run(x))",
        ]
    return []
