"""Linear attention is its definition, pair by pair, whatever the mask, the positions and the heads."""

import math

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.masks import Causal, Dense, Documents, Full, Mask, Padding
from saccade.mechanisms import Linear
from saccade.nn import MultiHeadAttention
from saccade.testing.largest_tensor import largest_tensor

F64 = torch.float64
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "padding": Padding([7, 5]),
    "causal-padding": Causal() & Padding([7, 5]),
    "left-padding": Causal() & Padding([4, 9], side="left", padded_len=11),
    "documents": Documents([3, 5, 2, 60]),
    "causal-documents": Documents([[3, 5, 2, 60], [1, 6, 1]], rule=Causal()),
    "all": Causal() & Documents([3, 5, 62]) & Padding([6, 9]),
    "two-packings": Documents([3, 8, 59]) & Documents([5, 65]),
    "keys": Dense(torch.arange(140).reshape(2, 1, 1, 70) % 3 > 0),
}
LENGTHS = [(11, 11), (4, 11), (11, 4), (70, 70), (3, 70), (0, 3), (3, 0)]


def _phi(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def _definition(q: Tensor, k: Tensor, allowed: Tensor, phi=_phi) -> Tensor:
    weights = phi(q) @ phi(k).repeat_interleave(q.shape[1] // k.shape[1], 1).mT * allowed
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, weights / torch.where(total == 0, 1.0, total))


def _inputs(q_len: int, kv_len: int, groups: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 4, q_len, 3), (2, groups, kv_len, 3), (2, groups, kv_len, 5))
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v


@pytest.mark.ci
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", MASKS)
def test_products_and_gradients_are_those_of_the_definition(name: str, groups: int, lengths: tuple[int, int]) -> None:
    mask = MASKS[name]
    q, k, v = _inputs(*lengths, groups)
    matrix = Linear()(q, k, mask=mask)
    weights = _definition(q, k, (Full() if mask is None else mask).to_dense(*lengths, batch=2, heads=4))
    torch.testing.assert_close(matrix.to_dense(), weights)
    expected = weights @ v.repeat_interleave(4 // groups, 1)
    out = matrix @ v
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(sc.Matrix.matmul(matrix, v), expected)
    x = torch.randn(2, 4, lengths[0], 2, dtype=F64)
    grad, other = torch.randn_like(out), torch.randn(2, 4, lengths[1], 2, dtype=F64)
    torch.testing.assert_close(matrix.mT @ x, weights.mT @ x)
    own, true = (torch.autograd.grad(y, (q, k, v), grad, retain_graph=True) for y in (out, expected))
    torch.testing.assert_close(own, true)
    own, true = (torch.autograd.grad(y, (q, k), other) for y in (matrix.mT @ x, weights.mT @ x))
    torch.testing.assert_close(own, true)


TABLES = {
    "left-padded": torch.tensor([[-1, -1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]]),
    "right-padded": torch.tensor([[0, 1, 2, 3, -1, -1, -1], [0, 1, 2, 3, 4, 5, 6]]),
    "gaps": torch.tensor([[0, 4, 5, 9, 10, 12, 13]]),
    "shuffled": torch.tensor([[4, 1, 0, -1, 6, 5, 2], [0, 2, 1, 4, 3, 6, 5]]),
    "repeated": torch.tensor([[0, 0, 1, 1, 1, 5, 5]]),
    "flat": torch.tensor([3, 2, 1, 0, 4, 6, 5]),
}


@pytest.mark.parametrize("of", ["both", "queries", "keys", "last"])
@pytest.mark.parametrize("name", ["none", "causal", "causal-padding", "documents", "causal-documents"])
@pytest.mark.parametrize("table", TABLES)
def test_positions_say_who_comes_before_whom(table: str, name: str, of: str) -> None:
    positions, mask = TABLES[table], MASKS[name]
    mask = Full() if mask is None else mask
    q, k, v = _inputs(7, 7, 2)
    q_positions = None if of == "keys" else positions
    kv_positions = None if of == "queries" else positions
    if of == "last":
        q, q_positions = q[:, :, 4:], positions[..., 4:]
    matrix = Linear()(q, k, mask=mask, q_positions=q_positions, kv_positions=kv_positions)
    filled = (torch.arange(7) if x is None else x for x in (q_positions, kv_positions))
    q_table, kv_table = filled
    allowed = mask.to_dense(q.shape[2], 7, batch=2, heads=4, q_positions=q_table, kv_positions=kv_table)
    weights = _definition(q, k, allowed)
    torch.testing.assert_close(matrix.to_dense(), weights)
    torch.testing.assert_close(matrix @ v, weights @ v.repeat_interleave(2, 1))
    x = torch.randn(2, 4, q.shape[2], 2, dtype=F64)
    torch.testing.assert_close(matrix.mT @ x, weights.mT @ x)


@pytest.mark.parametrize(
    "given, phi",
    [
        ("relu", lambda x: x.clamp(min=0)),
        ("squared_relu", lambda x: x.clamp(min=0) ** 2),
        (torch.exp, torch.exp),
        (lambda x: torch.cat([x.exp(), (-x).exp()], -1), lambda x: torch.cat([x.exp(), (-x).exp()], -1)),
    ],
)
def test_feature_maps(given: object, phi: object) -> None:
    q, k, v = _inputs(9, 9, 2)
    q = torch.cat([q[:, :, :8], -torch.ones_like(q[:, :, 8:])], 2)  # relu leaves nothing of the last query
    weights = _definition(q, k, Causal().to_dense(9), phi)
    matrix = Linear(given)(q, k, mask=Causal())
    torch.testing.assert_close(matrix @ v, weights @ v.repeat_interleave(2, 1))
    torch.testing.assert_close(matrix.to_dense(), weights)
    assert matrix.is_stochastic
    if given == "relu":
        assert not matrix.to_dense()[:, :, 8].any()


def test_eps_takes_a_share() -> None:
    q, k, v = _inputs(9, 9, 4)
    weights = _phi(q) @ _phi(k).mT
    expected = weights / (weights.sum(-1, keepdim=True) + 0.5)
    matrix = Linear(eps=0.5)(q, k)
    torch.testing.assert_close(matrix @ v, expected @ v)
    torch.testing.assert_close(matrix.to_dense(), expected)
    assert not matrix.is_stochastic
    with pytest.raises(sc.UnsupportedError, match="do not sum to 1"):
        matrix.entropy()


def test_features_below_zero_are_no_distributions() -> None:
    q, k, _ = _inputs(9, 9, 4)
    assert not Linear(lambda x: x)(q, k).is_stochastic


def test_statistics_are_answered() -> None:
    q, k, _ = _inputs(40, 40, 2)
    weights = _definition(q, k, Causal().to_dense(40)).detach()
    matrix = Linear()(q, k, mask=Causal())
    torch.testing.assert_close(matrix.received(), weights.sum(2))
    torch.testing.assert_close(matrix.entropy(), torch.special.entr(weights).sum(-1))
    torch.testing.assert_close(matrix[1, 2, 30], weights[1, 2, 30])


@pytest.mark.parametrize("entries", [1, 40, 1 << 18])
def test_blocks_of_any_size(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.mechanisms.linear_time._ENTRIES", entries)
    q, k, _ = _inputs(11, 11, 2)
    for mask in (None, Causal(), Documents([4, 7], rule=Causal())):
        allowed = (Full() if mask is None else mask).to_dense(11)
        torch.testing.assert_close(Linear()(q, k, mask=mask).to_dense(), _definition(q, k, allowed))
    with pytest.raises(
        ValueError, match=r"FeatureMatrix\.blocks: rows must be a range with step 1; got range\(0, 4, 2\)"
    ):
        list(Linear()(q, k).blocks(rows=range(0, 4, 2)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", MASKS)
def test_hidden_tokens_change_nothing(name: str, bad: float) -> None:
    mask = MASKS[name]
    q, k, v = _inputs(11, 11, 2)
    dirty_k, dirty_v = k.detach().clone(), v.detach().clone()
    dirty_k[0, 0, 4], dirty_v[1, 1, 9] = bad, bad
    dirty_k.requires_grad_(), dirty_v.requires_grad_()
    allowed = (Full() if mask is None else mask).to_dense(11, batch=2, heads=4)
    touched = torch.zeros(2, 4, 11, dtype=torch.bool)
    touched[0, :2] = allowed[0, :2, :, 4]
    by_key = touched.clone()
    touched[1, 2:] = allowed[1, 2:, :, 9]
    out = Linear()(q, dirty_k, mask=mask) @ dirty_v
    clean = Linear()(q, k, mask=mask) @ v
    torch.testing.assert_close(out[~touched], clean[~touched])
    if mask is None:
        assert not out[touched].isfinite().any(-1).all()
    else:
        assert out[touched].isnan().all()
    if mask is not None:
        torch.testing.assert_close(Linear()(q, dirty_k, mask=mask).to_dense().isnan().any(-1), by_key)
        grads = torch.autograd.grad(out[~touched].sum(), (q, dirty_k, dirty_v))
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_kept_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in _inputs(300, 300, 2))
    out = Linear()(q, k, mask=Causal()) @ v
    weights = _definition(q.double(), k.double(), Causal().to_dense(300))
    assert out.dtype == dtype
    torch.testing.assert_close(out, (weights @ v.double().repeat_interleave(2, 1)).to(dtype), atol=1e-5, rtol=1e-2)


def test_dropout_is_that_of_every_matrix() -> None:
    q, k, v = _inputs(30, 30, 2)
    matrix = Linear()(q, k, mask=Causal())
    dropped = matrix.matmul(v, dropout_p=0.3, seed=5)
    torch.testing.assert_close(dropped, sc.Matrix.matmul(matrix, v, dropout_p=0.3, seed=5))
    assert not torch.allclose(dropped, matrix @ v)


def test_the_future_changes_nothing() -> None:
    q, k, v = (x.detach() for x in _inputs(100, 100, 4, torch.float32))
    out = Linear()(q, k, mask=Causal()) @ v
    k[:, :, 70:], v[:, :, 70:] = 1e4, -1e6
    torch.testing.assert_close((Linear()(q, k, mask=Causal()) @ v)[:, :, :70], out[:, :, :70], rtol=0, atol=0)


def test_memory_is_linear_in_training() -> None:
    def largest(n: int) -> int:
        q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for _ in range(3))
        return largest_tensor(lambda: (Linear()(q, k, mask=Causal()) @ v).sum().backward())

    assert largest(2048) <= 2.1 * largest(1024)


def test_it_stands_in_a_layer() -> None:
    layer = MultiHeadAttention(16, 4, num_kv_heads=2, mask=Causal(), mechanism=Linear(), dropout_p=0.1).eval()
    x = torch.randn(2, 9, 16)
    out, weights = layer.with_weights(x, mask=Padding([9, 6]))
    assert not weights[1, :, :, 6:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
    torch.testing.assert_close(layer(x[1:, :6]), out[1:, :6])
    with pytest.raises(sc.UnsupportedError, match="Window is none of Causal, Padding and Documents"):
        layer(x, mask=masks.Window(2, 2))


@pytest.mark.parametrize(
    "mask, reason",
    [
        (masks.Window(2, 0), "Window is none of Causal, Padding and Documents"),
        (Causal() | Padding([3]), "Or is none of"),
        (~Causal(), "Not is none of"),
        (Dense(torch.ones(4, 4, dtype=torch.bool)), "Dense is none of"),
        (Documents([4], rule=masks.Window(1, 0) & Causal()), "Window inside Documents is not Causal"),
        (Causal().after(2), "After is none of"),
    ],
)
def test_masks_that_cannot_be_had(mask: Mask, reason: str) -> None:
    assert reason in Linear().reasons(mask)[0]
    x = torch.ones(1, 1, 4, 2)
    with pytest.raises(sc.UnsupportedError, match=reason):
        Linear()(x, x, mask=mask)


def test_wrong_arguments_are_refused() -> None:
    x = torch.ones(1, 2, 4, 2)
    with pytest.raises(ValueError, match="Linear: feature_map must be one of 'elu', 'relu', 'squared_relu'"):
        Linear("gelu")
    with pytest.raises(TypeError, match="Linear: feature_map must be one of 'elu', 'relu', 'squared_relu'"):
        Linear(3)
    with pytest.raises(ValueError, match="Linear: eps must be a finite number of at least 0; got -1"):
        Linear(eps=-1)
    with pytest.raises(TypeError, match="Linear: eps must be a finite number of at least 0; got True"):
        Linear(eps=True)
    with pytest.raises(ValueError, match="Linear: eps must be a finite number"):
        Linear(eps=math.nan)
    with pytest.raises(ValueError, match=r"Linear: feature_map must return \[1, 2, 4, features\]; got \[1, 2, 8\]"):
        Linear(lambda x: x.flatten(2))(x, x)
    with pytest.raises(TypeError, match="Linear: feature_map must return a tensor; got list"):
        Linear(lambda x: [x])(x, x)
    with pytest.raises(ValueError, match="Linear: head_dim must be the same for query and key; got 2 and 1"):
        Linear()(x, x[..., :1])
    widths = iter((3, 4))
    with pytest.raises(ValueError, match="Linear: features must be equal in number for queries and keys; got 3 and 4"):
        Linear(lambda x: x[..., :1].expand(-1, -1, -1, next(widths)))(x, x)
    with pytest.raises(ValueError, match=r"FeatureMatrix\.matmul: value must have shape"):
        _ = Linear()(x, x) @ x[:, :, :3]
    with pytest.raises(ValueError, match="Linear: q_positions must hold 4 positions; got 3"):
        Linear()(x, x, q_positions=range(3))


def test_a_query_that_is_not_finite_spoils_its_own_row() -> None:
    q, k, v = _inputs(11, 11, 2)
    dirty = q.detach().clone()
    dirty[0, 1, 3] = math.nan
    dirty.requires_grad_()
    matrix = Linear()(dirty, k, mask=Causal())
    out, clean = matrix @ v, Linear()(q, k, mask=Causal()) @ v
    rows = torch.zeros(2, 4, 11, dtype=torch.bool)
    rows[0, 1, 3] = True
    assert out[rows].isnan().all()
    torch.testing.assert_close(out[~rows], clean[~rows])
    torch.testing.assert_close(matrix.to_dense().isnan().any(-1), rows)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out[~rows].sum(), (dirty, k, v)))
