"""Two ways of running a model that ought to say the same, held against what one rounding does to that model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.equivalence_pairs import Way, Whole, remedied, ways
from saccade.auditing.float64 import TrueFloat64, float64_copy, said
from saccade.auditing.rounding_noise import FACTOR, jitter, relative, row_differences, undisturbed
from saccade.auditing.runner import Outputs, Runner, Unanswered, WrongArgument
from saccade.auditing.runners import runner_of
from saccade.models.inputs import check_tokens
from saccade.support.errors import shown, type_error, value_error
from saccade.support.validation import check_bool, check_int, check_number

_TOLERANCE = 1e-11  # in true float64: right pairs are within 1e-14, the smallest break seen was 8e-3
_UNSURE = 0.1  # a model that one rounding moves so far, a router that flips for instance, hides what is sought


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two ways of running a model, and how far apart they are.

    Attributes:
        name: of the claim that they say the same.
        difference: the largest, by the root mean square of what it should be; NaN where the claim was not answered.
        allowed: what rounding explains; NaN where the claim was not answered.
        verdict: "held", "broken", or "not answered" where the model has no such way, or raised.
        why: the dtype that was judged in, or why there is no answer.
        where: the first row that differs by more than is allowed, as (batch item, place); None if there is none.
        remedy: how the model holds the claim with our kernel, where that was tried and seen; else empty.
    """

    name: str
    difference: float
    allowed: float
    verdict: Literal["held", "broken", "not answered"]
    why: str = ""
    where: tuple[int, int] | None = None
    remedy: str = ""


class _Bench(NamedTuple):
    """A model in one dtype: what it says of the whole text, and by how much rounding moves that."""

    runner: Runner
    whole: Tensor
    jitter: float
    allowed: float
    why: str
    mode: Callable[[], Any]


def sameness(
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
    """Whether a model says the same however it is run: alone or in a batch, padded, packed, step by step, in training.

    Nothing is compared with a table: two ways may differ by ``factor`` times what one rounding in every part of this
    model does on these ids. Where a copy of the model runs in float64 (see `TrueFloat64`), it is judged there, and at
    least 1e-11 is allowed.

    Args:
        model: of transformers, a `saccade.models.Decoder` or `Encoder`, a module that is called with ids alone, or a
            `Runner` that knows how to run it. Judged in eval mode, and left as it was.
        ids: int ``[batch, len]``, without padding.
        packed: lengths of texts that the first row of ``ids`` is cut into; each must say what it says alone. None: not
            asked.
        padded: whether to ask about padding.
        cache: whether to ask about steps through a cache.
        against: names of implementations of attention, such as ``"eager"`` and ``"sdpa"``.
        outputs: makes rows ``[batch, len, ...]`` of what the model returns: the logits, or the last hidden states, or
            the tensor itself, when None.
        factor: how many times its rounding a model may differ by.
        seed: of the rounding.

    Returns:
        One `Pair` for each claim. What the model raises becomes "not answered".

    Raises:
        TypeError: no such model, or ids that are no integers.
        ValueError: ids outside the vocabulary, fewer than two of them, lengths that are not those of the row, or a
            function ``outputs`` that returns something else.

    Cost: about 20 runs, and with ``cache`` as many steps as there are tokens; a copy of the model in float64, and for a
    moment another one of it.
    """
    runner = runner_of(model, outputs)
    lengths = _checked(runner, ids, packed, against)
    for name, given in {"padded": padded, "cache": cache}.items():
        check_bool(name, given)
    factor, seed = check_number("factor", factor, above=0), check_int("seed", seed, 0)
    claims = list(ways(runner, ids, packed=lengths, padded=padded, cache=cache, against=against))
    with undisturbed(runner.model), torch.no_grad():
        runner.model.eval()
        try:
            own, wide, reason = _benches(runner, ids, factor, seed)
        except WrongArgument:
            raise
        except Exception as error:
            return [_unanswered(name, said(error)) for name, _ in claims]
        benches = [wide, own] if wide else [own]
        pairs = [_judged(name, way, benches) for name, way in claims]
        if any(pair.verdict == "broken" and pair.name.startswith("packed") for pair in pairs):
            pairs = _with_remedy(pairs, _judged("by our kernel", remedied(ids, lengths), benches), lengths)
        return [*pairs, *_dtypes(own, wide, reason)]


def _benches(runner: Runner, ids: Tensor, factor: float, seed: int) -> tuple[_Bench, _Bench | None, str]:
    """The model as it is, and its copy in float64, or why there is none."""
    whole, noise = _with_noise(runner, ids, seed)
    stored = torch.finfo(whole.dtype).eps
    copied, reason = float64_copy(runner.model, lambda model: runner.on(model).whole(ids))
    dtype = str(whole.dtype).removeprefix("torch.")
    why = dtype + (f"; in float64: {reason}" if reason else "")
    why += f"; one rounding moves the outputs by {noise:.1g}, so this says little" if noise > _UNSURE else ""
    own = _Bench(runner, whole, noise, factor * noise, why, nullcontext)
    if copied is None:
        return own, None, reason
    other = runner.on(copied)
    with TrueFloat64():
        whole, noise = _with_noise(other, ids, seed, stored)
    return own, _Bench(other, whole, noise, max(_TOLERANCE, factor * noise), "true float64", TrueFloat64), reason


def _with_noise(runner: Runner, ids: Tensor, seed: int, stored: float = 0.0) -> tuple[Tensor, float]:
    """The whole run, and what rounding does to it: in every part, and once more in the outputs themselves.

    The last step of a model need not be a module: the head that shares its weights with the embedding often is none.
    """
    whole = runner.whole(ids)
    noise = jitter(runner.model, lambda: runner.whole(ids), seed=seed, tables=stored)
    return whole, noise + relative(whole * (1 + torch.finfo(whole.dtype).eps), whole)


def _judged(name: str, way: Way, benches: Sequence[_Bench]) -> Pair:
    """In the first dtype that the model can do it in."""
    failed = ""
    for bench in benches:
        try:
            with bench.mode():
                got, want = way(Whole(bench.runner, bench.whole))
            return _compared(name, got, want, bench.allowed, bench.why + (f"; in float64: {failed}" if failed else ""))
        except WrongArgument:
            raise
        except Unanswered as answer:
            return _unanswered(name, str(answer))
        except Exception as error:  # whatever a model may raise is no proof that it is wrong
            failed = said(error)
    return _unanswered(name, failed)


def _compared(name: str, got: Tensor, want: Tensor, allowed: float, why: str) -> Pair:
    if got.shape != want.shape:
        return _unanswered(name, f"rows {list(got.shape)} cannot be compared with {list(want.shape)}")
    apart = row_differences(got, want)
    bad = (apart > allowed).nonzero()
    where = (int(bad[0, 0]), int(bad[0, 1])) if len(bad) else None
    return Pair(name, float(apart.max()), allowed, "broken" if len(bad) else "held", why, where)


def _unanswered(name: str, why: str) -> Pair:
    return Pair(name, math.nan, math.nan, "not answered", why)


def _with_remedy(pairs: Sequence[Pair], by_ours: Pair, lengths: Sequence[int]) -> list[Pair]:
    """Where our kernel keeps packed texts apart, every broken claim of them says how to switch to it."""
    if by_ours.verdict != "held":
        return list(pairs)
    install = f'saccade.integrations.transformers.install("saccade-packed", mask=Documents({list(lengths)}))'
    remedy = f'{install}; model.set_attn_implementation("saccade-packed")'
    return [
        dataclasses.replace(pair, remedy=remedy if pair.verdict == "broken" and pair.name.startswith("packed") else "")
        for pair in pairs
    ]


def _dtypes(own: _Bench, wide: _Bench | None, reason: str) -> Iterator[Pair]:
    """The model in its own dtype against float64: allowed is the rounding of its own."""
    if own.whole.dtype is torch.float64:
        return
    name = f"{str(own.whole.dtype).removeprefix('torch.')} = float64"
    yield _compared(name, own.whole, wide.whole, own.allowed, own.why) if wide else _unanswered(name, reason)


def _checked(runner: Runner, ids: Tensor, packed: Sequence[int] | None, against: Sequence[str]) -> tuple[int, ...]:
    """The lengths of packed texts, after what the user gave is looked at."""
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
