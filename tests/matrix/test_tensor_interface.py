"""A matrix in the hand: parts by index, scores, other devices and dtypes, NumPy, torch's own functions."""

import re

import numpy as np
import pytest
import torch

import saccade as sc
from saccade import masks, mechanisms, positions, scores
from saccade.support.errors import UnsupportedError

B, H, L, S, D = 2, 4, 6, 9, 8
MASKS = [None, masks.Causal(), masks.Window(2, 1), masks.Window(1, 0) | masks.Global([0, 4]), ~masks.Full()]


def inputs(dtype=torch.float64, q_len=L):
    torch.manual_seed(0)
    sizes = [(B, H, q_len, D), (B, 2, S, D), (B, 2, S, 5)]
    return [torch.randn(*size, dtype=dtype) for size in sizes]


def matrix_of(mask=None, **options):
    query, key, _ = inputs()
    return sc.AttentionMatrix(query, key, mask, **options)


INDICES = [
    (0, 1, 2),
    (1, -1),
    (1,),
    0,
    ...,
    (0, 3, -1, -1),
    (..., 2, 3),
    (..., 3),
    (slice(None), 1, slice(1, 4), slice(2, None)),
    (slice(None), slice(1, 3)),
    (0, 0, slice(None, None, 2), slice(None, None, 3)),
    (0, slice(None, None, -1), slice(4, 1, -2), slice(-3, 1, -1)),
    (slice(0, 0),),
    (0, 0, slice(5, 2)),
    (0, ..., slice(1, 2)),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_part_is_that_of_the_dense_matrix(mask, index):
    matrix = matrix_of(mask)
    expected = np.array(matrix)[index]  # NumPy steps backwards, too
    torch.testing.assert_close(matrix[index], torch.from_numpy(np.array(expected)))


def test_only_the_rows_that_are_asked_for_are_computed():
    x = torch.randn(1, 2, 50_000, 8)
    matrix = sc.AttentionMatrix(x, x, masks.Causal())
    row = matrix[0, 1, 40_000]
    whole = (x[0, 1, 40_000].double() @ x[0, 1, :40_001].double().T / 8**0.5).softmax(0)
    torch.testing.assert_close(row[:40_001].double(), whole, atol=1e-6, rtol=1e-4)
    assert matrix[0, 1, 40_000, 17].item() == pytest.approx(row[17].item())
    assert matrix[..., 49_990:, 49_990:].shape == (1, 2, 10, 10)
    some = []
    matrix.blocks = lambda *where: some.append(where[2]) or sc.AttentionMatrix.blocks(matrix, *where)
    torch.testing.assert_close(
        matrix[0, 1, 40_000::-20_000], torch.stack([matrix[0, 1, i] for i in (40_000, 20_000, 0)])
    )
    assert some[:3] == [range(i, i + 1) for i in (40_000, 20_000, 0)]
    with pytest.raises(ValueError, match="a part by index must be at most"):
        matrix[0]


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_scores_are_what_the_softmax_is_taken_of(mask, impl):
    bias = torch.randn(1, H, L, S, dtype=torch.float64)
    matrix = matrix_of(mask, bias=bias, softcap=3.0, scale=0.7, impl=impl)
    query, key, _ = inputs()
    made = 3.0 * torch.tanh(0.7 * query @ key.repeat_interleave(2, 1).mT / 3.0) + bias
    expected = made.masked_fill(~(masks.Full() if mask is None else mask).to_dense(L, S), -torch.inf)
    found = matrix.scores
    torch.testing.assert_close(found.to_dense(), expected)
    torch.testing.assert_close(found[1, 2, 1:4, ::2], expected[1, 2, 1:4, ::2])
    top = found.topk(2)
    torch.testing.assert_close(top.weights.double(), expected.topk(2).values)
    assert not found.is_stochastic


def test_scores_answer_what_has_a_meaning_and_refuse_the_rest():
    found, value = matrix_of(masks.Causal()).scores, inputs()[2]
    wrongs = [lambda: found @ value, lambda: found.mT @ value, found.entropy, found.summary]
    wrongs += [lambda: found - found, lambda: 2 * found, lambda: -found, lambda: square @ found, lambda: found @ square]
    square = sc.AttentionMatrix(torch.zeros(B, H, L, D), torch.zeros(B, H, L, D))
    for wrong in wrongs:
        with pytest.raises(UnsupportedError, match="cannot run these inputs"):
            wrong()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": torch.randn(1, H, L, S)},
        {"bias": positions.ALiBi(H)},
        {"score": scores.Cosine(), "scale": 4.0},
        {"sink_logit": torch.randn(H)},
        {"q_positions": range(3, 9), "kv_positions": [0, 1, 2, 5, 6, 7, 8, 9, 10]},
        {"score": lambda score, b, h, q, kv: score / (1 + (q - kv).abs())},
    ],
    ids=["plain", "bias", "alibi", "cosine", "sink", "positions", "modified"],
)
def test_another_dtype_is_the_matrix_of_the_inputs_in_it(options):
    query, key, value = inputs(torch.float32)
    matrix = sc.AttentionMatrix(query, key, masks.Causal(), **options)
    wide = matrix.to(torch.float64)
    assert wide.dtype == torch.float64
    assert (wide @ value.double()).dtype == torch.float64
    torch.testing.assert_close(wide.to_dense().float(), matrix.to_dense())
    half = matrix.to("cpu", torch.bfloat16)
    assert (half @ value.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(half.to_dense(), matrix.to_dense(), atol=0.05, rtol=0.05)
    assert matrix.dtype == torch.float32
    assert matrix.to("meta").device.type == matrix.to(device="meta", dtype=None).device.type == "meta"
    assert matrix.to(dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    "mechanism",
    [mechanisms.Linear(), mechanisms.Performer(num_features=16), mechanisms.Nystrom(3)],
    ids=lambda own: str(own)[:9],
)
def test_matrices_of_every_mechanism_move(mechanism):
    query, key, value = (x.float() for x in inputs(q_len=S))
    matrix = mechanism(query, key)
    wide = matrix.to(torch.float64)
    torch.testing.assert_close((wide @ value.double()).float(), matrix @ value, atol=1e-4, rtol=1e-3)
    half = matrix.to(torch.bfloat16) @ value.bfloat16()
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), matrix @ value, atol=0.05, rtol=0.05)
    torch.testing.assert_close(matrix[1, 2, 3:5], matrix.to_dense()[1, 2, 3:5])


def test_torch_and_numpy_take_it_where_the_meaning_is_plain():
    matrix, value = matrix_of(masks.Causal()), inputs()[2]
    left = torch.randn(B, H, 3, L, dtype=torch.float64)
    torch.testing.assert_close(torch.matmul(matrix, value), matrix @ value)
    torch.testing.assert_close(left @ matrix, left @ matrix.to_dense())
    torch.testing.assert_close(torch.matmul(left, matrix), left @ matrix.to_dense())
    torch.testing.assert_close((torch.tensor(0.5) * matrix).to_dense(), 0.5 * matrix.to_dense())
    np.testing.assert_allclose(np.array(matrix), matrix.to_dense().numpy())
    assert np.array(matrix, dtype=np.float32).dtype == np.float32
    assert len(matrix) == B
    torch.testing.assert_close(torch.stack(list(matrix)), matrix.to_dense())


WRONG = {
    "softmax": (lambda A: torch.softmax(A, -1), "its weights are already softmaxed and masked"),
    "sum": (torch.sum, "A.summary()"),
    "cat": (lambda A: torch.cat([A, A]), "A.summary()"),
    "T": (lambda A: A.T, "A.mT is its transpose"),
    "numpy()": (lambda A: A.numpy(), "A.to_dense() builds it"),
    "mean()": (lambda A: A.mean(-1), "A.received()"),
    "cuda()": (lambda A: A.cuda(), "A.to(device, dtype)"),
    "logits": (lambda A: A.logits, "Hint: A.scores"),
    "a name of nobody's": (lambda A: A.nobody, "attribute must be one of a lazy matrix; got nobody"),
    "a list": (lambda A: A[[0, 1]], "index must consist of whole numbers, slices and ...; got list"),
    "None": (lambda A: A[None], "index must consist of whole numbers, slices and ...; got None"),
    "a mask": (lambda A: A[A.to_dense() > 0.5], "slices and ...; got Tensor"),
    "a bool": (lambda A: A[True], "slices and ...; got True"),
    "five": (lambda A: A[0, 0, 0, 0, 0], "at most batch, head, query, key"),
    "too far": (lambda A: A[2], "batch index must be in [-2, 2); got 2"),
    "no step": (lambda A: A[0, 0, ::0], "step of a slice must not be 0"),
    "a whole dtype": (lambda A: A.to(torch.int64), "be a device, a float dtype, or both; got torch.int64"),
    "a name of to's": (lambda A: A.to(other=torch.ones(1)), "an argument must be device= or dtype=; got other="),
    "a tensor to be added": (lambda A: A + 1.0, "an operand of + must be a matrix; got float"),
    "a number before": (lambda A: 1.0 - A, "must be a matrix; got float"),
    "a number of NumPy's before": (lambda A: np.float64(1.0) - A, "must be a matrix; got float64"),
    "an array before": (lambda A: np.ones((L, S)) * A, "a factor must be a number"),
    "weights one by one": (lambda A: A * torch.ones(L, S), "a factor must be a number, or a tensor [4, 1, 1]"),
    "another length": (lambda A: A + matrix_of().mT.mT.to(torch.float32), "the other matrix must be torch.float64"),
    "no chain": (lambda A: A @ A, "the other matrix must have shape [2, 4, 9, 9] to be the right operand of @"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_rest_gets_a_sentence(name):
    wrong, words = WRONG[name]
    with pytest.raises((TypeError, ValueError, AttributeError, IndexError), match=re.escape(words)):
        wrong(matrix_of(masks.Causal()))
