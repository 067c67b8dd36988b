"""Right kernels of every form, written with `saccade.attention`, and their adapters."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade.testing import adapters
from saccade.testing.adapters.patterns import in_band


def attend(query, key, value, mask, **options):
    """Attention ``[batch, heads, len, dim]``."""
    return sc.attention(query, key, value, mask, **options)


def in_order(order):
    """A kernel whose tensors have another order of axes; without b it takes one item."""
    axes = "b" + order if "b" not in order else order

    def kernel(q, k, v, mask, **options):
        if "b" not in order:
            q, k, v, mask = (x[None] for x in (q, k, v, mask))
        to, back = [axes.index(x) for x in "bhld"], ["bhld".index(x) for x in axes]
        out = attend(*(x.permute(to) for x in (q, k, v)), mask, **options).permute(back)
        return out if "b" in order else out[0]

    return kernel


def flash(q, k, v, *, causal, window_size=(-1, -1), softmax_scale=None):
    """FlashAttention's arguments: ``[batch, len, heads, dim]``, a flag and a window."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    band = (window_size[0], 0 if causal else window_size[1])
    mask = in_band(q.shape[2], k.shape[2], band, q)
    return attend(q, k, v, mask, scale=softmax_scale).transpose(1, 2)


def packed(q, k, v, cu_q, cu_k, max_q, max_k, *, causal, window_size=(-1, -1), softmax_scale=None):
    """One call of `flash` for each sequence; rows behind the last are NaN."""
    whole = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
    outs = []
    for a, b, c, d in zip(*(x.tolist() for x in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:])), strict=True):
        assert b - a <= max_q
        assert d - c <= max_k
        options = {"causal": causal, "window_size": window_size, "softmax_scale": softmax_scale}
        outs.append(flash(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0])
    return torch.cat([*outs, whole[int(cu_q[-1]) :]])


def from_pages(q, k_cache, v_cache, *, cache_seqlens, block_table, causal, softmax_scale=None):
    """One call of `flash` for each item."""
    outs = []
    for b, length in enumerate(cache_seqlens.tolist()):
        k, v = (x[block_table[b].long()].flatten(0, 1)[None, :length] for x in (k_cache, v_cache))
        outs.append(flash(q[b : b + 1], k, v, causal=causal, softmax_scale=softmax_scale))
    return torch.cat(outs)


def of_blocks(q, k, v, *, kv_num_blocks, kv_indices, size=4):
    """The dense mask of the blocks."""
    columns = kv_indices.shape[3]
    chosen = torch.zeros_like(kv_indices, dtype=torch.bool)
    wanted = torch.arange(columns) < kv_num_blocks[..., None]
    chosen.scatter_(3, kv_indices.long(), wanted)
    mask = chosen.repeat_interleave(size, 2).repeat_interleave(size, 3)
    return attend(q, k, v, mask[:, :, : q.shape[2], : k.shape[2]])


def of_functions(q, k, v, *, score_mod, mask_mod, scale):
    """Functions of scores and pairs, read at all indices."""
    shape = (*q.shape[:3], k.shape[2])
    index = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    mask, bias = mask_mod(*index), None
    if score_mod is not None:
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        factor = q.shape[3] ** -0.5 if scale is None else scale
        finite = (x.nan_to_num(0.0, 0.0, 0.0) for x in (q, keys))
        scores = torch.einsum("bhqd,bhkd->bhqk", *finite) * factor
        bias = score_mod(scores, *index) - scores
    return attend(q, k, v, mask, bias=bias, scale=scale)


def step_by_step(rule):
    """A recurrence of flash-linear-attention's arguments, token by token."""

    def kernel(q, k, v, beta=None, g=None, initial_state=None, output_final_state=True, a=None, b=None):
        state = v.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
        outs = [v.new_zeros(len(q), 0, *v.shape[2:])]
        for start in range(0, q.shape[1], 16):  # the states of all tokens would take gigabytes
            some = (None if x is None else x[:, start : start + 16] for x in (q, k, v, beta, g, a, b))
            out, state = checkpoint(part, state, *some, use_reentrant=False)
            outs.append(out)
        return torch.cat(outs, 1), state

    def part(state, q, k, v, beta, g, a, b):
        outs = []
        for i in range(q.shape[1]):
            key, value = k[:, i, :, :, None], v[:, i, :, None]
            moved = 0.0 if a is None else torch.einsum("bhk,bhd,bhde->bhke", b[:, i], a[:, i], state)
            if g is not None:
                state = state * (g[:, i] if g.dim() == 4 else g[:, i, :, None])[..., None].exp()
            state = state + moved
            if rule in ("delta", "gated_delta", "kda"):
                value = value - (key * state).sum(2, keepdim=True)
            state = state + key * value * (1.0 if beta is None else beta[:, i, :, None, None])
            outs.append((q[:, i, :, :, None] * state).sum(2) * q.shape[3] ** -0.5)
        return torch.stack(outs, 1), state

    return kernel


def ssd(x, dt, A, B, C, initial_states=None, return_final_states=True):
    """Mamba-2's arguments."""
    shape = (len(x), x.shape[2], B.shape[3], x.shape[3])
    state = x.new_zeros(shape) if initial_states is None else initial_states
    outs = []
    for i in range(x.shape[1]):
        step = dt[:, i, :, None, None]
        state = state * (step * A[:, None, None]).exp() + step * B[:, i, :, :, None] * x[:, i, :, None]
        outs.append((C[:, i, :, :, None] * state).sum(2))
    return torch.stack(outs, 1), state


SCALED = {"names": {"scale": "softmax_scale"}, "offers": ("scale",)}
RIGHT = {
    "bhld": adapters.layout(in_order("bhld"), offers=("scale", "bias", "softcap")),
    "blhd": adapters.layout(in_order("blhd"), "blhd", offers=("scale", "bias")),
    "lbhd": adapters.layout(in_order("lbhd"), "lbhd"),
    "lhd": adapters.layout(in_order("lhd"), "lhd", offers=("bias",)),
    "flash": adapters.layout(flash, "blhd", masks="window", **SCALED),
    "causal-flag": adapters.layout(flash, "blhd", masks="causal"),
    "varlen": adapters.varlen(packed, windows=True, tail=3, offers=("scale",)),
    "paged": adapters.paged(from_pages, page_size=4, offers=("scale",)),
    "blocks": adapters.block_sparse(of_blocks, 4),
    "score_mod": adapters.score_mod(of_functions),
    "linear": adapters.recurrent(step_by_step("linear"), "linear"),
    "gla": adapters.recurrent(step_by_step("gla"), "gla"),
    "delta": adapters.recurrent(step_by_step("delta"), "delta"),
    "gated_delta": adapters.recurrent(step_by_step("gated_delta"), "gated_delta"),
    "kda": adapters.recurrent(step_by_step("kda"), "kda"),
    "rwkv7": adapters.recurrent(step_by_step("rwkv7"), "rwkv7"),
    "ssd": adapters.recurrent(ssd, "ssd"),
}


def additive(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    """A kernel of a float mask."""
    return attend(q, k, v, attn_mask == 0)


RIGHT["additive"] = adapters.layout(additive, masks="additive", mask_name="attn_mask")
