"""Latent attention with an indexer, and later layers that attend to the keys it selects."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks
from saccade.caches import IndexedCache, IndexedLatentCache, Int8Cache, KVCache, LatentCache, load_cache, save_cache
from saccade.intervention import intervene
from saccade.matrix.block_sparse import SelectedBlocks
from saccade.nn import DecoderLayer, DecoderStack, FeedForward, Indexer, LatentAttention, MultiHeadAttention
from saccade.nn.base_layer import AttentionLayer
from saccade.positions import ALiBi, Rotary
from saccade.statistics import IndexerLoss
from saccade.support.errors import UnsupportedError

N, WIDTH, HEADS, K, CAUSAL = 23, 24, 4, 5, masks.Causal()
FORMS = ("auto", "expanded", "absorbed")
SIZES = {"latent_dim": 10, "head_dim": 9, "rotary_dim": 4, "value_dim": 6}


def _indexer(query_dim: int | None = 8, k: int = K) -> Indexer:
    rotary = Rotary(6, rotary_dim=4)
    return Indexer(WIDTH, k, num_heads=8, head_dim=6, query_dim=query_dim, rotary=rotary)


def _attention(indexer: Indexer | None = None, mask: masks.Mask = CAUSAL, **options: object) -> LatentAttention:
    given = {**SIZES, "query_latent_dim": 8, "rotary": Rotary(4), **options}
    return LatentAttention(WIDTH, HEADS, indexer=indexer, mask=mask, **given)


def _stack(form: str = "auto", **options: object) -> DecoderStack:
    """Five layers with indexers in the first and in the fourth, each with a reader; the middle one has neither."""
    torch.manual_seed(0)
    attentions = [
        _attention(_indexer(), **options),
        _attention(selection_from=0, **options),
        _attention(**options),
        _attention(_indexer(), **options),
        _attention(selection_from=3, **options),
    ]
    for one in attentions:
        one.form = form
    layers = [DecoderLayer(one, FeedForward(WIDTH, 8), norm="rms") for one in attentions]
    return DecoderStack(layers, final_norm=nn.RMSNorm(WIDTH)).double().eval()


def _tokens(batch: int = 2, length: int = N) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def _rotated(x: Tensor) -> Tensor:
    """Rotate the first four channels of ``[len, width]`` by positions, in two halves, as complex numbers."""
    angles = torch.arange(len(x), dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.01], dtype=x.dtype)
    turned = torch.complex(x[:, :2], x[:, 2:4]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag, x[:, 4:]], 1)


@torch.no_grad()
def _scores(indexer: Indexer, x: Tensor, latent: Tensor) -> Tensor:
    """Return the index scores of one text by their formula, without the constant factor, ``[len, len]``."""
    own = {name: weight.detach() for name, weight in indexer.named_parameters()}
    key = x @ own["key_projection.weight"].T
    key = (key - key.mean(-1, keepdim=True)) / (key.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    key = _rotated(key * own["key_norm.weight"] + own["key_norm.bias"])
    queries = (latent @ own["query_projection.weight"].T).view(len(x), 8, 6)
    weights = x @ own["weight_projection.weight"].T
    return sum(weights[:, h, None] * (_rotated(queries[:, h]) @ key.T).clamp(min=0) for h in range(8))


def _selected(indexer: Indexer, x: Tensor, latent: Tensor, allowed: Tensor) -> Tensor:
    """Return which keys each query of one text reads, ``[len, len]``."""
    scores = _scores(indexer, x, latent)
    chosen = torch.zeros_like(allowed)
    for row, visible in enumerate(allowed):
        ranked = sorted(visible.nonzero()[:, 0].tolist(), key=lambda j: -float(scores[row, j]))
        chosen[row, ranked[:K]] = True
    return chosen


def test_scores_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    indexer, x, latents = _indexer().double(), _tokens(), torch.randn(2, N, 8, dtype=torch.float64)
    nn.init.normal_(indexer.key_norm.bias)
    expected = torch.stack([_scores(indexer, *own) for own in zip(x, latents, strict=True)])
    own = indexer(x, latents).scores(range(N), N)[:, 0]
    torch.testing.assert_close(own, expected * (8 * 6) ** -0.5, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", [CAUSAL, masks.sliding_window(8), masks.Documents([9, 14], rule=CAUSAL)], ids=str)
def test_the_keys_of_each_query_are_those_with_the_highest_scores(mask: masks.Mask, form: str) -> None:
    torch.manual_seed(0)
    layer, x = _attention(_indexer(), mask, form=form).double().eval(), _tokens()
    assert layer.indexer is not None
    nn.init.normal_(layer.indexer.key_norm.bias)
    latents, allowed = layer.query_norm(layer.query_latent_projection(x)), mask.to_dense(N)[0, 0]
    chosen = torch.stack([_selected(layer.indexer, *own, allowed) for own in zip(x, latents, strict=True)])
    dense = copy.deepcopy(layer)
    dense.indexer = None
    torch.testing.assert_close(layer(x), dense(x, mask=chosen), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(layer.matrix(x).to_dense(), dense.matrix(x, mask=chosen).to_dense())
    assert int(chosen.sum(-1).max()) == K


def test_without_a_query_latent_index_queries_are_computed_from_the_tokens() -> None:
    layer, x = _attention(_indexer(None), query_latent_dim=None).double().eval(), _tokens()
    chosen = torch.stack([_selected(layer.indexer, own, own, CAUSAL.to_dense(N)[0, 0]) for own in x])
    assert torch.equal(layer.matrix(x).to_dense() > 0, chosen[:, None].expand(-1, HEADS, -1, -1))


def test_later_layers_attend_to_the_same_keys() -> None:
    stack, x = _stack(), _tokens()
    with torch.no_grad(), sc.record(stack, keep="qk") as recording:
        stack(x)
    matrices = stack.matrices(x)
    patterns = [matrix.to_dense() > 0 for matrix in matrices]
    assert torch.equal(patterns[0], patterns[1])
    assert torch.equal(patterns[3], patterns[4])
    assert not torch.equal(patterns[0], patterns[3])
    assert [int(pattern.sum(-1).max()) for pattern in patterns] == [K, K, N, K, K]
    assert list(recording) == [f"layers.{index}.attention" for index in range(5)]
    for index, matrix in enumerate(matrices):
        torch.testing.assert_close(recording[index].matrix.to_dense(), matrix.to_dense())
    dense, tokens = copy.deepcopy(stack.layers[1]), stack.layers[0](x)
    dense.attention.source = None
    torch.testing.assert_close(dense(tokens, mask=patterns[0]), DecoderStack(stack.layers[:2])(x))


def test_the_mask_of_a_reader_hides_selected_keys() -> None:
    stack, x = _stack(), _tokens()
    stack.layers[1].attention.mask = window = masks.sliding_window(3)
    first, second = (matrix.to_dense() > 0 for matrix in stack.matrices(x)[:2])
    assert torch.equal(second, first & window.to_dense(N))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("edges", [[0, 3, 9, 10, 11, 23], [0, 1, 22, 23]])
def test_any_split_with_a_cache_is_the_full_run(edges: list[int], grad: bool, form: str) -> None:
    stack, x = _stack(form), _tokens()
    with torch.set_grad_enabled(grad):
        full, cache = stack(x), stack.new_cache()
        out = [stack(x[:, i:j], cache=cache) for i, j in itertools.pairwise(edges)]
        torch.testing.assert_close(torch.cat(out, 1), full, atol=1e-10, rtol=1e-10)
        copied = cache.fork()
        copied.crop(7)
        copied.reorder([1, 0])
        out = stack(x[[1, 0], 7:], cache=copied)
        torch.testing.assert_close(out, full[[1, 0], 7:], atol=1e-10, rtol=1e-10)


def test_caches_hold_index_keys_only_for_indexers_and_are_saved(tmp_path) -> None:
    stack, x = _stack().requires_grad_(False), _tokens()
    cache = stack.new_cache(N)
    stack(x[:, :9], cache=cache)
    kinds = [IndexedLatentCache, LatentCache, LatentCache, IndexedLatentCache, LatentCache]
    assert [type(one) for one in cache] == kinds
    save_cache(cache, tmp_path / "cache")
    for one in (cache, load_cache(tmp_path / "cache")):
        torch.testing.assert_close(stack(x[:, 9:], cache=one), stack(x)[:, 9:])
    first = IndexedCache()  # stores latents twice, and index keys
    attention = stack.layers[0].attention
    out = torch.cat([attention(part, cache=first) for part in x.split([9, 1, 13], 1)], 1)
    torch.testing.assert_close(out, attention(x))


@pytest.mark.parametrize("form", FORMS)
def test_ragged_and_packed_texts_are_each_text_alone(form: str) -> None:
    stack, x = _stack(form), _tokens()
    positions = torch.tensor([[-1] * 4 + [*range(N - 4)], [*range(N)]])
    cache = stack.new_cache()
    out = stack(x, positions=positions, cache=cache)
    torch.testing.assert_close(out[0, 4:], stack(x[:1, 4:])[0])
    torch.testing.assert_close(out[1], stack(x[1:])[0])
    new = _tokens(length=2)
    for item, text in enumerate((x[0, 4:], x[1])):
        whole = stack(torch.cat([text, new[item]])[None])[0, -2:]
        torch.testing.assert_close(stack(new, cache=cache.fork())[item], whole)
    packed = stack(x.flatten(0, 1)[None], mask=masks.Documents([N, N]))
    torch.testing.assert_close(packed.view(2, N, WIDTH), stack(x))


def test_with_as_many_keys_as_there_are_the_layer_is_dense() -> None:
    layer, x = _attention(_indexer(k=N)).double().eval(), _tokens()
    dense = copy.deepcopy(layer)
    dense.indexer = None
    torch.testing.assert_close(layer(x), dense(x))
    assert not isinstance(layer.matrix(x).inputs.rule, SelectedBlocks)  # nothing is selected
    bias = ALiBi(HEADS)
    torch.testing.assert_close(layer(x, bias=bias), dense(x, bias=bias))
    layer.indexer.k = K
    chosen = layer.matrix(x).to_dense()[:, 0] > 0
    torch.testing.assert_close(layer(x, bias=bias), dense(x, bias=bias, mask=chosen))


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_gradients_are_those_of_the_selected_pairs(form: str) -> None:
    stack, x = _stack(form), _tokens()
    dense = copy.deepcopy(stack)
    for index, matrix in enumerate(stack.matrices(x)):
        attention = dense.layers[index].attention
        attention.indexer = attention.source = None
        attention.mask = masks.Dense((matrix.to_dense()[:, :1] > 0).detach())
    stack(x).sin().sum().backward()
    dense(x).sin().sum().backward()
    expected = dict(dense.named_parameters())
    for name, own in stack.named_parameters():
        if ".indexer." in name:
            assert own.grad is None
        else:
            torch.testing.assert_close(own.grad, expected[name].grad, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_have_the_gradients_of_plain_ones(use_reentrant: bool) -> None:
    stack, x = _stack(), _tokens().requires_grad_()
    (expected,) = torch.autograd.grad(stack(x).sin().sum(), x)
    for layer in stack.layers:
        run = layer.forward
        layer.forward = lambda x, *args, run=run, **options: checkpoint(
            lambda x: run(x, *args, **options), x, use_reentrant=use_reentrant
        )
    (stack(x).sin().sum()).backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("k", [K, N])
def test_the_loss_trains_the_indexer_alone(k: int) -> None:
    layer, x = _attention(_indexer(k=k)), torch.randn(2, N, WIDTH, requires_grad=True)
    optimizer, losses = torch.optim.Adam(layer.indexer.parameters(), lr=0.02), []
    for _ in range(8):
        (loss,) = layer.matrix(x).compute(IndexerLoss(layer.scorer(x)))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert x.grad is None
    trained = {name for name, own in layer.named_parameters() if own.grad is not None}
    assert trained == {name for name, _ in layer.named_parameters() if name.startswith("indexer.")}


def test_the_scorer_for_the_loss_is_the_one_that_selects() -> None:
    layer, x = _attention(_indexer()).double(), _tokens()
    positions = torch.arange(N) + 5
    scorer = layer.scorer(x, positions=positions)
    scores = scorer.scores(range(N), N)[:, 0].masked_fill(~CAUSAL.to_dense(N)[0], -torch.inf)
    chosen = torch.zeros(2, N, N, dtype=torch.bool).scatter_(2, scores.topk(K).indices, True) & CAUSAL.to_dense(N)[0]
    assert torch.equal(layer.matrix(x, positions=positions).to_dense()[:, 0] > 0, chosen)
    with pytest.raises(UnsupportedError, match="the layer has no indexer"):
        _attention().scorer(x)


@pytest.mark.ci
def test_costs_contain_the_scores_of_all_keys_and_the_selected_pairs() -> None:
    stack = DecoderStack(_stack().layers[i] for i in (0, 1, 3))
    cache, n = stack.new_cache(), 64
    stack(_tokens(length=n), cache=cache)
    told = sc.cost(stack, n, mask=CAUSAL, batch=2)
    assert told.cache_bytes == cache.nbytes
    pairs = [step.size for step in told.decode.steps if step.kernel]
    assert pairs == [2 * HEADS * number for number in (K, K, K)]
    stack.layers[0].attention.indexer = None
    stack.layers[1].attention.source = None
    dense = sc.cost(stack, n, mask=CAUSAL, batch=2)
    index_heads, width = 8, 6
    less = 2 * 2 * index_heads * n * width  # scores of one query
    less += 2 * 2 * (8 * index_heads * width + WIDTH * (width + index_heads))  # projections
    width_of_pair = SIZES["latent_dim"] * 2 + SIZES["rotary_dim"]
    more = 2 * 2 * HEADS * (n - K) * width_of_pair * 2  # of two layers
    assert dense.decode.flops - told.decode.flops == more - less


@pytest.mark.ci
def test_compiled_stacks_select_the_same_keys() -> None:
    stack, x = DecoderStack(list(_stack().layers[:2])).requires_grad_(False), _tokens()
    torch.testing.assert_close(torch.compile(stack, backend="eager")(x), stack(x))


def test_keys_that_an_intervention_hides_are_not_selected_for_later_layers_either() -> None:
    stack, x = _stack().requires_grad_(False), _tokens()
    run = intervene(stack)
    run.mask("layers.0.attention", None, ~masks.Global([3]))
    with sc.record(stack, keep="qk") as recording, run:
        stack(x)
    first, second = (recording[f"layers.{index}.attention"].matrix.to_dense() > 0 for index in (0, 1))
    assert (stack.matrices(x)[0].to_dense() > 0)[..., 3].any()
    assert not first[..., 3].any()
    assert torch.equal(first[:, :, 4:], second[:, :, 4:])
    assert int(second[0, 0, -1].sum()) == K


def test_other_caches_are_refused() -> None:
    stack, x = _stack(), _tokens()
    for cache in (KVCache(), LatentCache(10), Int8Cache(4)):
        name = type(cache).__name__
        with pytest.raises(UnsupportedError, match=f"a {name} does not store index keys; an IndexedLatentCache does"):
            stack.layers[0](x, cache=cache)
    with pytest.raises(UnsupportedError, match="a Int8Cache does not return all latents; a LatentCache does"):
        stack.layers[1].attention(x, cache=Int8Cache(4))
    cache = stack.new_cache()
    stack(x[:, :9], cache=cache)
    cache[1].crop(7)
    with pytest.raises(ValueError, match="call must have as many queries and keys as the layer that selects"):
        stack(x[:, 9:], cache=cache)


def test_only_a_stack_can_call_a_reader() -> None:
    layer = _attention(selection_from=0)
    for call in (layer, layer.matrix):
        with pytest.raises(ValueError, match="shared must contain the selection of an earlier layer"):
            call(torch.zeros(1, 9, WIDTH))


@pytest.mark.parametrize(
    ("source", "selection_from", "said"),
    [
        (
            _attention(),
            0,
            "layer 0, a source, must be a LatentAttention with an indexer; got LatentAttention without one",
        ),
        (MultiHeadAttention(WIDTH, 4), 0, "must be a LatentAttention with an indexer; got MultiHeadAttention"),
        (_attention(_indexer()), 1, "source of layer 1 must be an earlier layer; got 1"),
    ],
    ids=["no indexer", "no latents", "itself"],
)
def test_sources_that_do_not_fit_are_refused(source: AttentionLayer, selection_from: int, said: str) -> None:
    reader = _attention(selection_from=selection_from)
    with pytest.raises(ValueError, match=said):
        DecoderStack([DecoderLayer(one, FeedForward(WIDTH, 8)) for one in (source, reader)])


def test_wrong_arguments_say_what_is_right() -> None:
    with pytest.raises(ValueError, match="indexer must be made for embed_dim 24 and query_dim 8; got \\[24, 24\\]"):
        _attention(_indexer(None))
    with pytest.raises(TypeError, match=r"indexer must be a saccade.nn.Indexer or None"):
        _attention(K)
    with pytest.raises(ValueError, match="selection_from must be None in a layer with an indexer; got 0"):
        _attention(_indexer(), selection_from=0)
    with pytest.raises(ValueError, match="k must be an int of at least 1; got 0"):
        _indexer(k=0)
    with pytest.raises(ValueError, match="rotary must be made for head_dim 6; got 4"):
        Indexer(WIDTH, K, num_heads=2, head_dim=6, rotary=Rotary(4))


@pytest.mark.parametrize(
    ("x", "latent", "said"),
    [
        (
            (2, N, WIDTH),
            None,
            "query_latent must be \\[2, 23, 8\\], the input of the layer's query projection; got None",
        ),
        ((2, N, WIDTH), (2, N, WIDTH), "query_latent must be \\[2, 23, 8\\].*; got \\[2, 23, 24\\]"),
        ((2, N, 8), (2, N, 8), "query must have shape \\[batch, len, 24\\]; got \\[2, 23, 8\\]"),
        ((N, WIDTH), (N, 8), "query must have shape \\[batch, len, 24\\]; got \\[23, 24\\]"),
    ],
    ids=["no latent", "wide latent", "narrow", "no batch"],
)
def test_wrong_inputs_of_an_indexer_say_what_is_right(x: tuple[int, ...], latent: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _indexer()(torch.zeros(x), None if latent is None else torch.zeros(latent))
    with pytest.raises(ValueError, match="dtype must be float32, like the parameters; got float64"):
        _indexer()(_tokens(), torch.zeros(2, N, 8))


def test_two_readers_and_the_layer_that_selects_read_the_same_keys_in_steps() -> None:
    torch.manual_seed(0)
    attentions = [_attention(_indexer()), *(_attention(selection_from=0) for _ in range(2))]
    stack = DecoderStack([DecoderLayer(one, FeedForward(WIDTH, 8)) for one in attentions]).double().eval()
    x, cache = _tokens().requires_grad_(False), stack.new_cache()
    with torch.no_grad():
        full, patterns = stack(x), [matrix.to_dense() > 0 for matrix in stack.matrices(x)]
        for start, stop in itertools.pairwise([0, 3, 4, 5, 6, 9, 22, N]):  # fewer keys than k, and then more
            with sc.record(stack, keep="qk") as recording:
                out = stack(x[:, start:stop], cache=cache)
            torch.testing.assert_close(out, full[:, start:stop])
            for index, pattern in enumerate(patterns):
                assert torch.equal(recording[index].matrix.to_dense() > 0, pattern[:, :, start:stop, :stop])
    assert torch.equal(patterns[0], patterns[2])


def test_readers_repeat_under_dropout() -> None:
    stack, x = _stack(dropout_p=0.5).train(), _tokens()
    torch.manual_seed(1)
    first = stack(x)
    torch.manual_seed(1)
    torch.testing.assert_close(stack(x), first)
    assert not torch.allclose(stack(x), first)
