"""The adapter for operators registered with ``torch.library``, and a law about their registration."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from saccade.support.errors import value_error
from saccade.testing.adapters.calling_convention import Form
from saccade.testing.adapters.layouts import layout
from saccade.testing.case import Case
from saccade.testing.kernel_under_test import OPTIONS, Subject
from saccade.testing.laws import Law
from saccade.testing.laws.expect import LawBroken
from saccade.testing.laws.law import law


def operator(name: str, order: str = "bhld", **options: Any) -> Form:
    """Adapt an operator registered with ``torch.library``, by its name, such as "mylib::attention".

    Its options are read from its argument names, unless ``offers=`` lists them. In addition to all other laws,
    `torch.library.opcheck` tests its schema, its fake implementation, and its registration for gradients and
    compilation.

    Args:
        name: namespace and name.
        order, options: as for `layout`.

    Raises:
        ValueError: no operator with this name is registered.
    """
    namespace, separator, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None) if separator else None
    if packet is None:
        raise value_error("name", "be the name of a registered operator, namespace::name", repr(name))
    taken = {argument.name for argument in packet.default._schema.arguments}
    options.setdefault("offers", tuple(option for option in OPTIONS if option in taken))
    form = layout(packet.default, order, **options)
    return dataclasses.replace(form, laws=(_opcheck(form),))


def _opcheck(form: Form) -> Law:
    """Build a law that runs `torch.library.opcheck` on an operator, with the arguments that the form passes to it."""

    @law(cases=(Case("opcheck"), Case("opcheck-one-head", num_heads=1, num_kv_heads=1)), dtypes=(torch.float32,))
    def opcheck(subject: Subject, case: Case, dtype: torch.dtype) -> None:
        """The operator's schema, fake implementation and registrations are those that torch.library requires."""
        problem = case.problem(dtype, subject.device)
        problem = (problem if form.gqa else problem.ungrouped()).leaves()
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def remember(*arguments: Any, **keywords: Any) -> Any:
            calls.append((arguments, keywords))
            return form.kernel(*arguments, **keywords)

        form.run(remember, problem.query, problem.key, problem.value, problem.allowed, **form.settings)
        for arguments, keywords in calls:
            try:
                torch.library.opcheck(form.kernel, arguments, keywords)
            except Exception as error:  # it raises errors of many classes
                lines = [line for line in str(error).splitlines() if line.strip()]
                raise LawBroken(f"torch.library.opcheck: {' '.join(lines[:2])[:300]}") from None

    return opcheck
