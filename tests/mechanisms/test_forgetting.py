"""Forgetting attention: the definition, at any length and with any kernel; positions, padding and NaN of gates."""

import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE, needs_native
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from saccade import masks, mechanisms
from saccade.caches import HeavyHitterCache, KVCache, SinkWindowCache
from saccade.mechanisms import Forgetting
from saccade.mechanisms.forgetting import with_gates

WIDTH = 8


def definition(query: Tensor, key: Tensor, gates: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Scores by definition in float64, one sum of logarithms for each pair."""
    groups, length = query.shape[1] // key.shape[1], key.shape[2]
    q, k, logs = query.double(), key.double().repeat_interleave(groups, 1), F.logsigmoid(gates.double())
    scores = torch.einsum("bhic,bhjc->bhij", q, k) / query.shape[3] ** 0.5
    rows, columns, every = torch.arange(length)[:, None, None], torch.arange(length)[:, None], torch.arange(length)
    between = (columns < every) & (every <= rows)
    scores = scores + torch.einsum("ijl,bhl->bhij", between.double(), logs)
    visible = (columns <= rows)[..., 0]
    return scores.masked_fill(~(visible if allowed is None else visible & allowed), -torch.inf)


def draw(length: int, dtype: torch.dtype = torch.float64, shift: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, gates = torch.randn(2, 4, length, WIDTH, dtype=dtype), torch.randn(2, 4, length, dtype=dtype) + shift
    key, value = (torch.randn(2, 2, length, WIDTH, dtype=dtype) for _ in range(2))
    return query, key, value, gates


@pytest.mark.parametrize("mask", [masks.Causal(), masks.sliding_window(9), masks.Documents([20, 40], masks.Causal())])
@pytest.mark.parametrize("impl", ["tiled", "reference", "auto"])
def test_it_is_the_definition(mask: masks.Mask, impl: str) -> None:
    query, key, value, gates = draw(60)
    if impl == "auto":
        query, key, value, gates = (x.float() for x in (query, key, value, gates))
    scores = definition(query, key, gates, mask.to_dense(60).reshape(60, 60))
    A = Forgetting(WIDTH, impl=impl)(query, with_gates(key, gates), mask=mask)
    close = {"atol": 1e-5, "rtol": 1e-5} if impl == "auto" else {}
    torch.testing.assert_close(A.to_dense().double(), scores.softmax(-1), **close)
    expected = scores.softmax(-1) @ value.double().repeat_interleave(2, 1)
    torch.testing.assert_close((A @ value).double(), expected, **close)
    torch.testing.assert_close(A.lse.double(), scores.logsumexp(-1), **close)
    torch.testing.assert_close(A.entropy().double(), torch.special.entr(scores.softmax(-1)).sum(-1), **close)


@pytest.mark.parametrize("impl", ["tiled", NATIVE])
def test_gradients_of_output_and_lse_are_those_of_the_definition(impl: str) -> None:
    leaves = [x.requires_grad_() for x in draw(100, torch.float32)]
    query, key, value, gates = leaves
    A = Forgetting(WIDTH, impl=impl)(query, with_gates(key, gates), mask=masks.Causal())
    scores = definition(query, key, gates)
    out, lse = scores.softmax(-1) @ value.double().repeat_interleave(2, 1), scores.logsumexp(-1)
    of_out, of_lse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad(((A @ value) * of_out).sum() + (A.lse * of_lse).sum(), leaves)
    expected = torch.autograd.grad((out * of_out).sum() + (lse * of_lse).sum(), leaves)
    for own, other in zip(got, expected, strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("grad", [False, True])
def test_sums_of_thousands_lose_no_digits(grad: bool) -> None:
    length = 3000
    query, key, value, gates = (x[:1, :2].float() for x in draw(length, shift=-1.0))
    sums = F.logsigmoid(gates.double()).cumsum(2)
    assert sums.min() < -3000  # a float32 beside it is off by 1e-4
    with torch.set_grad_enabled(grad):
        gates.requires_grad_(grad)
        A = Forgetting(WIDTH)(query, with_gates(key, gates), mask=masks.Causal())
        out = A @ value
    scores = query.double() @ key.double().mT / WIDTH**0.5 + sums[..., None] - sums[..., None, :]
    weights = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    torch.testing.assert_close(out.double(), weights @ value.double(), atol=5e-6, rtol=5e-6)


def test_single_pairs_are_those_of_tiles() -> None:
    query, key, _, gates = draw(9)
    term = Forgetting(WIDTH)(query, with_gates(key, gates), mask=masks.Causal()).inputs.bias
    whole = Forgetting(WIDTH)(query, with_gates(key, gates), mask=masks.Causal()).inputs.everything
    place = torch.meshgrid(*map(torch.arange, (2, 4, 9, 9)), indexing="ij")
    torch.testing.assert_close(term.at(*place), term.read(whole))


def test_a_gate_of_zero_begins_anew() -> None:
    query, key, value, gates = draw(20)
    gates[..., 7] = -torch.inf
    A = Forgetting(WIDTH)(query, with_gates(key, gates), mask=masks.Causal())
    assert not A[..., 7:, :7].any()
    alone = Forgetting(WIDTH)(query[:, :, 7:], with_gates(key, gates)[:, :, 7:], mask=masks.Causal())
    torch.testing.assert_close((A @ value)[:, :, 7:], alone @ value[:, :, 7:])


def test_gates_of_one_are_softmax() -> None:
    query, key, value, gates = draw(30)
    A = Forgetting(WIDTH)(query, with_gates(key, torch.full_like(gates, torch.inf)), mask=masks.Causal())
    torch.testing.assert_close(A @ value, sc.attention(query, key, value, mask=masks.Causal()))


def test_a_gate_that_is_nan_makes_nan_of_the_rows_that_see_its_key() -> None:
    query, key, value, gates = draw(20)
    gates[0, :, 9] = torch.nan
    out = Forgetting(WIDTH)(query, with_gates(key, gates), mask=masks.sliding_window(4)) @ value
    is_nan = out.isnan().all(-1)
    assert is_nan[0, :, 9:13].all()
    assert is_nan.sum() == 4 * 4
    assert out.isnan().any(-1).equal(is_nan)


@pytest.mark.parametrize("hidden", [[5], [0, 1, 11]])
def test_gates_of_hidden_keys_do_not_count(hidden: list[int]) -> None:
    query, key, value, gates = draw(12)
    kept = torch.tensor([i for i in range(12) if i not in hidden])
    keys = with_gates(key, gates)
    positions = torch.arange(12)
    positions[hidden] = -1
    alone = Forgetting(WIDTH)(query[:, :, kept], keys[:, :, kept], mask=masks.Causal()) @ value[:, :, kept]
    placed = Forgetting(WIDTH)(query, keys, mask=masks.Causal(), q_positions=positions, kv_positions=positions)
    torch.testing.assert_close((placed @ value)[:, :, kept], alone)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (masks.Window(2, 2), "not causal"),
        (masks.streaming(2, 4), "none of Causal, Window, Padding and Documents"),
        (masks.Documents([4, 8], masks.streaming(1, 2)), "none of Causal, Window, Padding and Documents"),
        (None, "not causal"),
    ],
    ids=str,
)
def test_masks_with_gaps_are_refused(mask: masks.Mask | None, reason: str) -> None:
    query, key, _, gates = draw(12)
    with pytest.raises(sc.UnsupportedError, match=reason):
        Forgetting(WIDTH)(query, with_gates(key, gates), mask=mask)


def test_keys_out_of_order_are_refused() -> None:
    query, key, _, gates = draw(6)
    places = torch.tensor([0, 2, 1, 3, 4, 5])
    with pytest.raises(sc.UnsupportedError, match="keys between key and query"):
        Forgetting(WIDTH)(query, with_gates(key, gates), mask=masks.Causal(), q_positions=places, kv_positions=places)


def test_widths_are_checked() -> None:
    query, key, _, gates = draw(6)
    with pytest.raises(ValueError, match=r"key must have shape .* 8 \+ 2"):
        Forgetting(WIDTH)(query, key, mask=masks.Causal())
    with pytest.raises(ValueError, match="query must have shape"):
        Forgetting(WIDTH + 1)(query, with_gates(key, gates), mask=masks.Causal())
    with pytest.raises(ValueError, match="gates must have shape"):
        with_gates(key, gates[:, :3])
    with pytest.raises(sc.UnsupportedError, match="its decays are already the bias"):
        Forgetting(WIDTH).with_bias(torch.zeros(1))


@pytest.mark.parametrize("make", [lambda: SinkWindowCache(1, 4), lambda: HeavyHitterCache(4)])
def test_caches_that_let_keys_go_are_refused(make: type[KVCache]) -> None:
    query, key, value, gates = draw(6)
    with pytest.raises(sc.UnsupportedError, match="does not provide all of them"):
        make().attend(Forgetting(WIDTH), query, with_gates(key, gates), value, mask=masks.Causal())


def test_a_compiled_program_has_the_same_numbers() -> None:
    leaves = [x.requires_grad_() for x in draw(50, torch.float32)]

    def run(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
        return Forgetting(WIDTH)(query, with_gates(key, gates), mask=masks.Causal()).matmul(value)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(run(*leaves).sin().sum(), leaves)
    for own, other in zip(torch.autograd.grad(compiled(*leaves).sin().sum(), leaves), expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)


def test_second_derivatives() -> None:
    leaves = [x[:1].detach().requires_grad_() for x in draw(5)]

    def run(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
        return Forgetting(WIDTH)(query, with_gates(key, gates), mask=masks.Causal()) @ value

    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.fixture(params=["without_native", pytest.param("with_native", marks=needs_native)])
def _each_kernel(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(request.param)


@pytest.mark.usefixtures("_each_kernel")
def test_vmap_over_samples() -> None:
    query, key, value, gates = draw(10)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        A = Forgetting(WIDTH)(query[None], with_gates(key[None], gates[:1]), mask=masks.Causal())
        return (A @ value[None])[0]

    expected = torch.stack([run(*one) for one in zip(query, key, value, strict=True)])
    torch.testing.assert_close(torch.vmap(run)(query, key, value), expected)


def test_the_published_reference() -> None:
    """The naive form of flash-linear-attention, with float32 sums and the layout ``[batch, len, heads, width]``."""
    query, key, value, gates = (x.float() for x in draw(40))
    decays = F.logsigmoid(gates).mT.cumsum(1)
    q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q * WIDTH**-0.5, k)
    scores = scores + decays.permute(0, 2, 1)[..., None] - decays.permute(0, 2, 1)[:, :, None]
    scores = scores.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).transpose(1, 2)
    A = mechanisms.Forgetting(WIDTH)(query, with_gates(key, gates), mask=masks.Causal())
    torch.testing.assert_close(A @ value, expected, atol=2e-5, rtol=2e-5)
