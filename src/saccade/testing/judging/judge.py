"""`judge`: try all laws on a kernel, and shrink the inputs that break them."""

from __future__ import annotations

import dataclasses
import platform
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from saccade.testing.adapters import Form
from saccade.testing.judging.counter_example import counter_examples
from saccade.testing.judging.declaration import Declaration
from saccade.testing.judging.first_calls import first_calls
from saccade.testing.judging.judgement import CORE_LAWS, Judgement
from saccade.testing.judging.kernel import Kernel, Trial
from saccade.testing.judging.source import Source
from saccade.testing.report import Report, Result


def judge(
    kernel: Callable[..., Any] | Form | Kernel,
    claims: Declaration | None = None,
    *,
    source: Source | None = None,
    laws: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | str = "cpu",
    minutes: float | None = None,
    seed: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Judgement:
    """Judge an attention kernel: try every law on cases that fit its claims, and shrink the cases that break a law.

    Capabilities that the claims leave open are first tried with small calls. If a call raises an error, the capability
    counts as not claimed, and `Judgement.notes` says so.

    Example:
        >>> from saccade.testing.judging import Declaration, judge
        >>> def mine(query, key, value, mask):
        ...     scores = query @ key.mT / query.shape[-1] ** 0.5
        ...     return scores.masked_fill(~mask, -1e9).softmax(-1) @ value
        >>> found = judge(mine, Declaration(groups=False), laws=["empty_rows"], dtypes=[torch.float32], seed=0)
        >>> found.ok, found.counter_examples[0].inputs
        (False, 'query [1, 1, 2, 1], key [1, 1, 1, 1], value [1, 1, 1, 1], float32, Causal()')

    Args:
        kernel: a kernel with the calling convention that the claims name, a `Form`, or a `Kernel` that `first_calls`
            returned, whose open claims are not tried again.
        claims: what the kernel supports; by default, nothing is declared. A `Kernel` has its own claims.
        source: the location of the kernel, from which scripts load it.
        laws: names of laws; all by default.
        cases: names of cases; all by default. Some laws define their own cases.
        dtypes: dtypes of the inputs; by default those of the claims, or float64 and float32.
        device: device of the inputs.
        minutes: time limit, after which no further trial starts; if None, all trials run.
        seed: seed of all values; if None, a new seed is drawn.
        progress: called before each trial with the numbers of finished trials and of all trials, and the names of the
            trial's law, case and dtype.

    Returns:
        A `Judgement`.

    Raises:
        ValueError, TypeError: a name is unknown, or the kernel does not match its form.
    """
    began = time.monotonic()
    deadline = torch.inf if minutes is None else began + 60 * minutes
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    judged = kernel if isinstance(kernel, Kernel) else Kernel.of(kernel, claims or Declaration(), source)
    judged = judged if isinstance(kernel, Kernel) else first_calls(judged, device, dtypes)
    subject = judged.subject(judged, device)
    by_law = judged.trials_by_law(laws, cases, dtypes, seed)
    accepted, results = _divided(by_law, judged.refuser(subject))
    refused = Counter(law.name for (law, _, _), _ in results)

    def run_trial(trial: Trial) -> bool:
        if progress is not None:
            law, case, dtype = trial
            named = f"{law.name}, case {case.name}, {str(dtype).removeprefix('torch.')}"
            progress(len(results) - refused.total(), sum(map(len, accepted)), named)
        results.append((trial, judged.run_trial(subject, *trial)))
        return results[-1][1].verdict in ("kept", "broken")

    _run_in_turn(accepted, run_trial, began, deadline)
    by_name = {trials[0][0].name: trials[0][0] for trials in by_law if trials}
    known = list(by_name)
    ordered = sorted((result for _, result in results), key=lambda result: known.index(result.law))
    draft = Judgement(
        judged.form.name,
        Report(tuple(ordered), tuple(by_name.values()), seed),
        (),
        judged.declaration.xfail,
        _errors(ordered),
        {each[0][0].name: len(each) for each in by_law if each},
        refused,
        0.0,
        str(device),
        {"torch": torch.__version__, "python": platform.python_version()},
        judged.inferred,
        judged.notes,
    )
    examples = tuple(counter_examples(judged, draft, results, device))
    return dataclasses.replace(draft, counter_examples=examples, seconds=time.monotonic() - began)


def _divided(
    by_law: Sequence[Sequence[Trial]], refuse: Callable[..., Result | None]
) -> tuple[list[list[Trial]], list[tuple[Trial, Result]]]:
    """Divide trials into those to run, grouped by law, and those that are refused, represented by their results."""
    accepted, refused = list[list[Trial]](), list[tuple[Trial, Result]]()
    for trials in by_law:
        answers = [(trial, refuse(*trial)) for trial in trials]
        accepted.append([trial for trial, answer in answers if answer is None])
        refused += [(trial, answer) for trial, answer in answers if answer is not None]
    return accepted, refused


def _run_in_turn(
    by_law: Sequence[Sequence[Trial]], run_trial: Callable[[Trial], bool], began: float, deadline: float
) -> None:
    """Run trials until a deadline: for each law until the kernel accepts one, then one of each law in turn.

    The most important laws come first. For each other law, the search for an accepted trial takes at most a fiftieth of
    the time, because a kernel may refuse all of its trials.
    """
    remaining = {index: deque(trials) for index, trials in enumerate(by_law)}
    names = [each[0][0].name if each else "" for each in by_law]
    for index in sorted(remaining, key=lambda i: CORE_LAWS.index(names[i]) if names[i] in CORE_LAWS else len(names)):
        share = torch.inf if names[index] in CORE_LAWS else (deadline - began) / 50
        until = min(deadline, time.monotonic() + share)
        while remaining[index] and time.monotonic() <= until and not run_trial(remaining[index].popleft()):
            pass
    while any(remaining.values()):
        for trials in remaining.values():
            if time.monotonic() > deadline:
                return
            if trials:
                run_trial(trials.popleft())


def _errors(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """Return the largest measured error by law and dtype, in units of the dtype's eps."""
    errors: dict[tuple[str, str], float] = {}
    for result in results:
        error = result.roundings
        if error is not None:
            key = (result.law, str(result.dtype).removeprefix("torch."))
            errors[key] = max(errors.get(key, 0.0), error)
    return errors
