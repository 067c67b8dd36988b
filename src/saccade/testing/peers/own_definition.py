"""A case that is judged by another definition than softmax attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.testing.case import Case
from saccade.testing.problem import Problem

__all__ = ["Definition", "own"]

Definition = Callable[["Problem"], Tensor]


def own(case: Case, definition: Definition) -> Case:
    """The case, its truth being ``definition(problem)``, float64 ``[batch, heads, q_len, value_dim]``."""
    return _OwnCase(**_fields(case), definition=definition)


@dataclasses.dataclass(frozen=True)
class _OwnCase(Case):
    definition: Definition | None = None

    def problem(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Problem:
        return _OwnProblem(**_fields(super().problem(dtype, device)), definition=self.definition)


@dataclasses.dataclass(frozen=True, eq=False)
class _OwnProblem(Problem):
    definition: Definition | None = None

    def truth(self) -> tuple[Tensor, Tensor]:
        assert self.definition is not None  # `own` has given one
        out = self.definition(self)
        return out, out.new_full(out.shape[:3], torch.nan)  # there is no lse, and nobody is asked for it


def _fields(of: Case | Problem) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}
