"""Recurrence: a layer of gated linear attention, the delta rule or Mamba-2's state space."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.masks import Mask
from saccade.mechanisms import SSD, Delta, GatedLinear, Mechanism
from saccade.nn.recurrent_layer import Read, RecurrentLayer
from saccade.support.errors import value_error
from saccade.support.validation import check_choice, check_int, check_type

_INITIAL_STEPS = -3, -1  # powers of ten, as in Mamba


class Recurrence(RecurrentLayer):
    r"""A recurrent layer: tokens write into a state of fixed size and read from it, with learned gates.

    .. math:: \mathrm{out} = W \big( \mathrm{norm}(A V) \odot \mathrm{silu}(G x) \big)

    The norm divides each head by its root mean square. Queries and keys pass through silu; with `Delta` they are then
    scaled to length 1. ``beta`` is a sigmoid. A decay, and SSD's step, is a softplus that starts between 0.001 and 0.1;
    it is multiplied by a head's rate, 1 to ``num_heads`` at first. With `SSD` each head adds a learned multiple of its
    values, which is not part of the matrix.

    It replaces self-attention in `EncoderLayer`, `DecoderLayer` and stacks, with packed and padded sequences, and with
    a cache of constant size. It is causal. The short convolution of published layers before queries, keys and values
    is not included.

    Args:
        embed_dim: width.
        num_heads: divides ``embed_dim``.
        mechanism: a `saccade.mechanisms.Delta`, `GatedLinear` or `SSD`; ``Delta()`` when None.
        decay: "token" for one decay per token and head, "channel" for one per channel too, None for none or for
            mechanisms that define one (`SSD`, ``GatedLinear.retnet``).
        mask: joined with Causal and with the mask of each call by ``&``.
        projection_bias: whether the output projection has a bias.

    Raises:
        TypeError: another mechanism.
        ValueError: sizes that do not divide, a decay for a mechanism that defines one, or inputs of another width.
        UnsupportedError: a mask that a recurrence cannot apply, or a bias.

    Cost: O(n head_dim^2) for each head, and five projections.

    Example:
        >>> from saccade.mechanisms import Delta
        >>> gated_delta = Recurrence(16, 2, Delta(), decay="token")
        >>> x = torch.randn(1, 5, 16)
        >>> gated_delta(x).shape, gated_delta.matrix(x).shape
        (torch.Size([1, 5, 16]), (1, 2, 5, 5))

    Reference: Yang et al. 2025, arXiv:2412.06464, section 3.4; Dao and Gu 2024, arXiv:2405.21060, section 7.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mechanism: Mechanism | None = None,
        *,
        decay: Literal["token", "channel"] | None = None,
        mask: Mask | None = None,
        projection_bias: bool = False,
    ):
        if check_int("embed_dim", embed_dim) % check_int("num_heads", num_heads):
            raise value_error("num_heads", f"divide embed_dim {embed_dim}", num_heads)
        mechanism = Delta() if mechanism is None else mechanism
        rule, hint = "be a Delta, GatedLinear or SSD", "MultiHeadAttention takes the others"
        check_type("mechanism", mechanism, (Delta, GatedLinear, SSD), rule, hint=hint)
        if decay is not None:
            check_choice("decay", decay, ("token", "channel"))
            if isinstance(mechanism, SSD) or getattr(mechanism, "decay", None) is not None:
                rule = f"be None with {type(mechanism).__name__}, which has its own"
                raise value_error("decay", rule, decay)
        super().__init__(embed_dim, num_heads, mask, mechanism)
        self.decay = decay
        self.inputs = nn.Linear(embed_dim, 4 * embed_dim, bias=False)  # queries, keys, values, and the output's gate
        self.write = nn.Linear(embed_dim, num_heads) if isinstance(mechanism, Delta) else None
        self.step = nn.Linear(embed_dim, num_heads) if isinstance(mechanism, SSD) else None
        self.fade = nn.Linear(embed_dim, num_heads if decay == "token" else embed_dim) if decay else None
        self.log_rate = nn.Parameter(torch.arange(1.0, num_heads + 1.0).log()) if decay else None
        self.skip = nn.Parameter(torch.ones(num_heads)) if isinstance(mechanism, SSD) else None
        self.output_projection = nn.Linear(embed_dim, embed_dim, bias=projection_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set Xavier-uniform weights, zero biases, and steps from 0.001 to 0.1, equally spaced in their logarithms."""
        super().reset_parameters()
        for gate in (self.fade, self.step):
            if gate is not None:
                steps = torch.logspace(*_INITIAL_STEPS, len(gate.bias))
                gate.bias.data.copy_(steps.expm1().log())  # the inverse of softplus

    def _read(self, x: Tensor) -> Read:
        query, key, value, gate = self.inputs(x).unflatten(2, (4, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = F.silu(query), F.silu(key)
        if self.write is not None:
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        return Read(partial(self.mechanism, **self._gates(x)), query, key, value, F.silu(gate))

    def _merged(self, out: Tensor, read: Read) -> Tensor:
        if self.skip is not None:
            out = out + self.skip[:, None, None] * read.value
        assert read.gate is not None  # `_read` gives one
        normed = F.rms_norm(out, out.shape[-1:]) * read.gate
        return self.output_projection(normed.transpose(1, 2).flatten(2))

    def _gates(self, x: Tensor) -> dict[str, Tensor]:
        """Return the gates of each token."""
        gates = {}
        if self.write is not None:
            gates["beta"] = self.write(x).sigmoid().mT
        if self.step is not None:
            gates["step"] = F.softplus(self.step(x)).mT
        if self.fade is not None and self.log_rate is not None:
            steps = F.softplus(self.fade(x)).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            decay = -self.log_rate.exp()[:, None, None] * steps
            gates["decay"] = decay if self.decay == "channel" else decay[..., 0]
        return gates

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, decay={self.decay!r}, mask={self.mask}"
