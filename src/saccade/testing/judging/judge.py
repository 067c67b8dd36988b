"""`judge`: try all laws on a kernel, and shrink the inputs that break them."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import platform
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.matrix import attention
from saccade.support.errors import unsupported, value_error
from saccade.testing.adapters import FORMS, Form
from saccade.testing.case import Case
from saccade.testing.conformance import trials, try_law
from saccade.testing.drawn_cases import DRAWN_CASES, drawn
from saccade.testing.judging.declaration import DTYPES, Declaration
from saccade.testing.judging.fitting import fitted
from saccade.testing.judging.judgement import CounterExample, Judgement
from saccade.testing.judging.recorded_calls import RecordedCalls
from saccade.testing.judging.script import script_of
from saccade.testing.judging.shrinking import shrunk
from saccade.testing.judging.source import Source
from saccade.testing.kernel_under_test import OPTIONS, Claims, Subject
from saccade.testing.laws import Law
from saccade.testing.report import Report, Result
from saccade.testing.tolerances import tolerance

_SHRINKING = (5.0, 30.0)  # maximum seconds for one broken law, and for all
_FIXED = ("sizes", "gradients_at_sizes")  # laws at fixed sizes, to replace laws that draw sizes
_Trial = tuple[Law, Case, torch.dtype]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel under test, with its form, its claims and its source."""

    form: Form
    declaration: Declaration
    source: Source | None = None
    lse: Callable[..., Any] | None = None

    @classmethod
    def of(cls, kernel: Callable[..., Any] | Form, declaration: Declaration, source: Source | None = None) -> Kernel:
        """Adapt a kernel with the form that its declaration names; a `Form` is used unchanged."""
        if isinstance(kernel, Form):
            return cls(kernel, declaration, source)
        settings = dict(declaration.settings)
        if source is not None and source.is_library:
            return cls(FORMS["c"](kernel, source.name, **settings), declaration, source)
        if source is not None and source.is_operator:
            return cls(FORMS["operator"](source.name, **settings), declaration, source)
        if declaration.form in ("layout", "varlen", "paged", "block_sparse", "score_mod") and "offers" not in settings:
            options = _options_of(kernel, settings.get("names", {}), declaration)
            settings["offers"] = options
        lse = None if declaration.with_lse is None or source is None else source.load(declaration.with_lse)
        return cls(FORMS[declaration.form](kernel, **settings), declaration, source, lse)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
        """Run the kernel, or raise an error for inputs that it does not claim to support."""
        why = self.declaration.reasons(query, key, value, mask)
        if why:
            raise unsupported(self.form.name, (*why, *self.form.reasons(query, key, value, mask, **options)))
        return self.form(query, key, value, mask, **options)

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: object) -> tuple[str, ...]:
        """Return the reasons why the claims or the form exclude the inputs of a call; empty if they do not."""
        claims = self.declaration.reasons(query, key, value, mask)
        return (*claims, *self.form.reasons(query, key, value, mask, **options))

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        """Run the variant that returns ``(out, lse)``, or raise an error for inputs that the kernel does not claim."""
        assert self.lse is not None
        why = self.reasons(query, key, value, mask, **options)
        why += tuple(f"takes no {name}" for name in options if name not in self.form.offers)
        if why:
            raise unsupported(self.form.name, why)
        names = self.form.settings["names"]
        renamed = {names.get(name, name): option for name, option in options.items()}
        return self.lse(query, key, value, mask, **renamed)

    def right(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
        """Compute the correct output for inputs that the kernel claims, as a control for the laws."""
        why = self.reasons(query, key, value, mask, **options)
        if why:
            raise unsupported("the control", why)
        if self.form.truth is None:
            return attention(query, key, value, mask, **options)
        wide = (x.double() for x in (query, key, value))
        return self.form.truth(*wide, mask, **self.form.settings, **options).to(query.dtype)

    def subject(self, function: Callable[..., Any], device: torch.device | str) -> Subject:
        """Build a subject for the laws from a function with the kernel's calling convention and claims."""
        return Subject(
            function,
            with_lse=None if self.lse is None else self.with_lse,
            masks="objects" if self.declaration.mask_objects else "dense",
            offers=self.form.offers,
            reasons=self.reasons,
            gqa=self.form.gqa and self.declaration.groups,
            gradients=self.declaration.gradients,
            claims=Claims(memory_exponent=self.declaration.memory_exponent),
            device=device,
        )

    def tried(self, subject: Subject, law: Law, case: Case, dtype: torch.dtype) -> Result:
        """Try a law on a case.

        If the claims limit sizes, a broken law counts only if a correct kernel keeps the law on the same case.
        """
        result = try_law(subject, law, case, dtype)
        claims = self.declaration
        if result.verdict != "broken" or not (claims.widths or claims.value_widths or claims.lengths):
            return result
        control = try_law(self.subject(self.right, subject.device), law, case, dtype)
        if control.verdict == "kept":
            return result
        return dataclasses.replace(result, verdict="not applicable", message="not a case of the claimed sizes")

    def trials(
        self, laws: Sequence[str] | None, cases: Sequence[str] | None, dtypes: Sequence[torch.dtype] | None, seed: int
    ) -> list[_Trial]:
        """Return the trials of laws on cases that fit the claims. Laws take turns, and the seed determines the order.

        Raises:
            ValueError: a name of a law or a case is unknown.
        """
        chosen = _named("laws", self.form.chosen_laws(), laws)
        own = [fitted(case, self.declaration) for case in _named("cases", self.form.judged_cases(), cases)]
        claimed = self.declaration.dtypes
        asked = dtypes or [DTYPES[name] for name in claimed or ("float64", "float32")]
        by_law = []
        for law in chosen:
            law_cases = None if law.cases is None else tuple(fitted(case, self.declaration) for case in law.cases)
            law_dtypes = law.dtypes
            if claimed is not None and law_dtypes is not None:
                law_dtypes = tuple(x for x in law_dtypes if x in [DTYPES[name] for name in claimed])
                law_dtypes = law_dtypes or tuple(DTYPES[name] for name in claimed[:1])
            now = dataclasses.replace(law, cases=law_cases, dtypes=law_dtypes)
            found = list(trials([now], own, asked, seed))
            random.Random(seed).shuffle(found)
            by_law.append(found)
        rounds = itertools.zip_longest(*by_law)
        return [trial for each in rounds for trial in each if trial is not None]


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
    planned = judged.trials(laws, cases, dtypes, seed)
    results = list[tuple[_Trial, Result]]()
    for number, trial in enumerate(planned):
        if time.monotonic() > deadline:
            break
        if progress is not None:
            progress(number, len(planned), trial[0].name)
        results.append((trial, judged.tried(subject, *trial)))
    known = list(dict.fromkeys(law.name for law, _, _ in planned))
    ordered = sorted((result for _, result in results), key=lambda result: known.index(result.law))
    by_name = {law.name: law for law, _, _ in planned}
    draft = Judgement(
        judged.form.name,
        Report(tuple(ordered), tuple(by_name.values()), seed),
        (),
        judged.declaration.xfail,
        _errors(ordered),
        len(planned) - len(results),
        0.0,
        str(device),
        {"torch": torch.__version__, "python": platform.python_version()},
    )
    examples = tuple(_counter_examples(judged, draft, results, device))
    return dataclasses.replace(draft, counter_examples=examples, seconds=time.monotonic() - began)


def _counter_examples(
    judged: Kernel, draft: Judgement, results: Sequence[tuple[_Trial, Result]], device: torch.device | str
) -> Iterator[CounterExample]:
    """Yield the smallest counter-example of each law that is unexpectedly broken."""
    by_law: dict[str, list[tuple[_Trial, Result]]] = {}
    for trial, result in results:
        if result.verdict == "broken" and draft.reason(result) is None:
            by_law.setdefault(result.law, []).append((trial, result))
    seconds = min(_SHRINKING[0], _SHRINKING[1] / max(1, len(by_law)))
    for law in draft.report.laws:
        if law.name in by_law:
            trial, result = min(by_law[law.name], key=lambda pair: _size(pair[0][1]))
            yield counter_example(judged, trial, result, device, draft.report.seed, seconds)


def counter_example(
    judged: Kernel, trial: _Trial, result: Result, device: torch.device | str, seed: int, seconds: float = _SHRINKING[0]
) -> CounterExample:
    """Shrink a trial that broke a law to a smallest counter-example, and write a script that shows it.

    A smaller case counts only if a correct kernel keeps the law on it: on very small inputs, rounding may break a law.
    """
    law, case, dtype = _without_draws(judged, trial, device)
    subject, control = judged.subject(judged, device), judged.subject(judged.right, device)
    kind = _kind(result)

    def still_broken(candidate: Case) -> bool:
        is_broken = _kind(try_law(subject, law, candidate, dtype)) == kind
        return is_broken and try_law(control, law, candidate, dtype).verdict == "kept"

    if _kind(try_law(subject, law, case, dtype)) == kind:
        case = shrunk(case, still_broken, time.monotonic() + seconds)
    recorded = RecordedCalls(judged)
    again = try_law(judged.subject(recorded, device), law, case, dtype)
    inputs = _described(case, dtype, device)
    if again.verdict != "broken":
        why = "the law is not broken again: the result depends on earlier calls, or on chance"
        return CounterExample(result.law, result.message, inputs, no_script=why)
    words = [f"{law.name}: {law.statement}", again.message, inputs, f"Written by saccade judge, seed {seed}."]
    limits = (tolerance(dtype, "output"), tolerance(dtype, "gradient"))
    if judged.source is None:
        return CounterExample(result.law, again.message, inputs, no_script="the kernel does not come from a file")
    for calls in (*([call] for call in reversed(recorded.calls)), recorded.calls):
        script = script_of(judged.form, judged.source, calls, limits, words)
        shows = [] if script is None else script.faults(judged.source.load())
        if script is not None and shows:
            return CounterExample(result.law, again.message, inputs, tuple(shows), script.text)
    why = "no call of the law is wrong by itself, or its inputs cannot be written"
    return CounterExample(result.law, again.message, inputs, no_script=why)


def _without_draws(judged: Kernel, trial: _Trial, device: torch.device | str) -> _Trial:
    """Replace a trial that draws sizes by a broken trial of another law at the same, fixed sizes, if there is one."""
    if trial[1].name not in {case.name for case in DRAWN_CASES}:
        return trial
    law, case, dtype = trial
    fixed = drawn(case)
    for other in judged.form.chosen_laws():
        subject = judged.subject(judged, device)
        if other.name in _FIXED and try_law(subject, other, fixed, dtype).verdict == "broken":
            return other, fixed, dtype
    return law, case, dtype


def _described(case: Case, dtype: torch.dtype, device: torch.device | str) -> str:
    """Return the shapes, the dtype and the mask of a case in one line."""
    problem = case.problem(dtype, device)
    shapes = ", ".join(f"{name} {list(getattr(problem, name).shape)}" for name in ("query", "key", "value"))
    mask = "no mask" if case.mask is None else str(case.mask)
    placed = ", with positions" if case.explicit_positions else ""
    return f"{shapes}, {str(dtype).removeprefix('torch.')}, {mask}{placed}"


def _kind(result: Result) -> str:
    """Return how a law is broken, to compare two counter-examples; empty if it is not broken."""
    if result.verdict != "broken":
        return ""
    return result.message.partition(":")[0] if result.message.startswith("raised ") else "broken"


def _size(case: Case) -> tuple[bool, int]:
    return bool(case.explicit_positions), case.batch * case.num_heads * max(1, case.q_len) * max(
        1, case.kv_len
    ) * case.head_dim


def _errors(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """Return the largest measured error by law and dtype, in units of the dtype's eps."""
    found: dict[tuple[str, str], float] = {}
    for result in results:
        error = result.roundings
        if error is not None:
            place = (result.law, str(result.dtype).removeprefix("torch."))
            found[place] = max(found.get(place, 0.0), error)
    return found


def _options_of(kernel: Callable[..., Any], names: dict[str, str], declaration: Declaration) -> tuple[str, ...]:
    """Return the options that a kernel declares; if it declares none, those found in its signature.

    ``names`` maps the options to the names that the kernel uses for them.
    """
    if declaration.options is not None:
        return declaration.options
    try:
        parameters = set(inspect.signature(kernel).parameters)
    except (TypeError, ValueError):  # a builtin has no signature
        return ()
    known = (*OPTIONS, "q_positions", "kv_positions") if declaration.mask_objects else OPTIONS
    return tuple(name for name in known if names.get(name, name) in parameters and name != "relative")


def _named(argument: str, known: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    """Return the laws or cases with the given names; all if ``names`` is None."""
    if names is None:
        return list(known)
    by_name = {one.name: one for one in known}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise value_error(argument, f"be among {', '.join(by_name)}", ", ".join(unknown))
    return [by_name[name] for name in names]
