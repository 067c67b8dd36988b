"""DeltaProduct and RWKV-7: the published recurrences token by token, their matrices, states, texts and gradients."""

from pathlib import Path

import pytest
import torch
from tests.sampled import kept
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from saccade import masks, nn
from saccade.caches import RecurrentCache, load_cache, save_cache
from saccade.distributed.parallel_mechanism import ParallelMechanism
from saccade.mechanisms import RWKV7, Delta, DeltaProduct, Mechanism

HEADS, WIDTH, OUT = 2, 4, 3
Given = dict[str, Tensor]


def draw(name: str, length: int, steps: int = 2) -> tuple[Mechanism, Tensor, Tensor, Tensor, Given]:
    """A mechanism, its query, key and value, and its gates, all float64."""
    torch.manual_seed(0)
    several = steps if name == "delta product" else 1

    def normal(*sizes: int) -> Tensor:
        return torch.randn(2, HEADS, length, *sizes, dtype=torch.float64)

    query, key, value = normal(WIDTH), F.normalize(normal(several, WIDTH), dim=-1).flatten(3), normal(several * OUT)
    if name == "delta product":
        beta, decay = 2.0 * torch.rand_like(normal(steps)), -F.softplus(normal() - 1.0)
        return DeltaProduct(steps, scale=0.7), query, key, value, {"beta": beta, "decay": decay}
    gates = {"removal": F.normalize(normal(WIDTH), dim=-1), "rate": torch.rand_like(normal(WIDTH))}
    return RWKV7(), query, key, value, {**gates, "decay": -0.6 * torch.rand_like(normal(WIDTH))}


def definition(mechanism: Mechanism, query: Tensor, key: Tensor, value: Tensor, gates: Given) -> Tensor:
    """The recurrence as its paper has it, one token at a time."""
    out, state = [], query.new_zeros(2, HEADS, WIDTH, OUT)
    for t in range(query.shape[2]):
        decay = gates["decay"][:, :, t].exp()
        if isinstance(mechanism, RWKV7):
            removal, rate = gates["removal"][:, :, t], gates["rate"][:, :, t]
            gone = torch.einsum("bhc,bhcv->bhv", removal, state)
            state = state * decay[..., None] - torch.einsum("bhc,bhv->bhcv", rate * removal, gone)
            state = state + torch.einsum("bhc,bhv->bhcv", key[:, :, t], value[:, :, t])
        else:
            state = state * decay[..., None, None]
            for i in range(mechanism.num_steps):
                k, v = key[:, :, t, i * WIDTH : (i + 1) * WIDTH], value[:, :, t, i * OUT : (i + 1) * OUT]
                told = v - torch.einsum("bhc,bhcv->bhv", k, state)
                state = state + gates["beta"][:, :, t, i, None, None] * torch.einsum("bhc,bhv->bhcv", k, told)
        out.append(mechanism.scale * torch.einsum("bhc,bhcv->bhv", query[:, :, t], state))
    return torch.stack(out, 2)


CASES = [("delta product", 1), ("delta product", 2), ("delta product", 3), ("rwkv-7", 2)]


@pytest.mark.parametrize(("name", "steps"), CASES)
@pytest.mark.parametrize("length", [1, 40, 300])
def test_products_and_gradients_are_those_of_the_definition(name: str, steps: int, length: int) -> None:
    mechanism, *tensors, gates = draw(name, length, steps)
    leaves = [x.requires_grad_() for x in (*tensors, *gates.values())]
    query, key, value = tensors
    A = mechanism(query, key, mask=masks.Causal(), **gates)
    expected = definition(mechanism, query, key, value, gates)
    torch.testing.assert_close(A.total(value), expected)
    weights = torch.randn_like(expected)
    got = torch.autograd.grad((A.total(value) * weights).sum(), leaves)
    for own, other in zip(got, torch.autograd.grad((expected * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(own, other, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_the_matrix_has_a_head_for_each_step_that_writes(name: str, steps: int) -> None:
    mechanism, query, key, value, gates = draw(name, 70, steps)
    A = mechanism(query, key, mask=masks.Causal(), **gates)
    assert A.shape == (2, HEADS * A.writers, 70, 70)
    each = value.unflatten(3, (A.writers, OUT)).transpose(2, 3).flatten(1, 2)
    dense = A.to_dense()
    torch.testing.assert_close(A @ each, dense @ each)
    torch.testing.assert_close((A @ each).unflatten(1, (HEADS, -1)).sum(2), A.total(value))
    assert not dense.triu(1).any()
    x = torch.randn(2, A.shape[1], 70, 5, dtype=torch.float64)
    torch.testing.assert_close(A.rmatmul(x), dense.mT @ x)
    torch.testing.assert_close(A.received(), dense.sum(2))
    torch.testing.assert_close(A[1, 1, 65], dense[1, 1, 65])
    part = A.of_heads([A.shape[1] - 1, 0])
    torch.testing.assert_close(part.to_dense(), dense[:, [A.shape[1] - 1, 0]])
    torch.testing.assert_close(part @ each[:, [A.shape[1] - 1, 0]], (A @ each)[:, [A.shape[1] - 1, 0]])


def test_one_step_is_the_delta_rule() -> None:
    mechanism, query, key, value, gates = draw("delta product", 50, 1)
    own = mechanism(query, key, mask=masks.Causal(), **gates)
    given = {"decay": gates["decay"], "beta": gates["beta"][..., 0]}
    torch.testing.assert_close(own @ value, Delta(scale=0.7)(query, key, mask=masks.Causal(), **given) @ value)


def test_two_reflections_rotate_the_state() -> None:
    angle = torch.tensor(0.3)
    key = torch.stack([torch.tensor([1.0, 0.0]), torch.stack([angle.cos(), angle.sin()])]).flatten()
    length, start = 5, torch.tensor([1.0, 0.0])
    keys = key.expand(1, 1, length, -1)
    _, memory = DeltaProduct(2)(
        keys[..., :2], keys, mask=masks.Causal(), beta=2.0 * torch.ones(1, 1, length, 2)
    ).advance(torch.zeros(1, 1, length, 2), sc.caches.recurrent.Memory(start.view(1, 1, 2, 1)))
    turned = torch.stack([(length * 2 * angle).cos(), (length * 2 * angle).sin()])
    torch.testing.assert_close(memory.state[0, 0, :, 0], turned)


@pytest.mark.parametrize(("name", "steps"), CASES)
@pytest.mark.parametrize("sizes", [[7, 1, 1, 30], [1] * 6, [40, 3, 2]], ids=str)
def test_prefill_and_any_steps_are_the_whole_run(name: str, steps: int, sizes: list[int], tmp_path: Path) -> None:
    mechanism, *tensors, gates = draw(name, sum(sizes), steps)
    query, key, value = tensors
    expected, cache, start, out = (
        mechanism(query, key, mask=masks.Causal(), **gates).total(value),
        RecurrentCache(),
        0,
        [],
    )
    for size in sizes:
        span = slice(start, start + size)
        given = {gate: x[:, :, span] for gate, x in gates.items()}

        def make(*heads: Tensor, given: Given = given, **places: object) -> sc.matrix.Matrix:
            return mechanism(*heads, **given, **places)

        forked = cache.fork()
        out.append(cache.attend(make, *(x[:, :, span] for x in tensors), mask=masks.Causal()))
        torch.testing.assert_close(forked.attend(make, *(x[:, :, span] for x in tensors), mask=masks.Causal()), out[-1])
        save_cache(cache, tmp_path / "state.safetensors")
        cache, start = load_cache(tmp_path / "state.safetensors"), start + size
    torch.testing.assert_close(torch.cat(out, 2), expected)
    assert cache.nbytes < 2 * HEADS * (WIDTH * OUT + 1) * 8


@pytest.mark.parametrize("name", ["delta product", "rwkv-7"])
def test_packed_and_padded_texts_are_those_alone(name: str) -> None:
    mechanism, *tensors, gates = draw(name, 50)

    def run(span: slice, mask: masks.Mask, places: Tensor | None = None) -> Tensor:
        query, key, value = (x[:, :, span] for x in tensors)
        given = {gate: x[:, :, span] for gate, x in gates.items()}
        return mechanism(query, key, mask=mask, q_positions=places, kv_positions=places, **given).total(value)

    packed = run(slice(None), masks.Documents([3, 40, 7], masks.Causal()))
    for text in (slice(0, 3), slice(3, 43), slice(43, 50)):
        torch.testing.assert_close(packed[:, :, text], run(text, masks.Causal()))
    places = torch.arange(50) - 11
    places[places < 0] = -1
    torch.testing.assert_close(run(slice(None), masks.Causal(), places)[:, :, 11:], run(slice(11, 50), masks.Causal()))
    padded = run(slice(None), masks.Causal() & masks.Padding([20, 50]))
    torch.testing.assert_close(padded[:, :, :20], run(slice(0, 20), masks.Causal()))


@pytest.mark.parametrize("name", kept(["delta product", "rwkv-7"], "delta product"))
def test_second_derivatives_and_compiled_programs(name: str) -> None:
    mechanism, *tensors, gates = draw(name, 4)
    names, leaves = list(gates), [x[:1].detach().requires_grad_() for x in (*tensors, *gates.values())]

    def run(query: Tensor, key: Tensor, value: Tensor, *given: Tensor) -> Tensor:
        return mechanism(query, key, mask=masks.Causal(), **dict(zip(names, given, strict=True))).total(value)

    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*leaves).sin().sum(), leaves)
    for own, other in zip(got, torch.autograd.grad(run(*leaves).sin().sum(), leaves), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("name", ["delta product", "rwkv-7"])
def test_a_nan_spoils_what_follows_it_in_its_text(name: str) -> None:
    mechanism, query, key, value, gates = draw(name, 12)
    gates["decay"][0, 1, 5] = torch.nan
    mask = masks.Documents([9, 3], masks.Causal())
    is_nan = mechanism(query, key, mask=mask, **gates).total(value).isnan().all(-1)
    assert is_nan.nonzero().tolist() == [[0, 1, i] for i in range(5, 9)]


@pytest.mark.parametrize("mechanism", [DeltaProduct(2), DeltaProduct(3), RWKV7()], ids=str)
def test_the_layer_decodes_and_is_recorded(mechanism: Mechanism) -> None:
    torch.manual_seed(0)
    layer, x = nn.Recurrence(16, 2, mechanism, short_convolution=3).double().eval(), torch.randn(2, 20, 16).double()
    cache = layer.new_cache()
    with torch.no_grad():
        parts = [layer(x[:, :9], cache=cache), *(layer(x[:, i : i + 1], cache=cache) for i in range(9, 20))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x))
    with sc.record(layer, keep="qk") as recording:
        layer(x).square().mean().backward()
    name = next(one for one in recording if "convolution" not in one)
    torch.testing.assert_close(recording[name].matrix.to_dense(), layer.matrix(x).to_dense())
    assert all(own.grad is not None and own.grad.abs().max() > 0 for own in layer.parameters())


@pytest.mark.parametrize("mechanism", [DeltaProduct(2), RWKV7()], ids=str)
def test_ranks_do_not_pass_on_steps(mechanism: Mechanism) -> None:
    with pytest.raises(sc.UnsupportedError, match="a token takes several steps"):
        ParallelMechanism(mechanism, None)  # type: ignore[arg-type]  # it is asked before any rank is


def test_wrong_shapes_are_refused() -> None:
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"key must have shape \[batch, kv_heads, kv_len, 2 \* 4\]"):
        DeltaProduct(2)(query, query, mask=masks.Causal())
    pair = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"beta must have shape \[1, 2, 5, 2\]"):
        DeltaProduct(2)(query, pair, beta=torch.rand(1, 2, 5), mask=masks.Causal())
    with pytest.raises(ValueError, match="those of all steps side by side"):
        DeltaProduct(2)(query, pair, mask=masks.Causal()).total(torch.randn(1, 2, 5, 3))
    with pytest.raises(ValueError, match="rate must be floats"):
        RWKV7()(query, query, rate=torch.rand(1, 2, 5), mask=masks.Causal())
    with pytest.raises(ValueError, match="decay must be at least -30"):
        RWKV7()(query, query, decay=torch.full((1, 2, 5), -40.0), mask=masks.Causal())
    with pytest.raises(ValueError, match="decay must be None with RWKV7"):
        nn.Recurrence(16, 2, RWKV7(), decay="token")
    with pytest.raises(sc.UnsupportedError, match="Window is none of Causal, Padding and Documents"):
        DeltaProduct(2)(query, pair, mask=masks.sliding_window(2))
