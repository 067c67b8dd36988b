"""`with_definition`: give a case a definition of its expected output other than softmax attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.testing.case import Case
from saccade.testing.problem import Problem

Definition = Callable[[Problem], Tensor]
"""A function that computes the expected output of a problem, float64 ``[batch, heads, q_len, value_dim]``."""


def with_definition(case: Case, definition: Definition) -> Case:
    """Return a copy of the case that computes its expected output with ``definition``; the expected lse is NaN."""
    return _DefinedCase(**_fields(case), definition=definition)


@dataclasses.dataclass(frozen=True)
class _DefinedCase(Case):
    """A case whose expected output is computed by its own definition instead of softmax attention."""

    definition: Definition | None = None

    def problem(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Problem:
        return _DefinedProblem(**_fields(super().problem(dtype, device)), definition=self.definition)


@dataclasses.dataclass(frozen=True, eq=False)
class _DefinedProblem(Problem):
    """A problem whose expected output is computed by its own definition instead of softmax attention."""

    definition: Definition | None = None

    def truth(self) -> tuple[Tensor, Tensor]:
        assert self.definition is not None
        out = self.definition(self)
        return out, out.new_full(out.shape[:3], torch.nan)


def _fields(case: Case | Problem) -> dict[str, Any]:
    return {field.name: getattr(case, field.name) for field in dataclasses.fields(case) if field.name != "definition"}
