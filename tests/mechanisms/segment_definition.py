"""The definition of a memory of segments: a plain loop over them, in the dtype given."""

import torch
from torch import Tensor


def by_segments(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, segment: int, update: str) -> Tensor:
    """Return the output for ``[batch, heads, len, width]`` from position 0 on; ``gate [heads]`` is after sigmoid."""
    share, gate = q.shape[1] // k.shape[1], gate[:, None, None]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    memory, norm, out = 0.0, 0.0, []
    for start in range(0, q.shape[2], segment):
        own, keys, values = (x[:, :, start : start + segment] for x in (q, k, v))
        scores = own @ keys.mT / own.shape[3] ** 0.5
        above = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        local = scores.masked_fill(above, -torch.inf).softmax(-1) @ values
        if start == 0:
            out.append((1 - gate) * local)
        else:
            out.append(gate * (_sigma(own) @ memory) / (_sigma(own) @ norm) + (1 - gate) * local)
            if update == "delta":
                values = values - (_sigma(keys) @ memory) / (_sigma(keys) @ norm)
        memory, norm = memory + _sigma(keys).mT @ values, norm + _sigma(keys).sum(2)[..., None]
    return torch.cat(out, 2)


def _sigma(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
