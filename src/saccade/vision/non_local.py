"""NonLocal, the non-local block: every position of a feature map attends to all positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.matrix import AttentionMatrix
from saccade.nn.projections import weight_of
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_choice, check_int, check_number
from saccade.vision.feature_map import BatchNorm, as_map, as_tokens, check_features

KINDS = ("embedded", "gaussian", "dot", "concatenation")
_SOFTMAX = ("embedded", "gaussian")


class NonLocal(ArgumentHints, nn.Module):
    r"""The non-local block: every position receives a weighted average of all positions.

    .. math:: \mathrm{out} = x + \mathrm{norm}(W_z\, y), \qquad
              y_i = \frac{1}{C_i} \sum_j f(x_i, \hat x_j)\, W_g \hat x_j

    ``kind`` selects the similarity f and its normalizer C:

    - ``"embedded"``: :math:`\exp(\theta_i^\top \phi_j)` over its sum (softmax attention of two projections);
    - ``"gaussian"``: :math:`\exp(x_i^\top \hat x_j)` over its sum (softmax attention without projections);
    - ``"dot"``: :math:`\theta_i^\top \phi_j` over the number of positions, computed as :math:`\Theta(\Phi^\top G)`;
    - ``"concatenation"``: :math:`\mathrm{ReLU}(w^\top [\theta_i; \phi_j])` over the number of positions,
      computed by sorting.

    For the first two kinds, the rows of `matrix` sum to 1. For the last two, the weights can have any sum, and those of
    ``"dot"`` can be negative. The matrix of all pairs is never stored, in either the forward or the backward pass. The
    norm starts at 0, so a new block is the identity.

    Args:
        channels: channels of the feature map.
        kind: name of the similarity; see above.
        bottleneck: number of inner channels; if None, ``channels // 2`` but at least 1.
        subsample: max-pooling factor for keys and values; 1 to use all positions.
        scale: factor that multiplies the dot products; 1.0 as in the paper, or None for ``head_dim ** -0.5``. Not used
            with "concatenation".

    Raises:
        ValueError, TypeError: the sizes are incompatible, the kind is unknown, the features have the wrong shape or
            dtype, or the module is trained on a single position, for which the batch norm has no variance.
        UnsupportedError: `matrix` is called for a kind without a softmax.

    Cost: with N = H · W and bottleneck D, O(batch · N² · D / subsample²) time for the first two kinds,
    O(batch · N · D²) for "dot", O(batch · N · (D + log N)) for "concatenation", plus projections; memory linear in N.

    Example:
        >>> block = NonLocal(32, kind="embedded", subsample=2)
        >>> x = torch.randn(2, 32, 6, 8)
        >>> torch.equal(block(x), x), block.matrix(x)
        (True, AttentionMatrix(shape=[2, 1, 48, 12], torch.float32, cpu))

    Reference: Wang et al. 2018, arXiv:1711.07971, section 3.
    """

    def __init__(
        self,
        channels: int,
        *,
        kind: str = "embedded",
        bottleneck: int | None = None,
        subsample: int = 1,
        scale: float | None = 1.0,
    ):
        super().__init__()
        self.channels = check_int("channels", channels)
        bottleneck = max(1, channels // 2) if bottleneck is None else bottleneck
        self.bottleneck = check_int("bottleneck", bottleneck)
        self.subsample = check_int("subsample", subsample)
        self.kind = check_choice("kind", kind, KINDS)
        scale = None if scale is None else check_number("scale", scale)
        if kind == "concatenation" and scale != 1.0:
            hint = "it has no dot product to scale; its vector w is learned"
            raise value_error("scale", "be 1.0 for kind 'concatenation'", scale, hint=hint)
        width = channels if kind == "gaussian" else bottleneck
        self.scale = width**-0.5 if scale is None else scale
        self.query = None if kind == "gaussian" else nn.Conv2d(channels, bottleneck, 1)
        self.key = None if kind == "gaussian" else nn.Conv2d(channels, bottleneck, 1)
        self.value = nn.Conv2d(channels, bottleneck, 1)
        # The vector w for [θ; φ], with its two halves as rows.
        self.joint = nn.Parameter(torch.empty(2, bottleneck)) if kind == "concatenation" else None
        self.output = nn.Conv2d(bottleneck, channels, 1)
        self.norm = BatchNorm(channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the norm with 0, so that the block starts as the identity, and the rest with torch's defaults."""
        nn.init.zeros_(self.norm.weight)
        nn.init.zeros_(self.norm.bias)
        if self.joint is not None:
            nn.init.uniform_(self.joint, -((2 * self.bottleneck) ** -0.5), (2 * self.bottleneck) ** -0.5)

    def forward(self, features: Tensor) -> Tensor:
        """Return the non-local block's output ``features + norm(output(gathered))``, ``[batch, channels, H, W]``."""
        self._check(features)
        context = self._context(features)
        value = as_tokens(self.value(context))
        if self.kind in _SOFTMAX:
            matrix = self._matrix(features, context)
            gathered = matrix @ value.to(matrix.dtype)  # autocast: "gaussian" does not project x
        else:
            gathered = self._pairwise(features, context, value[:, 0])[:, None]
        return features + self.norm(self.output(as_map(gathered, *features.shape[2:])))

    def matrix(self, features: Tensor) -> AttentionMatrix:
        """Return the lazy attention matrix, ``[batch, 1, H·W, kv_len]``; position (y, x) is row ``y * W + x``.

        Columns are the ``ceil(H / subsample) * ceil(W / subsample)`` positions of the subsampled map.

        Args:
            features: ``[batch, channels, H, W]``.

        Raises:
            UnsupportedError: ``kind`` is "dot" or "concatenation", whose weights are not a distribution.
        """
        if self.kind not in _SOFTMAX:
            reason = f"kind {self.kind!r} has weights that can be negative or sum to anything but 1"
            hint = "the kinds 'embedded' and 'gaussian' have a row-stochastic matrix"
            raise unsupported("AttentionMatrix", [reason], hint=hint)
        self._check(features)
        return self._matrix(features, self._context(features))

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, kind={self.kind!r}, bottleneck={self.bottleneck}, "
            f"subsample={self.subsample}, scale={self.scale:g}"
        )

    def _check(self, features: Tensor) -> None:
        check_features(features, self.channels, weight_of(self.output))
        self.norm.check_spread(features[:, 0].numel())

    def _context(self, features: Tensor) -> Tensor:
        """Subsample the feature map by max pooling, to compute keys and values from it.

        Cells at the edges may be pooled from fewer positions.
        """
        if self.subsample == 1:
            return features
        return nn.functional.max_pool2d(features, self.subsample, ceil_mode=True)

    def _matrix(self, features: Tensor, context: Tensor) -> AttentionMatrix:
        query, key = self._projected(features, context)
        return AttentionMatrix(as_tokens(query), as_tokens(key), scale=self.scale)

    def _projected(self, features: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        if self.query is None or self.key is None:
            return features, context
        return self.query(features), self.key(context)

    def _pairwise(self, features: Tensor, context: Tensor, value: Tensor) -> Tensor:
        query, key = (x.flatten(2).mT for x in self._projected(features, context))
        if self.joint is None:
            # Without a softmax, multiplying from the right is linear in the number of positions.
            return (query * self.scale) @ (key.mT @ (value / key.shape[1]))
        return rectified_sum_mean(query @ self.joint[0], key @ self.joint[1], value)


def rectified_sum_mean(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    r"""Return the mean over keys j of :math:`\mathrm{ReLU}(a_i + b_j)\, v_j`, for the "concatenation" non-local block.

    If keys are sorted by b in descending order, those with a positive :math:`a_i + b_j` form a prefix, and the total
    over them is :math:`a_i \sum_j v_j + \sum_j b_j v_j`. Both terms are running sums, looked up at the same index, so
    no pairs are computed. The running sums are float64, because the terms cancel if a and b have opposite signs.

    Args:
        query: a, ``[batch, q_len]``.
        key: b, ``[batch, kv_len]``.
        value: ``[batch, kv_len, value_dim]``.

    Returns:
        ``[batch, q_len, value_dim]`` in the value's dtype.

    Cost: O(batch · (q_len + kv_len) · (value_dim + log kv_len)) time, O(batch · (q_len + kv_len) · value_dim) memory.
    """
    a, b, v = query.double(), key.double(), value.double() / key.shape[1]
    b, order = b.sort(dim=1)
    v = v.gather(1, order[:, :, None].expand_as(v))
    # In descending order of b: entry n is the sum over the n largest, starting at n = 0.
    running = torch.cat([v, b[:, :, None] * v], 2).flip(1).cumsum(1)
    running = torch.cat([torch.zeros_like(running[:, :1]), running], 1)
    counts = b.shape[1] - torch.searchsorted(b.detach(), -a.detach(), right=True)
    sums = running.gather(1, counts[:, :, None].expand(-1, -1, running.shape[2]))
    value_sums, weighted_sums = sums.chunk(2, 2)
    return (a[:, :, None] * value_sums + weighted_sums).to(value.dtype)
