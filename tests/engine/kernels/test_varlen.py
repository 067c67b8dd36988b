"""Tests of the kernel for packed texts: its arguments and results, with a stand-in for torch's function."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

import saccade as sc
from saccade import masks, testing
from saccade.engine.kernels import varlen as kernel
from saccade.masks.convert.patterns import packed_of

N = 50
MASKS = {
    "all": None,
    "causal": masks.Causal(),
    "window": masks.Window(5, 3),
    "sliding": masks.sliding_window(7),
    "one side": masks.Window(None, 4) & masks.Window(9, None),
    "one packed line": masks.Documents([20, 12, 18], rule=masks.Causal()),
    "texts": masks.Documents([[20, 12, 18], [50]]),
    "texts and no text": masks.Documents([[20, 0, 12], [49, 1]], rule=masks.Causal() & masks.Window(6, 0)),
    "texts and windows": masks.Documents([[20, 30], [1, 2, 47]], rule=masks.Window(4, 4)),
}


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: varlen.AuxRequest,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the operation as documented, text by text; the lse has the layout of torch's fake function."""
    assert return_aux.lse
    assert (cu_seq_q.dtype, cu_seq_k.dtype) == (torch.int32, torch.int32)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert int(cu_seq_q[-1]) == len(query) == len(key) == len(value)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert query.shape[2] % 8 == 0
    outs, lses = [], []
    left, right = (None if side < 0 else side for side in window_size)
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        seen = (distance <= (stop if left is None else left)) & (distance >= -(stop if right is None else right))
        q, k, v = (x[start:stop].transpose(0, 1).float() for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        scores = (scale * q @ k.mT).masked_fill(~seen, -torch.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs).to(query.dtype), torch.cat(lses, 1)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(kernel.Varlen, "devices", ("cpu",))
    monkeypatch.setattr("saccade.engine.first_use_check.results._RECORDS", {})


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize("name", MASKS)
def test_it_is_the_definition(name, width):
    q, k = (torch.randn(2, heads, N, width, dtype=torch.bfloat16) for heads in (4, 2))
    v = torch.randn(2, 2, N, 12, dtype=torch.bfloat16)
    assert testing.first_use("varlen", q, k, v, MASKS[name]).raise_if_wrong().ok
    with torch.no_grad():
        out, lse = sc.attention_with_lse(q, k, v, MASKS[name], impl="varlen")
        expected, expected_lse = sc.attention_with_lse(q, k, v, MASKS[name], impl="reference")
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_torch_2_11_has_no_option_for_grouped_heads(kv_heads, monkeypatch):
    def of_2_11(query, key, value, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        options = {"return_aux": return_aux, "scale": scale, "window_size": window_size}
        is_grouped = query.shape[1] != key.shape[1]
        return stand_in(query, key, value, cu_q, cu_k, max_q, max_k, **options, enable_gqa=is_grouped)

    monkeypatch.setattr(varlen, "varlen_attn", of_2_11)
    q, k, v = (torch.randn(1, heads, N, 16, dtype=torch.bfloat16) for heads in (4, kv_heads, kv_heads))
    assert testing.first_use("varlen", q, k, v, masks.Causal()).raise_if_wrong().ok


@pytest.mark.usefixtures("on_cpu")
def test_it_says_how_many_pairs_it_computes():
    q, k = torch.randn(2, 2, 4, N, 16, dtype=torch.bfloat16)
    for mask in MASKS.values():
        A = sc.AttentionMatrix(q, k, mask, impl="varlen")
        rule = masks.Full() if mask is None else mask
        assert A.explain().pairs == 4 * int(rule.to_dense(N, batch=2).sum())


@pytest.mark.usefixtures("on_cpu")
def test_unsupported_inputs_are_refused():
    x = torch.randn(1, 2, 20, 300)
    half = x[..., :16].bfloat16().requires_grad_()
    with pytest.raises(sc.UnsupportedError, match="cannot run these inputs") as caught:
        sc.AttentionMatrix(x, x, masks.Global([0]), scale=-1.0, softcap=2.0, impl="varlen").matmul(x, dropout_p=0.5)
    assert caught.value.reasons == (
        "it has no float32",
        "it needs heads at most 256 wide, and no empty inputs",
        "it needs a scale above 0",
        "it has no dropout",
        "it has no softcap and no bias",
    )
    with pytest.raises(sc.UnsupportedError, match="it supports windows over full sequences"):
        sc.attention(half[:, :, 3:], half, half, masks.Causal(), impl="varlen")
    with pytest.raises(sc.UnsupportedError, match="its lse has no gradient"):
        sc.attention_with_lse(half, half, half, masks.Causal(), impl="varlen")


def test_it_is_for_gpus():
    x = torch.randn(1, 2, 20, 16, dtype=torch.bfloat16)
    with pytest.raises(sc.UnsupportedError, match="it runs on cuda, not on cpu"):
        sc.attention(x, x, x, masks.Causal(), impl="varlen")


def test_masks_that_are_no_texts_with_windows():
    for mask in (
        masks.Causal() | masks.Global([0]),
        ~masks.Causal(),
        masks.Causal() & masks.Strided(2),
        masks.Documents([5], rule=masks.Global([0])),
        masks.Documents([7]),
        masks.Padding([3]),
    ):
        assert packed_of(mask, 6) is None
    assert packed_of(masks.Documents([2, 0, 3]), 6) == (((2, 3),), None, None)
    assert packed_of(masks.Causal() & masks.Window(4, 2) & masks.Window(3, None), 6) == (((6,),), 3, 0)
