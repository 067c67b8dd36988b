"""Mesa: a recurrence in which each token reads a least-squares fit of all values so far to their keys (MesaNet)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from saccade.mechanisms.checked_mechanism import Inputs
from saccade.mechanisms.readable_tensors import is_readable
from saccade.mechanisms.recurrences.mechanism import GatedRecurrence, check_decay_of_tokens
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.mechanisms.recurrences.recurrence_spec import CHUNK, Rule
from saccade.support.errors import value_error
from saccade.support.torch_modes import is_transformed
from saccade.support.validation import check_number, register_tensor


class MesaMatrix(RecurrenceMatrix):
    """The lazy matrix of `Mesa`: a recurrence whose queries are solutions of linear systems, solved for each product.

    A state is H followed by S (see `Mesa`), ``[head_dim, head_dim + value_dim]``.
    """

    def with_ridge(self, ridge: Tensor) -> MesaMatrix:
        """Return a copy of the matrix with the ridge Λ, ``[heads, head_dim]``."""
        matrix, (lines, length, head_dim) = copy.copy(self), self._rule.key.shape
        rows = ridge.repeat(lines // max(1, len(ridge)), 1)[:, None]
        matrix._rule = self._rule._replace(extras=(rows.expand(-1, length, head_dim),))
        return matrix

    def _state_size(self, value_dim: int) -> tuple[int, int]:
        head_dim = self._rule.key.shape[2]
        return head_dim, head_dim + value_dim

    def _run(self, rule: Rule, value: Tensor, state: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor]:
        of_keys, of_values = state.split([rule.key.shape[2], value.shape[2]], 2)
        rule, last = _solved(rule, of_keys, segment, self.shape[2])
        out, after = super()._run(rule, value, of_values, segment)
        return out, torch.cat([last, after], 2)

    def _transposed(self, rule: Rule, x: Tensor) -> Tensor:
        return super()._transposed(_solved(rule, None, self._segment_of(rule), x.shape[1])[0], x)

    @staticmethod
    def _segment_of(rule: Rule) -> Tensor | None:
        return None if rule.segments is None or not rule.segments.shape[1] else rule.segments[:, 0]


class Mesa(GatedRecurrence):
    r"""The mesa layer: each token reads the ridge regression of all values so far on their keys.

    .. math:: H_t = e^{g_t} H_{t-1} + \beta_t k_t k_t^T, \qquad S_t = e^{g_t} S_{t-1} + \beta_t k_t v_t^T, \qquad
              o_t = S_t^T (H_t + \Lambda)^{-1} q_t

    .. math:: A_{ij} = \beta_j \exp \Big( \sum_{t=j+1}^{i} g_t \Big)\, q_i^T (H_i + \Lambda)^{-1} k_j

    This is `GatedLinear` with the queries :math:`(H_t + \Lambda)^{-1} q_t`, so its matrix has the same structure. The
    paper approximates the inverse with 30 steps of conjugate gradients; here, each token's system is solved exactly,
    by a Cholesky factorization.

    Args:
        ridge: Λ, above 0: a number, or a tensor ``[heads | 1, head_dim]``; an ``nn.Parameter`` is trained.

    Raises:
        ValueError: the ridge is not above 0, or so small that a system has no solution in the dtype of the inputs (in
            float32 for half precision); a beta is below 0, a decay is above 0, there is a decay for each channel, or a
            shape is wrong.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that
            depend only on keys (Padding).

    Cost: as for `GatedLinear`, plus ``head_dim ** 3 / 3`` multiplications for each token and head. Every product and
    every block of rows solves the systems again. The backward pass stores one state for every 32 tokens. For decoding,
    a `saccade.caches.RecurrentCache` stores ``head_dim * (head_dim + value_dim)`` elements per head.

    Example:
        >>> from saccade.masks import Causal
        >>> key = torch.eye(2)[[0, 0, 1, 0]][None, None]  # the first two tokens and the last have the same key
        >>> Mesa(ridge=1.0)(key, key, mask=Causal())[0, 0]
        tensor([[0.5000, 0.0000, 0.0000, 0.0000],
                [0.3333, 0.3333, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.0000],
                [0.2500, 0.2500, 0.0000, 0.2500]])

    Reference: von Oswald et al. 2025, arXiv:2506.05233, section 2.
    """

    matrix_class = MesaMatrix
    ridge: Tensor

    def __init__(self, ridge: float | Tensor = 1.0):
        super().__init__(scale=1.0)
        if not isinstance(ridge, Tensor):
            ridge = torch.tensor([[check_number("ridge", ridge, above=0)]], dtype=torch.float64)
        if ridge.dim() != 2 or not ridge.is_floating_point():
            raise value_error("ridge", "be a number or a float tensor [heads | 1, head_dim]", list(ridge.shape))
        register_tensor(self, "ridge", ridge)

    def _matrix(self, inputs: Inputs, decay: Tensor | None, beta: Tensor | None) -> RecurrenceMatrix:
        head_dim = inputs.key.shape[3]
        check_decay_of_tokens(decay, "with a decay for each channel, the state H of the keys would not be symmetric")
        if beta is not None and is_readable(beta) and bool((low := (beta < 0) & beta.isfinite()).any()):
            raise value_error("beta", "be at least 0", f"{float(beta[low].min()):.3g}")
        ridge = self.ridge
        if is_readable(ridge) and bool((bad := ~((ridge > 0) & ridge.isfinite())).any()):
            raise value_error("ridge", "be above 0 and finite", f"{float(ridge[bad][0]):.3g}")
        matrix = self._recurrence(inputs, decay, beta)
        heads = matrix.shape[1]
        if ridge.shape[0] not in (1, heads) or ridge.shape[1] not in (1, head_dim):
            raise value_error("ridge", f"have shape [{heads} | 1, {head_dim}]", list(ridge.shape))
        assert isinstance(matrix, MesaMatrix)
        return matrix.with_ridge(ridge.to(inputs.wide).expand(heads, head_dim))

    def extra_repr(self) -> str:
        return f"ridge={[round(x, 3) for x in self.ridge.flatten().tolist()[:4]]}"


def _solved(rule: Rule, state: Tensor | None, segment: Tensor | None, rows: int | None = None) -> tuple[Rule, Tensor]:
    """Return the recurrence with the queries ``(H_t + ridge)⁻¹ q_t``, and H after the last token.

    Args:
        rule: the recurrence, with a ridge.
        state, segment: H before the first token, ``[sequences, head_dim, head_dim]``, and its segment.
        rows: number of last queries for which to solve the systems; None for all. The other queries may become 0.
    """
    lines, length, head_dim = rule.key.shape
    state = rule.key.new_zeros(lines, head_dim, head_dim) if state is None else state
    first = 0 if rows is None else length - rows
    queries = []
    solve: Callable[..., tuple[Tensor, Tensor]] = _solve_chunk
    is_recorded = torch.is_grad_enabled() or is_transformed() or torch.compiler.is_compiling()
    if torch.is_grad_enabled() and not is_transformed() and not torch.compiler.is_compiling():
        solve = partial(checkpoint, _solve_chunk, use_reentrant=False)
    out = rule.query if is_recorded else torch.empty_like(rule.query)  # separate small parts would fragment the heap
    for start in range(0, length if lines else 0, CHUNK):
        part = rule.of(slice(None), slice(start, start + CHUNK))
        query, state = solve(part, state, segment, start + CHUNK > first)
        segment = None if part.segments is None else part.segments[:, -1]
        if is_recorded:
            queries.append(query)
        else:
            out[:, start : start + CHUNK] = query
    return rule._replace(query=torch.cat(queries, 1) if queries else out, extras=()), state


def _solve_chunk(rule: Rule, state: Tensor, segment: Tensor | None, is_read: bool) -> tuple[Tensor, Tensor]:
    """Solve the linear systems of the tokens in a chunk. Return the solutions and H after the chunk.

    Unless ``is_read``, only H is computed, and the solutions are 0.
    """
    query, key, decay, beta, segments = rule[:5]
    (ridge,) = rule.extras
    length = key.shape[1]
    sums = key.new_zeros(len(key), length, dtype=torch.float64) if decay is None else decay[..., 0].double().cumsum(1)
    rows = slice(None) if is_read else slice(length - 1, None)
    later = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)[rows]
    logs = (sums[:, rows, None] - sums[:, None]).masked_fill(later, -torch.inf)
    carried = sums[:, rows]
    if segments is not None and segment is not None:
        logs = logs.masked_fill(segments[:, rows, None] != segments[:, None], -torch.inf)
        carried = carried.masked_fill(segments[:, rows] != segment[:, None], -torch.inf)
    weights = logs.exp().to(key.dtype)
    weights = weights if beta is None else weights * beta.mT
    own = (weights @ (key[..., None] * key[:, :, None]).flatten(2)).unflatten(2, key.shape[2:] * 2)
    own = own + carried.exp().to(key.dtype)[..., None, None] * state[:, None]
    if not is_read:
        return torch.zeros_like(query), own[:, -1].clone()
    try:
        factor = torch.linalg.cholesky(own + torch.diag_embed(ridge))
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        must = f"be large enough that the state H of the keys plus ridge has an inverse in {key.dtype}"
        hint = "scale keys to norm 1, increase ridge, or pass float64 tensors"
        raise value_error("ridge", must, f"{float(ridge.min()):.3g}", hint=hint) from error
    return torch.cholesky_solve(query[..., None], factor)[..., 0], own[:, -1].clone()
