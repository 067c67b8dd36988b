"""Compiled and exported programs say the same as eager ones, in one graph."""

import pytest
import torch
from tests.sampled import kept
from torch._dynamo.testing import CompileCounterWithBackend

import saccade as sc
from saccade import masks, positions, scores
from saccade.engine import dispatch
from saccade.engine.bias.term import DenseTerm
from saccade.models import Decoder, DecoderConfig

MASK = masks.Causal() & (masks.Window(3, 0) | masks.Global([0]))


@pytest.mark.ci
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


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", kept(OPTIONS, "trainable bias", "additive with a bias", "positions"))
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


@pytest.mark.ci
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


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore")
def test_an_exported_module_runs_at_other_lengths() -> None:
    mha = sc.nn.MultiHeadAttention(16, 4, num_kv_heads=2, mask=MASK, rotary=positions.Rotary(4)).eval()
    length = torch.export.Dim("length", min=2, max=200)
    exported = torch.export.export(mha, (torch.randn(2, 9, 16),), dynamic_shapes=({1: length},), strict=True)
    x = torch.randn(2, 31, 16)
    torch.testing.assert_close(exported.module()(x), mha(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("room", [None, 12])
@pytest.mark.parametrize("kind", ["learned", "rotary"])
def test_a_compiled_decoder_goes_on_with_a_cache(kind: str, room: int | None) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "max_len": 32, "embed_dim": 8, "num_heads": 2, "num_layers": 2, "feed_forward_dim": 8}
    model = Decoder(DecoderConfig(**sizes, position_encoding=kind)).eval()
    compiled, cache = torch.compile(model, backend="aot_eager"), model.new_cache(room)
    tokens = torch.randint(9, (2, 12))
    with torch.no_grad():
        parts = [compiled(tokens[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 12))]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens))


@pytest.mark.parametrize("terms, expected", [(0.0, None), (0.5, DenseTerm), (float("nan"), DenseTerm)])
def test_a_program_leaves_out_terms_that_are_all_zero(
    terms: float, expected: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Biased(torch.nn.Module):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return sc.attention(x, x, x, masks.Causal(), bias=bias)

    x, bias, seen = torch.randn(1, 2, 5, 4), torch.zeros(1, 1, 5, 5), []
    bias[..., -1, 0] = terms
    program = torch.export.export(Biased(), (x, bias)).module()
    attend = dispatch.attend
    monkeypatch.setattr(dispatch, "attend", lambda inputs, *rest: seen.append(inputs.bias) or attend(inputs, *rest))
    out = program(x, bias)
    torch.testing.assert_close(out, sc.attention(x, x, x, masks.Causal(), bias=bias), equal_nan=True)
    assert (None if seen[0] is None else type(seen[0])) is expected
