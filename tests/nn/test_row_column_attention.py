"""Attention over alignments and pairs: AlphaFold's definitions, ESMFold's weights, padding, memory, recordings."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.esm.modeling_esmfold import EsmFoldAttention, EsmFoldTriangleAttention

import saccade as sc
from saccade.nn import ColumnAttention, RowAttention, TriangleAttention
from saccade.testing.largest_tensor import largest_tensor

WIDTH, HEADS = 12, 3
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "rows": lambda: RowAttention(WIDTH, HEADS),
    "rows and pairs": lambda: RowAttention(WIDTH, HEADS, pair_dim=5),
    "columns": lambda: ColumnAttention(WIDTH, HEADS),
    "start": lambda: TriangleAttention(WIDTH, HEADS),
    "end": lambda: TriangleAttention(WIDTH, HEADS, "end"),
}
THEIRS = {
    "layer_norm": "norm",
    "linear": "bias_projection",
    **{
        f"mha.linear_{letter}": f"attention.{name}_projection"
        for letter, name in zip("qkvgo", ("query", "key", "value", "gate", "output"), strict=True)
    },
}


def _filled(module: nn.Module) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def _made(name: str, batch: int = 2, rows: int = 4, columns: int = 5) -> tuple[Any, tuple[Tensor, ...], Tensor]:
    """A layer, what it takes, and which tokens are there: other numbers of rows and columns in each item."""
    torch.manual_seed(0)
    layer = _filled(LAYERS[name]())
    rows = columns if name in ("start", "end") else rows
    given: tuple[Tensor, ...] = (torch.randn(batch, rows, columns, WIDTH, dtype=torch.float64),)
    if name == "rows and pairs":
        given += (torch.randn(batch, columns, columns, 5, dtype=torch.float64),)
    valid = torch.ones(batch, rows, columns, dtype=torch.bool)
    valid[-1, 3 if rows == columns else 2 :], valid[-1, :, 3:] = False, False
    return layer, given, valid


def _by_definition(
    name: str, layer: Any, x: Tensor, pairs: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """One token after another, as the supplement of AlphaFold has it."""
    parts, head_dim = layer.attention, WIDTH // HEADS
    x = nn.functional.layer_norm(x, (WIDTH,), layer.norm.weight, layer.norm.bias)
    if name in ("start", "end"):
        pairs = x
    elif pairs is not None:
        pairs = nn.functional.layer_norm(pairs, pairs.shape[-1:], layer.pair_norm.weight, layer.pair_norm.bias)
    bias = None if pairs is None else pairs @ layer.bias_projection.weight.T  # [batch, i, j, heads]
    q, k, v = (x @ own.weight.T for own in (parts.query_projection, parts.key_projection, parts.value_projection))
    gate = (x @ parts.gate_projection.weight.T + parts.gate_projection.bias).sigmoid()
    found = torch.zeros_like(x)
    batch, rows, columns, _ = x.shape
    for b, i, j, h in torch.cartesian_prod(*map(torch.arange, (batch, rows, columns, HEADS))).tolist():
        part = slice(h * head_dim, (h + 1) * head_dim)
        if name in ("columns", "end"):
            keys, values = k[b, :, j, part], v[b, :, j, part]
            seen = None if valid is None else valid[b, :, j]
            term = 0.0 if bias is None else bias[b, :, i, h]
        else:
            keys, values = k[b, i, :, part], v[b, i, :, part]
            seen = None if valid is None else valid[b, i]
            term = 0.0 if bias is None else bias[b, j, :, h]
        scores = keys @ q[b, i, j, part] / head_dim**0.5 + term
        if seen is not None:
            scores, values = scores[seen], values[seen]
        found[b, i, j, part] = scores.softmax(0) @ values
    return (gate * found) @ parts.output_projection.weight.T + parts.output_projection.bias


@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_definition(name: str, padded: bool) -> None:
    layer, given, valid = _made(name)
    facts = {"valid": valid} if padded else {}
    torch.testing.assert_close(layer(*given, **facts), _by_definition(name, layer, *given, **facts))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    layer, given, valid = _made(name)
    given = tuple(x.requires_grad_() for x in given)
    wanted = [*given, *layer.parameters()]
    weight = torch.randn_like(given[0])
    own, want = (
        torch.autograd.grad((out * weight).sum(), wanted)
        for out in (layer(*given, valid=valid), _by_definition(name, layer, *given, valid=valid))
    )
    for one, other in zip(own, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", LAYERS)
def test_the_matrix_is_what_the_output_is_made_of(name: str) -> None:
    layer, given, valid = _made(name)
    matrix = layer.matrix(*given, valid=valid)
    turned = (lambda x: x.transpose(1, 2)) if name in ("columns", "end") else (lambda x: x)
    x = turned(layer.norm(given[0]))
    batch, rows, columns, _ = x.shape
    assert matrix.shape == (rows, batch * HEADS, columns, columns)
    weights = matrix.to_dense().unflatten(1, (batch, HEADS))
    value = layer.attention.value_projection(x).unflatten(-1, (HEADS, -1))
    found = torch.einsum("rbhij,brjhd->brihd", weights, value).flatten(3)
    gated = found * layer.attention.gate_projection(x).sigmoid()
    torch.testing.assert_close(layer(*given, valid=valid), turned(layer.attention.output_projection(gated)))
    seen = turned(valid).transpose(0, 1)[:, :, None, None].expand_as(weights)
    assert weights[~seen].eq(0).all()
    is_row = seen.any(-1)
    torch.testing.assert_close(weights.sum(-1), is_row.double())


@pytest.mark.parametrize("name", LAYERS)
def test_padding_is_as_if_each_were_alone(name: str) -> None:
    layer, given, valid = _made(name)
    small = [x[1:, :3, :3] if i else x[1:, :2, :3] for i, x in enumerate(given)]
    if name in ("start", "end"):
        small = [given[0][1:, :3, :3]]
    padded = [x.clone() for x in given]
    for x, fits in zip(padded, small, strict=True):
        x[1, fits.shape[1] :], x[1, :, fits.shape[2] :] = 1e3, -1e3
    out = layer(*padded, valid=valid)
    torch.testing.assert_close(out[:1], layer(*(x[:1] for x in given)))
    torch.testing.assert_close(out[1:, : small[0].shape[1], :3], layer(*small))


@pytest.mark.parametrize("name", LAYERS)
def test_padding_may_hold_any_number(name: str) -> None:
    layer, given, valid = _made(name)
    spoiled = given[0].clone()
    spoiled[~valid] = torch.nan
    torch.testing.assert_close(layer(spoiled, *given[1:], valid=valid)[valid], layer(*given, valid=valid)[valid])


@pytest.mark.parametrize("padded", [False, True], ids=["all", "padded"])
@pytest.mark.parametrize("around", ["start", "end"])
def test_triangles_are_esmfold_s(around: str, padded: bool) -> None:
    torch.manual_seed(1)
    theirs = EsmFoldTriangleAttention(32, 8, 4, starting=around == "start")
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours, state = TriangleAttention(32, 4, around), {}
    for name, weight in theirs.state_dict().items():
        module, _, kind = name.rpartition(".")
        state[f"{THEIRS[module]}.{kind}"] = weight
    ours.load_state_dict(state)
    pairs = torch.randn(3, 11, 11, 32)
    here = torch.arange(11) < torch.tensor([11, 7, 4])[:, None]
    valid = here[:, :, None] & here[:, None]
    expected = theirs(pairs, valid.float() if padded else None)
    got = ours(pairs, valid=valid if padded else None)
    shown = valid if padded else torch.ones_like(valid)  # they let padding look at padding
    torch.testing.assert_close(got[shown], expected[shown], rtol=1e-5, atol=1e-5)


def test_rows_with_pairs_are_openfold_s_attention() -> None:
    layer, (x, pairs), _ = _made("rows and pairs", batch=1)
    theirs = EsmFoldAttention(WIDTH, WIDTH, WIDTH, WIDTH // HEADS, HEADS).double()
    own = dict(layer.attention.named_parameters())
    theirs.load_state_dict(
        {
            name: own[f"{THEIRS[f'mha.{name.split(chr(46))[0]}'].partition('.')[2]}.{name.split('.')[1]}"]
            for name in theirs.state_dict()
        }
    )
    normed, bias = layer.norm(x), layer.bias_projection(layer.pair_norm(pairs))
    expected = theirs(normed, normed, [bias.permute(0, 3, 1, 2)[:, None]])
    torch.testing.assert_close(layer(x, pairs), expected)


@pytest.mark.ci
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["start", "rows and pairs"])
def test_no_tensor_has_an_entry_for_each_triple(name: str, batch: int) -> None:
    n = 128
    layer, given, valid = _made(name, batch, n, n)
    layer, given = layer.float(), tuple(x.float().requires_grad_() for x in given)
    triples = 4 * batch * HEADS * n**3
    for run in (lambda: layer(*given), lambda: layer(*given, valid=valid).sum().backward()):
        assert largest_tensor(run) < triples / 4  # a block of rows at a time, however many there are


def test_a_fresh_layer_adds_nothing_and_learns() -> None:
    for make in LAYERS.values():
        layer = make()
        pairs = (torch.randn(1, 5, 5, 5),) if getattr(layer, "pair_dim", None) else ()
        out = layer(torch.randn(1, 5, 5, WIDTH), *pairs)
        assert out.eq(0).all()
        out.sum().backward()
        assert layer.attention.output_projection.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_recorded_and_runs_in_half_precision(name: str) -> None:
    layer, given, valid = _made(name)
    layer, given = layer.float(), tuple(x.float() for x in given)
    with torch.no_grad(), sc.record(layer) as recording:
        layer(*given)
    assert recording[0].shape == layer.matrix(*given).shape
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(*given, valid=valid)
    assert half.dtype == torch.bfloat16
    exact = layer(*given, valid=valid)
    assert (half.float() - exact).norm() < 0.03 * exact.norm()
    empty = copy.deepcopy(layer)(*(x[:0] for x in given))
    assert empty.shape == given[0][:0].shape


# A compiler takes seconds for each.
@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "rows and pairs")) for name in LAYERS]
)
def test_it_compiles_whole(name: str) -> None:
    layer, given, valid = _made(name)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), layer(*given))
    torch.testing.assert_close(compiled(*given, valid=valid), layer(*given, valid=valid))


X, PAIRS = torch.zeros(2, 3, 5, 12), torch.zeros(2, 5, 5, 4)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: RowAttention(12, 5), "RowAttention: num_heads must divide embed_dim 12; got 5."),
        (lambda: RowAttention(12, 3, 0), "RowAttention: pair_dim must be an int of at least 1; got 0."),
        (
            lambda: TriangleAttention(12, 3, "starting"),
            "TriangleAttention: around must be one of 'start', 'end'; got 'starting'.",
        ),
        (
            lambda: RowAttention(12, 3)(X[0]),
            "RowAttention: x must have shape [batch, rows, columns, embed_dim] = [batch, rows, columns, 12]; "
            "got [3, 5, 12].",
        ),
        (lambda: RowAttention(12, 3)(X, PAIRS), "RowAttention: pairs must be None without a pair_dim; got a tensor."),
        (
            lambda: RowAttention(12, 3, 4)(X),
            "RowAttention: pairs must be given, because the layer has a pair_dim; got None.",
        ),
        (
            lambda: RowAttention(12, 3, 4)(X, PAIRS[:, :3]),
            "RowAttention: pairs must have shape [batch, columns, columns, pair_dim] = [2, 5, 5, 4]; got [2, 3, 5, 4].",
        ),
        (
            lambda: ColumnAttention(12, 3)(X, valid=torch.ones(2, 5, 3).bool()),
            "ColumnAttention: valid must have shape [batch, rows, columns] = [2, 3, 5]; got [2, 5, 3].",
        ),
        (
            lambda: ColumnAttention(12, 3)(X, valid=torch.ones(2, 3, 5)),
            "ColumnAttention: valid must be a bool tensor; got float32.",
        ),
        (
            lambda: ColumnAttention(12, 3)(X.double()),
            "ColumnAttention: dtype must be float32, like the parameters; got float64.",
        ),
        (
            lambda: TriangleAttention(12, 3)(X),
            "TriangleAttention: pairs must have shape [batch, n, n, embed_dim] = [batch, n, n, 12]; got [2, 3, 5, 12].",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()
