"""The adapter for kernels that compute only selected blocks of keys for each block of queries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.masks import Predicate
from saccade.support.language import Message
from saccade.support.validation import check_int
from saccade.testing.adapters.calling_convention import Form, check_kernel_callable
from saccade.testing.case import Case


def block_sparse(
    kernel: Callable[..., Any],
    block_size: int = 16,
    *,
    indices: bool = True,
    names: Mapping[str, str] | None = None,
    offers: Collection[str] = (),
    gqa: bool = True,
    output: int | None = None,
) -> Form:
    """Adapt a block-sparse attention kernel that takes the arguments of FlexAttention's ``BlockMask``.

    The adapter calls ``kernel(q, k, v, kv_num_blocks=, kv_indices=)`` with tensors ``[batch, heads, len, dim]``. For
    each block of queries, int32 ``kv_num_blocks [batch, heads, query blocks]`` is the number of selected key blocks,
    and int32 ``kv_indices [batch, heads, query blocks, key blocks]`` lists the indices of all key blocks, selected
    blocks first. The last block may be incomplete.

    Args:
        kernel: the kernel.
        block_size: number of queries and of keys in a block.
        indices: if False, pass ``block_mask=``, bool ``[batch, heads, query blocks, key blocks]``, instead.
        names: the kernel's names for options and for the keywords above.
        offers: the options that the kernel supports.
        gqa: whether the kernel supports fewer key heads than query heads.
        output: index of the output in the tuple that the kernel returns; None if it returns one tensor.
    """
    check_int("block_size", block_size)
    settings = {"block_size": block_size, "indices": indices, "names": dict(names or {}), "output": output}
    cases = _cases(block_size)
    return Form(
        check_kernel_callable(kernel),
        run,
        _reasons_against,
        settings,
        tuple(offers),
        gqa,
        (blocks_of_mask,),
        cases=cases,
    )


def run(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    block_size: int,
    indices: bool,
    names: Mapping[str, str],
    output: int | None,
    **options: Any,
) -> Tensor:
    """Convert the mask to the kernel's block arguments, call the kernel, and return its output."""
    blocks = blocks_of_mask(mask, block_size)
    assert blocks is not None  # `_reasons_against` excludes such masks
    keywords: dict[str, Any] = {"block_mask": blocks}
    if indices:
        first = torch.sort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).indices
        keywords = {"kv_num_blocks": blocks.sum(-1, dtype=torch.int32), "kv_indices": first.to(torch.int32)}
    keywords = {names.get(name, name): option for name, option in (keywords | options).items()}
    result = kernel(query, key, value, **keywords)
    out: Tensor = result if output is None else result[output]
    return out


def blocks_of_mask(mask: Tensor, size: int) -> Tensor | None:
    """Return which blocks of pairs a mask allows, bool ``[batch, heads, query blocks, key blocks]``.

    Return None if the mask allows only some of the pairs in a block.
    """
    q_len, kv_len = mask.shape[2:]
    fill = (0, -kv_len % size, 0, -q_len % size)
    tiles = [F.pad(mask, fill, value=edge).unflatten(3, (-1, size)).unflatten(2, (-1, size)) for edge in (True, False)]
    sure, some = tiles[0].all(5).all(3), tiles[1].any(5).any(3)
    return some if torch.equal(sure, some) else None


def _reasons_against(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, block_size: int, **settings: object
) -> tuple[str, ...]:
    """Return the reasons why the kernel cannot take the inputs, such as a mask that splits a block; empty if it can."""
    if 0 in mask.shape:
        return ("takes no empty inputs",)
    whole = blocks_of_mask(mask, block_size) is not None
    return () if whole else (Message("takes only masks made of whole blocks of {size}", size=block_size),)


def _cases(size: int) -> tuple[Case, ...]:
    """Build test cases whose masks consist of whole blocks, with and without an incomplete last block."""

    def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv // size <= q // size

    def striped(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q // size + kv // size + h + b) % 3 == 0

    def case(name: str, rule: Callable[..., Any], length: int) -> Case:
        return Case(name, Predicate(rule), rule, q_len=length, kv_len=length)

    return (
        case("blocks-causal", causal, 3 * size),
        case("blocks-causal-incomplete", causal, 2 * size + 1),
        case("blocks-of-heads", striped, 3 * size),
        case("blocks-of-heads-incomplete", striped, 4 * size - 1),
    )
