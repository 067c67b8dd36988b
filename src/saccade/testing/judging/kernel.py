"""The kernel that `judge` examines, with its calling convention, its claims and its source."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.masks import Causal
from saccade.matrix import attention
from saccade.support.errors import unsupported, value_error
from saccade.support.language import Message, joined
from saccade.testing.adapters import FORMS, Form
from saccade.testing.case import Case
from saccade.testing.conformance import result_if_not_run, trials, try_law
from saccade.testing.drawn_cases import drawn, is_drawn
from saccade.testing.judging.declaration import DTYPES, Declaration
from saccade.testing.judging.fitting import fitted
from saccade.testing.judging.signature import mask_settings, options_of
from saccade.testing.judging.source import Source
from saccade.testing.kernel_under_test import OPTIONS, Claims, Subject
from saccade.testing.laws import Law
from saccade.testing.report import Result

Trial = tuple[Law, Case, torch.dtype]
USUAL_DTYPES = ("float64", "float32")
"""Names of the dtypes in which laws are tried if a kernel declares none."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel under test, with its form, its claims and its source.

    Attributes:
        form: the kernel, adapted to the laws' calling convention.
        declaration: the claims; `first_calls` adds those that the kernel's author left open.
        source: the location of the kernel.
        lse: a variant that returns ``(out, lse)``.
        inferred: the settings that were read from the signature, in TOML syntax; empty if none were.
        dtypes: names of the dtypes in which laws are tried; if None, the declared dtypes, or `USUAL_DTYPES` if none are
            declared.
        notes: sentences on what was read from the signature or shown by the first calls.
    """

    form: Form
    declaration: Declaration
    source: Source | None = None
    lse: Callable[..., Any] | None = None
    inferred: str = ""
    dtypes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, kernel: Callable[..., Any] | Form, declaration: Declaration, source: Source | None = None) -> Kernel:
        """Adapt a kernel with the form that its declaration names; a `Form` is used unchanged.

        If the declaration does not say how to pass the mask, the kernel's signature determines it.
        """
        if isinstance(kernel, Form):
            return cls(kernel, declaration, source)
        settings = dict(declaration.settings)
        if source is not None and source.is_library:
            return cls(FORMS["c"](kernel, source.name, **settings), declaration, source)
        if source is not None and source.is_operator:
            return cls(FORMS["operator"](source.name, **settings), declaration, source)
        read = mask_settings(kernel) if declaration.form == "layout" and _leaves_mask_open(declaration) else {}
        settings |= read
        if declaration.form in ("layout", "varlen", "paged", "block_sparse", "score_mod") and "offers" not in settings:
            known = (*OPTIONS, "q_positions", "kv_positions") if declaration.mask_objects else OPTIONS
            in_signature = options_of(kernel, settings.get("names", {}), known)
            settings["offers"] = in_signature if declaration.options is None else declaration.options
        lse = None if declaration.with_lse is None or source is None else source.load(declaration.with_lse)
        inferred = ", ".join(f'{name} = "{setting}"' for name, setting in read.items())
        sentence = Message("its signature has no mask and no causal flag: judged on full attention alone")
        notes = (sentence,) if read == {"masks": "none"} else ()
        return cls(FORMS[declaration.form](kernel, **settings), declaration, source, lse, inferred, notes=notes)

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
        """Run the variant that returns ``(out, lse)``, or raise an error for inputs outside the kernel's claims."""
        assert self.lse is not None
        why = self.reasons(query, key, value, mask, **options)
        why += tuple(Message("takes no {name}", name=name) for name in options if name not in self.form.offers)
        if why:
            raise unsupported(self.form.name, why)
        names = self.form.settings["names"]
        renamed = {names.get(name, name): option for name, option in options.items()}
        return self.lse(query, key, value, mask, **renamed)

    def right(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
        """Compute the correct output for inputs that the kernel claims to support, as a control for the laws."""
        why = self.reasons(query, key, value, mask, **options)
        if why:
            raise unsupported("the control", why)
        if self.form.truth is None:
            return attention(query, key, value, mask, **options)
        wide = (x.double() for x in (query, key, value))
        return self.form.truth(*wide, mask, **self.form.settings, **options).to(query.dtype)

    def subject(self, function: Callable[..., Any], device: torch.device | str) -> Subject:
        """Build a `Subject` for the laws from a function with the kernel's calling convention and claims."""
        return Subject(
            function,
            with_lse=None if self.lse is None else self.with_lse,
            masks="objects" if self.declaration.mask_objects else "dense",
            offers=self.form.offers,
            reasons=self.reasons,
            gqa=self.form.gqa and self.declaration.groups is not False,
            gradients=self.form.gradients and self.declaration.gradients is not False,
            claims=Claims(memory_exponent=self.declaration.memory_exponent),
            device=device,
        )

    def run_trial(self, subject: Subject, law: Law, case: Case, dtype: torch.dtype) -> Result:
        """Try a law on a case, and return the result.

        If the claims limit sizes or dtypes, a broken law counts only if a correct kernel satisfies it on the same case.
        """
        result = try_law(subject, law, case, dtype)
        claims = self.declaration
        if result.verdict != "broken" or not (claims.widths or claims.value_widths or claims.lengths or claims.dtypes):
            return result
        control = try_law(self.subject(self.right, subject.device), law, case, dtype)
        if control.verdict == "kept":
            return result
        message = Message("at the claimed sizes and dtypes, a correct kernel breaks it too")
        return dataclasses.replace(result, verdict="not applicable", message=message)

    def refuser(self, subject: Subject) -> Callable[[Law, Case, torch.dtype], Result | None]:
        """Return a function that returns the result of an excluded trial, and None for a trial that must run."""

        @functools.cache  # many laws are tried on one case
        def reasons_against(case: Case, dtype: torch.dtype) -> tuple[str, ...]:
            sized = drawn(case) if is_drawn(case) else case
            return subject.reasons_against(sized.problem(dtype, subject.device))

        def refused(law: Law, case: Case, dtype: torch.dtype) -> Result | None:
            """Return the result of a trial that need not run; None if it must run."""
            if law.non_finite and not self.declaration.non_finite:
                return Result(law.name, case.name, dtype, "not offered", Message("claims nothing about NaN and inf"))
            declined = result_if_not_run(subject, law, case, dtype)
            if declined is not None or law.needs is None:  # such a law is about what the kernel declines
                return declined
            why = reasons_against(case, dtype)
            return Result(law.name, case.name, dtype, "not offered", joined(why)) if why else None

        return refused

    def trials_by_law(
        self, laws: Sequence[str] | None, cases: Sequence[str] | None, dtypes: Sequence[torch.dtype] | None, seed: int
    ) -> list[list[Trial]]:
        """Return the trials of each law on cases that fit the claims, in an order that the seed determines.

        A causal case with as many queries as keys comes first, and one with fewer queries second, because most mistakes
        show there.

        Raises:
            ValueError: a name of a law or a case is unknown.
        """
        chosen = _named("laws", self.form.laws_to_check(), laws)

        @functools.cache  # laws share cases, and each computes its mask once
        def adapted(case: Case) -> Case:
            return fitted(case, self.declaration).with_seed(seed)

        fitting = [adapted(case) for case in _named("cases", self.form.cases_with_definition(), cases)]
        claimed = self.declaration.dtypes
        requested = dtypes or [DTYPES[name] for name in self.dtypes or claimed or USUAL_DTYPES]
        by_law = []
        for law in chosen:
            law_cases = None if law.cases is None else tuple(map(adapted, law.cases))
            law_dtypes = law.dtypes
            if claimed is not None and law_dtypes is not None:
                law_dtypes = tuple(x for x in law_dtypes if x in [DTYPES[name] for name in claimed])
                law_dtypes = law_dtypes or tuple(DTYPES[name] for name in claimed[:1])
            changed = dataclasses.replace(law, cases=law_cases, dtypes=law_dtypes)
            shuffled = list(trials([changed], fitting, requested))
            random.Random(seed).shuffle(shuffled)
            by_law.append(_causal_first(shuffled))
        return by_law


def _leaves_mask_open(declaration: Declaration) -> bool:
    """Return whether a declaration in the form "layout" leaves open how to pass the mask."""
    return not ({"masks", "mask_name"} & set(declaration.settings) or declaration.with_lse or declaration.mask_objects)


def _causal_first(trials: list[Trial]) -> list[Trial]:
    """Move a plain causal case with as many queries as keys to the front, followed by one with fewer queries."""
    causal = [
        trial
        for trial in trials
        if isinstance(trial[1].mask, Causal) and not (trial[1].needs or trial[1].explicit_positions)
    ]
    square = [trial for trial in causal if 1 < trial[1].q_len == trial[1].kv_len][:1]
    fewer = [trial for trial in causal if 1 < trial[1].q_len < trial[1].kv_len][:1]
    first = [*square, *fewer]
    return [*first, *(trial for trial in trials if not any(trial is each for each in first))]


def _named(argument: str, known: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
    """Return the laws or cases with the given names; all if ``names`` is None."""
    if names is None:
        return list(known)
    by_name = {item.name: item for item in known}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise value_error(argument, f"be among {', '.join(by_name)}", ", ".join(unknown))
    return [by_name[name] for name in names]
