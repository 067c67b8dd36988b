"""Arguments of another type with only one meaning are accepted and converted."""

import numpy as np
import pytest
import torch

import saccade as sc
from saccade import masks, mechanisms, positions, scores
from saccade.masks.convert.serialize import encode

TWO = np.int64(2)
PAIRS = [
    (masks.Padding(np.array([1, 2])), masks.Padding([1, 2])),
    (masks.Padding([TWO, 4], side="left", padded_len=np.int32(4)), masks.Padding([2, 4], "left", 4)),
    (masks.Documents(np.array([2, 3])), masks.Documents([2, 3])),
    (masks.Documents(np.array([[2, 3], [4, 1]])), masks.Documents([[2, 3], [4, 1]])),
    (masks.Documents([[TWO, 3]]), masks.Documents([2, 3])),
    (masks.Window(TWO, np.uint8(1)), masks.Window(2, 1)),
    (masks.Global(np.array([0, 3])), masks.Global([0, 3])),
    (masks.Strided(TWO), masks.Strided(2)),
    (masks.Prefix(TWO), masks.Prefix(2)),
    (masks.Random(TWO, TWO, seed=TWO), masks.Random(2, 2, seed=2)),
    (masks.Coarse(masks.Causal(), TWO), masks.Coarse(masks.Causal(), 2)),
    (masks.Causal().after(TWO), masks.Causal().after(2)),
    (masks.Blocks([[True]], np.int64(6)), masks.Blocks([[True]], 6)),
    (masks.Neighborhood(TWO, 3, (TWO, 1)), masks.Neighborhood(2, 3, (2, 1))),
    (masks.Neighborhood(2, 3, TWO), masks.Neighborhood(2, 3, 2)),
    (masks.Axial(TWO, TWO), masks.Axial(2, 2)),
    (masks.ShiftedWindows(TWO, 4, TWO, np.int8(1)), masks.ShiftedWindows(2, 4, 2, 1)),
    (masks.sliding_window(TWO), masks.sliding_window(2)),
    (masks.bigbird(TWO), masks.bigbird(2)),
    (masks.streaming(TWO, TWO), masks.streaming(2, 2)),
]


@pytest.mark.parametrize(("given", "meant"), PAIRS, ids=str)
def test_numbers_of_numpy_make_the_same_mask(given, meant):
    assert given == meant
    assert hash(given) == hash(meant)
    assert repr(given) == repr(meant)
    (program, tensors), (expected, others) = encode(given), encode(meant)
    assert program == expected
    assert len(tensors) == len(others)
    assert all(torch.equal(own, other) for own, other in zip(tensors, others, strict=True))


@pytest.mark.parametrize("wrong", [np.float32(2), np.bool_(True), np.array(2.0), "2", np.datetime64(2, "s")])
def test_numbers_that_are_not_whole_are_refused(wrong):
    for make in (masks.Prefix, masks.Strided, lambda x: masks.Window(x, 0), lambda x: masks.Padding([x])):
        with pytest.raises((ValueError, TypeError), match=r"be (an int|ints) of at least"):
            make(wrong)


def test_numbers_of_numpy_are_taken_by_functions():
    x = torch.randn(1, 2, 6, 4)
    for given, meant in ((np.float32(0.25), 0.25), (np.float64(0.25), 0.25), (np.int64(2), 2)):
        torch.testing.assert_close(sc.attention(x, x, x, scale=given), sc.attention(x, x, x, scale=meant))
        torch.testing.assert_close(sc.attention(x, x, x, softcap=given), sc.attention(x, x, x, softcap=meant))
        assert torch.equal(sc.AttentionMatrix(x, x).topk(np.int64(2)).indices, sc.AttentionMatrix(x, x).topk(2).indices)
    matrix = sc.AttentionMatrix(x, x)
    assert torch.equal(matrix[np.int64(0), np.int64(1), np.int64(-1)], matrix[0, 1, -1])
    for wrong in (np.float32("inf"), np.float64("nan"), np.float16("inf")):
        with pytest.raises(ValueError, match="scale must be a finite number"):
            sc.attention(x, x, x, scale=wrong)
    assert sc.attention(x, x, x, dropout_p=np.float32(0.5)).shape == x.shape
    assert scores.Gaussian(np.float32(2.0)).log_bandwidth.exp().item() == pytest.approx(2.0)
    assert mechanisms.Performer(np.int64(8), seed=np.int64(1)).num_features == 8
    assert positions.Rotary(np.int64(4))(x, range(6)).shape == x.shape
    assert sc.nn.MultiHeadAttention(np.int64(8), np.int64(2))(torch.randn(1, 3, 8)).shape == (1, 3, 8)


@pytest.mark.parametrize(("answer", "meant"), [(True, masks.Full()), (np.True_, masks.Full()), (False, ~masks.Full())])
def test_a_rule_may_answer_for_all_pairs_at_once(answer, meant):
    x = torch.randn(2, 2, 6, 4)
    torch.testing.assert_close(sc.attention(x, x, x, lambda b, h, q, kv: answer), sc.attention(x, x, x, meant))
    assert torch.equal(masks.Predicate(lambda b, h, q, kv: answer).to_dense(3), meant.to_dense(3))


@pytest.mark.parametrize("mechanism", [mechanisms.Softmax(), mechanisms.Linear(), mechanisms.Nystrom(2)], ids=repr)
def test_positions_may_be_lists(mechanism):
    x = torch.randn(2, 1, 3, 4)
    mask = masks.Padding([3, 2]) if isinstance(mechanism, mechanisms.Nystrom) else masks.Causal()
    for given in ([0, 1, -1], [[0, 1, 2], [0, 1, -1]], ((0, 1, 2), (0, 1, -1))):
        table = torch.tensor(given)
        out = mechanism(x, x, mask=mask, q_positions=given, kv_positions=given) @ x
        torch.testing.assert_close(out, mechanism(x, x, mask=mask, q_positions=table, kv_positions=table) @ x)
    layer = sc.nn.MultiHeadAttention(4, 1, mask=masks.Causal(), rotary=positions.Rotary(4))
    for made in (None, sc.caches.KVCache()):
        out = layer(x[:, 0], positions=[[0, 1, 2], [0, 1, -1]], cache=made)
        torch.testing.assert_close(out, layer(x[:, 0], positions=torch.tensor([[0, 1, 2], [0, 1, -1]])))


@pytest.mark.parametrize(
    "wrong", [[0, 1.5, 2], [[0, 1], [0]], [0, [1], 2], ["0", "1", "2"], [True, False, True], [0, 10**30, 1]]
)
def test_lists_of_something_else_are_refused(wrong):
    x = torch.randn(2, 1, 3, 4)
    with pytest.raises(
        (ValueError, TypeError), match=r"q_positions must (be a range|have rows of one length|be below 2)"
    ):
        sc.attention(x, x, x, q_positions=wrong)


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("other", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_bias_of_any_width_is_read_in_that_of_the_scores(own, other):
    x = torch.randn(1, 2, 6, 4).to(own)
    bias = torch.randn(1, 2, 6, 6).to(other).requires_grad_()
    wide = torch.float64 if own == torch.float64 else torch.float32
    for mask in (None, masks.Causal()):
        out = sc.attention(x, x, x, mask, bias=bias)
        assert out.dtype == own
        want = sc.attention(x, x, x, mask, bias=bias.to(wide), impl="reference")
        torch.testing.assert_close(
            out, want, rtol=2e-2 if x.itemsize == 2 else 1e-5, atol=2e-2 if x.itemsize == 2 else 1e-5
        )
        (gradient,) = torch.autograd.grad(out.sum(), bias)
        assert gradient.dtype == other


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_torch(half):
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    mixed = (q, k.to(half), v.double().float())
    with torch.autocast("cpu", half):
        theirs = torch.nn.functional.scaled_dot_product_attention(*mixed)
        ours, matrix = sc.attention(*mixed), sc.AttentionMatrix(*mixed[:2])
        assert ours.dtype == theirs.dtype == matrix.dtype == (matrix @ v).dtype == half
        linear = mechanisms.Linear()(*mixed[:2]) @ v
        wide = sc.attention(q.double(), k.double(), v.double())
    assert torch.equal(ours, sc.attention(q.to(half), k.to(half), v.to(half)))
    assert linear.dtype == half
    assert wide.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="dtype must be the same"):
        sc.attention(*mixed)
