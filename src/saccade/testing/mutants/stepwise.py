"""A correct attention, taken apart into steps: each mutant gets one of them wrong."""

import torch
from torch import Tensor

from saccade.errors import unsupported

__all__ = ["Stepwise"]


class Stepwise:
    """Exact attention for a bool mask, some rows at a time; keeps every law, slowly.

    A forbidden key or value is replaced by 0 before anything is multiplied with it: 0 * NaN is NaN. It has no
    dropout, and says so beforehand.
    """

    rows_at_once: int = 64
    offers: tuple[str, ...] | None = ("bias", "scale", "softcap")

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        *,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """The output, ``[batch, heads, q_len, value_dim]``."""
        # fmt: off
        return self.with_lse(
            query, key, value, mask, bias=bias, scale=scale, softcap=softcap, dropout_p=dropout_p
        )[0]
        # fmt: on

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: object) -> tuple[str, ...]:
        """Why it will not run these inputs; empty if it will."""
        del query, key, value, mask
        return ("it has no dropout",) if options.get("dropout_p") else ()

    def with_lse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        *,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout_p: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """The output and the lse of each row."""
        self.refuse(softcap, dropout_p)
        query, allowed = self.take(query), self.read(mask)
        blocks = []
        for first in range(0, max(query.shape[2], 1), self.rows_at_once):
            rows = slice(first, first + self.rows_at_once)
            added = bias
            if bias is not None and bias.shape[2] > 1:
                added = bias[:, :, rows]
            part = query[:, :, rows], key, value, allowed[:, :, rows]
            blocks.append(self.block(*part, bias=added, scale=scale, softcap=softcap))
        outs, lses = zip(*blocks, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def block(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed: Tensor,
        *,
        bias: Tensor | None,
        scale: float | None,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) of a few rows."""
        wide = torch.promote_types(query.dtype, torch.float32)
        repeats = query.shape[1] // key.shape[1]
        k, v = self.share(key.to(wide), repeats), self.share(value.to(wide), repeats)
        scores = self.scores(query.to(wide), k, allowed, self.factor(scale, query.shape[3]))
        scores = self.add(self.cap(scores, softcap), bias)
        weights, lse = self.normalise(scores, allowed)
        return self.give(self.product(weights, v, allowed), query.dtype), lse

    def refuse(self, softcap: float | None, dropout_p: float) -> None:
        """Raise an error for what it does not run."""
        del softcap
        if dropout_p:
            raise unsupported("stepwise", "it", ("it has no dropout",))

    def take(self, query: Tensor) -> Tensor:
        """The query as it was handed over."""
        return query

    def give(self, out: Tensor, dtype: torch.dtype) -> Tensor:
        """The output as it is handed back, in the dtype of the query."""
        return out.to(dtype)

    def read(self, mask: Tensor) -> Tensor:
        """The mask, True = may attend."""
        return mask

    def share(self, x: Tensor, repeats: int) -> Tensor:
        """Each head's keys or values: head h reads group h // repeats."""
        return x.repeat_interleave(repeats, dim=1)

    def factor(self, scale: float | None, head_dim: int) -> float:
        """What scores are multiplied by."""
        return head_dim**-0.5 if scale is None else scale

    def scores(self, query: Tensor, key: Tensor, allowed: Tensor, factor: float) -> Tensor:
        """Scaled scores, ``[batch, heads, rows, kv_len]``."""
        seen = torch.where(allowed[..., None], key[:, :, None], 0.0)
        return (query[:, :, :, None] * seen).sum(-1) * factor

    def cap(self, scores: Tensor, softcap: float | None) -> Tensor:
        """Soft-capped scores."""
        return scores if softcap is None else softcap * torch.tanh(scores / softcap)

    def add(self, scores: Tensor, bias: Tensor | None) -> Tensor:
        """Scores with their bias."""
        return scores if bias is None else scores + bias

    def normalise(self, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and lse; a row that sees nothing has weights 0 and lse -inf."""
        some = allowed.any(-1, keepdim=True)
        scores = scores.masked_fill(~(allowed | ~some), -torch.inf)
        weights = torch.where(some, scores.softmax(-1), 0.0)
        return weights, torch.where(some[..., 0], scores.logsumexp(-1), -torch.inf)

    def product(self, weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
        """Weights times values."""
        seen = torch.where(allowed[..., None], value[:, :, None], 0.0)
        return (weights[..., None] * seen).sum(-2)
