"""A law about side effects of a call on torch and on this package."""

from __future__ import annotations

import torch

from saccade.support.language import Message, joined
from saccade.testing.case import Case
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws.backward import gradients
from saccade.testing.laws.expect import holds
from saccade.testing.laws.law import law
from saccade.testing.size_cases import SHORT_CASES


@law(cases=SHORT_CASES[:2], dtypes=(torch.float32,))
def outside(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """No call replaces a function of torch or of this package, or changes a setting of torch.

    Functions and settings are compared with those before the first call of a run, and restored.
    """
    problem = case.problem(dtype, subject.device)
    try:
        subject.output(problem)
        gradients(subject, problem)
    finally:
        changed = subject.surroundings.restore()
    holds(not changed, Message("after a call, {changed}", changed=joined(changed[:3])))


LAWS = (outside,)
