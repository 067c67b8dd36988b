"""`judge`: try all laws on a kernel, and shrink the inputs that break them."""

from __future__ import annotations

import dataclasses
import platform
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from saccade.testing.adapters import Form
from saccade.testing.judging.counter_example import counter_examples
from saccade.testing.judging.declaration import Declaration
from saccade.testing.judging.judgement import CORE_LAWS, Judgement
from saccade.testing.judging.kernel import Kernel, Trial
from saccade.testing.judging.source import Source
from saccade.testing.report import Report, Result


def judge(
    kernel: Callable[..., Any] | Form,
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
    """Judge an attention kernel: try every law on the cases that fit its claims, and shrink cases that break a law.

    Example:
        >>> from saccade.testing.judging import Declaration, judge
        >>> def mine(query, key, value, mask):
        ...     scores = query @ key.mT / query.shape[-1] ** 0.5
        ...     return scores.masked_fill(~mask, -1e9).softmax(-1) @ value
        >>> found = judge(mine, Declaration(groups=False), laws=["empty_rows"], dtypes=[torch.float32], seed=0)
        >>> found.ok, found.counter_examples[0].inputs
        (False, 'query [1, 1, 2, 1], key [1, 1, 1, 1], value [1, 1, 1, 1], float32, Causal()')

    Args:
        kernel: a kernel with the calling convention that the claims name, or a `Form`.
        claims: what the kernel supports; by default, everything.
        source: where the kernel comes from, for scripts.
        laws: names of laws; all by default.
        cases: names of cases; all by default. Some laws define their own cases.
        dtypes: dtypes of the inputs; by default those of the claims, or float64 and float32.
        device: device of the inputs.
        minutes: time after which no further trial begins; None runs all trials.
        seed: seed of all values; None draws a new seed.
        progress: a function of the number of finished trials, the number of all trials and the name of the current law.

    Returns:
        A `Judgement`.

    Raises:
        ValueError, TypeError: a name is unknown, or the kernel does not fit its form.
    """
    began = time.monotonic()
    deadline = torch.inf if minutes is None else began + 60 * minutes
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    judged = Kernel.of(kernel, claims or Declaration(), source)
    subject = judged.subject(judged, device)
    by_law = judged.trials_by_law(laws, cases, dtypes, seed)
    planned = [trial for each in by_law for trial in each]
    results = list[tuple[Trial, Result]]()

    def tried(trial: Trial) -> bool:
        if progress is not None:
            progress(len(results), len(planned), trial[0].name)
        results.append((trial, judged.run_trial(subject, *trial)))
        return results[-1][1].verdict in ("kept", "broken")

    _run_in_turn(by_law, tried, began, deadline)
    known = list(dict.fromkeys(law.name for law, _, _ in planned))
    ordered = sorted((result for _, result in results), key=lambda result: known.index(result.law))
    by_name = {law.name: law for law, _, _ in planned}
    draft = Judgement(
        judged.form.name,
        Report(tuple(ordered), tuple(by_name.values()), seed),
        (),
        judged.declaration.xfail,
        _errors(ordered),
        {each[0][0].name: len(each) for each in by_law if each},
        0.0,
        str(device),
        {"torch": torch.__version__, "python": platform.python_version()},
        judged.inferred,
    )
    examples = tuple(counter_examples(judged, draft, results, device))
    return dataclasses.replace(draft, counter_examples=examples, seconds=time.monotonic() - began)


def _run_in_turn(
    by_law: Sequence[Sequence[Trial]], tried: Callable[[Trial], bool], began: float, deadline: float
) -> None:
    """Run the trials of laws until a deadline: first each law until it is tried once, then the laws in turn.

    A law is tried by a trial that the kernel does not refuse. The most important laws come first. The other laws spend
    at most a fiftieth of the time each on looking for such a trial, since a kernel may refuse all of them.
    """
    left = {number: deque(trials) for number, trials in enumerate(by_law)}
    names = [each[0][0].name if each else "" for each in by_law]
    for number in sorted(left, key=lambda one: CORE_LAWS.index(names[one]) if names[one] in CORE_LAWS else len(names)):
        share = torch.inf if names[number] in CORE_LAWS else (deadline - began) / 50
        until = min(deadline, time.monotonic() + share)
        while left[number] and time.monotonic() <= until and not tried(left[number].popleft()):
            pass
    while any(left.values()):
        for trials in left.values():
            if time.monotonic() > deadline:
                return
            if trials:
                tried(trials.popleft())


def _errors(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """Return the largest measured error by law and dtype, in units of the dtype's eps."""
    found: dict[tuple[str, str], float] = {}
    for result in results:
        error = result.roundings
        if error is not None:
            place = (result.law, str(result.dtype).removeprefix("torch."))
            found[place] = max(found.get(place, 0.0), error)
    return found
