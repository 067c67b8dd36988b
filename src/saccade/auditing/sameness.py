"""Two ways of running a model that ought to say the same, held against what one rounding does to that model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from saccade.arguments import flag, integer, number
from saccade.auditing.float64 import TrueFloat64, float64_copy, said
from saccade.auditing.noise import FACTOR, jitter, relative, row_differences, undisturbed
from saccade.auditing.runner import Beside, Outputs, Runner, Side, Unanswered, WrongArgument
from saccade.auditing.runners import runner_of
from saccade.errors import shown, type_error, value_error
from saccade.models.tokens import check_tokens

__all__ = ["Pair", "sameness"]

_TOLERANCE = 1e-11  # in true float64: right pairs are within 1e-14, the smallest break seen was 8e-3
_UNSURE = 0.1  # a model that one rounding moves so far, a router that flips for instance, hides what is sought
_PAD, _SHIFT = 8, 13


@dataclass(frozen=True)
class Pair:
    """Two ways of running a model, and how far apart they are.

    Attributes:
        name: of the claim that they say the same.
        difference: the largest, by the root mean square of what it should be; NaN where the claim was not answered.
        allowed: what rounding explains; NaN where the claim was not answered.
        verdict: "held", "broken", or "not answered" where the model has no such way, or raised.
        why: the dtype that was judged in, or why there is no answer.
        where: the first row that differs by more than is allowed, as (batch item, place); None if there is none.
    """

    name: str
    difference: float
    allowed: float
    verdict: Literal["held", "broken", "not answered"]
    why: str = ""
    where: tuple[int, int] | None = None


class _Bench(NamedTuple):
    """A model in one dtype: what it says of the whole text, and by how much rounding moves that."""

    runner: Runner
    whole: Tensor
    jitter: float
    allowed: float
    why: str
    mode: Callable[[], Any]


_Claim = Callable[[_Bench], tuple[Tensor, Tensor]]  # what came of one way, and what it should be


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
        flag("sameness", name, given)
    factor, seed = number("sameness", "factor", factor, above=0), integer("sameness", "seed", seed, 0)
    claims = [("one by one = in a batch", _batched(ids)), ("in training, without dropout", _trained(ids))]
    claims += [("positions shifted", lambda bench: (bench.runner.shifted(ids, _SHIFT), bench.whole))]
    claims += _padded(ids) if padded else []
    claims += _packed(ids[:1], lengths) if lengths else []
    claims += [*_steps(ids, runner.window), *_cache_claims(ids)] if cache else []
    claims += [(f"attention by {name}", _implemented(ids, name)) for name in against]
    with undisturbed(runner.model), torch.no_grad():
        runner.model.eval()
        try:
            own, wide, reason = _benches(runner, ids, factor, seed)
        except WrongArgument:
            raise
        except Exception as error:
            return [_unanswered(name, said(error)) for name, _ in claims]
        pairs = [_judged(name, claim, [wide, own] if wide else [own]) for name, claim in claims]
        return [*pairs, *_dtypes(own, wide, reason, factor)]


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


def _judged(name: str, claim: _Claim, benches: Sequence[_Bench]) -> Pair:
    """In the first dtype that the model can do it in."""
    failed = ""
    for bench in benches:
        try:
            with bench.mode():
                got, want = claim(bench)
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


def _dtypes(own: _Bench, wide: _Bench | None, reason: str, factor: float) -> Iterator[Pair]:
    """The model in its own dtype against float64: allowed is the rounding of its own."""
    if own.whole.dtype is torch.float64:
        return
    name = f"{str(own.whole.dtype).removeprefix('torch.')} = float64"
    yield _compared(name, own.whole, wide.whole, own.allowed, own.why) if wide else _unanswered(name, reason)


def _batched(ids: Tensor) -> _Claim:
    batch = ids if len(ids) > 1 else torch.cat([ids, ids.flip(1)])

    def claim(bench: _Bench) -> tuple[Tensor, Tensor]:
        return torch.cat([bench.runner.whole(one) for one in batch.split(1)]), bench.runner.whole(batch)

    return claim


def _trained(ids: Tensor) -> _Claim:
    return lambda bench: (bench.runner.trained().whole(ids), bench.whole)


def _padded(ids: Tensor) -> list[tuple[str, _Claim]]:
    def claim(side: Side) -> _Claim:
        return lambda bench: (bench.runner.padded(ids, side, _PAD), bench.whole)

    return [("padded at the right", claim("right")), ("padded at the left", claim("left"))]


def _packed(ids: Tensor, lengths: Sequence[int]) -> list[tuple[str, _Claim]]:
    def claim(beside: Beside) -> _Claim:
        def packed(bench: _Bench) -> tuple[Tensor, Tensor]:
            got = bench.runner.packed(ids, lengths, beside=beside)
            return got, torch.cat([bench.runner.whole(text) for text in ids.split(list(lengths), 1)], 1)

        return packed

    others: tuple[Beside, ...] = ("a cache", "a mask of ones", "a mask of four dimensions")
    return [("packed", claim("positions")), *((f"packed, with {beside}", claim(beside)) for beside in others)]


def _steps(ids: Tensor, window: int | None) -> list[tuple[str, _Claim]]:
    n = ids.shape[1]
    splits: dict[str, Sequence[int]] = {
        "one token first": [1],
        "one token last": [n - 1],
        "two halves": [n // 2],
        "one by one": range(1, n),
        "pieces of 5": range(5, n, 5),
    }
    for cut in (window - 1, window, window + 1) if window else ():
        splits |= {f"cut at {cut}, window {window}": [cut]} if 0 < cut < n else {}

    def claim(split: Sequence[int]) -> _Claim:
        return lambda bench: (bench.runner.steps(ids, split), bench.whole)

    return [(f"steps: {name}", claim(split)) for name, split in splits.items()]


def _cache_claims(ids: Tensor) -> list[tuple[str, _Claim]]:
    """What is done to a cache in the middle of a text must not show in what is read after it.

    The other side is read in the same two pieces, with nothing done between them: what steps do is asked elsewhere.
    """
    n, half = ids.shape[1], ids.shape[1] // 2
    other = torch.cat([ids[:, :half], ids.flip(1)[:, : n - half]], 1)

    def cropped(bench: _Bench) -> tuple[Tensor, Tensor]:
        runner = bench.runner
        _, state = runner.more(ids[:, :half], runner.start())
        _, state = runner.more(other[:, half:], runner.rewindable(state))
        after, _ = runner.more(ids[:, half:], runner.cropped(state, n - half))
        return _continued(runner.steps(ids, [half]), after)

    def forked(bench: _Bench) -> tuple[Tensor, Tensor]:
        runner = bench.runner
        _, state = runner.more(ids[:, :half], runner.start())
        fork = runner.forked(state)
        in_fork, _ = runner.more(other[:, half:], fork)
        after, _ = runner.more(ids[:, half:], state)
        want = torch.cat([runner.steps(ids, [half]), runner.steps(other, [half])])
        return _continued(want, torch.cat([after, in_fork]))

    def reordered(bench: _Bench) -> tuple[Tensor, Tensor]:
        runner = bench.runner
        rows = torch.arange(len(ids) - 1, -1, -1) if len(ids) > 1 else torch.zeros(2, dtype=torch.long)
        rows = rows.to(ids.device)
        _, state = runner.more(ids[:, :half], runner.start())
        after, _ = runner.more(ids[rows, half:], runner.reordered(state, rows))
        return _continued(runner.steps(ids, [half])[rows], after)

    return [("cache cropped", cropped), ("cache forked", forked), ("cache reordered", reordered)]


def _continued(want: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """What came after the beginning of the rows that were wanted, so that it stands in its place."""
    return torch.cat([want[:, : want.shape[1] - after.shape[1]], after], 1), want


def _implemented(ids: Tensor, name: str) -> _Claim:
    return lambda bench: (bench.runner.implemented(name).whole(ids), bench.whole)


def _checked(runner: Runner, ids: Tensor, packed: Sequence[int] | None, against: Sequence[str]) -> tuple[int, ...]:
    """The lengths of packed texts, after what the user gave is looked at."""
    check_tokens("sameness", "ids", ids, runner.vocab_size)
    if not len(ids) or ids.shape[1] < 2:
        raise value_error("sameness", "ids", "be at least one row of two tokens", list(ids.shape))
    if isinstance(against, str) or not all(isinstance(name, str) for name in against):
        raise type_error("sameness", "against", "be a list of names", shown(against))
    lengths = tuple(integer("sameness", "packed", one) for one in packed or ())
    if packed is not None and sum(lengths) != ids.shape[1]:
        rule = f"be lengths that sum to the {ids.shape[1]} tokens of a row"
        raise value_error("sameness", "packed", rule, list(lengths))
    return lengths
