"""Shrink a trial that broke a law to a minimal counter-example, and write a script that shows the fault."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch

from saccade.support.language import Message
from saccade.testing.case import Case
from saccade.testing.conformance import try_law
from saccade.testing.drawn_cases import drawn, is_drawn
from saccade.testing.judging.counter_example import CounterExample
from saccade.testing.judging.fitting import is_possible
from saccade.testing.judging.judgement import Judgement
from saccade.testing.judging.kernel import Kernel, Trial
from saccade.testing.judging.recorded_calls import RecordedCalls
from saccade.testing.judging.script import script_of
from saccade.testing.judging.shrinking import shrunk
from saccade.testing.report import Result
from saccade.testing.tolerances import tolerance

MARK = "Written by saccade judge"
"""The text in a script's header by which a later run recognises a generated script."""
_SHRINKING = (5.0, 30.0)  # maximum seconds for one broken law, and for all
_LARGE = 1 << 20  # pairs
_FIXED = ("sizes", "gradients_at_sizes")  # laws at fixed sizes, to replace laws that draw sizes


def counter_examples(
    kernel: Kernel, draft: Judgement, results: Sequence[tuple[Trial, Result]], device: torch.device | str
) -> Iterator[CounterExample]:
    """Yield the smallest counter-example found for each law that is unexpectedly broken."""
    by_law: dict[str, list[tuple[Trial, Result]]] = {}
    for trial, result in results:
        if result.verdict == "broken" and draft.reason(result) is None:
            by_law.setdefault(result.law, []).append((trial, result))
    seconds = min(_SHRINKING[0], _SHRINKING[1] / max(1, len(by_law)))
    for law in draft.report.laws:
        if law.name in by_law:
            trial, result = min(by_law[law.name], key=lambda pair: (_oddness(kernel, pair[0][1]), *_size(pair[0][1])))
            yield counter_example(kernel, trial, result, device, draft.report.seed, seconds)


def counter_example(
    kernel: Kernel, trial: Trial, result: Result, device: torch.device | str, seed: int, seconds: float = _SHRINKING[0]
) -> CounterExample:
    """Shrink a trial that broke a law to a minimal counter-example, and write a script that reproduces it.

    A smaller case counts only if a correct kernel satisfies the law on it, because rounding may break a law on very
    small inputs.
    """
    law, case, dtype = _without_draws(kernel, trial, device)
    subject, control = kernel.subject(kernel, device), kernel.subject(kernel.right, device)
    kind = _kind(result)

    def still_broken(candidate: Case) -> bool:
        is_broken = _kind(try_law(subject, law, candidate, dtype)) == kind
        return is_broken and try_law(control, law, candidate, dtype).verdict == "kept"

    def broken_without_empty_rows(candidate: Case) -> bool:
        return not _has_empty_rows(candidate) and still_broken(candidate)

    if _kind(try_law(subject, law, case, dtype)) == kind:
        case = next(filter(broken_without_empty_rows, _with_keys(case)), case)
        odd = _oddness(kernel, case)

        def no_odder(candidate: Case) -> bool:
            return _oddness(kernel, candidate) <= odd and still_broken(candidate)

        case = shrunk(case, no_odder, time.monotonic() + seconds)
    recorded = RecordedCalls(kernel)
    again = try_law(kernel.subject(recorded, device), law, case, dtype)
    inputs = _described(case, dtype, device)
    if again.verdict != "broken":
        why = "the failure does not recur: the result depends on earlier calls or on random numbers"
        return CounterExample(result.law, result.message, inputs, no_script=why)
    words = [f"{law.name}: {law.statement}", again.message, inputs, f"{MARK}, seed {seed}."]
    limits = (tolerance(dtype, "output"), tolerance(dtype, "gradient"))
    if kernel.source is None:
        return CounterExample(result.law, again.message, inputs, no_script="the kernel does not come from a file")
    for calls in (*([call] for call in reversed(recorded.calls)), recorded.calls):
        script = script_of(kernel.form, kernel.source, calls, limits, words)
        shows = [] if script is None else script.faults(kernel.source.load())
        if script is not None and shows:
            return CounterExample(result.law, again.message, inputs, tuple(shows), script.text)
    why = "no single call fails on its own, or its inputs cannot be written to a script"
    return CounterExample(result.law, again.message, inputs, no_script=why)


def _without_draws(kernel: Kernel, trial: Trial, device: torch.device | str) -> Trial:
    """Replace a trial whose sizes are drawn with a trial that breaks another law at these sizes, if there is one."""
    if not is_drawn(trial[1]):
        return trial
    law, case, dtype = trial
    fixed = drawn(case)
    for other in kernel.form.laws_to_check():
        subject = kernel.subject(kernel, device)
        if other.name in _FIXED and try_law(subject, other, fixed, dtype).verdict == "broken":
            return other, fixed, dtype
    return law, case, dtype


def _described(case: Case, dtype: torch.dtype, device: torch.device | str) -> str:
    """Return the shapes, the dtype and the mask of a case in one line."""
    problem = case.problem(dtype, device)
    shapes = ", ".join(f"{name} {list(getattr(problem, name).shape)}" for name in ("query", "key", "value"))
    words = "{shapes}, {dtype}, {mask}, explicit positions" if case.explicit_positions else "{shapes}, {dtype}, {mask}"
    mask = Message("no mask") if case.mask is None else str(case.mask)
    return Message(words, shapes=shapes, dtype=str(dtype).removeprefix("torch."), mask=mask)


def _kind(result: Result) -> str:
    """Return how a law is broken: "raised" and an error class, or "broken"; "" if it is not broken."""
    if result.verdict != "broken":
        return ""
    return result.message.partition(":")[0] if result.message.startswith("raised ") else "broken"


def _has_empty_rows(case: Case) -> bool:
    """Return whether some query of a case sees no key. Large cases are assumed to have no such query."""
    if case.batch * case.num_heads * case.q_len * case.kv_len > _LARGE:
        return False
    return not bool(case.allowed.any(-1).all())


def _oddness(kernel: Kernel, case: Case) -> int:
    """Return how unusual a case is, so that counter-examples are not more unusual than necessary.

    The result is 2 if a query sees no key, 1 if the numbers of queries and keys differ and the kernel does not declare
    whether it supports that, and 0 otherwise.
    """
    if _has_empty_rows(case):
        return 2
    return int(kernel.declaration.decoding is None and case.q_len != case.kv_len)


def _with_keys(case: Case) -> Iterator[Case]:
    """If a query of the case sees no key, yield variants with equal lengths, which may have no such query."""
    if _has_empty_rows(case) and case.bias is None and not case.explicit_positions:
        for length in sorted({max(1, case.q_len), max(1, case.kv_len)}):
            candidate = dataclasses.replace(case, q_len=length, kv_len=length)
            if is_possible(candidate):
                yield candidate


def _size(case: Case) -> tuple[bool, int]:
    return bool(case.explicit_positions), case.batch * case.num_heads * max(1, case.q_len) * max(
        1, case.kv_len
    ) * case.head_dim
