"""MixtureOfExperts: a shared feed-forward network, and several experts of which each token chooses a few."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.mechanisms.readable_tensors import is_dry_run, is_readable
from saccade.nn.base_layer import Layer
from saccade.nn.feed_forward import Activation, FeedForward
from saccade.support.argument_hints import ArgumentHints
from saccade.support.validation import check_int


class MixtureOfExperts(ArgumentHints, Layer):
    r"""A mixture of experts: a shared gated feed-forward network, plus the experts with the highest router scores.

    .. math:: \mathrm{out} = F(x) + \sum_{e \in \mathrm{top}} F_e(\sigma(r_e \cdot x)\, x)

    As in Llama 4, the weight of an expert multiplies its input, not its output, and weights need not sum to 1.

    Args:
        embed_dim: width of the model.
        hidden_dim: inner width of the shared network and of each expert.
        num_experts: number of experts.
        num_chosen: number of experts that each token chooses.
        activation: see `FeedForward`. The networks are gated and have no biases.

    Raises:
        ValueError: a size is below 1, ``num_chosen`` exceeds ``num_experts``, or the activation is unknown.

    Cost: ``6 * embed_dim * hidden_dim * (1 + num_chosen)`` FLOPs per token. Experts run one after another, each on the
    tokens that chose it. If values cannot be read (``torch.compile``, ``torch.export``, ``torch.func``), all experts
    run on all tokens.

    Example:
        >>> MixtureOfExperts(8, 16, num_experts=4, num_chosen=2)(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])

    Reference: Shazeer et al. 2017, arXiv:1701.06538; this form: Llama 4 (Meta 2025).
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        num_chosen: int = 1,
        activation: Activation = "silu",
    ):
        super().__init__()
        self.embed_dim = check_int("embed_dim", embed_dim)
        self.num_experts = check_int("num_experts", num_experts)
        self.num_chosen = check_int("num_chosen", num_chosen, below=num_experts + 1)

        def network() -> FeedForward:
            return FeedForward(embed_dim, hidden_dim, activation=activation, gated=True, projection_bias=False)

        self.router = nn.Linear(embed_dim, num_experts, bias=False)
        self.shared = network()
        self.experts = nn.ModuleList(network() for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the shared network and the chosen experts for each token, ``[..., embed_dim]``."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.router(tokens).topk(self.num_chosen, -1)
        weights, out = scores.sigmoid(), self.shared(tokens)
        if not is_readable(tokens) and is_dry_run():
            for column, expert in enumerate(list(self.experts)[: self.num_chosen]):  # as many as each token chooses
                out = out + expert(tokens * weights[:, column, None])
        elif not is_readable(tokens):
            table = torch.zeros_like(weights[:, :1]).expand(-1, self.num_experts).scatter(1, chosen, weights)
            for number, expert in enumerate(self.experts):  # an expert returns 0 for the input 0
                out = out + expert(tokens * table[:, number, None])
        else:
            for number, expert in enumerate(self.experts):
                rows, columns = (chosen == number).nonzero(as_tuple=True)
                out = out.index_add(0, rows, expert(tokens[rows] * weights[rows, columns, None]).to(out.dtype))
        return out.view(x.shape)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_experts={self.num_experts}, num_chosen={self.num_chosen}"
