"""Compare equivalent ways of running a model, with a tolerance derived from the effect of rounding on that model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.equivalence_pairs import FullRun, RunPair, packed_with_our_kernel, run_pairs
from saccade.auditing.float64 import TrueFloat64, describe_error, float64_copy
from saccade.auditing.model_under_test import rows_of
from saccade.auditing.rounding_noise import (
    FACTOR,
    autocast_noise,
    jitter,
    relative,
    restoring_state,
    row_differences,
)
from saccade.auditing.runner import Outputs, PlainRunner, Runner, Unanswered, WrongArgument
from saccade.auditing.saccade_runner import SaccadeRunner
from saccade.auditing.transformers_runner import TransformersRunner
from saccade.models import Decoder, Encoder
from saccade.models.model_inputs import check_tokens
from saccade.support.errors import kind, shown, type_error, value_error
from saccade.support.language import Message, joined
from saccade.support.validation import check_bool, check_int, check_number

_TOLERANCE = 1e-11  # in true float64: correct pairs agree within 1e-14, and the smallest error observed was 8e-3
_UNSURE = 0.1  # if one rounding changes the outputs this much (because a router flips), the comparison says little


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two equivalent ways of running a model, and how much their rows differ.

    Attributes:
        name: the claim that both runs give equal rows.
        difference: the largest difference, relative to the root mean square of the expected rows; NaN for
            "not answered".
        allowed: the largest difference that rounding can explain; NaN for "not answered".
        verdict: "held", "broken", or "not answered" if the model cannot be run this way or raised an error.
        why: the dtype of the comparison, or why there is no answer.
        where: the first row that differs by more than is allowed, as (batch item, position); None if there is none.
        remedy: how to make the claim hold with saccade's kernel, if a run showed that this works; otherwise empty.
    """

    name: str
    difference: float
    allowed: float
    verdict: Literal["held", "broken", "not answered"]
    why: str = ""
    where: tuple[int, int] | None = None
    remedy: str = ""


class _ModelInDtype(NamedTuple):
    """One side of a comparison: a model in one dtype, its rows for the full text, and rounding's effect on them."""

    runner: Runner
    whole: Tensor
    jitter: float
    allowed: float
    why: str
    mode: Callable[[], Any]


def check_equivalence(
    model: nn.Module | Runner,
    ids: Tensor,
    *,
    packed: Sequence[int] | None = None,
    padded: bool = False,
    cache: bool = False,
    against: Sequence[str] = (),
    outputs: Outputs | None = None,
    factor: float = FACTOR,
    seed: int = 0,
) -> list[Pair]:
    """Check that equivalent ways of running a model give the same rows.

    The texts are run alone or in a batch, padded, packed, in chunks through a cache, and in training mode. The
    tolerance is measured: two runs may differ by at most ``factor`` times the effect of a single rounding error in
    every module of this model on these ids. If a copy of the model runs in float64 (see `TrueFloat64`), the copy is
    compared, with a tolerance of at least 1e-11.

    Args:
        model: a transformers model, a `saccade.models.Decoder` or `Encoder`, a module that takes only ids, or a
            `Runner` for the model. The model runs in eval mode and is left unchanged.
        ids: int ``[batch, len]``, without padding.
        packed: lengths of the texts into which the first row of ``ids`` is split. Each text must give the same rows
            packed as alone. If None, this check is skipped.
        padded: whether to check padding.
        cache: whether to check runs in chunks through a cache.
        against: names of attention implementations to compare with, such as ``"eager"`` and ``"sdpa"``.
        outputs: a function that extracts rows ``[batch, len, ...]`` from the model's result. If None, they are the
            logits, the last hidden states or the tensor itself.
        factor: the allowed difference, as a multiple of the effect of a single rounding error in every module.
        seed: seed of the random rounding errors.

    Returns:
        One `Pair` for each claim. If the model raises an exception, the claim is "not answered".

    Raises:
        TypeError: the type of the model is not supported, or the ids are not integers.
        ValueError: an id is outside the vocabulary, there are fewer than two ids, the lengths do not sum to the length
            of a row, ``outputs`` does not return rows, or it is passed with a `Runner`, which has its own.

    Cost: about 20 runs, plus one run per token with ``cache``; memory for a copy of the model in float64, and briefly
    for a second copy.
    """
    runner = runner_of(model, outputs)
    lengths = _checked(runner, ids, packed, against)
    check_bool("padded", padded)
    check_bool("cache", cache)
    factor, seed = check_number("factor", factor, above=0), check_int("seed", seed, 0)
    claims = list(run_pairs(runner, ids, packed=lengths, padded=padded, cache=cache, against=against))
    with restoring_state(runner.model), torch.no_grad():
        runner.model.eval()
        try:
            original, wide, reason = _in_both_dtypes(runner, ids, factor, seed)
        except WrongArgument:
            raise
        except Exception as error:
            return [_unanswered(name, describe_error(error)) for name, _ in claims]
        models = [wide, original] if wide else [original]
        pairs = [_run_pair(name, run_pair, models) for name, run_pair in claims]
        if any(pair.verdict == "broken" and pair.name.startswith("packed") for pair in pairs):
            pairs = _with_remedy(
                pairs, _run_pair("with saccade's kernel", packed_with_our_kernel(ids, lengths), models), lengths
            )
        return [*pairs, *_compare_dtypes(original, wide, reason)]


def compare_run_pairs(
    runner: Runner, ids: Tensor, claims: Sequence[tuple[str, RunPair]], *, factor: float = FACTOR, seed: int = 0
) -> list[Pair]:
    """Compare pairs of equivalent runs of a model, with the tolerance of `check_equivalence`.

    Args:
        runner: the runner of the model.
        ids: int ``[batch, len]``, without padding.
        claims: the name of each claim, and the pair of runs that it compares.
        factor: the allowed difference, as a multiple of the effect of a single rounding error in every module.
        seed: seed of the random rounding errors.
    """
    with restoring_state(runner.model), torch.no_grad():
        runner.model.eval()
        original, wide, _ = _in_both_dtypes(runner, ids, factor, seed)
        return [_run_pair(name, run_pair, [wide, original] if wide else [original]) for name, run_pair in claims]


def pairs_under_autocast(
    runner: Runner, ids: Tensor, claims: Sequence[tuple[str, RunPair]], *, seed: int = 0
) -> list[Pair]:
    """Compare pairs of runs under autocast to bfloat16, leaving out pairs that differ without autocast.

    The allowed difference is `FACTOR` times the effect of one rounding (see `autocast_noise`).

    Args:
        runner, ids, claims, seed: see `compare_run_pairs`.
    """
    equal = {pair.name for pair in compare_run_pairs(runner, ids, claims, seed=seed) if pair.verdict == "held"}
    named = [(Message("under autocast: {name}", name=name), run_pair) for name, run_pair in claims if name in equal]
    with restoring_state(runner.model), torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16):
        runner.model.eval()
        whole = runner.whole(ids)

        def compared(found: float) -> list[Pair]:
            noise = autocast_noise(runner.model, lambda: runner.whole(ids), whole, found, seed)
            model = _ModelInDtype(runner, whole, noise, FACTOR * noise, weakness(noise), nullcontext)
            return [_run_pair(words, run_pair, [model]) for words, run_pair in named]

        pairs = compared(0.0)
        broken = [pair.difference for pair in pairs if pair.verdict == "broken"]
        return compared(max(broken)) if broken else pairs


def _in_both_dtypes(
    runner: Runner, ids: Tensor, factor: float, seed: int
) -> tuple[_ModelInDtype, _ModelInDtype | None, str]:
    """Return three values: the model in its own dtype, its float64 copy (or None), and why there is no copy."""
    whole, noise = _with_noise(runner, ids, seed)
    stored = torch.finfo(whole.dtype).eps
    copied, reason = float64_copy(runner.model, lambda model: runner.on(model).whole(ids))
    dtype = str(whole.dtype).removeprefix("torch.")
    why = joined((dtype, *_in_float64(reason), weakness(noise)))
    original = _ModelInDtype(runner, whole, noise, factor * noise, why, nullcontext)
    if copied is None:
        return original, None, reason
    other = runner.on(copied)
    with TrueFloat64():
        whole, noise = _with_noise(other, ids, seed, stored)
    return (
        original,
        _ModelInDtype(other, whole, noise, max(_TOLERANCE, factor * noise), "true float64", TrueFloat64),
        reason,
    )


def weakness(noise: float) -> str:
    """Return a warning if a single rounding changes the outputs so much that comparisons are weak; otherwise ""."""
    words = "one rounding changes the outputs by {noise:.1g}, so the comparison is weak"
    return Message(words, noise=noise) if noise > _UNSURE else ""


def _with_noise(runner: Runner, ids: Tensor, seed: int, stored: float = 0.0) -> tuple[Tensor, float]:
    """Return the output rows for the full text, and how much a rounding error in every module changes them.

    A rounding error in the output rows themselves is added, because a model need not end with a module: an output head
    that shares its weights with the embedding is often a plain function call.
    """
    whole = runner.whole(ids)
    noise = jitter(runner.model, lambda: runner.whole(ids), seed=seed, tables=stored)
    return whole, noise + relative(whole * (1 + torch.finfo(whole.dtype).eps), whole)


def _in_float64(reason: str) -> list[Message]:
    """Return the reason why a run in float64 failed, as a list of one message; empty if ``reason`` is empty."""
    return [Message("in float64: {why}", why=Message(reason))] if reason else []


def _run_pair(name: str, run_pair: RunPair, models: Sequence[_ModelInDtype]) -> Pair:
    """Compare two equivalent ways of running a model, in the first dtype in which the model can run both ways."""
    failed = ""
    for model in models:
        try:
            with model.mode():
                got, want = run_pair(FullRun(model.runner, model.whole))
            return _compare(name, got, want, model.allowed, joined((model.why, *_in_float64(failed))))
        except WrongArgument:
            raise
        except Unanswered as answer:
            return _unanswered(name, answer.args[0])
        except Exception as error:  # a model may raise any error, which does not prove it wrong
            failed = describe_error(error)
    return _unanswered(name, failed)


def _compare(name: str, got: Tensor, want: Tensor, allowed: float, why: str) -> Pair:
    if got.shape != want.shape:
        return _unanswered(
            name, Message("rows {got} cannot be compared with {want}", got=list(got.shape), want=list(want.shape))
        )
    apart = row_differences(got, want)
    bad = (apart > allowed).nonzero()
    where = (int(bad[0, 0]), int(bad[0, 1])) if len(bad) else None
    return Pair(name, float(apart.max()), allowed, "broken" if len(bad) else "held", why, where)


def _unanswered(name: str, why: str) -> Pair:
    return Pair(name, math.nan, math.nan, "not answered", why)


def _with_remedy(pairs: Sequence[Pair], by_ours: Pair, lengths: Sequence[int]) -> list[Pair]:
    """Add instructions for saccade's kernel to broken pairs of packed texts, if that kernel separates the texts."""
    if by_ours.verdict != "held":
        return list(pairs)
    install = f'saccade.integrations.transformers.install("saccade-packed", mask=Documents({list(lengths)}))'
    remedy = f'{install}; model.set_attn_implementation("saccade-packed")'
    return [
        dataclasses.replace(pair, remedy=remedy if pair.verdict == "broken" and pair.name.startswith("packed") else "")
        for pair in pairs
    ]


def _compare_dtypes(original: _ModelInDtype, wide: _ModelInDtype | None, reason: str) -> Iterator[Pair]:
    """Yield the comparison of a model with its float64 copy, allowing for rounding in the dtype of the model."""
    if original.whole.dtype is torch.float64:
        return
    name = Message("{dtype} = float64", dtype=str(original.whole.dtype).removeprefix("torch."))
    yield (
        _compare(name, original.whole, wide.whole, original.allowed, original.why)
        if wide
        else _unanswered(name, reason)
    )


def _checked(runner: Runner, ids: Tensor, packed: Sequence[int] | None, against: Sequence[str]) -> tuple[int, ...]:
    """Validate the arguments of `check_equivalence`, and return the lengths of the packed texts."""
    check_tokens("ids", ids, runner.vocab_size)
    if not len(ids) or ids.shape[1] < 2:
        raise value_error("ids", "be at least one row of two tokens", list(ids.shape))
    if isinstance(against, str) or not all(isinstance(name, str) for name in against):
        raise type_error("against", "be a list of names", shown(against))
    lengths = tuple(check_int("packed", one) for one in packed or ())
    if packed is not None and sum(lengths) != ids.shape[1]:
        rule = f"be lengths that sum to the {ids.shape[1]} tokens of a row"
        raise value_error("packed", rule, list(lengths))
    return lengths


def runner_of(model: object, outputs: Outputs | None = None) -> Runner:
    """Return the runner for a model; a `Runner` is returned unchanged.

    Raises:
        TypeError: the model is neither a module nor a runner.
        ValueError: ``outputs`` is not the function of the given runner.
    """
    if isinstance(model, Runner):
        if outputs not in (None, rows_of, model.outputs):
            raise value_error("outputs", "be left out with a Runner", shown(outputs), hint="pass it to the Runner")
        return model
    if isinstance(model, Decoder | Encoder):
        return SaccadeRunner(model, outputs)
    if isinstance(model, nn.Module):
        ours = any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)
        return (TransformersRunner if ours else PlainRunner)(model, outputs)
    raise type_error("model", "be a torch.nn.Module or a saccade.auditing Runner", kind(model))
