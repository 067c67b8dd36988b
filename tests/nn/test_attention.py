"""MultiHeadAttention and its post-norm block: equal to torch's, and what they hand out."""

import pytest
import torch
from torch import nn

import saccade as sc
from saccade import masks
from saccade.mechanisms import Softmax
from saccade.nn import AttentionBlock, MultiHeadAttention, from_torch, to_torch


def _torch_module(**options: object) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(24, 4, batch_first=True, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 10}, {"dropout": 0.2}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_from_torch_and_back(options: dict[str, object], padded: bool) -> None:
    theirs = _torch_module(**options)
    ours = from_torch(theirs)
    x, context = torch.randn(3, 5, 24), torch.randn(3, 7, theirs.kdim)
    is_padding = torch.arange(7) >= torch.tensor([7, 3, 1])[:, None] if padded else None
    mask = masks.from_key_padding_mask(is_padding) if padded else None
    expected, weights = theirs(x, context, context, key_padding_mask=is_padding, average_attn_weights=False)
    torch.testing.assert_close(ours(x, context, mask=mask), expected)
    out, own_weights = ours.with_weights(x, context, mask=mask)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(own_weights, weights)
    again = to_torch(ours)
    assert again.state_dict().keys() == theirs.state_dict().keys()
    for name, parameter in again.state_dict().items():
        assert torch.equal(parameter, theirs.state_dict()[name])
    assert again.dropout == theirs.dropout
    assert not again.training


def test_three_sources_and_attention_masks() -> None:
    theirs = _torch_module()
    ours = from_torch(theirs)
    q, k, v = torch.randn(2, 5, 24), torch.randn(2, 6, 24), torch.randn(2, 6, 24)
    allowed = torch.rand(5, 6) < 0.7
    allowed[:, 0] = True
    expected, _ = theirs(q, k, v, attn_mask=~allowed)
    torch.testing.assert_close(ours(q, k, v, mask=allowed), expected)


def test_gradients_equal_torch_s() -> None:
    theirs = _torch_module().double()
    ours = from_torch(theirs)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    theirs(x, x, x)[0].pow(2).sum().backward()
    ours(x).pow(2).sum().backward()
    joined = torch.cat([p.weight.grad for p in (ours.query_projection, ours.key_projection, ours.value_projection)])
    torch.testing.assert_close(joined, theirs.in_proj_weight.grad)
    torch.testing.assert_close(ours.output_projection.weight.grad, theirs.out_proj.weight.grad)


def test_shared_heads_written_out_for_torch() -> None:
    ours = MultiHeadAttention(24, 4, num_kv_heads=2, context_dim=10).eval()
    x, context = torch.randn(2, 5, 24), torch.randn(2, 7, 10)
    torch.testing.assert_close(to_torch(ours)(x, context, context)[0], ours(x, context))


def test_conversions_say_why_not() -> None:
    with pytest.raises(sc.UnsupportedError, match="add_bias_kv") as caught:
        from_torch(_torch_module(add_bias_kv=True, add_zero_attn=True, kdim=3, vdim=5))
    assert len(caught.value.reasons) == 3
    with pytest.raises(sc.UnsupportedError, match="it owns the mask Causal"):
        to_torch(MultiHeadAttention(8, 2, mask=masks.Causal()))
    with pytest.raises(sc.UnsupportedError, match="its mechanism is Softmax"):
        to_torch(MultiHeadAttention(8, 2, mechanism=Softmax(scale=1.0)))
    with pytest.raises(TypeError, match=r"from_torch: module must be an nn\.MultiheadAttention, .*; got Linear\."):
        from_torch(nn.Linear(2, 2))


def test_the_module_s_pattern_and_the_call_s_facts_are_joined() -> None:
    x = torch.randn(2, 6, 16)
    plain = MultiHeadAttention(16, 4)
    patterned = MultiHeadAttention(16, 4, mask=masks.Causal())
    patterned.load_state_dict(plain.state_dict())
    facts = masks.Padding([6, 2])
    expected = plain(x, mask=masks.Causal() & facts)
    torch.testing.assert_close(patterned(x, mask=facts), expected)
    dense = facts.to_dense(6)
    torch.testing.assert_close(patterned(x, mask=dense), expected)
    torch.testing.assert_close(patterned(x, mask=lambda b, h, q, kv: dense[b, 0, q, kv]), expected)
    assert patterned.matrix(x, mask=facts).to_dense()[1, :, :, 2:].eq(0).all()


def test_dropout_in_training_only_and_never_in_the_weights() -> None:
    mha = MultiHeadAttention(16, 4, dropout_p=0.5)
    x = torch.randn(2, 6, 16)
    first, second = mha(x), mha(x)
    assert not torch.allclose(first, second)
    weights = mha.with_weights(x)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    mha.eval()
    assert torch.equal(mha(x), mha(x))


def test_weights_beyond_the_limit_are_refused_with_the_way_out() -> None:
    mha = MultiHeadAttention(8, 8)
    x = torch.randn(1, 3000, 8)
    with pytest.raises(ValueError, match=r"with_weights: size must be at most .*; got 72,000,000 weights") as caught:
        mha.with_weights(x)
    assert "matrix(...)" in str(caught.value)
    assert mha.matrix(x)[0, 0, 5].shape == (3000,)


def test_the_mechanism_is_called_once_and_can_be_hooked() -> None:
    mha = MultiHeadAttention(16, 4)
    seen: list[sc.Matrix] = []
    handle = mha.mechanism.register_forward_hook(lambda module, args, matrix: seen.append(matrix))
    x = torch.randn(2, 6, 16)
    mha(x)
    handle.remove()
    mha(x)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0].to_dense(), mha.with_weights(x)[1])


def test_the_post_norm_block_is_its_formula() -> None:
    block = AttentionBlock(16, 4, context_dim=10, dropout_p=0.3).eval()
    x, context = torch.randn(2, 5, 16), torch.randn(2, 7, 10)
    expected = nn.functional.layer_norm(
        x + block.attention(x, context), (16,), block.norm.weight, block.norm.bias, block.norm.eps
    )
    out, weights = block.with_weights(x, context)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(block(x, context), expected)
    torch.testing.assert_close(weights, block.matrix(x, context).to_dense())
    block.train()
    assert not torch.allclose(block(x, context), expected)
