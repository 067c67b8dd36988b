"""FeedForward: a two-layer network, applied to each token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.engine import dropout
from saccade.nn.base_layer import Layer
from saccade.support.argument_hints import ArgumentHints
from saccade.support.autograd_functions import is_eager_training, needs_plain_backward, recomputed_gradients
from saccade.support.validation import check_bool, check_choice, check_int

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]


def _quick_gelu(x: Tensor) -> Tensor:
    """Approximate GELU with a sigmoid; Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class FeedForward(ArgumentHints, Layer):
    r"""A feed-forward network: two linear layers with an activation in between, applied to each token.

    .. math:: \mathrm{out} = W_2\,\phi(W_1 x), \qquad \text{gated:}\quad
              \mathrm{out} = W_2\,(\phi(W_g x) \odot W_1 x)

    If gated, the network is called SwiGLU with ``"silu"``, GEGLU with ``"gelu"``, and ReGLU with ``"relu"``.

    Args:
        embed_dim: width of the model.
        hidden_dim: inner width; often ``4 * embed_dim``, or ``8 / 3 * embed_dim`` if gated, for the same number of
            weights.
        activation: ``"gelu"``, ``"gelu_tanh"`` (an approximation of GELU, as in GPT-2), ``"quick_gelu"`` (a cheaper
            approximation, as in CLIP), ``"relu"`` or ``"silu"``.
        gated: whether the activation is multiplied by a second projection.
        dropout_p: dropout of the inner channels, in training only.
        projection_bias: whether the linear layers have a bias.

    Raises:
        ValueError: a size is below 1, the activation is unknown, or the probability is outside [0, 1).
        TypeError: ``gated`` or ``projection_bias`` is not a bool.

    Cost: ``4 * embed_dim * hidden_dim`` FLOPs per token, or 1.5 times as many if gated.

    Example:
        >>> import torch
        >>> FeedForward(8, 32, activation="silu", gated=True, projection_bias=False)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.3; gated: Shazeer 2020, arXiv:2002.05202, section 2.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: Activation = "gelu",
        gated: bool = False,
        dropout_p: float = 0.0,
        projection_bias: bool = True,
    ):
        super().__init__()
        self.embed_dim = embed_dim = check_int("embed_dim", embed_dim)
        self.hidden_dim = hidden_dim = check_int("hidden_dim", hidden_dim)
        self.activation = check_choice("activation", activation, get_args(Activation))
        check_bool("gated", gated)
        check_bool("projection_bias", projection_bias)
        dropout.check(dropout_p)
        self.expand = nn.Linear(embed_dim, hidden_dim, bias=projection_bias)
        self.gate = nn.Linear(embed_dim, hidden_dim, bias=projection_bias) if gated else None
        self.contract = nn.Linear(hidden_dim, embed_dim, bias=projection_bias)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to each token. The shape ``[..., embed_dim]`` does not change."""
        activation, parts = ACTIVATIONS[self.activation], self._modules
        expand, gate, dropout_layer = parts["expand"], parts.get("gate"), parts["dropout"]
        if gate is None:
            inner = activation(expand(x))
        else:
            gates, expanded = gate(x), expand(x)
            is_one = activation is F.silu and torch.is_grad_enabled() and is_eager_training(gates, expanded)
            inner = _GatedSilu.apply(gates, expanded) if is_one else activation(gates) * expanded
        return parts["contract"](dropout_layer(inner) if dropout_layer.training else inner)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.hidden_dim}, activation={self.activation!r}, gated={self.gate is not None}"


class _GatedSilu(torch.autograd.Function):
    """Autograd function of ``silu(gate) * x``, which stores only its inputs and makes no other large tensors."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x)
        return F.silu(gate).mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, x = ctx.saved_tensors
        if needs_plain_backward(grad):
            return recomputed_gradients(lambda gate, x: F.silu(gate) * x, (gate, x), ctx.needs_input_grad, grad)
        of_gate = grad * x
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return of_gate, F.silu(gate).mul_(grad)
