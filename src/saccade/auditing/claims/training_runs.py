"""The claim that training matches inference: in train mode, with recomputed activations, and under autocast."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from saccade.auditing.claims.autocast import autocast
from saccade.auditing.claims.compared import compared
from saccade.auditing.claims.model_measurements import ModelMeasurements
from saccade.auditing.equivalence_pairs import FullRun, RunPair
from saccade.auditing.finding import ClaimResult
from saccade.auditing.leak_location import SavedRuns
from saccade.auditing.runner import Runner, Unanswered


def training(measured: ModelMeasurements) -> Iterator[ClaimResult]:
    """Check that a model run as in a training step gives the same rows and gradients as in a plain run."""
    try:
        yield from _as_in_inference(measured)
    except Unanswered as answer:  # functions and models of embeddings still run under autocast
        yield ClaimResult("training", "not answered", why=answer.args[0])
    yield from autocast(measured)


def _as_in_inference(measured: ModelMeasurements) -> Iterator[ClaimResult]:
    ids = measured.ids
    pairs: dict[str, RunPair] = {
        "in training, without dropout": lambda full_run: (full_run.runner.trained().whole(ids), full_run.whole),
        "recomputed in the backward pass": _checkpointed(ids, gradients=False),
        "gradients, recomputed": _checkpointed(ids, gradients=True),
        "while it fills a cache": lambda full_run: (full_run.runner.filling_cache(ids), full_run.whole),
    }
    yield from (_with_module(measured, claim) for claim in compared(measured, pairs))


def _with_module(measured: ModelMeasurements, claim: ClaimResult) -> ClaimResult:
    """Add the first module whose rows differ in training to a broken claim; return other claims unchanged."""
    makers = {"in training, without dropout": "trained", "recomputed in the backward pass": "checkpointed"}
    if claim.finding is None or claim.name not in makers:
        return claim
    runner, saved = measured.runner(), SavedRuns(measured.subject)
    other = getattr(runner, makers[claim.name])()
    saved.run(run=lambda: runner.whole(measured.ids))
    with torch.enable_grad():
        saved.run({name: own for name, own in other.model.named_modules() if name}, lambda: other.whole(measured.ids))
    return dataclasses.replace(claim, finding=dataclasses.replace(claim.finding, module=saved.first_difference()))


def _checkpointed(ids: Tensor, *, gradients: bool) -> RunPair:
    def run_pair(full_run: FullRun) -> tuple[Tensor, Tensor]:
        recomputed = full_run.runner.checkpointed()
        plain = full_run.runner.trained()
        if gradients:
            return _gradient(recomputed, ids), _gradient(plain, ids)
        with torch.enable_grad():
            return recomputed.whole(ids).detach(), full_run.whole

    return run_pair


def _gradient(runner: Runner, ids: Tensor) -> Tensor:
    """Return the gradient of a random sum of the rows with respect to token embeddings, ``[batch, len, width]``."""
    table = next(own for own in runner.model.modules() if isinstance(own, nn.Embedding))
    with torch.enable_grad():
        rows = runner.whole(ids)
        weights = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(rows)
        (grad,) = torch.autograd.grad(rows, table.weight, weights)
    return grad[ids]
