"""User-defined score functions, like FlexAttention's ``score_mod``. Each call changes the scores of an entire tile."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.scores.base import ScoreMod
from saccade.support.errors import kind, type_error, value_error


@dataclasses.dataclass(frozen=True, eq=False)
class Modification:
    """A user's score function (``score_mod``) and the captured tensors that need gradients.

    Args:
        function: ``(score, b, h, q, kv) -> score``.
        leaves: tensors that require gradients and that the function's results depend on.
    """

    function: ScoreMod
    leaves: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, function: ScoreMod, place: tuple[Tensor, ...], dtype: torch.dtype) -> Modification:
        """Create the modification. The function is called on one pair to find captured tensors that need gradients.

        Args:
            function: the user's score function.
            place: batch item, head, query position and key position of the pair, int64 ``[1, 1, 1, 1]`` each.
            dtype: the dtype of the scores.
        """
        answer = _call_function(function, torch.zeros(1, 1, 1, 1, dtype=dtype, device=place[0].device), place)
        return cls(function, tuple(_captured_leaves(answer)))

    def __call__(self, scores: Tensor, place: tuple[Tensor, ...]) -> Tensor:
        """Return the scores of a tile, ``[batch, heads, rows, columns]``, changed by the user's function."""
        return _call_function(self.function, scores, place)

    def gradients(
        self, grad: Tensor, scores: Tensor, place: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """Return the gradients with respect to the unmodified scores and to the captured tensors."""
        scores = scores.detach().requires_grad_()
        with torch.enable_grad():
            answer = self(scores.clone(), place)  # a copy, because the function may modify it in place
        if not answer.requires_grad:
            return None, (None,) * len(self.leaves)
        # Captured tensors may be computed from leaves; the graph from the leaves is traversed again for each tile.
        of_scores, *others = torch.autograd.grad(
            answer, (scores, *self.leaves), grad, allow_unused=True, retain_graph=bool(self.leaves)
        )
        return of_scores, tuple(others)


def _call_function(function: ScoreMod, scores: Tensor, place: tuple[Tensor, ...]) -> Tensor:
    answer = function(scores, *place)
    rule = "return a number for each score: (score, b, h, q, kv) -> score, all tensors"
    if not isinstance(answer, Tensor):
        raise type_error("the function of scores", rule, kind(answer))
    if answer.is_floating_point() is False:
        hint = "a function (b, h, q, kv) -> bool is a mask: pass it as mask=" if answer.dtype == torch.bool else None
        raise type_error("the function of scores", rule, str(answer.dtype), hint=hint)
    if answer is scores:
        return scores
    try:
        # Copy, because the caller modifies the result, and the function may return a tensor that it stores.
        return answer.to(scores.dtype).expand(scores.shape).clone()
    except RuntimeError:
        hint = "b, h, q and kv are tensors of four dimensions that broadcast, as in table[h, q - kv]"
        got = f"{list(answer.shape)} for {list(scores.shape)}"
        raise value_error("the function of scores", rule, got, hint=hint) from None


def _captured_leaves(answer: Tensor) -> list[Tensor]:
    """Return the leaf tensors to which autograd would pass gradients from a score function's result."""
    nodes, seen, leaves = [answer.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves
