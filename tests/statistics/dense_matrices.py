"""The cases as dense matrices."""

import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.testing import CASES, Case

__all__ = ["EVERY", "dense_of", "lags_of", "matrix_of"]


STRIDED = (
    Case("strided", masks.Strided(3), q_len=11, kv_len=17),
    Case("strided-causal", masks.Strided(3) & masks.Causal(), q_len=11, kv_len=17),
)
EVERY = [*CASES, *STRIDED]


def matrix_of(case: Case, dtype: torch.dtype = torch.float64) -> sc.AttentionMatrix:
    problem = case.problem(dtype)
    return sc.AttentionMatrix(problem.query, problem.key, problem.mask, **problem.options, **problem.positions)


def dense_of(case: Case, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the weights in float64 by the oracle, with the identity as values."""
    eye = torch.eye(case.kv_len, dtype=torch.float64).expand(case.batch, case.num_kv_heads, -1, -1)
    return case.problem(dtype).but(value=eye).truth()[0]


def lags_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return the distances of queries from keys, and the positions of keys, by the case's own positions."""
    positions = case.problem(torch.float64).positions
    q, kv = positions.get("q_positions"), positions.get("kv_positions")

    def listed(given: object, first: int, length: int) -> Tensor:
        if given is None:
            given = range(first, first + length)
        given = torch.tensor(given) if isinstance(given, range) else given
        return given.expand(case.batch, length)

    q = listed(q, case.kv_len - case.q_len, case.q_len)
    kv = listed(kv, 0, case.kv_len)
    return (q[:, None, :, None] - kv[:, None, None, :]), kv[:, None, None, :]
