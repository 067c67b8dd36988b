"""The adapter for kernels that take packed sequences and their offsets, ``(q, k, v, cu_seqlens_q, ...)``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.support.validation import check_int
from saccade.testing.adapters.calling_convention import Form, check_kernel_callable
from saccade.testing.adapters.patterns import band_of_blocks, blocks_of, distances, in_band, of_items


def varlen(
    kernel: Callable[..., Any],
    *,
    windows: bool = False,
    tail: int = 0,
    names: Mapping[str, str] | None = None,
    offers: Collection[str] = (),
    gqa: bool = True,
    output: int | None = None,
) -> Form:
    """Adapt a kernel for packed sequences that takes FlashAttention's arguments.

    The call is ``kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=...)``, where q, k and
    v are ``[tokens, heads, dim]`` and ``cu_seqlens`` int32 ``[sequences + 1]``. Each document of each batch item
    becomes a sequence. Padding and other tokens that neither see a token nor are seen by one are omitted.

    Args:
        kernel: the kernel.
        windows: whether the kernel takes ``window_size=(left, right)``, with -1 for no limit.
        tail: number of rows of NaN that follow the last sequence in q, k and v. Their outputs are ignored.
        names: the kernel's names for options and for ``causal`` and ``window_size``; by default, the scale is
            ``softmax_scale``.
        offers: the options that the kernel supports.
        gqa: whether the kernel supports fewer key heads than query heads.
        output: index of the output in the tuple that the kernel returns; None if it returns one tensor.
    """
    check_int("tail", tail, 0)
    chosen = {"scale": "softmax_scale"} | dict(names or {})
    settings = {"windows": windows, "tail": tail, "names": chosen, "output": output}
    parts = (distances, in_band, of_items, blocks_of, band_of_blocks)
    return Form(check_kernel_callable(kernel), run, _reasons_against, settings, tuple(offers), gqa, parts)


def run(
    kernel: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    windows: bool,
    tail: int,
    names: Mapping[str, str],
    output: int | None,
    **options: Any,
) -> Tensor:
    """Pack the documents of all batch items, call the kernel, and unpack its output. Rows of omitted tokens are 0."""
    items = of_items(mask)
    assert items is not None  # `_reasons_against` excludes such masks
    documents = [blocks_of(item) for item in items]
    band = band_of_blocks(items, documents) or (-1, -1)
    count, rows, columns = [], list[Tensor](), list[Tensor]()
    for b, found in enumerate(documents):
        for first, last, low, high in found:
            count.append((last - first, high - low))
            rows.append(torch.arange(first, last) + b * query.shape[2])
            columns.append(torch.arange(low, high) + b * key.shape[2])
    batch, heads, q_len, _ = query.shape
    whole = value.new_zeros(batch * q_len, heads, value.shape[3])
    if count:
        at_q, at_kv = (torch.cat(x).to(query.device) for x in (rows, columns))
        packed = [x.transpose(1, 2).flatten(0, 1)[at] for x, at in ((query, at_q), (key, at_kv), (value, at_kv))]
        packed = [F.pad(x, (0, 0, 0, 0, 0, tail), value=torch.nan) if tail else x for x in packed]
        lengths = torch.tensor([(0, 0), *count], device=query.device)
        ends = [column.cumsum(0).to(torch.int32) for column in lengths.unbind(1)]
        keywords: dict[str, Any] = {"causal": band[1] == 0} | ({"window_size": band} if windows else {})
        keywords = {names.get(name, name): option for name, option in (keywords | options).items()}
        result = kernel(*packed, *ends, *(int(x) for x in lengths.amax(0)), **keywords)
        out: Tensor = result if output is None else result[output]
        whole = whole.to(out.dtype).index_copy(0, at_q, out[: len(at_q)])
    return whole.unflatten(0, (batch, q_len)).transpose(1, 2)


def _reasons_against(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, windows: bool, **settings: object
) -> tuple[str, ...]:
    """Return the reasons why packed sequences cannot represent the mask; empty if they can."""
    items = of_items(mask)
    documents = [] if items is None else [blocks_of(item) for item in items]
    if items is not None and not any(documents):
        return ("takes at least one sequence",)
    band = None if items is None else band_of_blocks(items, documents)
    if band is None or (not windows and band not in ((-1, -1), (-1, 0))):
        return (
            "takes only packed sequences, full or causal or with a window"
            if windows
            else "takes only packed sequences, full or causal",
        )
    return ()
