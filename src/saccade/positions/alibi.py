"""ALiBi: a bias that falls linearly with distance."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.positions.bias import Bias, check_distances
from saccade.support.numerics import wide_dtype
from saccade.support.validation import check_int

_TRAINED = (
    "the slopes follow from the number of heads; for a trained bias, use positions.T5(num_heads) or positions.Clipped"
)


class ALiBi(
    Bias, hints=dict.fromkeys(("trainable", "learnable", "learned", "trained", "slopes", "alibi_slopes"), _TRAINED)
):
    r"""The ALiBi bias: scores fall linearly with distance, with a fixed slope for each head.

    .. math:: b_h(i - j) = -m_h\, |i - j|, \qquad m_h = 2^{-8 h / H}, \quad h = 1, \dots, H

    If ``num_heads`` is not a power of two, the first heads use the slopes for the largest power of two below it, and
    the other heads use every second slope for twice that power, as in the authors' code. There are no parameters or
    buffers: slopes are computed in float32 (float64 for a float64 query), regardless of the dtype of the module.

    Slopes are not trained. For trainable biases that depend on the distance, use `T5` or `Clipped`.

    The paper only considers causal attention. If queries also see later keys, the absolute value makes the bias
    symmetric.

    Args:
        num_heads: number of query heads.

    Raises:
        ValueError: ``num_heads`` is not an int of at least 1.

    Cost: one value for each head and distance.

    Example:
        >>> ALiBi(2).table(torch.arange(-1, 3))
        tensor([[-0.0625,  0.0000, -0.0625, -0.1250],
                [-0.0039,  0.0000, -0.0039, -0.0078]])

    Reference: Press et al. 2022, arXiv:2108.12409, section 3.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = check_int("num_heads", num_heads, hint=_TRAINED)

    def table(self, distances: Tensor) -> Tensor:
        return self._at(distances, torch.float32)

    def values(self, distances: Tensor, query: Tensor, scale: float) -> Tensor:
        dtype = wide_dtype(query.dtype)
        return self._at(distances, dtype)[None, :, None, :]

    def extra_repr(self) -> str:
        return f"{self.num_heads}"

    def _at(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        check_distances(distances)
        # A buffer would follow the module to half precision, which cannot distinguish large distances.
        head = torch.arange(self.num_heads, dtype=dtype, device=distances.device)
        regular = 1 << (self.num_heads.bit_length() - 1)
        exponent = torch.where(head < regular, 8 * (head + 1) / regular, 4 * (2 * (head - regular) + 1) / regular)
        slopes = torch.exp2(-exponent)
        return 0.0 - slopes[:, None] * distances.abs().to(dtype)
