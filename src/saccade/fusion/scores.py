"""Scores: deferred attention scores or weights, stored as a matrix product and the operations applied to it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from saccade.fusion.axes import Axes, Axis, renamed
from saccade.support.torch_modes import is_autocast

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Term(NamedTuple):
    """A bias tensor that is added to the scores, with one dimension for each factor (sub-axis) of the scores' axes."""

    tensor: Tensor
    scale: float = 1.0


class Fill(NamedTuple):
    """A masked fill, in which some query-key pairs of the scores were filled with a negative number.

    Args:
        pairs: bool, True at filled pairs, with one dimension for each factor of the axes.
        value: the number, multiplied by any later scaling of the scores.
        num_terms: number of biases added before the fill; -1 if pairs were filled with different numbers.
    """

    pairs: Tensor
    value: float
    num_terms: int


class Cleared(NamedTuple):
    """Pairs whose weights were set to 0 after the softmax.

    Args:
        pairs: bool, True at these pairs, with one dimension for each factor of the axes.
        is_filled: whether NaN became 0 as well; False if the weights were multiplied by 0.
    """

    pairs: Tensor
    is_filled: bool


@dataclass(frozen=True)
class Scores:
    """The product of two tensors, scaled, capped, biased and masked; after a softmax, the attention weights.

    Either tensor may contain the queries; which one does is unknown until a softmax over the keys. Methods return the
    scores after an operation, or None if this class cannot express the result.

    Args:
        axes: the axes that the model sees, as products of factors; see `saccade.fusion.axes.Axes`.
        left, right: the tensors, with one dimension for each factor in `batch` and `left_only` or `right_only`, then
            the dimension that is summed over.
        batch: the factors that both tensors have.
        left_only, right_only: the factors that only the left or only the right tensor has.
        heads: the factors in `batch` that are heads; None if unknown, for instance if heads and batch were joined.
        lead: the factors of either tensor that do not index positions of queries or keys.
        product_dtype: the dtype in which the product is computed.
        dtype: the dtype that the model sees.
        scale: a number that multiplies the product, before the cap.
        factors: tensors that multiply the product, before the cap, with one dimension for each factor.
        cap: the number that multiplies the tanh; None if no tanh was applied.
        terms: biases that are added after the cap.
        shift: sum of the numbers that were added; it does not affect the softmax.
        maximum_of: the factors of the axis whose maximum was subtracted. This does not affect a softmax over that axis.
        fills: the masks that were applied.
        zeros: pairs whose scores were multiplied by 0; a later mask must mask them.
        softmax: the factors of the axis over which a softmax was applied.
        cleared: pairs whose weights were set to 0; the mask must mask them.
        replaces_nan: whether NaN was replaced, in the scores or in the weights.
        dropout_p: dropout probability of the weights.
        operands: each tensor that was read, with its version counter at that time. If the counter has changed, the
            tensor was overwritten after the model read it.
    """

    axes: Axes
    left: Tensor
    right: Tensor
    batch: Axis
    left_only: Axis
    right_only: Axis
    heads: Axis | None
    lead: Axis
    product_dtype: torch.dtype
    dtype: torch.dtype
    scale: float = 1.0
    factors: tuple[Tensor, ...] = ()
    cap: float | None = None
    terms: tuple[Term, ...] = ()
    shift: float = 0.0
    maximum_of: Axis | None = None
    fills: tuple[Fill, ...] = ()
    zeros: tuple[Tensor, ...] = ()
    softmax: Axis | None = None
    cleared: tuple[Cleared, ...] = ()
    replaces_nan: bool = False
    dropout_p: float = 0.0
    operands: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)
    is_detached: ClassVar[bool] = False  # as in `RowMaximum`

    @property
    def all_factors(self) -> Axis:
        """All factors (sub-axes) of the scores' axes; biases and masks have one dimension for each, in this order."""
        return (*self.batch, *self.left_only, *self.right_only)

    @property
    def is_current(self) -> bool:
        """Whether all operands of the scores are unchanged since they were read."""
        return all(version_of(x) == version for x, version in self.operands)

    def check_current(self) -> None:
        """Raise an error if code that calls no torch function has overwritten an operand of the scores.

        Raises:
            RuntimeError: an operand was overwritten, so its old values are lost.
        """
        if not self.is_current:
            what = "a tensor was changed in place, outside of torch's functions, after a product had read it"
            raise RuntimeError(f"{what}; run this part of the model without FuseAttention")

    @property
    def _is_scaled_product(self) -> bool:
        """Whether the scores are just a scaled product, without cap, biases, masks or softmax."""
        return self._can_be_multiplied and not self.terms

    @property
    def _can_be_multiplied(self) -> bool:
        """Whether the scores may still be multiplied by a tensor: they have no cap, mask, softmax or added number."""
        is_shifted = bool(self.shift) or self.maximum_of is not None
        return self.cap is None and not self.fills and not is_shifted and self.softmax is None

    # ---- shapes ------------------------------------------------------------------------------------------------

    def view(self, shape: Sequence[int]) -> Scores | None:
        """Return the scores after ``view(shape)``."""
        viewed = self.axes.view(shape)
        if viewed is None:
            return None
        axes, splits = viewed
        heads = None if self.heads is None else renamed(self.heads, splits)
        if len(shape) == 4 and set(axes.axes[1]) <= set(renamed(self.batch, splits)):
            heads = axes.axes[1]
        if not splits:
            return replace(self, axes=axes, heads=heads)
        lead = renamed(self.lead, splits)
        batch, left_only, right_only = (renamed(x, splits) for x in (self.batch, self.left_only, self.right_only))

        def split(x: Tensor, factors: Axis) -> Tensor:
            sizes = [
                1 if x.shape[axis] == 1 else axes.sizes[part]
                for axis, factor in enumerate(factors)
                for part in splits.get(factor, (factor,))
            ]
            return x.reshape(*sizes, *x.shape[len(factors) :])

        every = self.all_factors
        return replace(
            self,
            axes=axes,
            heads=heads,
            lead=lead,
            left=split(self.left, (*self.batch, *self.left_only)),
            right=split(self.right, (*self.batch, *self.right_only)),
            batch=batch,
            left_only=left_only,
            right_only=right_only,
            factors=tuple(split(x, every) for x in self.factors),
            terms=tuple(Term(split(x, every), scale) for x, scale in self.terms),
            fills=tuple(fill._replace(pairs=split(fill.pairs, every)) for fill in self.fills),
            zeros=tuple(split(x, every) for x in self.zeros),
            cleared=tuple(one._replace(pairs=split(one.pairs, every)) for one in self.cleared),
            softmax=None if self.softmax is None else renamed(self.softmax, splits),
            maximum_of=None if self.maximum_of is None else renamed(self.maximum_of, splits),
        )

    def without_repetitions(self, copies: Axis, shape: Sequence[int], is_left: bool) -> Scores:
        """Reshape the scores to ``shape``, and store each repeated head of one tensor once.

        Args:
            copies: the part of the heads axis along which that tensor is repeated; empty if it is not repeated.
            shape: the shape that the model sees.
            is_left: whether the left tensor is the repeated one.
        """
        viewed = self.view(shape)
        assert viewed is not None
        if not copies:
            return viewed
        position = viewed.batch.index(copies[0])
        batch = tuple(x for x in viewed.batch if x not in copies)
        heads = None if viewed.heads is None else tuple(x for x in viewed.heads if x not in copies)
        left, right = viewed.left, viewed.right
        if is_left:
            left, right = left.select(position, 0), right.movedim(position, len(batch))
            return replace(
                viewed, left=left, right=right, batch=batch, heads=heads, right_only=(*copies, *viewed.right_only)
            )
        left, right = left.movedim(position, len(batch)), right.select(position, 0)
        return replace(viewed, left=left, right=right, batch=batch, heads=heads, left_only=(*copies, *viewed.left_only))

    def permuted(self, order: Sequence[int]) -> Scores:
        """Return the scores after ``permute(order)``."""
        return replace(self, axes=self.axes.permuted(order))

    def regrouped(self, axes: tuple[Axis, ...]) -> Scores:
        """Return the scores with new axes, which may differ from the current axes only by axes of size 1."""
        return replace(self, axes=Axes(self.axes.sizes, axes))

    # ---- values ------------------------------------------------------------------------------------------------

    def times_number(self, number: float) -> Scores | None:
        """Return the scores times a number; it must be positive if the scores have a mask or a cap."""
        is_fixed = bool(self.fills) or self.cap is not None
        if self.softmax is not None or not math.isfinite(number) or number == 0 or (is_fixed and number < 0):
            return None
        return replace(
            self,
            scale=self.scale * number if self.cap is None else self.scale,
            cap=None if self.cap is None else self.cap * number,
            terms=tuple(Term(x, scale * number) for x, scale in self.terms),
            fills=tuple(fill._replace(value=fill.value * number) for fill in self.fills),
            shift=self.shift * number,
        )

    def times(self, x: Tensor) -> Scores | None:
        """Return the scores times a tensor that varies along queries or keys but not both, or contains only 0 and 1."""
        if not self.axes.broadcasts(x.shape):
            return None
        if self.softmax is not None and not x.is_complex():
            is_mask = not x.requires_grad and bool(((x == 0) | (x == 1)).all())
            return self._with_cleared(x == 0, is_filled=False, dtype=self._promoted(x)) if is_mask else None
        if not self._can_be_multiplied or not _is_real(x):
            return None
        by_factor = self.axes.by_factor(detached_if_no_grad(x), self.all_factors)
        varies = [self._varies(by_factor, factors) for factors in (self.left_only, self.right_only)]
        if all(varies):
            is_mask = not (self.terms or x.requires_grad) and bool(((x == 0) | (x == 1)).all())
            return replace(self, zeros=(*self.zeros, by_factor == 0), dtype=self._promoted(x)) if is_mask else None
        terms = tuple(Term(term * by_factor, scale) for term, scale in self.terms)
        factors = (*self.factors, by_factor)
        return replace(self, factors=factors, terms=terms, dtype=self._promoted(x))

    def plus_number(self, number: float) -> Scores | None:
        """Return the scores plus a number."""
        if self.softmax is not None or not math.isfinite(number):
            return None
        return replace(self, shift=self.shift + number)

    def minus_maximum(self, axis: int) -> Scores | None:
        """Return the scores minus their maximum over an axis."""
        factors = self.axes.axes[axis]
        return replace(self, maximum_of=factors) if self.maximum_of in (None, factors) else None

    def plus(self, x: Tensor, scale: float = 1.0) -> Scores | None:
        """Return the scores plus a tensor, such as a bias or a float mask."""
        if self.softmax is not None or not _is_real(x) or not self.axes.broadcasts(x.shape):
            return None
        term = Term(self.axes.by_factor(detached_if_no_grad(x), self.all_factors), scale)
        return replace(self, terms=(*self.terms, term), dtype=self._promoted(x))

    def filled(self, pairs: Tensor, value: float, others: Tensor | None = None) -> Scores | None:
        """Return the scores after a masked fill with large negative values or -inf.

        Args:
            pairs: bool, True at the pairs to fill.
            value: the fill value; if ``others`` is a tensor, its maximum.
            others: a tensor of fill values that broadcasts to the scores; None if every pair is filled with ``value``.
        """
        if self.softmax is not None and value == 0.0 and others is None and pairs.dtype == torch.bool:
            return self._with_cleared(pairs, is_filled=True, dtype=self.dtype)
        if self.softmax is not None or pairs.dtype != torch.bool or not value < -100.0:
            return None
        if not (self.axes.broadcasts(pairs.shape) and self.axes.broadcasts(() if others is None else others.shape)):
            return None
        by_factor = self.axes.by_factor(pairs, self.all_factors)
        is_constant = others is None or bool((others == value).all())
        return replace(self, fills=(*self.fills, Fill(by_factor, value, len(self.terms) if is_constant else -1)))

    def _with_cleared(self, pairs: Tensor, *, is_filled: bool, dtype: torch.dtype) -> Scores | None:
        """Return the weights after those of some pairs were set to 0."""
        if not self.axes.broadcasts(pairs.shape):
            return None
        one = Cleared(self.axes.by_factor(pairs, self.all_factors), is_filled)
        return replace(self, cleared=(*self.cleared, one), dtype=dtype)

    def finite(self, lowest: float | None) -> Scores | None:
        """Return the scores or weights after ``nan_to_num``, which replaces -inf by ``lowest``."""
        is_plain = self.softmax is not None or not (self.fills or self.terms)  # finite if queries and keys are
        lowest = torch.finfo(self.dtype).min if lowest is None else float(lowest)
        scores = self if is_plain else self.floored(lowest)
        return None if scores is None else replace(scores, replaces_nan=True)

    def floored(self, value: float) -> Scores | None:
        """Return the elementwise maximum of the scores and a large negative number."""
        if self.softmax is not None or not value < -100.0:
            return None
        nothing = torch.zeros((1,) * len(self.all_factors), dtype=torch.bool, device=self.left.device)
        fills = tuple(fill._replace(value=max(fill.value, value)) for fill in self.fills)
        return replace(self, fills=(*fills, Fill(nothing, value, len(self.terms))))

    def tanh(self) -> Scores | None:
        """Return the scores after a tanh, the first part of a softcap."""
        return replace(self, cap=1.0) if self._is_scaled_product else None

    def cast(self, dtype: torch.dtype) -> Scores | None:
        """Return the scores cast to a dtype, without rounding them to a narrower dtype."""
        return replace(self, dtype=dtype) if dtype in FLOATS else None

    def softmaxed(self, axis: int, dtype: torch.dtype | None = None) -> Scores | None:
        """Return the attention weights, the softmax of the scores over ``axis``, which must be the key axis."""
        is_known = self.maximum_of in (None, self.axes.axes[axis])
        if not (self.is_keys(axis) and is_known) or dtype not in (None, *FLOATS):
            return None
        dtype = softmax_dtype(self.left, self.dtype) if dtype is None else dtype
        return replace(self, softmax=self.axes.axes[axis], dtype=dtype)

    def is_keys(self, axis: int) -> bool:
        """Return whether an axis of the scores may be the key axis, because only one of the two tensors has it."""
        factors = set(self.axes.axes[axis])
        return (
            self.softmax is None and bool(factors) and any(factors <= {*x} for x in (self.left_only, self.right_only))
        )

    def dropped(self, dropout_p: float) -> Scores | None:
        """Return the attention weights after dropout."""
        if self.softmax is None or self.dropout_p or not 0.0 <= dropout_p < 1.0:
            return None
        return replace(self, dropout_p=float(dropout_p))

    def _varies(self, x: Tensor, factors: Axis) -> bool:
        return any(x.shape[self.all_factors.index(factor)] > 1 for factor in factors)

    def _promoted(self, x: Tensor) -> torch.dtype:
        if x.dim() == 0:
            return torch.result_type(torch.empty(1, dtype=self.dtype), torch.empty((), dtype=x.dtype))
        return torch.promote_types(self.dtype, x.dtype)

    def with_operands(self, tensors: Iterable[Tensor]) -> Scores:
        """Return a copy of the scores with additional operands."""
        return replace(self, operands=(*self.operands, *((x, version_of(x)) for x in tensors)))


def detached_if_no_grad(x: Tensor) -> Tensor:
    """Detach an operand of the scores if gradients are disabled, because it then contributes no gradient."""
    return x.detach() if x.requires_grad and not torch.is_grad_enabled() else x


def version_of(x: Tensor) -> int:
    """Return an operand's version counter, which counts in-place changes; 0 for an inference tensor, which has none."""
    return 0 if x.is_inference() else x._version


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which torch would now multiply a tensor: autocast's dtype if enabled, or the tensor's."""
    return torch.get_autocast_dtype(x.device.type) if is_autocast(x) and x.dtype != torch.float64 else x.dtype


def softmax_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a softmax of scores under the current autocast settings."""
    return _softmax_dtype(x.device, dtype, torch.get_autocast_dtype(x.device.type)) if is_autocast(x) else dtype


@functools.lru_cache
def _softmax_dtype(device: torch.device, dtype: torch.dtype, _: torch.dtype) -> torch.dtype:
    return torch.softmax(torch.zeros(1, dtype=dtype, device=device), 0).dtype


def _is_real(x: Tensor) -> bool:
    return is_dense(x) and x.dtype in FLOATS


def is_dense(x: object) -> bool:
    """Return whether an operand is an ordinary dense tensor with values in memory."""
    if not (isinstance(x, Tensor) and type(x) in (Tensor, torch.nn.Parameter)):
        return False
    return x.layout == torch.strided and not x.is_nested and not x.is_meta and not x.is_quantized
