"""`check`: the conformance test, which tries the laws on any attention function."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import torch

from saccade.support.errors import UnsupportedError, kind, type_error, value_error
from saccade.support.language import Message, joined
from saccade.support.validation import check_choice
from saccade.testing.case import Case
from saccade.testing.cases import CASES, LARGE_CASES
from saccade.testing.kernel_under_test import Claims, Subject
from saccade.testing.laws import LAWS, SIZE_LAWS, Law, LawBroken
from saccade.testing.laws.expect import measuring
from saccade.testing.report import Report, Result
from saccade.testing.size_cases import SIZE_CASES

_Named = TypeVar("_Named", Case, Law)
_TIERS = {"small": LAWS, "models": SIZE_LAWS, "all": (*LAWS, *SIZE_LAWS)}


def check(
    function: Callable[..., Any],
    *,
    call: Callable[..., Any] | None = None,
    with_lse: Callable[..., Any] | None = None,
    offers: Collection[str] | None = None,
    reasons: Callable[..., tuple[str, ...]] | None = None,
    gqa: bool = True,
    gradients: bool = True,
    masks: Literal["dense", "objects"] = "dense",
    cases: Sequence[Case | str] | None = None,
    laws: Sequence[Law | str] | None = None,
    sizes: Literal["small", "models", "all"] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32),
    claims: Claims | None = None,
    device: torch.device | str = "cpu",
    seed: int | None = None,
) -> Report:
    """Check an attention function for conformance by trying every law on every case in every dtype.

    Example:
        >>> import torch.nn.functional as F
        >>> from saccade import testing
        >>> report = testing.check(
        ...     lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
        ...     cases=["causal", "padding"],
        ... )
        >>> sorted({result.law for result in report.broken})  # torch lets a masked NaN through
        ['blindness', 'isolation']

    If a law needs an option that the function does not take, or if the function raises `NotImplementedError`, the
    verdict is "not offered", and the report lists the reason. Any other error counts as a broken law.

    Args:
        function: ``function(query, key, value, mask, **options) -> out``, in the layout
            ``[batch, heads, len, head_dim]``. Options (``bias``, ``scale``, ``softcap``, ``dropout_p``,
            ``sink_logit``, ``score``) are passed only if they are used.
        call: ``call(function, query, key, value, mask, **options)``, to call a function with a different calling
            convention.
        with_lse: a variant of the function that returns ``(out, lse)``, or None.
        offers: the options that the function supports; it must refuse all others. If None, the options are read from
            the signature, which builtins do not have. "relative" means that ``bias`` may also be a
            `saccade.positions.Bias`. A signature cannot show this, so without "relative", no relative bias is tried.
        reasons: a function that takes the same arguments and returns the reasons why ``function`` cannot run them, or
            an empty tuple. Both functions must agree.
        gqa: whether the function supports fewer key heads than query heads; if not, keys are repeated for every head.
        gradients: whether the function has a backward pass; if not, laws check only the output.
        masks: "dense" passes the mask as a bool tensor ``[batch, heads, q_len, kv_len]``, True = may attend.
            "objects" passes it as a `saccade.masks.Mask` or None, with ``q_positions`` and ``kv_positions`` if a case
            has them. (A relative bias always comes with positions.)
        cases: the cases to try the laws on, or their names; `CASES` if None. Some laws define their own cases.
        laws: the laws to try, or their names; if None, those that ``sizes`` selects.
        sizes: "small" for `LAWS`, on cases of a few tokens, where every entry is compared; "models" for `SIZE_LAWS`, at
            the lengths and widths of real models; "all" for both. If None, it is "all", or "small" if ``cases`` is set.
        dtypes: the dtypes of the inputs; some laws define their own dtypes.
        claims: claims about memory, which are tested in addition to the laws.
        device: the device of the inputs.
        seed: seed for all values and for the sizes that laws draw. If None, a new seed is drawn for each run, so that
            no function can know its inputs in advance. The report shows the seed, so that the run can be repeated.

    Returns:
        A `Report`.

    Raises:
        ValueError, TypeError: a case or law is unknown, or ``sizes`` is combined with ``laws``, or "models" with
            ``cases``.
    """
    subject = Subject(
        function,
        call=call,
        with_lse=with_lse,
        offers=offers,
        reasons=reasons,
        gqa=gqa,
        gradients=gradients,
        masks=masks,
        claims=claims,
        device=device,
    )
    if sizes is not None and (laws is not None or (cases is not None and sizes == "models")):
        hint = "laws= already chooses the laws, and the laws at model sizes have their own cases"
        raise value_error(
            "sizes", "be None if laws= is given, and not be 'models' if cases= is given", repr(sizes), hint=hint
        )
    tier: str = ("all" if cases is None else "small") if sizes is None else sizes
    chosen = (
        _TIERS[check_choice("sizes", tier, tuple(_TIERS))]
        if laws is None
        else _named("laws", laws, (*LAWS, *SIZE_LAWS), Law)
    )
    tried = CASES if cases is None else _named("cases", cases, (*CASES, *LARGE_CASES, *SIZE_CASES), Case)
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    results = tuple(try_law(subject, *trial) for trial in trials(chosen, tried, dtypes, seed))
    return Report(results, tuple(chosen), seed)


def trials(
    laws: Iterable[Law], cases: Sequence[Case], dtypes: Sequence[torch.dtype], seed: int = 0
) -> Iterator[tuple[Law, Case, torch.dtype]]:
    """Yield every combination of law, case and dtype for `check` to try. A law may define its own cases and dtypes.

    The seed of each case is increased by ``seed``.
    """
    seeded = functools.cache(lambda case: case.with_seed(seed))
    for law in laws:
        for case in cases if law.cases is None else law.cases:
            for dtype in dtypes if law.dtypes is None else law.dtypes:
                yield law, seeded(case), dtype


def try_law(subject: Subject, law: Law, case: Case, dtype: torch.dtype) -> Result:
    """Try one law on one case in one dtype, and return the result with its verdict."""
    try:
        declined = result_if_not_run(subject, law, case, dtype)
        if declined is not None:
            return declined
        with measuring() as measured:
            law(subject, case, dtype)
    except LawBroken as broken:
        return Result(law.name, case.name, dtype, "broken", broken.args[0])
    except NotImplementedError as refused:
        why = joined(refused.reasons) if isinstance(refused, UnsupportedError) else _one_line(refused)
        return Result(law.name, case.name, dtype, "not offered", why)
    except Exception as crash:
        message = Message("raised {error}: {text}", error=type(crash).__name__, text=_one_line(crash))
        return Result(law.name, case.name, dtype, "broken", message)
    return Result(law.name, case.name, dtype, "kept", roundings=max(measured, default=None))


def result_if_not_run(subject: Subject, law: Law, case: Case, dtype: torch.dtype) -> Result | None:
    """Return the result of a trial if its law does not apply or needs an option that the function does not offer.

    Return None if the trial must run.
    """
    reasons = law.reasons(subject, case)
    if reasons:
        return Result(law.name, case.name, dtype, "not applicable", joined(reasons))
    lacks = () if law.needs is None else subject.lacks(case, law.needs)
    return Result(law.name, case.name, dtype, "not offered", joined(lacks)) if lacks else None


def _named(argument: str, given: Sequence[_Named | str], known: Sequence[_Named], sort: type[_Named]) -> list[_Named]:
    """Return the cases or laws in ``given``, looking up those that are given by name."""
    by_name, selected = {item.name: item for item in known}, list[_Named]()
    for item in [given] if isinstance(given, str) else given:
        if isinstance(item, str) and item in by_name:
            selected.append(by_name[item])
        elif isinstance(item, sort):
            selected.append(item)
        elif isinstance(item, str):
            close = ", ".join(get_close_matches(item, by_name, 3)) or ", ".join(by_name)
            raise value_error(argument, f"be names of {argument}, or the {argument} themselves", repr(item), hint=close)
        else:
            raise type_error(argument, f"be names of {argument}, or the {argument} themselves", kind(item))
    return selected


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
