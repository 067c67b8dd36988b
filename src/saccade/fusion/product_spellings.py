"""Product: a matrix product written as matmul, bmm, baddbmm or einsum, converted to einsum notation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from saccade.fusion.axes import Axes, Axis, new_factor
from saccade.fusion.repeated_heads import Repeated, Repeats
from saccade.fusion.scores import FLOATS, Scores, detached_if_no_grad, is_dense, product_dtype

Operand = Tensor | Scores


@dataclass(frozen=True)
class Product:
    """A product of two tensors in einsum notation, with a letter for each axis.

    Args:
        left, right: the tensors; a lazy one is represented by its `Scores`.
        left_letters, right_letters, letters: the axis names of the left tensor, the right tensor and the product.
            A tensor is broadcast along an axis of size 1.
        sizes: the size of the axis that each letter names.
        alpha: a number that multiplies the product.
        added, beta: a tensor added to the product, or None, and the number that multiplies this tensor.
    """

    left: Operand
    right: Operand
    left_letters: tuple[str, ...]
    right_letters: tuple[str, ...]
    letters: tuple[str, ...]
    sizes: dict[str, int]
    alpha: float = 1.0
    added: Tensor | None = None
    beta: float = 1.0

    @property
    def summed(self) -> tuple[str, ...]:
        """The letters that the product sums over: those that both tensors have and the product lacks."""
        return tuple(x for x in self.left_letters if x in self.right_letters and x not in self.letters)

    @property
    def is_contraction(self) -> bool:
        """Whether the product sums over at least one letter, and only over letters that both tensors have."""
        both = {*self.left_letters, *self.right_letters}
        return bool(self.summed) and both == {*self.letters, *self.summed}


def _matmul(args: tuple[Any, ...], kwargs: dict[str, Any], *, dims: int | None = None) -> Product | None:
    operands = [*args, *(kwargs.pop(name) for name in ("other", "tensor2", "mat2") if name in kwargs)]
    operands = [kwargs.pop("input"), *operands] if "input" in kwargs else operands
    if len(operands) != 2 or kwargs or not all(isinstance(x, Operand) for x in operands):
        return None
    left, right = operands
    shapes = _shape(left), _shape(right)
    if min(map(len, shapes)) < 2 or (dims is not None and {*map(len, shapes)} != {dims}):
        return None
    if dims is not None and shapes[0][:-2] != shapes[1][:-2]:
        return None
    lead = tuple(f"batch{axis}" for axis in reversed(range(max(map(len, shapes)) - 2)))
    left_letters, right_letters = (lead[len(lead) - (len(shape) - 2) :] for shape in shapes)
    return _in_letters(
        left, right, (*left_letters, "row", "sum"), (*right_letters, "sum", "column"), (*lead, "row", "column")
    )


def _reversed_matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    return _matmul(args[::-1], kwargs)


def _bmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    return _matmul(args, kwargs, dims=3)


def _mm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    return _matmul(args, kwargs, dims=2)


def _baddbmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    names = ("input", "batch1", "batch2")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    beta, alpha = arguments.pop("beta", 1), arguments.pop("alpha", 1)
    if set(arguments) != set(names) or not isinstance(arguments["input"], Tensor):
        return None
    product = _bmm((arguments["batch1"], arguments["batch2"]), {})
    if product is None or not all(isinstance(x, int | float) for x in (alpha, beta)):
        return None
    return replace(product, alpha=float(alpha), added=arguments["input"] if beta else None, beta=float(beta))


def _einsum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or kwargs:
        return None
    if not all(isinstance(x, Operand) for x in operands):
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        return None
    if not arrow:
        single = sorted(x for x in {*inputs} - {*".,"} if inputs.count(x) == 1)
        output = ("..." if "..." in inputs else "") + "".join(single)
    dots = [len(_shape(x)) - len(term.replace("...", "")) for x, term in zip(operands, terms, strict=True)]
    if any(count < 0 or (count and "..." not in term) for count, term in zip(dots, terms, strict=True)):
        return None
    letters = [_letters(term, count) for term, count in zip(terms, dots, strict=True)]
    left, right = operands
    return _in_letters(left, right, letters[0], letters[1], _letters(output, max(dots)))


def _letters(term: str, dots: int) -> tuple[str, ...]:
    """Return the letters of one einsum term, with a name for each dimension that "..." covers."""
    before, ellipsis, after = term.partition("...")
    covered = tuple(f"batch{axis}" for axis in reversed(range(dots))) if ellipsis else ()
    return (*before, *covered, *after)


def _in_letters(
    left: Operand,
    right: Operand,
    left_letters: tuple[str, ...],
    right_letters: tuple[str, ...],
    letters: tuple[str, ...],
) -> Product | None:
    sizes: dict[str, int] = {}
    for operand, names in ((left, left_letters), (right, right_letters)):
        if len(set(names)) != len(names) or 0 in _shape(operand):
            return None
        for name, size in zip(names, _shape(operand), strict=True):
            if sizes.setdefault(name, size) != size and 1 not in (sizes[name], size):
                return None  # torch raises
            sizes[name] = max(size, sizes[name])
    if len(set(letters)) != len(letters) or not set(letters) <= set(sizes):
        return None
    product = Product(left, right, left_letters, right_letters, letters, sizes)
    shapes = (_shape(left), left_letters), (_shape(right), right_letters)
    full = all(shape[names.index(x)] == sizes[x] for x in product.summed for shape, names in shapes)
    return product if full and product.is_contraction else None


def _shape(x: Operand) -> tuple[int, ...]:
    return x.axes.shape if isinstance(x, Scores) else tuple(x.shape)


_PARSERS: dict[Callable[..., Any], Callable[[tuple[Any, ...], dict[str, Any]], Product | None]] = {
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul), _matmul),
    Tensor.__rmatmul__: _reversed_matmul,
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
    **dict.fromkeys((torch.mm, Tensor.mm), _mm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _baddbmm),
    torch.functional.einsum: _einsum,
}

PRODUCTS = frozenset(_PARSERS)
"""The torch functions that `product_of` can parse."""


def product_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Return the `Product` that a call to a torch function computes, or None if the call is not supported."""
    return _PARSERS[func](args, dict(kwargs))


def scores_of(product: Product, repeats: Repeats) -> Scores | None:
    """Convert a product of two tensors to lazy attention scores; return None if it cannot be part of attention."""
    left, right = product.left, product.right
    if not (_may_be_query_or_key(left) and _may_be_query_or_key(right)) or left.device != right.device:
        return None
    dtype = product_dtype(left)
    is_layer = left.dim() > right.dim() == 2 and product.right_letters[0] in product.summed and right.is_contiguous()
    if is_layer or dtype != product_dtype(right) or not (product.added is None or is_dense(product.added)):
        return None
    has = [
        {x for x, size, step in zip(names, operand.shape, operand.stride(), strict=True) if size > 1 and step}
        for operand, names in ((left, product.left_letters), (right, product.right_letters))
    ]
    lead = _lead(product)
    letters = (product.left_letters, product.right_letters)
    for side, side_letters, other in zip(has, letters, letters[::-1], strict=True):
        side |= {x for x in side_letters if x not in (*other, *lead)}  # even if there is a single query or key
    factors = {x: new_factor() for x in product.letters if x in has[0] | has[1]}
    by_side = [[x for x in factors if x in has[0] and x in has[1]]]
    by_side += [[x for x in factors if x in side and x not in other] for side, other in (has, has[::-1])]
    batch, left_only, right_only = (tuple(factors[x] for x in side) for side in by_side)
    axes = Axes(
        {factors[x]: product.sizes[x] for x in factors},
        tuple((factors[x],) if x in factors else () for x in product.letters),
    )
    is_whole = axes.shape == tuple(product.sizes[x] for x in product.letters)  # not if both are expanded along an axis
    if not is_whole or not (left_only or right_only):
        return None
    scores = Scores(
        axes=axes,
        left=_arranged(detached_if_no_grad(left), product.left_letters, (*by_side[0], *by_side[1]), product.summed),
        right=_arranged(detached_if_no_grad(right), product.right_letters, (*by_side[0], *by_side[2]), product.summed),
        batch=batch,
        left_only=left_only,
        right_only=right_only,
        heads=_heads(product, dict(zip(product.letters, axes.axes, strict=True)), batch),
        lead=tuple(factors[x] for x in lead if x in factors),
        product_dtype=dtype,
        dtype=dtype,
        scale=product.alpha,
    )
    if product.added is not None:
        return scores.plus(product.added, product.beta)
    return _grouped(scores, product, repeats.find(left), repeats.find(right))


def _grouped(scores: Scores, product: Product, left: Repeated | None, right: Repeated | None) -> Scores:
    """Store each repeated key head once, so that groups of query heads share a key head."""
    repeated, names = (left, product.left_letters) if left is not None else (right, product.right_letters)
    if repeated is None or (left is not None and right is not None):
        return scores
    if names[repeated.axis] not in product.letters:
        return scores
    axis = product.letters.index(names[repeated.axis])
    if not set(scores.axes.axes[axis]) & set(scores.batch):
        return scores
    shape = list(scores.axes.shape)
    split = scores.view([*shape[:axis], shape[axis] // repeated.copies, repeated.copies, *shape[axis + 1 :]])
    return scores if split is None else split.without_repetitions(split.axes.axes[axis + 1], shape, left is not None)


def _heads(product: Product, axes: dict[str, Axis], batch: Axis) -> Axis | None:
    """Return the factors of the head axis, or None if the product has fewer than four axes.

    The head axis is the last axis that both tensors have. Their first shared axis is never the head axis.
    """
    shared = [x for x in product.letters if x in product.left_letters and x in product.right_letters]
    of_both = [axes[x] for x in shared[1:] if set(axes[x]) <= set(batch)]
    return (of_both or [()])[-1] if len(product.letters) > 3 else None


def _lead(product: Product) -> list[str]:
    """Return the letters of a product that index no positions: all except one query letter and one key letter.

    These two are the nearest to each other, but not "h" in an einsum, which names heads: ``"bshd,btd->bsht"``.
    """
    letters = product.letters
    of_left = [x for x in letters if x not in product.right_letters]
    of_right = [x for x in letters if x not in product.left_letters]
    of_left, of_right = ([x for x in side if x != "h"] or side for side in (of_left, of_right))
    pairs = itertools.product(of_left or [""], of_right or [""])
    index = {x: position for position, x in enumerate(letters)} | {"": len(letters)}
    nearest = min(pairs, key=lambda pair: abs(index[pair[0]] - index[pair[1]]))
    return [x for x in letters if x not in nearest]


def _may_be_query_or_key(x: Operand) -> TypeGuard[Tensor]:
    """Return whether a tensor may contain queries or keys; a parameter may not, because it is a layer's weights."""
    return is_dense(x) and type(x) is Tensor and x.dtype in FLOATS and not x.is_conj() and not x.is_neg()


def _arranged(x: Tensor, names: tuple[str, ...], kept: tuple[str, ...], summed: tuple[str, ...]) -> Tensor:
    """Reshape an operand of a product to the axes that the product keeps, followed by one axis for all summed axes."""
    for axis, name in enumerate(names):
        if name not in (*kept, *summed):
            x = x.narrow(axis, 0, 1)
    order = (*kept, *summed, *(name for name in names if name not in (*kept, *summed)))
    x = x.permute([names.index(name) for name in order])
    return x.reshape(*x.shape[: len(kept)], -1)
