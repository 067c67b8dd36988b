"""Recurrence: a layer with a recurrent state (gated linear attention, delta rules, state spaces)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches import Cache, LayerCache
from saccade.engine.nested import check_dense
from saccade.masks import Causal, Mask
from saccade.matrix import Matrix
from saccade.mechanisms import (
    RWKV7,
    SSD,
    Delta,
    DeltaProduct,
    GatedDelta2,
    GatedLinear,
    Mamba3,
    Mechanism,
    Mesa,
)
from saccade.mechanisms.recurrences.substeps import SubstepMatrix
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.convolved_projections import ConvolvedProjections, restored_on_error, split_cache
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_choice, check_int, check_type


class ProjectedTokens(NamedTuple):
    """The projections of a recurrent layer's input tokens, and the mechanism with the tokens' gates.

    Args:
        compute_matrix: the mechanism, with the gates of the input tokens already bound.
        query, key, value: ``[batch, heads, len, width]``; keys and values of several steps are concatenated along the
            width.
        gate: the output gate, with the shape of the output, or None.
    """

    compute_matrix: Callable[..., Matrix]
    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None = None


class RecurrentLayer(AttentionLayer):
    """The base class of causal layers with a recurrent state.

    Args:
        embed_dim, num_heads, mechanism: as in `AttentionLayer`.
        mask: the layer's mask; combined with Causal by ``&`` unless it is causal.
    """

    def __init__(self, embed_dim: int, num_heads: int, mask: Mask | None, mechanism: Mechanism):
        super().__init__(embed_dim, num_heads, mask, mechanism, 0.0)
        self.mask = Causal() if mask is None else mask if mask.is_causal else Causal() & mask
        self.convolution: ConvolvedProjections | None = None

    @abstractmethod
    def _project_tokens(
        self, x: Tensor, mask: Mask | None, positions: Positions | None, convolution_cache: LayerCache | None
    ) -> ProjectedTokens:
        """Project the recurrent layer's input tokens ``[batch, len, embed_dim]`` to queries, keys, values and gates.

        Args:
            x: the tokens.
            mask, positions, convolution_cache: the arguments of the short convolution, if there is one.
        """

    @abstractmethod
    def _project_output(self, out: Tensor, tokens: ProjectedTokens) -> Tensor:
        """Project the output of the heads, ``[batch, heads, len, width]``, to ``[batch, len, embed_dim]``."""

    def forward(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | Cache | None = None,
    ) -> Tensor:
        """Return the recurrent layer's output for a sequence, or for new tokens after a cached sequence.

        Args:
            query: ``[batch, len, embed_dim]``; with a cache, only the new tokens.
            mask: a mask for this batch, such as documents or padding; combined with the layer's own mask by ``&``.
            positions: ascending positions of the tokens; -1 marks padding. Only their order matters.
            bias: must be None, because there are no scores.
            cache: the cache of earlier calls, from `new_cache`.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        main_cache, convolution_cache = (cache, None) if self.convolution is None else split_cache(cache)
        joined, positions = self._checked_options(query, mask, positions, bias, main_cache)  # type: ignore[arg-type]
        with restored_on_error(convolution_cache):
            tokens = self._project_tokens(query, joined, positions, convolution_cache)
            compute_matrix, heads, key, value, _ = tokens
            if main_cache is None:
                matrix = compute_matrix(heads, key, mask=joined, q_positions=positions, kv_positions=positions)
                out = _output(matrix, value)
            else:
                out = main_cache.attend(compute_matrix, heads, key, value, mask=joined, positions=positions)  # type: ignore[union-attr]
        return self._project_output(out, tokens)

    def new_cache(self, max_len: int | None = None) -> LayerCache | Cache:  # type: ignore[override]  # two if convolved
        """Return an empty cache for the recurrent layer or, with a short convolution, a `Cache` of two caches.

        Args:
            max_len: largest number of tokens; None for no limit.
        """
        cache = super().new_cache(max_len)
        return cache if self.convolution is None else Cache([cache, self.convolution.new_cache()])

    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Return the recurrence as a lazy matrix, ``[batch, num_heads, len, len]``; see `forward`."""
        joined, positions = self._checked_options(query, mask, positions, bias, None)
        compute_matrix, heads, key, _, _ = self._project_tokens(query, joined, positions, None)
        return compute_matrix(heads, key, mask=joined, q_positions=positions, kv_positions=positions)

    def _checked_options(
        self, query: Tensor, mask: object, positions: GivenPositions, bias: object, cache: LayerCache | None
    ) -> tuple[Mask | None, Positions | None]:
        """Check the options of a call. Return the combined mask and the positions."""
        if bias is not None:
            raise unsupported("bias", ["there are no scores to add it to"])
        check_dense(query=query)
        if query.dim() != 3 or query.shape[2] != self.embed_dim:
            raise value_error("query", f"have shape [batch, len, {self.embed_dim}]", list(query.shape))
        batch, length, _ = query.shape
        cached = 0 if cache is None else cache.length
        joined = self._joined(mask, (batch, self.num_heads, length, cached + length))
        return joined, None if positions is None else Positions.of(positions, length=length, batch=batch)


_RULES = (Delta, GatedDelta2, DeltaProduct, RWKV7, GatedLinear, Mesa, SSD, Mamba3)
_INITIAL_STEPS = -3, -1  # powers of ten, as in Mamba
_INITIAL_FADE = -6.0, -1.0  # before the sigmoid, as in RWKV-7: from slow to fast decays


def _output(matrix: Matrix, value: Tensor) -> Tensor:
    """Multiply a recurrence matrix by the values of all steps, concatenated along the width, and sum over the steps."""
    if isinstance(matrix, SubstepMatrix):
        return matrix.total(value)
    steps = matrix.kv_heads // max(1, value.shape[1])
    if steps == 1:
        return matrix.matmul(value)
    each = value.unflatten(3, (steps, -1)).transpose(2, 3).flatten(1, 2)  # a matrix that stands in for a recurrence
    return matrix.matmul(each).unflatten(1, (-1, steps)).sum(2)


class Recurrence(RecurrentLayer):
    r"""A recurrent layer: tokens write to and read from a state of fixed size, with learned gates.

    .. math:: \mathrm{out} = W \big( \mathrm{norm}(A V) \odot \mathrm{silu}(G x) \big)

    The norm divides each head by its root mean square. Queries and keys pass through silu; with the delta rules and
    `Mesa`, they are then scaled to norm 1. ``beta`` is a sigmoid, doubled for `DeltaProduct`. A decay, or the step size
    of `SSD`, is a softplus that starts between 0.001 and 0.1, and is multiplied by a learned rate for each head,
    initially 1 to ``num_heads``. With `GatedDelta2`, both gates are sigmoids. With `SSD` and `Mamba3`, each head also
    adds a learned multiple of its values, which is not part of the matrix.

    With `Mamba3`, queries and keys are divided by their root mean square instead, and get a learned bias, initially 1.
    Steps are as in `SSD`, λ is a sigmoid, a log decay is minus the step times a softplus, and the angles, which all
    heads share, are π times a tanh, times the step. With `RWKV7`, removal keys are the keys times a learned vector,
    scaled to norm 1, rates are sigmoids, and log decays are sigmoids times -exp(-1/2). RWKV-7's token shifts and its
    mixing of values with those of the first layer are not included.

    The layer is causal. It can replace self-attention in `EncoderLayer`, `DecoderLayer` and stacks, supports packed and
    padded sequences, and has a cache of constant size.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of heads; must divide ``embed_dim``.
        mechanism: a `saccade.mechanisms.Delta`, `GatedDelta2`, `DeltaProduct`, `RWKV7`, `GatedLinear`, `Mesa`, `SSD` or
            `Mamba3`; ``Delta()`` if None.
        decay: "token" for one decay per token and head, "channel" for one per token and channel, or None for no decay
            and for mechanisms that define one (`SSD`, `Mamba3`, `RWKV7`, ``GatedLinear.retnet``).
        short_convolution: number of positions that a convolution of queries, keys and values reads, followed by a silu;
            see `saccade.mechanisms.ShortConvolution`. None for no convolution.
        mask: combined with Causal and with the mask of each call by ``&``.
        projection_bias: whether the output projection has a bias.

    Raises:
        TypeError: the mechanism has an unsupported type.
        ValueError: sizes do not divide evenly, a decay is passed for a mechanism that defines one, or inputs have the
            wrong width.
        UnsupportedError: a mask that a recurrence cannot apply, or a bias.

    Cost: O(n * head_dim ** 2) for each head and step, five projections (two more for each further step of
    `DeltaProduct`), and the convolution.

    Example:
        >>> from saccade.mechanisms import Delta
        >>> gated_delta = Recurrence(16, 2, Delta(), decay="token")
        >>> x = torch.randn(1, 5, 16)
        >>> gated_delta(x).shape, gated_delta.matrix(x).shape
        (torch.Size([1, 5, 16]), (1, 2, 5, 5))

    Reference: Yang et al. 2025, arXiv:2412.06464, section 3.4; Dao and Gu 2024, arXiv:2405.21060, section 7; Siems et
    al. 2025, arXiv:2502.10297; Peng et al. 2025, arXiv:2503.14456; von Oswald et al. 2025, arXiv:2506.05233; Lahoti
    et al. 2026, arXiv:2603.15569; Hatamizadeh et al. 2026, arXiv:2605.22791.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mechanism: Mechanism | None = None,
        *,
        decay: Literal["token", "channel"] | None = None,
        short_convolution: int | None = None,
        mask: Mask | None = None,
        projection_bias: bool = False,
    ):
        if check_int("embed_dim", embed_dim) % check_int("num_heads", num_heads):
            raise value_error("num_heads", f"divide embed_dim {embed_dim}", num_heads)
        mechanism = Delta() if mechanism is None else mechanism
        rule = "be a Delta, GatedDelta2, DeltaProduct, RWKV7, GatedLinear, Mesa, SSD or Mamba3"
        hint = "MultiHeadAttention supports the other mechanisms"
        check_type("mechanism", mechanism, _RULES, rule, hint=hint)
        if decay is not None:
            check_choice("decay", decay, ("token",) if isinstance(mechanism, Mesa) else ("token", "channel"))
            if isinstance(mechanism, SSD | Mamba3 | RWKV7) or getattr(mechanism, "decay", None) is not None:
                rule = f"be None with {type(mechanism).__name__}, which has its own"
                raise value_error("decay", rule, decay)
        super().__init__(embed_dim, num_heads, mask, mechanism)
        self.decay = decay
        self.steps = mechanism.num_steps if isinstance(mechanism, DeltaProduct) else 1
        self.convolved_dim = (1 + 2 * self.steps) * embed_dim  # queries, and the keys and values of each step
        if short_convolution is not None:
            self.convolution = ConvolvedProjections(self.convolved_dim, short_convolution)
        self.inputs = nn.Linear(embed_dim, self.convolved_dim + embed_dim, bias=False)  # and the output gate
        self._make_gates(embed_dim, num_heads, mechanism)
        self.output_projection = nn.Linear(embed_dim, embed_dim, bias=projection_bias)
        self.reset_parameters()

    def _make_gates(self, embed_dim: int, num_heads: int, mechanism: Mechanism) -> None:
        """Create the projections and parameters of the gates. Set those that the mechanism does not use to None."""
        has_channels, is_rwkv = isinstance(mechanism, GatedDelta2), isinstance(mechanism, RWKV7)
        is_mamba3, has_steps = isinstance(mechanism, Mamba3), isinstance(mechanism, SSD | Mamba3)
        self.has_unit_keys = isinstance(mechanism, Delta | DeltaProduct | Mesa | GatedDelta2)

        def gate(width: int, *, exists: bool = True) -> nn.Linear | None:
            return nn.Linear(embed_dim, width) if exists else None

        self.write = gate(embed_dim if has_channels else num_heads * self.steps, exists=self.has_unit_keys)
        self.erase = gate(embed_dim, exists=has_channels)
        self.rate = gate(embed_dim, exists=is_rwkv)
        self.removal = nn.Parameter(torch.ones(embed_dim)) if is_rwkv else None
        self.step = gate(num_heads, exists=has_steps)
        self.blend = gate(num_heads, exists=is_mamba3)
        pairs = embed_dim // num_heads // 2
        self.turn = gate(pairs, exists=is_mamba3 and pairs > 0)
        self.biases = nn.Parameter(torch.ones(2, num_heads, 1, embed_dim // num_heads)) if is_mamba3 else None
        decay_dim = num_heads if self.decay == "token" or is_mamba3 else embed_dim
        self.fade = gate(decay_dim, exists=bool(self.decay) or is_rwkv or is_mamba3)
        self.log_rate = nn.Parameter(torch.arange(1.0, num_heads + 1.0).log()) if self.decay else None
        self.skip = nn.Parameter(torch.ones(num_heads)) if has_steps else None

    def reset_parameters(self) -> None:
        """Initialize with Xavier-uniform weights, zero biases and log-spaced step sizes from 0.001 to 0.1."""
        super().reset_parameters()
        if self.rate is not None and self.fade is not None:
            self.fade.bias.data.copy_(torch.linspace(*_INITIAL_FADE, len(self.fade.bias)))
            return
        for gate in (None if self.blend is not None else self.fade, self.step):
            if gate is not None:
                steps = torch.logspace(*_INITIAL_STEPS, len(gate.bias))
                gate.bias.data.copy_(steps.expm1().log())  # the inverse of softplus

    def _project_tokens(
        self, x: Tensor, mask: Mask | None, positions: Positions | None, convolution_cache: LayerCache | None
    ) -> ProjectedTokens:
        parts = self.inputs(x)
        if self.convolution is not None:
            convolved, gate = parts.split([self.convolved_dim, self.embed_dim], 2)
            convolved = self.convolution(convolved, mask=mask, positions=positions, cache=convolution_cache)
            parts = torch.cat([convolved, gate], 2)
        kv_dim = self.steps * self.embed_dim
        split = parts.split([self.embed_dim, kv_dim, kv_dim, self.embed_dim], 2)
        query, key, value, gate = (self._split(part) for part in split)
        if self.biases is not None:
            query, key = (F.rms_norm(x, x.shape[-1:]) + bias for x, bias in zip((query, key), self.biases, strict=True))
        elif self.convolution is None:
            query, key = F.silu(query), F.silu(key)
        if self.has_unit_keys:
            query = F.normalize(query, dim=-1)
            key = F.normalize(key.unflatten(3, (self.steps, -1)), dim=-1).flatten(3)
        if self.erase is not None and self.write is not None:
            value = value * self._split(self.write(x)).sigmoid()
        return ProjectedTokens(partial(self.mechanism, **self._gates(x, key)), query, key, value, F.silu(gate))

    def _project_output(self, out: Tensor, tokens: ProjectedTokens) -> Tensor:
        if self.skip is not None:
            out = out + self.skip[:, None, None] * tokens.value
        assert tokens.gate is not None  # `_project_tokens` returns one
        normed = F.rms_norm(out, out.shape[-1:]) * tokens.gate
        return self.output_projection(normed.transpose(1, 2).flatten(2))

    def _gates(self, x: Tensor, key: Tensor) -> dict[str, Tensor]:
        """Compute the gates that the mechanism needs for each token, such as decay, beta, erase gate or step size."""
        gates = {}
        if self.rate is not None and self.removal is not None and self.fade is not None:
            rate, decay = self._split(self.rate(x)), -math.exp(-0.5) * self._split(self.fade(x)).sigmoid()
            removal = F.normalize(key * self.removal.unflatten(0, (self.num_heads, 1, -1)), dim=-1)
            return {"rate": rate.sigmoid(), "decay": decay, "removal": removal}
        if self.erase is not None:
            gates["erase"] = self._split(self.erase(x)).sigmoid()
        elif isinstance(self.mechanism, DeltaProduct) and self.write is not None:
            gates["beta"] = 2.0 * self._split(self.write(x)).sigmoid()
        elif self.write is not None:
            gates["beta"] = self.write(x).sigmoid().mT
        if self.step is not None:
            gates["step"] = F.softplus(self.step(x)).mT
        if self.blend is not None and self.fade is not None:
            gates["blend"], gates["decay"] = self.blend(x).sigmoid().mT, -F.softplus(self.fade(x)).mT * gates["step"]
        if self.turn is not None:
            gates["angle"] = math.pi * self.turn(x).tanh()[:, None] * gates["step"][..., None]
        if self.fade is not None and self.log_rate is not None:
            steps = F.softplus(self._split(self.fade(x)))
            decay = -self.log_rate.exp()[:, None, None] * steps
            gates["decay"] = decay if self.decay == "channel" else decay[..., 0]
        return gates

    def _split(self, x: Tensor) -> Tensor:
        """Split channels ``[batch, len, width]`` into heads."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, decay={self.decay!r}, mask={self.mask}"
