"""Numbers of the rows and columns of a softmax, found by the compiled kernel in one sweep."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.bias.term import MaskedTerm
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request
from saccade.engine.kernels.native import HALF, Native, abilities, is_on
from saccade.engine.kernels.native_arguments import Call, chunks_of
from saccade.engine.nonfinite import is_clean
from saccade.support.torch_modes import is_plain

NUMBERS = ("largest_logit", "largest_weight", "held", "entropy", "squares", "variance", "distance")
"""Numbers of each row, in this order; native/src/problem.h has the same list."""
_FAR = 1 << 30


class Band(NamedTuple):
    """Keys from ``first`` to ``stop``, counted from the row's own index if they follow it."""

    follows: bool
    first: int
    stop: int


class Sweep(NamedTuple):
    """Results of a sweep.

    Attributes:
        rows: float32 ``[NUMBERS and bands, batch, heads, q_len]``: of each row the numbers, and its sums in the bands.
        received: sums of the columns, float64 ``[batch, heads, kv_len]``.
    """

    rows: Tensor
    received: Tensor


def can_sweep(inputs: AttentionInputs, impl: str | Kernel) -> bool:
    """Whether the compiled kernel is asked for, or allowed, and can look at these ingredients."""
    is_named = impl == "native" or isinstance(impl, Native)
    if not is_named and not (impl == "auto" and is_on()):
        return False
    if (
        not (is_plain(inputs.query) and is_plain(inputs.key))
        or 0 in inputs.shape
        or isinstance(inputs.bias, MaskedTerm)
    ):
        return False
    request = Request(impl="native")
    return not Native().verdict(_readable(inputs), request).cannot and is_clean(inputs, inputs.query, inputs.key)


def sweep_statistics(inputs: AttentionInputs, bands: list[Band], ahead: int) -> Sweep:
    """One sweep.

    Args:
        inputs: what `can_sweep` has said yes to.
        bands: whose sums are wanted.
        ahead: by how many positions query i stands before key i, for distances.

    Cost: time as for one product with as many pairs, or less; for each thread the scores of `ROWS` rows, and
    O(kv_len) for each of some parts whose column sums are added up, in one order on any number of threads.
    """
    wide = _readable(inputs)
    told = [[band.follows, *(min(max(edge, -_FAR), _FAR) for edge in band[1:])] for band in bands]
    sinks = None if inputs.sink_logit is None else inputs.sink_logit.float().contiguous()
    ranges = torch.tensor(told, dtype=torch.int32, device="cpu").reshape(-1, 3)
    rows, received = torch.ops.saccade_cpu.look(
        *Call.of(wide, wide.key, None).of_scores, sinks, ranges, ahead, chunks_of(inputs)
    )
    return Sweep(rows, received.sum(0))


def _readable(inputs: AttentionInputs) -> AttentionInputs:
    """In float32 where the processor has no products of the dtype: statistics are computed in it anyway."""
    dtype = inputs.query.dtype
    if dtype is torch.float16 or (dtype is torch.bfloat16 and (abilities() or 0) < HALF):
        return inputs.replaced(query=inputs.query.float(), key=inputs.key.float())
    return inputs
