"""Softmax: exact softmax attention."""

from __future__ import annotations

from types import NoneType

import torch
from torch import Tensor, nn

from saccade.engine.check_inputs import as_score
from saccade.engine.inputs import AttentionInputs
from saccade.matrix import AttentionMatrix, Impl, matrix_from_inputs
from saccade.mechanisms.base import Mechanism
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.scores import Score
from saccade.scores.base import ScoreMod
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_type, is_integer, register_tensor


class Softmax(Mechanism):
    """Exact softmax attention as a mechanism. It stores options and returns an `AttentionMatrix`.

    Args:
        score: a `saccade.scores.Score` of query and key, or a function that modifies dot products; the plain dot
            product when None.
        bias: a `saccade.positions.Bias` to add to the scores, or None. A tensor belongs to one batch; pass it to
            `saccade.attention` instead.
        scale, softcap, impl: see `saccade.AttentionMatrix`.
        sink_logit: initial values ``[num_heads]`` of a trainable logit per head. Its exponential is added to the
            softmax denominator. An int is a number of heads, with logits that start at 0. None for no sink.

    Raises:
        TypeError: a score or bias of a wrong type, or a sink_logit that is neither a float tensor nor an int.

    Example:
        >>> import torch
        >>> from saccade.positions import ALiBi
        >>> query = key = torch.ones(1, 2, 4, 8)
        >>> Softmax(bias=ALiBi(2))(query, key)[0, 0, 3]
        tensor([0.2271, 0.2417, 0.2573, 0.2739])
    """

    sink_logit: Tensor | None

    def __init__(
        self,
        *,
        score: Score | ScoreMod | None = None,
        bias: Bias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logit: Tensor | int | None = None,
        impl: Impl = "auto",
    ):
        super().__init__()
        check_type("bias", bias, (Bias, NoneType), "be a saccade Bias or None")
        self.score = None if score is None else as_score(score)
        self.bias: Tensor | Bias | None = bias
        self.scale, self.softcap, self.impl = scale, softcap, impl
        register_tensor(self, "sink_logit", None if sink_logit is None else _initial_sink(sink_logit))

    @property
    def treats_heads_alike(self) -> bool:
        return self.score is None and self.bias is None and self.sink_logit is None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> AttentionMatrix:
        inputs = AttentionInputs.of(
            query,
            key,
            mask,
            score=self.score,
            bias=self.bias,
            scale=self.scale,
            softcap=self.softcap,
            sink_logit=self.sink_logit,
            q_positions=q_positions,
            kv_positions=kv_positions,
        )
        return matrix_from_inputs(inputs, self.impl)

    def with_bias(self, bias: Tensor | Bias) -> Softmax:
        if self.bias is not None:
            reason = "it already has a bias, and the call passes another"
            raise unsupported("bias", [reason], hint="Softmax() without a bias uses the bias of each call")
        biased = Softmax(score=self.score, scale=self.scale, softcap=self.softcap, impl=self.impl)
        biased.bias = bias
        if self.sink_logit is not None:  # a compiler cannot trace the assignment of a buffer
            del biased.sink_logit
            register_tensor(biased, "sink_logit", self.sink_logit)
        return self._with_hooks(biased)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, softcap={self.softcap}, impl={self.impl!r}"


def _initial_sink(sink_logit: Tensor | int) -> Tensor:
    """Return the initial sink logits, ``[num_heads]``: zeros for a number of heads, or the tensor itself."""
    if isinstance(sink_logit, Tensor):
        if not sink_logit.is_floating_point():
            got = str(sink_logit.dtype).removeprefix("torch.")
            hint = "an int is a number of heads: sink_logit=8"
            raise type_error("sink_logit", "be a float tensor [num_heads]", got, hint=hint)
        if sink_logit.dim() != 1:
            raise value_error("sink_logit", "have shape [num_heads]", list(sink_logit.shape))
        # A tensor that is already a parameter is used directly.
        return sink_logit if sink_logit.requires_grad else nn.Parameter(sink_logit.detach().clone())
    if not is_integer(sink_logit) or sink_logit < 1:
        rule = "be a tensor, a number of heads of at least 1, or None"
        raise type_error("sink_logit", rule, repr(sink_logit))
    return nn.Parameter(torch.zeros(sink_logit))
