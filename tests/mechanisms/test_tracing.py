"""Approximate attention in compiled and exported programs, and under the transforms of torch.func."""

from collections.abc import Callable

import pytest
import torch
from tests.sampled import kept, sampled
from torch import Tensor, func

import saccade as sc
from saccade import masks, mechanisms
from saccade.masks import Mask
from saccade.mechanisms import Mechanism

N, F64 = 70, torch.float64  # more tokens than one chunk of a sweep
KEYS = masks.Padding((N - 25, N))
ONCE, TWICE = masks.Causal() & KEYS, masks.Documents(((30, 40), (50, 20))) & masks.Causal()
CASES: dict[str, tuple[Callable[[], Mechanism], Mask | None]] = {
    "linear": (mechanisms.Linear, None),
    "linear, causal and padded": (lambda: mechanisms.Linear("squared_relu", eps=1e-6), ONCE),
    "linear, the same documents": (mechanisms.Linear, masks.Documents(((30, 40),)) & masks.Causal()),
    "performer": (lambda: mechanisms.Performer(16, kind="trigonometric"), KEYS),
    "performer, causal documents": (lambda: mechanisms.Performer(16, kind="hyperbolic"), TWICE),
    "linformer": (lambda: mechanisms.Linformer(N, 10).to(F64), None),
    "linformer, padded": (lambda: mechanisms.Linformer(N + 9, 10, share="key_value").to(F64), KEYS),
    "nystrom": (lambda: mechanisms.Nystrom(8, iterations=2), None),
    # Few landmarks keep their matrix far from singular: an inverse amplifies rounding errors.
    "nystrom, padded": (lambda: mechanisms.Nystrom(3, iterations=None), KEYS),
}


class Module(torch.nn.Module):
    """A product as a module, with the parameters of its mechanism."""

    def __init__(self, name: str):
        super().__init__()
        make, self.mask = CASES[name]
        self.mechanism = make()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mechanism(q, k, mask=self.mask).matmul(v)


SOME = ["linear, causal and padded", "performer", "linformer, padded", "nystrom, padded"]
# A compiler takes a second for each: those of every mechanism, and documents once, stand for the others.
COMPILED = [
    pytest.param(name, marks=[] if name in (*SOME, "performer, causal documents") else [pytest.mark.slow])
    for name in CASES
]
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


def _tensors(*sizes: int, dtype: torch.dtype = F64) -> list[Tensor]:
    return [torch.randn(*sizes, 2, heads, N, 8, dtype=dtype) / 2 for heads in (4, 2, 2)]


def _product(name: str, **options: object) -> Product:
    make, mask = CASES[name]
    mechanism = make()
    return lambda q, k, v: mechanism(q, k, mask=mask, **options).matmul(v)


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _close(own: object, other: object) -> None:
    torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-10, equal_nan=True)


def _loss(product: Product) -> Callable[..., Tensor]:
    return lambda q, k, v: product(q, k, v).sin().sum()


def _gradients(product: Product, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(_loss(product)(*leaves), leaves)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", kept(COMPILED, "linear, causal and padded", "nystrom, padded"))
def test_one_graph_gives_the_same_and_the_same_gradients(name: str) -> None:
    product = _product(name)
    leaves = [x.requires_grad_() for x in _tensors()]
    out, expected = _compiled(product)(*leaves), product(*leaves)
    _close(out, expected)
    _close(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected)))


@pytest.mark.parametrize("name", CASES)
def test_transforms_give_the_same_and_the_same_gradients(name: str) -> None:
    product, several = _product(name), _tensors(3)
    tensors = [x[1] for x in several]
    _close(func.vmap(product)(*several)[1], product(*tensors))
    _close(func.grad(_loss(product), (0, 1, 2))(*tensors), _gradients(product, tensors))
    together = func.vmap(func.grad(_loss(product), (0, 1, 2)))(*several)
    _close(tuple(x[1] for x in together), _gradients(product, tensors))
    partly = func.vmap(func.grad(_loss(product)), (0, None, None))(several[0], *tensors[1:])
    _close(partly[1], together[0][1])
    _close(func.grad(lambda *x: func.vmap(_loss(product))(*x).sum())(*several), together[0])


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", kept(SOME, "linformer, padded"))
@pytest.mark.parametrize(
    "strict", [pytest.param(True, id="strict"), pytest.param(False, id="loose", marks=pytest.mark.slow)]
)
def test_exported_programs_give_the_same(name: str, strict: bool) -> None:
    module, tensors = Module(name), _tensors()
    exported = torch.export.export(module, tuple(tensors), strict=strict)
    _close(exported.module()(*tensors), module(*tensors))


def _spoil(place: str, tensors: list[Tensor]) -> None:
    q, k, v = tensors
    if place == "queries":
        q[0, 1, 20, 3] = torch.nan
    elif place == "keys":
        k[1, 1, 40, 2] = torch.inf
    elif place == "values":
        v[1, 0, 35] = torch.nan
    else:  # hidden where there is padding
        k[0, :, -1], v[0, :, -1] = torch.nan, torch.inf


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", kept(SOME, "linear, causal and padded", "linformer, padded"))
def test_nan_reaches_the_same_rows(name: str) -> None:
    product, compiled = _product(name), _compiled(_product(name))
    for place in ("queries", "keys", "values", "padding"):
        tensors = _tensors()
        _spoil(place, tensors)
        assert not all(x.isfinite().all() for x in tensors)
        expected = product(*tensors)
        _close(compiled(*tensors), expected)
        _close(func.vmap(product)(*(x[None] for x in tensors))[0], expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SOME)
def test_positions_in_tensors(name: str) -> None:
    where = torch.stack([torch.arange(N), torch.arange(N) - 5]).clamp(min=-1)
    product, tensors = _product(name, q_positions=where, kv_positions=where), _tensors()
    expected = product(*tensors)
    _close(_compiled(product)(*tensors), expected)
    _close(func.vmap(product)(*(x[None] for x in tensors))[0], expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["linear, causal and padded", "performer"])
def test_half_precision_and_autocast(name: str) -> None:
    product = _product(name)
    half, single = _tensors(dtype=torch.bfloat16), _tensors(dtype=torch.float32)
    torch.testing.assert_close(_compiled(product)(*half), product(*half))
    torch.testing.assert_close(_compiled(product)(*single), product(*single), rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(_compiled(product)(*single), product(*single), rtol=1e-5, atol=1e-5)


LAYERS: dict[str, Callable[[], sc.nn.MultiHeadAttention]] = {
    name: (lambda make=make, mask=mask: sc.nn.MultiHeadAttention(16, 2, mechanism=make(), mask=mask).double().eval())
    for name, make, mask in (
        ("linear", mechanisms.Linear, masks.Causal()),
        ("performer", lambda: mechanisms.Performer(16), masks.Causal()),
        ("linformer", lambda: mechanisms.Linformer(N, 10), None),
        ("nystrom", lambda: mechanisms.Nystrom(8, iterations=2), None),
    )
}


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        pytest.param("linformer", marks=pytest.mark.slow),
        pytest.param("performer", marks=pytest.mark.slow),
        pytest.param("nystrom", marks=pytest.mark.slow),
    ],
)
def test_a_layer_is_exported_for_other_lengths(name: str) -> None:
    layer = LAYERS[name]()
    length = torch.export.Dim("length", min=12, max=N)
    given = (torch.randn(2, 40, 16, dtype=F64),)
    exported = torch.export.export(layer, given, dynamic_shapes=({1: length},), strict=True)
    x = torch.randn(2, N, 16, dtype=F64)
    _close(exported.module()(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_for_each_sample(name: str) -> None:
    layer = LAYERS[name]()
    weights = {key: x.detach() for key, x in layer.named_parameters()}
    x = torch.randn(3, 1, N, 16, dtype=F64)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return func.functional_call(layer, weights, (x,)).pow(2).sum()

    together = func.vmap(func.grad(loss), (None, 0))(weights, x)
    _close({key: own[2] for key, own in together.items()}, func.grad(loss)(weights, x[2]))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_side_by_side(name: str) -> None:
    layers = [LAYERS[name]() for _ in range(2)]
    if name == "performer":
        layers[1].mechanism.draw()  # each has directions of its own
    x = torch.randn(2, N, 16, dtype=F64)
    state = func.stack_module_state(layers)
    together = func.vmap(lambda weights, buffers: func.functional_call(layers[0], (weights, buffers), (x,)))(*state)
    _close(together, torch.stack([layer(x) for layer in layers]))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_performer_follows_its_draws() -> None:
    tensors, seen = _tensors(), []
    pair = [mechanisms.Performer(16, seed=1 << 70, redraw=2) for _ in range(2)]
    compiled = _compiled(lambda q, k, v: pair[0](q, k).matmul(v))
    for _ in range(5):
        seen.append(compiled(*tensors))
        _close(seen[-1], pair[1](*tensors[:2]).matmul(tensors[2]))
        assert int(pair[0].draws) == int(pair[1].draws)
    assert int(pair[0].draws) == 2
    assert not torch.equal(seen[0], seen[-1])


def test_the_operations_keep_torch_s_rules() -> None:
    a, b, c = (x[:, :, :9].detach().requires_grad_() for x in _tensors())
    logs, segments = torch.zeros(2, 2, 9, dtype=F64), torch.arange(9)[None] // 4
    for own in ((None, None, None), (logs, logs, segments)):
        torch.library.opcheck(torch.ops.saccade.prefix_sums.default, (a, b, c, *own, False))
    arguments = (torch.tensor(2), "3", 5, 4, True)
    torch.library.opcheck(torch.ops.saccade.drawn_directions.default, arguments)


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_takes_the_operator_for_one_of_tensors() -> None:
    query, key, value = _tensors()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="FeatureMatrix"):
        _compiled(lambda q: mechanisms.Linear()(q, key) @ value)(query)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_dropout_in_a_compiled_function_is_drawn_anew() -> None:
    tensors, product = _tensors(), mechanisms.Linear()
    compiled = _compiled(lambda q, k, v: product(q, k).matmul(v, dropout_p=0.2))
    torch.manual_seed(1)
    first, second = compiled(*tensors), compiled(*tensors)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    _close(product(*tensors[:2]).matmul(tensors[2], dropout_p=0.2), first)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", sampled([ONCE, TWICE, KEYS, masks.Causal()], 2), ids=str)
def test_nan_in_a_value_reaches_who_may_attend_to_it(mask: Mask) -> None:
    (q, k, v), linear = _tensors(), mechanisms.Linear()
    v[1, 1, 35] = torch.nan
    seen = mask.to_dense(N, batch=2, heads=4)[..., 35]
    seen[0], seen[:, :2] = False, False  # the second key head is that of the last two heads

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear(q, k, mask=mask).matmul(v)

    for run in (product, _compiled(product)):
        assert torch.equal(run(q, k, v).isnan().all(-1), seen)
