"""The matrix of each mechanism with the questions it answers, the masks that the mechanism takes, and its cost."""

from __future__ import annotations

import inspect
from functools import cache
from typing import NamedTuple
from unittest import mock

import torch

import saccade as sc
from answers.examples import LONG, MASKS, MECHANISMS, SHORT, WIDTH
from answers.making import mask_named, mechanism_named, tokens
from saccade import masks, statistics
from saccade.engine.kernels import native
from saccade.statistics import Statistic
from saccade.testing import error, tolerance


class MechanismTold(NamedTuple):
    """Properties of a mechanism's matrix.

    Attributes:
        matrix: its class.
        is_softmax: whether products are those of softmax attention.
        is_stochastic: whether rows are distributions.
        has_lse, explains: whether it has an lse, and says which kernel runs.
        taken: masks that it takes.
        reason: why it takes not the first that it does not take.
        cache: what `new_cache` makes.
    """

    matrix: str
    is_softmax: bool
    is_stochastic: bool
    has_lse: bool
    explains: bool
    taken: tuple[str, ...]
    reason: str
    cache: str


@cache
def mechanisms_told() -> dict[str, MechanismTold]:
    """Return the properties of all mechanisms."""
    query, key, value = tokens()[:3]
    found = {}
    for name in MECHANISMS:
        mechanism = mechanism_named(name)
        refused = {one: mechanism.reasons(mask_named(one)) for one in MASKS}
        mask = None if refused["Causal"] else masks.Causal()
        with torch.no_grad():
            matrix = mechanism(query, key, mask=mask)
            wrong = error(matrix @ value, sc.attention(query, key, value, mask, impl="reference"))
        found[name] = MechanismTold(
            type(matrix).__name__,
            wrong <= tolerance(torch.float64, "output"),
            matrix.is_stochastic,
            hasattr(matrix, "lse"),
            hasattr(matrix, "explain"),
            tuple(one for one, reasons in refused.items() if not reasons),
            next((refused[one][0] for one in ("Causal", "Window", "Full") if refused[one]), ""),
            type(mechanism.new_cache()).__name__,
        )
    return found


class MechanismCost(NamedTuple):
    """Operations of `SHORT` and `LONG` tokens, and at `LONG` those of a training step and of one token more."""

    short: float
    long: float
    training: float
    decode: float | None


@cache
def costs_of_mechanisms() -> dict[str, MechanismCost | None]:
    """Return the cost of each mechanism, one head; None if `saccade.cost` does not know it."""
    found: dict[str, MechanismCost | None] = {}
    with mock.patch.object(native, "is_on", return_value=False):
        for name in MECHANISMS:
            if name == "TopK of index keys":  # as of TopK: what is read depends on what tensors hold
                continue
            mechanism = mechanism_named(name, heads=1, head_dim=WIDTH, kv_len=LONG, segment=WIDTH).float()
            mask = None if mechanism.reasons(masks.Causal()) else masks.Causal()
            try:
                told = [sc.cost(mechanism, n, mask=mask, num_heads=1, head_dim=WIDTH) for n in (SHORT, LONG)]
            except sc.UnsupportedError:
                found[name] = None
                continue
            decode = told[1].decode
            flops = told[0].forward.flops, told[1].forward.flops, told[1].training.flops
            found[name] = MechanismCost(*flops, None if decode is None else decode.flops)
    return found


def questions() -> dict[bool, list[str]]:
    """Return the questions to a matrix, by whether they need distributions."""
    found: dict[bool, list[str]] = {False: [], True: []}
    for name in statistics.__all__:
        one = getattr(statistics, name)
        if isinstance(one, type) and issubclass(one, Statistic) and not inspect.isabstract(one):
            found[one.needs_distributions is True].append(name)
    return found
