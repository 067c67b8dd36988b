"""Statistics of softmax rows and columns, computed by the compiled kernel in one sweep."""

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
"""Numbers of each row, in this order; native/src/arguments.h has the same list."""
_FAR = 1 << 30


class Band(NamedTuple):
    """A range of keys from ``first`` to ``stop``, counted from the row's own index if it follows the rows."""

    follows: bool
    first: int
    stop: int


class Sweep(NamedTuple):
    """The results of a compiled sweep: statistics of rows, and column sums.

    Attributes:
        rows: float32 ``[NUMBERS and bands, batch, heads, q_len]``: statistics of each row, then its sums over the
            bands.
        received: column sums, float64 ``[batch, heads, kv_len]``.
    """

    rows: Tensor
    received: Tensor


def can_sweep(inputs: AttentionInputs, impl: str | Kernel) -> bool:
    """Return whether the compiled kernel may and can compute the statistics of these inputs."""
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
    """Compute statistics of all softmax rows and columns by the compiled kernel, in one sweep.

    Args:
        inputs: inputs that `can_sweep` accepts.
        bands: ranges of keys whose weights are summed.
        ahead: how far the position of query i is ahead of key i, for distances.

    Cost: time as for one product with as many pairs, or less; memory per thread is the scores of `ROWS` rows, and
    O(kv_len) for each part of the column sums, which are added in one order on any number of threads.
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
    """Return the inputs in a dtype that the compiled kernel computes in; statistics are float32 anyway."""
    dtype = inputs.query.dtype
    if dtype is torch.float16 or (dtype is torch.bfloat16 and (abilities() or 0) < HALF):
        return inputs.replaced(query=inputs.query.float(), key=inputs.key.float())
    return inputs
