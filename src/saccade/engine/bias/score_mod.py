"""A function that changes scores pair by pair, as FlexAttention's ``score_mod`` does: asked a tile at a time."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.scores.base import ScoreMod
from saccade.support.errors import kind, type_error, value_error


@dataclasses.dataclass(frozen=True, eq=False)
class Modification:
    """A user's function of scores, and the tensors that gradients of it are taken of.

    Args:
        function: ``(score, b, h, q, kv) -> score``.
        leaves: tensors that require gradients and that its answers depend on.
    """

    function: ScoreMod
    leaves: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, function: ScoreMod, place: tuple[Tensor, ...], dtype: torch.dtype) -> Modification:
        """Ask the function about one pair, and find what it reads that is trained.

        Args:
            function: the user's.
            place: batch item, head and positions of the pair, int64 ``[1, 1, 1, 1]``.
            dtype: of scores.
        """
        answer = _asked(function, torch.zeros(1, 1, 1, 1, dtype=dtype, device=place[0].device), place)
        return cls(function, tuple(_leaves(answer)))

    def __call__(self, scores: Tensor, place: tuple[Tensor, ...]) -> Tensor:
        """Other scores ``[batch, heads, rows, columns]`` for these, at indices that broadcast to them."""
        return _asked(self.function, scores, place)

    def gradients(
        self, grad: Tensor, scores: Tensor, place: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
        """Return gradients of the scores and of the leaves, from that of the function's result."""
        scores = scores.detach().requires_grad_()
        with torch.enable_grad():
            answer = self(scores.clone(), place)  # which the function may write into
        if not answer.requires_grad:
            return None, (None,) * len(self.leaves)
        # What the function has captured may be computed from leaves; that is gone through for every tile.
        of_scores, *others = torch.autograd.grad(
            answer, (scores, *self.leaves), grad, allow_unused=True, retain_graph=bool(self.leaves)
        )
        return of_scores, tuple(others)


def _asked(function: ScoreMod, scores: Tensor, place: tuple[Tensor, ...]) -> Tensor:
    answer = function(scores, *place)
    rule = "give a number for each score: (score, b, h, q, kv) -> score, all tensors"
    if not isinstance(answer, Tensor):
        raise type_error("the function of scores", rule, kind(answer))
    if answer.is_floating_point() is False:
        hint = "a function (b, h, q, kv) -> bool is a mask: pass it as mask=" if answer.dtype == torch.bool else None
        raise type_error("the function of scores", rule, str(answer.dtype), hint=hint)
    if answer is scores:
        return scores
    try:
        # A copy, for whoever asks writes into it, and it may be what the function keeps.
        return answer.to(scores.dtype).expand(scores.shape).clone()
    except RuntimeError:
        hint = "b, h, q and kv are tensors of four dimensions that broadcast, as in table[h, q - kv]"
        got = f"{list(answer.shape)} for {list(scores.shape)}"
        raise value_error("the function of scores", rule, got, hint=hint) from None


def _leaves(answer: Tensor) -> list[Tensor]:
    """Return the tensors that autograd would add gradients to."""
    nodes, seen, found = [answer.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return found
