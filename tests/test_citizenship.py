"""Beside torch's own tools: autocast, compilation, checkpointing, inference mode, copies, threads."""

import copy
import dataclasses
import gc
import inspect
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from tests.kernels.native import NATIVE, needs_half
from tests.masks.test_masks import ATOMS
from torch import func
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks, positions, scores
from saccade.masks.program import decode, encode
from saccade.models import Decoder, DecoderConfig
from saccade.scores.base import Prepared
from saccade.testing import oracle

MASK = masks.Causal() & (masks.Window(3, 0) | masks.Global([0]))


def test_autocast_casts_projections_and_never_scores() -> None:
    mha = sc.nn.MultiHeadAttention(16, 4, mask=MASK)
    x = torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = mha(x)
        matrix = mha.matrix(x)
        dense = matrix.to_dense()
        inside = matrix.lse, matrix.mT @ torch.ones(2, 4, 9, 1, dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert dense.dtype == torch.float32
    torch.testing.assert_close(dense, matrix.to_dense(), rtol=0, atol=0)
    torch.testing.assert_close(
        inside[0], sc.AttentionMatrix(matrix.ingredients.query, matrix.ingredients.key, MASK).lse
    )
    torch.testing.assert_close(inside[1].float(), dense.sum(2)[..., None], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("impl", ["fused", "reference", pytest.param("native", marks=needs_half)])
def test_autocast_does_not_reach_into_a_product(impl: str) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    expected = sc.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), MASK, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sc.attention(q, k, v, MASK, impl=impl), expected)


def test_the_probe_answers_the_same_whatever_is_switched_on() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert sc.engine.kernels.aten.is_available.__wrapped__()
        assert sc.engine.kernels.aten.reads_groups.__wrapped__() == sc.engine.kernels.aten.reads_groups()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        available = sc.engine.kernels.aten.is_available.__wrapped__()
    finally:
        torch.set_default_dtype(before)
    assert available


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Window(3, 3), MASK, masks.Padding((5, 40))], ids=str)
def test_compiled_functions_give_the_same_in_one_graph(mask: masks.Mask | None) -> None:
    torch.compiler.reset()
    q, k, v = (torch.randn(2, 2, 40, 8, requires_grad=True) for _ in range(3))
    expected = 2 * sc.attention(q, k, v, mask)
    compiled = torch.compile(lambda q, k, v: 2 * sc.attention(q, k, v, mask), backend="aot_eager", fullgraph=True)
    out = compiled(q, k, v)
    torch.testing.assert_close(out, expected)
    for own, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(own, other)


OPTIONS = {
    "softcap": lambda: {"softcap": 2.0},
    "scale": lambda: {"scale": 0.3},
    "trainable bias": lambda: {"bias": torch.randn(1, 4, 20, 20, requires_grad=True)},
    "alibi": lambda: {"bias": positions.ALiBi(4)},
    "t5": lambda: {"bias": positions.T5(4)},
    "shaw": lambda: {"bias": positions.ShawKeys(8, 5)},
    "cosine": lambda: {"score": scores.Cosine(), "scale": 4.0},
    "bilinear": lambda: {"score": scores.Bilinear(8, 8)},
    "additive": lambda: {"score": scores.Additive(8, 8, 5)},
    "additive with a bias": lambda: {"score": scores.Additive(8, 8, 5), "bias": positions.T5(4)},
    "sink": lambda: {"sink_logit": torch.randn(4, requires_grad=True)},
    "positions": lambda: {"q_positions": torch.arange(20), "kv_positions": torch.arange(20)},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_compile_in_one_graph(name: str) -> None:
    torch.compiler.reset()
    q, k, v = (torch.randn(2, 4, 20, 8, requires_grad=True) for _ in range(3))
    options = OPTIONS[name]()
    modules = [x for x in options.values() if isinstance(x, torch.nn.Module)]
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
    leaves += [x for module in modules for x in module.parameters()]

    def answer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sc.attention(q, k, v, MASK, **options)

    out, expected = torch.compile(answer, backend="aot_eager", fullgraph=True)(q, k, v), answer(q, k, v)
    torch.testing.assert_close(out, expected)
    for own, other in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected)), strict=True):
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("score", [scores.Cosine(), scores.Additive(8, 8, 5)], ids=["cosine", "additive"])
def test_prepared_scores_keep_half_precision_outside(score: scores.Score) -> None:
    torch.compiler.reset()
    q = torch.randn(1, 2, 20, 8).bfloat16()

    def answer(q: torch.Tensor) -> torch.Tensor:
        return sc.attention(q, q, q, MASK, score=score)

    torch.testing.assert_close(torch.compile(answer, backend="aot_eager", fullgraph=True)(q), answer(q))


@pytest.mark.filterwarnings("ignore")
def test_lengths_and_windows_that_vary_take_few_graphs() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def answer(q: torch.Tensor) -> torch.Tensor:
        return sc.attention(q, q, q, masks.Causal() & masks.Window(q.shape[2] // 4, 0))

    compiled = torch.compile(answer, backend=counter, fullgraph=True)
    for n in (20, 24, 33, 40, 57):
        q = torch.randn(1, 2, n, 8)
        torch.testing.assert_close(compiled(q), answer(q))
    assert counter.frame_count <= 2


@pytest.mark.filterwarnings("ignore")
def test_a_function_as_mask_is_a_break_in_the_graph() -> None:
    torch.compiler.reset()
    q = torch.randn(1, 2, 20, 8)

    def answer(q: torch.Tensor) -> torch.Tensor:
        return sc.attention(q, q, q, lambda b, h, q, kv: (q - kv).abs() < 5)

    torch.testing.assert_close(torch.compile(answer, backend="aot_eager")(q), answer(q))


@pytest.mark.filterwarnings("ignore")
def test_dropout_in_a_compiled_function_is_that_of_the_seed() -> None:
    torch.compiler.reset()
    q = torch.randn(1, 2, 20, 8)

    def answer(q: torch.Tensor) -> torch.Tensor:
        return sc.AttentionMatrix(q, q, MASK).matmul(q, dropout_p=0.4, seed=5)

    torch.testing.assert_close(torch.compile(answer, backend="aot_eager", fullgraph=True)(q), answer(q))


@pytest.mark.filterwarnings("ignore")
def test_an_exported_module_runs_at_other_lengths() -> None:
    mha = sc.nn.MultiHeadAttention(16, 4, num_kv_heads=2, mask=MASK, rotary=positions.Rotary(4)).eval()
    length = torch.export.Dim("length", min=2, max=200)
    exported = torch.export.export(mha, (torch.randn(2, 9, 16),), dynamic_shapes=({1: length},), strict=True)
    x = torch.randn(2, 31, 16)
    torch.testing.assert_close(exported.module()(x), mha(x))


def test_the_operations_keep_torch_s_rules() -> None:
    x = torch.randn(1, 2, 6, 4, requires_grad=True)
    program = [0, 0, 0, 0, 0, 0, 0, *encode((masks.Causal(), None))[0]]
    arguments = (x, x, x, [], [torch.zeros((), dtype=torch.int64)], program, [0.5, float("nan"), 0.0], "auto")
    torch.library.opcheck(torch.ops.saccade.product.default, arguments)


def test_functional_gradients_and_maps_equal_plain_ones() -> None:
    tensors = [torch.randn(3, 2, 4, 7, 8, dtype=torch.float64) for _ in range(3)]
    bias = torch.randn(1, 4, 7, 7, dtype=torch.float64)
    for options in ({}, {"softcap": 2.0}, {"bias": bias}, {"sink_logit": torch.randn(4)}):

        def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict = options) -> torch.Tensor:
            return sc.attention(q, k, v, MASK, **options).sin().sum()

        leaves = [x[0].clone().requires_grad_() for x in tensors]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        for own, other in zip(func.grad(loss, (0, 1, 2))(*(x[0] for x in tensors)), expected, strict=True):
            torch.testing.assert_close(own, other)
        each = [func.grad(loss)(*item) for item in zip(*tensors, strict=True)]
        torch.testing.assert_close(func.vmap(func.grad(loss))(*tensors), torch.stack(each))
        shared = func.vmap(func.grad(loss), (0, None, None))(tensors[0], tensors[1][0], tensors[2][0])
        each = [func.grad(loss)(q, tensors[1][0], tensors[2][0]) for q in tensors[0]]
        torch.testing.assert_close(shared, torch.stack(each))


def test_gradients_for_each_sample_of_a_batch() -> None:
    mha = sc.nn.MultiHeadAttention(16, 4, mask=MASK).double()
    x = torch.randn(5, 1, 6, 16, dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in mha.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return func.functional_call(mha, weights, (x,)).pow(2).sum()

    together = func.vmap(func.grad(loss), (None, 0))(weights, x)
    for number, item in enumerate(x):
        for name, own in func.grad(loss)(weights, item).items():
            torch.testing.assert_close(together[name][number], own)


def test_what_vmap_cannot_map_is_refused() -> None:
    x = torch.randn(3, 2, 2, 5, 4)
    with pytest.raises(sc.UnsupportedError, match="tells batch items apart"):
        func.vmap(lambda x: sc.attention(x, x, x, masks.Padding((2, 5))))(x)


def test_shapes_alone_on_the_meta_device() -> None:
    x = torch.empty(2, 4, 7, 8, device="meta")
    assert sc.attention(x, x, x[..., :3], MASK).shape == (2, 4, 7, 3)
    assert sc.attention(x, x, x).device.type == "meta"


def test_checkpointing_and_inference_mode() -> None:
    mha = sc.nn.MultiHeadAttention(16, 4, mask=MASK, dropout_p=0.3)
    x = torch.randn(2, 9, 16, requires_grad=True)
    grads = []
    for call in (lambda x: checkpoint(mha, x, use_reentrant=False), mha):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(call(x).pow(2).sum(), x)[0])
    torch.testing.assert_close(*grads)
    with torch.inference_mode():
        assert mha.eval()(x).shape == x.shape
        assert mha.matrix(x).lse.shape == (2, 4, 9)


@pytest.mark.parametrize("mask", [mask for mask in ATOMS if not isinstance(mask, masks.Predicate)], ids=str)
def test_masks_can_be_copied_and_pickled(mask: masks.Mask) -> None:
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(other.to_dense(9, batch=2), mask.to_dense(9, batch=2))


GRIDS = [
    masks.Neighborhood(3, 3, 1),
    masks.Axial(3, 3, "rows"),
    masks.ShiftedWindows(3, 3, 2, shift=1),
    masks.Neighborhood(2, 4, 1).after(1),
]


@pytest.mark.parametrize("mask", [*(x for x in ATOMS if not isinstance(x, masks.Predicate)), *GRIDS], ids=str)
def test_masks_survive_as_numbers_and_tensors(mask: masks.Mask) -> None:
    joined = ~mask & (masks.Causal() | mask)
    encoded = encode(joined)
    assert encoded is not None
    assert all(isinstance(number, int) for number in encoded[0])
    assert torch.equal(decode(*encoded).to_dense(9, batch=2), joined.to_dense(9, batch=2))


@dataclasses.dataclass(frozen=True)
class Mirror(masks.Mask):
    """A mask of a user's own."""

    center: int
    other: masks.Mask
    shift: float = 0.5

    def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (q + kv >= 2 * self.center + self.shift) | self.other.allows(b, h, q, kv)


def distance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A tile function of a user's own."""
    return -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1)


@dataclasses.dataclass(frozen=True)
class Power:
    """One with a number in it."""

    exponent: float

    def __call__(self, q: torch.Tensor, k: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return -((q[..., :, None, :] - k[..., None, :, :]).abs() ** self.exponent @ weight)


class Apart(scores.Score):
    """A score of a user's own."""

    def __init__(self, exponent: float | None):
        super().__init__()
        self.exponent, self.weight = exponent, torch.nn.Parameter(torch.rand(8))

    def prepare(self, query: torch.Tensor, key: torch.Tensor) -> Prepared:
        if self.exponent is None:
            return Prepared(query, key, distance)
        return Prepared(query, key, Power(self.exponent), (self.weight,))


class Own(torch.nn.Module):
    """A module that attends by them."""

    def __init__(self, mask: masks.Mask, score: scores.Score | None):
        super().__init__()
        self.mask, self.score = mask, score

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sc.attention(x, x, x, self.mask, score=self.score)


OWN = {
    "mask": lambda: Own(masks.Causal() & Mirror(3, masks.Window(2, 0)), None),
    "mask of a batch": lambda: Own(Mirror(4, masks.Dense(torch.eye(20, dtype=torch.bool))), None),
    "score": lambda: Own(masks.Causal(), Apart(None)),
    "score with parameters": lambda: Own(Mirror(3, masks.Padding([4, 20])), Apart(1.5)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OWN)
def test_masks_and_scores_of_a_users_own_compile_and_are_exported(name: str) -> None:
    torch.compiler.reset()
    model, x = OWN[name](), torch.randn(2, 2, 20, 8, requires_grad=True)
    expected = model(x)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(out, expected)
    leaves = [x, *([model.score.weight] if name == "score with parameters" else [])]
    for own, other in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (out, expected)), strict=True):
        torch.testing.assert_close(own, other)
    for strict in (True, False):
        exported = torch.export.export(model, (x,), strict=strict)
        torch.testing.assert_close(exported.module()(x), expected)


def test_a_class_that_is_defined_again_is_another_one() -> None:
    def defined(reach: int) -> masks.Mask:
        @dataclasses.dataclass(frozen=True)
        class Near(masks.Mask):
            step: int

            def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
                return (q - kv).abs() * self.step <= reach

        return Near(1)

    for mask in (defined(1), defined(3)):
        assert torch.equal(decode(*encode(mask)).to_dense(6), mask.to_dense(6))


def test_a_program_of_another_process_names_what_is_not_there() -> None:
    written = encode(Mirror(3, masks.Causal()))
    code = f"from saccade.masks.program import decode; decode({written[0]}, [])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"it was made with Mirror of {__name__}, which is not defined in this process" in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__}; {code}"], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr


class Bound(scores.Score):
    """A score whose function has variables of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(()))

    def prepare(self, query: torch.Tensor, key: torch.Tensor) -> Prepared:
        weight = self.weight
        return Prepared(query, key, lambda q, k: weight * distance(q, k))


class Changing(masks.Mask):
    """A mask that is no value."""

    def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return q >= kv


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model, reason",
    [(Own(Changing(), None), "its mask is a Changing, which cannot be"), (Own(masks.Full(), Bound()), "its score")],
    ids=["mask", "score"],
)
def test_what_of_a_users_own_cannot_be_written_down_says_why(model: Own, reason: str) -> None:
    torch.compiler.reset()
    x = torch.randn(1, 2, 6, 8)
    with pytest.raises(sc.UnsupportedError, match=reason):
        torch.export.export(model, (x,), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))


def test_every_mask_can_be_written_down() -> None:
    kinds = {x for x in vars(masks).values() if isinstance(x, type) and issubclass(x, masks.Mask)}
    ours = {x for x in kinds if not inspect.isabstract(x) and x is not masks.Predicate}
    tried = {type(mask) for mask in (*ATOMS, *GRIDS)} | {masks.And, masks.Or, masks.Not}
    assert ours <= tried


def test_a_function_cannot_become_numbers() -> None:
    assert encode(masks.Predicate(lambda b, h, q, kv: q == kv) | masks.Causal()) is None


def test_threads_share_plans() -> None:
    errors: list[float] = []

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for turn in range(10):
            n = 20 + (7 * number + turn) % 30
            x = torch.randn(1, 2, n, 8, generator=generator)
            expected, _ = oracle.attention(x, x, x, MASK.to_dense(n).expand(1, 2, n, n))
            errors.append(float((sc.attention(x, x, x, MASK) - expected).abs().max()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 40
    assert max(errors) < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["learned", "rotary"])
def test_a_compiled_decoder_goes_on_with_a_cache(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "max_len": 32, "embed_dim": 8, "num_heads": 2, "num_layers": 2, "feed_forward_dim": 8}
    model = Decoder(DecoderConfig(**sizes, position_encoding=kind)).eval()
    compiled, cache = torch.compile(model, backend="aot_eager"), model.new_cache()
    tokens = torch.randint(9, (2, 12))
    with torch.no_grad():
        parts = [compiled(tokens[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 12))]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens))


@pytest.mark.parametrize("impl", ["fused", "tiled", NATIVE])
@pytest.mark.parametrize("bias", [False, True])
def test_who_keeps_saved_tensors_keeps_all_of_them(impl: str, bias: bool) -> None:
    """What waits for the backward pass holds on to nothing beside them, so that checkpoints free its memory."""
    leaf = torch.randn(1, 2, 64, 16, requires_grad=True)
    made = [leaf * 1.0, leaf * 2.0, leaf * 3.0, *([torch.randn(1, 2, 64, 64)] if bias else [])]
    held = [weakref.ref(x.untyped_storage()) for x in made]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x):
        out = sc.attention(*made[:3], masks.Causal(), bias=made[3] if bias else None, impl=impl)
    del made
    gc.collect()
    assert out.requires_grad
    assert [x() for x in held] == [None] * len(held)
