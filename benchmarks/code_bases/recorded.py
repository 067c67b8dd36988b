"""Judge a recording: every attention call of a model, with the weights that the model computes itself."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import saccade as sc
from benchmarks.code_bases.case import Case
from benchmarks.code_bases.truth import Weights, true_weights
from saccade.matrix import DenseMatrix
from saccade.recording.record import UnrecordedLayersWarning
from saccade.support.errors import UnsupportedError

TOLERANCE = 2e-5
"""The largest difference of a recorded weight from the model's own."""

Verdict = Literal["right", "partial", "none", "silent", "wrong"]


@dataclass(frozen=True)
class Recorded:
    """The verdict on a recording.

    Attributes:
        verdict: "right" if every attention call is recorded with the right weights; "partial" if calls are missing and
            reported; "none" if the recording raised and said why; "silent" if calls are missing without a word;
            "wrong" if a recorded matrix is not one of the model's.
        degrees: how the calls were recorded: "scores", "calls" or "weights", each once.
        right: the number of calls that are recorded right.
        attentions: the number of attention calls of the model.
        why: the reason, if the verdict is not "right".
    """

    verdict: Verdict
    degrees: tuple[str, ...]
    right: int
    attentions: int
    why: str = ""


def judge_record(case: Case) -> Recorded:
    """Record a case, and compare the matrices with the model's own weights.

    Raises:
        AssertionError: the model computes another number of attention calls than the case says, or other outputs while
            it is recorded.
    """
    model, run = case.model()
    with torch.no_grad():
        expected = tensors(run(model))
    if case.truth is None:
        truth = true_weights(model, run, case.leave, case.entering, case.equation)
    else:
        truth = [Weights(x, False, "") for x in case.truth(model, run)]
    if len(truth) != case.attentions:
        raise AssertionError(f"{case.key}: {case.attentions} attention calls expected, and {len(truth)} found")
    found: list[tuple[str, Tensor, bool]] = []

    def keep(name: str, matrix: sc.Matrix) -> None:
        found.append((name, matrix.to_dense().double(), isinstance(matrix, DenseMatrix)))

    why, is_reported, out = "", False, None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UnrecordedLayersWarning)
        try:
            with torch.no_grad(), sc.record(model, keep=(), callback=keep):
                out = tensors(run(model))
        except UnsupportedError as error:
            why, is_reported = str(error), True
    if not is_reported:
        assert out is not None
        if not all(torch.equal(a, b) for a, b in zip(out, expected, strict=True)):
            raise AssertionError(f"{case.key}: other outputs while it is recorded")
    reports = [str(one.message) for one in told if issubclass(one.category, UnrecordedLayersWarning)]
    is_reported = is_reported or bool(reports)
    why = why or " ".join(reports)
    missing, degrees = list(truth), list[str]()
    for name, weights, is_dense in found:
        its = next((one for one in missing if _agrees(weights, one.rows, case.order)), None)
        if its is None and any(_agrees(weights, one.rows, case.order) for one in truth):
            continue  # the same weights, multiplied a second time
        if its is None:
            return Recorded("wrong", (), len(truth) - len(missing), len(truth), _nearest(name, weights, missing))
        missing = [one for one in missing if one is not its]
        degrees.append("calls" if its.is_call else "weights" if is_dense else "scores")
    right = len(truth) - len(missing)
    if not missing:
        verdict: Verdict = "right"
    elif not is_reported:
        verdict, why = "silent", f"missing in {', '.join(one.place for one in missing)}"
    else:
        verdict = "partial" if right else "none"
    return Recorded(verdict, tuple(dict.fromkeys(degrees)), right, len(truth), "" if verdict == "right" else why)


def tensors(out: Any) -> list[Tensor]:
    """Return the tensors in an output."""
    return [x for x in tree_leaves(out) if isinstance(x, Tensor)]


def _agrees(found: Tensor, true: Tensor, order: tuple[int, ...] | None) -> bool:
    if order is not None and _difference(found, true.permute(*order, true.dim() - 1)) <= TOLERANCE:
        return True
    return _difference(found, true) <= TOLERANCE


def _difference(found: Tensor, true: Tensor) -> float:
    """Return the largest difference, inf if the shapes are not those of the same weights; batch and heads may join."""
    if found.numel() != true.numel() or found.shape[-1] != true.shape[-1]:
        return math.inf
    return float((found - true.double().reshape(found.shape)).abs().max())


def _nearest(name: str, found: Tensor, missing: list[Weights]) -> str:
    if not missing:
        return f"{name} has a matrix {list(found.shape)} more than the model"
    least = min(_difference(found, one.rows) for one in missing)
    shapes = ", ".join(str(list(one.rows.shape)) for one in missing[:3])
    return f"{name}: a matrix {list(found.shape)} differs by {least:.1e}; the model has {shapes}"
