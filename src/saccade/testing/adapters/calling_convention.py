"""The `Form` class: a kernel with its own calling convention, adapted for `saccade.testing.check`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from saccade.positions import Bias
from saccade.support.errors import type_error, unsupported
from saccade.support.language import Message
from saccade.testing.case import Case
from saccade.testing.cases import CASES
from saccade.testing.conformance import check
from saccade.testing.defined_case import Definition, with_definition
from saccade.testing.laws import LAWS, SIZE_LAWS, Law
from saccade.testing.problem import Problem
from saccade.testing.report import Report

_Target = TypeVar("_Target")


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel with its own calling convention, and a function that converts inputs and output for it.

    Calling the form with ``(query, key, value, mask, **options)`` in the layout ``[batch, heads, len, head_dim]`` runs
    the kernel, or raises `UnsupportedError` with all reasons why the kernel cannot take the inputs.

    Attributes:
        kernel: the original kernel.
        run: ``run(kernel, query, key, value, mask, **settings, **options)`` calls the kernel. It uses only torch, so
            that its source can be copied into a script.
        settings: arguments of ``run`` that describe the calling convention.
        why: ``why(query, key, value, mask, **settings)`` returns reasons why the calling convention cannot express the
            inputs.
        offers: names of the options that the kernel supports.
        gqa: whether the kernel supports fewer key heads than query heads.
        parts: functions and classes that ``run`` uses; scripts contain copies of them.
        truth: ``truth(query, key, value, mask, **settings, **options)`` returns the expected output in float64; None
            for softmax attention. Like ``run``, it uses only torch.
        left_out: names of laws that do not hold for ``truth``.
        laws: additional laws for this form.
        cases: additional cases for this form.
        gradients: whether the kernel has a backward pass; if not, laws check only the output.
    """

    kernel: Any
    run: Callable[..., Any]
    why: Callable[..., tuple[str, ...]]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    offers: tuple[str, ...] = ()
    gqa: bool = True
    parts: tuple[Callable[..., Any], ...] = ()
    truth: Callable[..., Tensor] | None = None
    left_out: tuple[str, ...] = ()
    laws: tuple[Law, ...] = ()
    cases: tuple[Case, ...] = ()
    gradients: bool = True

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
        """Run the kernel and return its output ``[batch, heads, q_len, value_dim]``."""
        used = ["relative" if isinstance(option, Bias) else name for name, option in options.items()]
        reasons: list[str] = [Message("takes no {name}", name=name) for name in used if name not in self.offers]
        if not self.gqa and query.shape[1] != key.shape[1]:
            reasons.append(Message("takes no grouped heads"))
        reasons += self.reasons(query, key, value, mask, **options)
        if reasons:
            raise unsupported(self.name, reasons)
        return self.run(self.kernel, query, key, value, mask, **self.settings, **options)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.settings.get("name") or getattr(self.kernel, "__name__", type(self.kernel).__name__))

    @property
    def definition(self) -> Definition | None:
        """A function that computes the expected output of a problem; None if the kernel computes softmax attention."""
        truth = self.truth
        if truth is None:
            return None

        def expected_output(problem: Problem) -> Tensor:
            tensors = (x.double() for x in (problem.query, problem.key, problem.value))
            options = {} if problem.scale is None else {"scale": problem.scale}
            return truth(*tensors, problem.allowed, **self.settings, **options)

        return expected_output

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: object) -> tuple[str, ...]:
        """Return the reasons why the calling convention cannot express the inputs; empty if it can."""
        return self.why(query, key, value, mask, **self.settings)

    def check(self, **options: Any) -> Report:
        """Check the kernel with `saccade.testing.check`; ``options`` are further arguments of that function.

        Raises:
            TypeError: an option belongs to the adapter that built the form, such as ``gqa`` or ``offers``.
        """
        for name in ("gqa", "offers", "reasons"):
            if name in options:
                adapter = self.run.__module__.rpartition(".")[2].removesuffix("s")
                hint = f"adapters.{adapter}(kernel, {name}={options[name]!r}).check()"
                raise type_error(name, f"be passed to the adapter, as in {hint}", f"check({name}={options[name]!r})")
        options.setdefault("gradients", self.gradients)
        given = options.pop("laws", None)
        laws = self.laws_to_check() if given is None else [self.law_with_definition(law) for law in given]
        if options.get("cases") is not None or self.truth is not None or self.cases:
            options["cases"] = self.cases_with_definition(options.get("cases"))
        return check(self, offers=self.offers, reasons=self.reasons, gqa=self.gqa, laws=laws, **options)

    def laws_to_check(self) -> list[Law]:
        """Return the laws to check the kernel with: the standard laws except ``left_out``, and the additional laws."""
        laws = (law for law in (*LAWS, *SIZE_LAWS, *self.laws) if law.name not in self.left_out)
        return [law for law in map(self.law_with_definition, laws) if isinstance(law, Law)]

    def law_with_definition(self, law: Law | str) -> Law | str:
        """Return the law; if the form has a definition, it gives the expected output of the law's own cases."""
        definition = self.definition
        if definition is None or isinstance(law, str) or law.cases is None:
            return law
        return dataclasses.replace(law, cases=tuple(with_definition(case, definition) for case in law.cases))

    def cases_with_definition(self, cases: tuple[Case | str, ...] | None = None) -> list[Case]:
        """Return the cases; if the form has a definition, it gives their expected output.

        If ``cases`` is None, return the standard cases and the additional cases of this form.
        """
        by_name = {case.name: case for case in (*CASES, *self.cases)}
        chosen = (
            (*CASES, *self.cases) if cases is None else tuple(by_name[x] if isinstance(x, str) else x for x in cases)
        )
        definition = self.definition
        return list(chosen) if definition is None else [with_definition(case, definition) for case in chosen]


def check_kernel_callable(kernel: _Target) -> _Target:
    """Raise an error if the kernel is not callable, otherwise return it."""
    if not callable(kernel):
        raise type_error("kernel", "be callable", type(kernel).__name__)
    return kernel
