"""The sum of cross-entropies of a linear layer's outputs, with its gradients computed in the forward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.support.autograd_functions import needs_plain_backward, recomputed_gradients
from saccade.tasks import IGNORED


class LinearCrossEntropy(torch.autograd.Function):
    """Autograd function of the sum of cross-entropies of ``x @ weight.mT``, computed chunk by chunk.

    The gradients are computed beside the loss, while the logits of a chunk exist, so that no chunk is computed twice.

    Reference: Hsu et al. 2024, arXiv:2410.10989, section 3.2 (fused linear cross-entropy).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
        """Return the sum over rows of ``x [rows, embed_dim]`` with targets int64 ``[rows]``, -100 for none.

        ``weight`` is ``[vocab_size, embed_dim]``, and ``size`` the number of rows whose logits are computed at a time.
        """
        has_target = targets != IGNORED
        x_is_wanted, weight_is_wanted, *_ = ctx.needs_input_grad
        of_x = torch.zeros_like(x) if x_is_wanted else None
        of_weight = torch.zeros_like(weight) if weight_is_wanted else None
        total = x.new_zeros(())
        for start in range(0, len(x), size):
            chosen = slice(start, start + size)
            known = has_target[chosen, None]
            rows = x[chosen].masked_fill(~known, 0)  # so that NaN stays out of the sums of other rows
            scores = torch.log_softmax(rows @ weight.mT, -1)
            total += F.nll_loss(scores, targets[chosen], ignore_index=IGNORED, reduction="sum")
            grads = scores.exp_().scatter_add_(1, targets[chosen, None].clamp(min=0), -known.to(x.dtype))
            if of_x is not None:
                torch.mm(grads, weight, out=of_x[chosen]).masked_fill_(~known, 0)
            if of_weight is not None:
                of_weight.addmm_(grads.mT, rows)
        ctx.save_for_backward(x, weight, targets, of_x, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the stored gradients times that of the sum."""
        x, weight, targets, *found = ctx.saved_tensors
        if needs_plain_backward(grad):
            plain, wanted = partial(_plain, targets=targets), ctx.needs_input_grad[:2]
            of_x, of_weight = recomputed_gradients(plain, (x, weight), wanted, grad)
        else:
            of_x, of_weight = (None if one is None else one * grad for one in found)
        return of_x, of_weight, None, None


def _plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets, ignore_index=IGNORED, reduction="sum")
