"""Compressed attention: a reference written by hand, caches, stacks, recordings and what it refuses."""

import itertools

import pytest
import torch
from tests.sampled import sampled
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.caches import EntryCache, KVCache, load_cache, save_cache
from saccade.distributed import ContextParallel
from saccade.distributed.parallel_mechanism import ParallelMechanism
from saccade.mechanisms import Softmax
from saccade.nn import CompressedAttention, DecoderLayer, DecoderStack, FeedForward
from saccade.positions import ALiBi, Rotary
from saccade.support.errors import UnsupportedError

N, WIDTH, HEADS, HEAD, TURNED = 29, 16, 4, 8, 4
SPARSE = {"overlap": True, "k": 2, "index_heads": 8, "index_dim": 6}
FORMS: dict[str, dict[str, object]] = {
    "heavily compressed": {"block_size": 6},
    "compressed sparse": SPARSE,
    "overlapping": {"overlap": True},
    "sparse without overlap": {**SPARSE, "overlap": False},
    "small window": {**SPARSE, "window": 1, "block_size": 1},
    "without extras": {"rotary": None, "query_latent_dim": None, "output_groups": None, "output_latent_dim": None},
}
EACH_FORM = pytest.mark.parametrize("form", FORMS)


def _layer(form: str, **changes: object) -> CompressedAttention:
    torch.manual_seed(0)
    options = {"head_dim": HEAD, "rotary_dim": TURNED, "block_size": 4, "window": 5, "query_latent_dim": 6}
    options |= {"rotary": Rotary(TURNED, base=100.0), "output_groups": 2, "output_latent_dim": 3}
    layer = CompressedAttention(WIDTH, HEADS, **(options | FORMS[form] | changes)).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def _tokens(batch: int = 2, length: int = N) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def _rms(x: Tensor, weight: Tensor | float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def _turn(x: Tensor, position: int, base: float | None) -> Tensor:
    """Rotate the last channels of one vector, in pairs of channels half the width apart."""
    if base is None:
        return x
    half = TURNED // 2
    angle = position * base ** (-torch.arange(half, dtype=x.dtype) / half)
    plain, a, b = x[..., :-TURNED], x[..., -TURNED:-half], x[..., -half:]
    return torch.cat([plain, a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def _entry(part: torch.nn.Module, x: Tensor, block: int, base: float | None) -> Tensor:
    """Compress one block of one text, ``[len, width]``, channel by channel."""
    size, width = part.block_size, part.width
    content, gate = x @ part.content_projection.weight.T, x @ part.gate_projection.weight.T
    rows = [(j, width if part.overlap else 0, j % size) for j in range(block * size, (block + 1) * size)]
    if part.overlap and block:
        rows += [(j, 0, j % size) for j in range((block - 1) * size, block * size)]
    gates = torch.stack([gate[j, o : o + width] + part.position_bias[p, o : o + width] for j, o, p in rows])
    contents = torch.stack([content[j, o : o + width] for j, o, _ in rows])
    return _turn(_rms((gates.softmax(0) * contents).sum(0), part.norm.weight), block * size, base)


def _definition(layer: CompressedAttention, x: Tensor) -> Tensor:
    """Attend query by query, for one text ``[len, width]``."""
    base = None if layer.rotary is None else layer.rotary.base
    size, window, k = layer.mechanism.block_size, layer.mechanism.window, layer.mechanism.k
    latent = x
    if layer.query_latent_projection is not None:
        latent = _rms(x @ layer.query_latent_projection.weight.T, layer.query_norm.weight)
    keys = _rms(x @ layer.key_projection.weight.T, layer.key_norm.weight)
    outs = []
    for t, token in enumerate(x):
        blocks = list(range((t + 1) // size))
        if k is not None and blocks:
            index = layer.indexer
            queries = (latent[t] @ index.query_projection.weight.T).view(-1, index.head_dim)
            weights = index.weight_projection.weight @ token
            scores = [
                (weights * (_turn(queries, t, base) @ _entry(index.compressor, x, e, base)).relu()).sum()
                for e in blocks
            ]
            blocks = torch.stack(scores).argsort(descending=True)[:k].tolist()
        read = [_entry(layer.compressor, x, e, base) for e in blocks]
        read = torch.stack(read + [_turn(keys[j], j, base) for j in range(max(0, t - window + 1), t + 1)])
        query = _turn(_rms((latent[t] @ layer.query_projection.weight.T).view(HEADS, HEAD), 1.0), t, base)
        scores = torch.cat([query @ read.T * HEAD**-0.5, layer.mechanism.sink_logit[:, None]], 1)
        heads = _turn(scores.softmax(1)[:, :-1] @ read, -t, base).flatten()
        if layer.output_latent_projection is not None:
            groups = heads.view(2, -1)
            heads = torch.cat([w @ g for w, g in zip(layer.output_latent_projection.weight, groups, strict=True)])
        outs.append(layer.output_projection.weight @ heads)
    return torch.stack(outs)


@EACH_FORM
def test_outputs_and_gradients_are_those_of_the_definition(form: str) -> None:
    layer, x = _layer(form), _tokens()
    out, expected = layer(x), torch.stack([_definition(layer, text) for text in x])
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    named = {name: own for name, own in layer.named_parameters() if not name.startswith("indexer")}
    grads = torch.autograd.grad(out.sin().sum(), list(named.values()))
    torch.testing.assert_close(
        grads, torch.autograd.grad(expected.sin().sum(), list(named.values())), atol=1e-9, rtol=1e-9
    )
    assert all(grad.abs().max() > 0 for grad in grads)


@pytest.mark.parametrize("grad", sampled([True, False], 2))
@pytest.mark.parametrize("edges", [[0, 9, 10, 11, 12, 13, N], [0, 1, 2, 28, N], [*range(N + 1)], [0, 0, 14, 14, N]])
@EACH_FORM
def test_any_split_with_a_cache_is_the_full_run(form: str, edges: list[int], grad: bool) -> None:
    layer, x = _layer(form), _tokens()
    for room in (None, N + 3):
        cache = layer.new_cache(room)
        with torch.set_grad_enabled(grad):
            out = torch.cat([layer(x[:, i:j], cache=cache) for i, j in itertools.pairwise(edges)], 1)
            torch.testing.assert_close(out, layer(x), atol=1e-10, rtol=1e-10)


@torch.no_grad()
@EACH_FORM
def test_forks_other_orders_and_files_continue_unchanged(form: str, tmp_path) -> None:
    layer, x = _layer(form), _tokens(3)
    full, cache = layer(x), layer.new_cache()
    for stop in (1, 3, 18):  # few tokens, within the window and the first block, and many
        layer(x[:, cache.length : stop], cache=cache)
        save_cache(cache, tmp_path / "cache")
        read = load_cache(tmp_path / "cache")
        assert repr(read.positions(2)) == repr(cache.positions(2))
        other = cache.fork()
        other.reorder([2, 0])
        torch.testing.assert_close(layer(x[[2, 0], stop : stop + 3], cache=other), full[[2, 0], stop : stop + 3])
        for one in (read, cache.fork()):
            steps = [layer(x[:, i : i + 1], cache=one) for i in range(stop, N)]
            torch.testing.assert_close(torch.cat(steps, 1), full[:, stop:])
    torch.testing.assert_close(layer(x[:, 18:], cache=cache), full[:, 18:])


@torch.no_grad()
def test_a_crop_is_possible_within_the_open_block_and_the_window() -> None:
    layer, x = _layer("overlapping", window=12), _tokens()
    cache = layer.new_cache()
    layer(x[:, :11], cache=cache)
    short = cache.fork()
    short.crop(9)
    assert short.length == 9
    torch.testing.assert_close(layer(x[:, 9:], cache=short), layer(x)[:, 9:])
    with pytest.raises(UnsupportedError, match="it has compressed the last block of these tokens, and no longer"):
        cache.crop(7)
    layer(x[:, 11:15], cache=cache)
    with pytest.raises(UnsupportedError, match=r"it has forgotten tokens that were in the window 2 tokens ago"):
        cache.crop(13)
    for stop in (15, 16):
        one = cache.fork()
        one.crop(14)
        torch.testing.assert_close(layer(x[:, 14:stop], cache=one), layer(x)[:, 14:stop])
        torch.testing.assert_close(layer(x[:, stop:], cache=one), layer(x)[:, stop:])
    cache.crop(0)
    assert (cache.length, cache.nbytes) == (0, 0)
    torch.testing.assert_close(layer(x, cache=cache), layer(x))


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 4])
def test_a_failed_call_changes_nothing(size: int) -> None:
    layer, x = _layer("compressed sparse"), _tokens()
    cache = layer.new_cache()
    layer(x[:, :15], cache=cache)
    failing = layer.mechanism.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        layer(torch.randn_like(x[:, :size]), cache=cache)
    failing.remove()
    torch.testing.assert_close(layer(x[:, 15:], cache=cache), layer(x)[:, 15:])


@torch.no_grad()
def test_a_crop_after_a_failed_step_finds_the_token_that_the_step_would_have_replaced() -> None:
    layer, x = _layer("heavily compressed", block_size=8, window=5), _tokens()
    cache = layer.new_cache()
    layer(x[:, :5], cache=cache)
    failing = layer.mechanism.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        layer(torch.randn_like(x[:, :1]), cache=cache)
    failing.remove()
    cache.crop(3)
    torch.testing.assert_close(layer(x[:, 3:], cache=cache), layer(x)[:, 3:])


@torch.no_grad()
def test_entries_are_scored_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = _layer("compressed sparse"), _tokens()
    expected = layer.matrix(x).to_dense()
    monkeypatch.setattr("saccade.mechanisms.entry_softmax._SCORES", 1)
    monkeypatch.setattr("saccade.mechanisms.entry_softmax._FEWEST", 3)
    torch.testing.assert_close(layer.matrix(x).to_dense(), expected)
    cache = layer.new_cache()
    out = torch.cat([layer(part, cache=cache) for part in x.split([11, 7, N - 18], 1)], 1)
    torch.testing.assert_close(out, layer(x))


@torch.no_grad()
def test_a_step_reads_the_window_and_the_selected_entries() -> None:
    layer, x = _layer("compressed sparse"), _tokens(1, 1000)
    cache = layer.new_cache(1000)
    layer(x[:, :-1], cache=cache)
    layer(x[:, -1:], cache=cache)
    assert cache.entries.shape == (1, 1, 250, HEAD)
    assert cache.traffic == (8 * ((5 + 2) * HEAD + 250 * 6), 8 * (HEAD + HEAD))
    pending = 4 * 4 * (HEAD + 6)  # the last block: two contents and two gates
    assert cache.nbytes == 8 * ((5 + 250) * HEAD + 250 * 6 + pending)


@pytest.mark.parametrize("form", sampled(FORMS, 4))
def test_it_is_recorded_and_its_cost_is_known(form: str) -> None:
    layer = _layer(form)
    stack = DecoderStack([DecoderLayer(layer, FeedForward(WIDTH, 8))]).double().eval()
    x, size = _tokens(), layer.mechanism.block_size
    with torch.no_grad(), sc.record(stack, keep="qk") as recording:
        stack(x)
    expected = layer.matrix(stack.layers[0].attention_norm(x))
    recorded = recording["layers.0.attention"].matrix
    assert recorded.shape == (2, HEADS, N, N // size + N)
    torch.testing.assert_close(recorded.to_dense(), expected.to_dense())
    told = sc.cost(stack, N, mask=masks.Causal())
    cache = stack.new_cache()
    stack(x[:1], cache=cache)
    assert told.cache_bytes == cache.nbytes
    last = layer.matrix(x[:1]).to_dense()[0, :, -1] > 0
    assert sum(step.size for step in told.decode.steps if step.kernel) == int(last.sum())


@torch.no_grad()
def test_steps_are_not_recorded_because_their_columns_are_out_of_order() -> None:
    stack = DecoderStack([DecoderLayer(_layer("overlapping"), FeedForward(WIDTH, 8))]).double().eval()
    hint = "Hint: record a run without a cache"
    with pytest.raises(UnsupportedError, match=hint), sc.record(stack, keep="qk"):
        stack(_tokens(), cache=stack.new_cache())


@torch.no_grad()
@EACH_FORM
def test_edits_hold_in_the_full_run_and_in_steps(form: str) -> None:
    layer, x = _layer(form), _tokens()
    stack = DecoderStack([DecoderLayer(layer, FeedForward(WIDTH, 8))]).double().eval()
    plain = stack(x)
    with sc.intervene(stack) as edit:
        edit.ablate("layers.0.attention", 1)
        cache, expected = stack.new_cache(), stack(x)
        steps = torch.cat([stack(part, cache=cache) for part in x.split([14, *[1] * (N - 14)], 1)], 1)
    assert not torch.allclose(expected, plain)
    torch.testing.assert_close(steps, expected)


def test_padding_on_the_right_is_each_text_alone() -> None:
    for form in FORMS:
        layer, x = _layer(form), _tokens()
        out = layer(x, mask=masks.Padding([11, N]))
        torch.testing.assert_close(out[:1, :11], layer(x[:1, :11]))
        torch.testing.assert_close(out[1:], layer(x[1:]))
        weights = layer.matrix(x, mask=masks.Padding([11, N])).to_dense()[0]
        entries = N // layer.mechanism.block_size
        assert not weights[..., 11 // layer.mechanism.block_size : entries].any()
        assert not weights[..., entries + 11 :].any()


@pytest.mark.ci
def test_a_compiled_layer_is_one_graph_without_a_selection() -> None:
    layer = _layer("heavily compressed")
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", dynamic=True, fullgraph=True)
    for length in (29, 17, 40):
        torch.testing.assert_close(compiled(_tokens(2, length)), layer(_tokens(2, length)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bias": ALiBi(HEADS)}, "an entry stands for a block of tokens"),
        ({"mask": masks.Documents([10, 19])}, "Documents is neither Causal nor padding on the right"),
        (
            {"mask": masks.Padding([10, N], side="left", padded_len=N)},
            "Padding is neither Causal nor padding on the right",
        ),
        ({"positions": [[-1, *range(N - 1)], [*range(N)]]}, "blocks are counted from position 0"),
        ({"positions": range(1, N + 1)}, "blocks are counted from position 0"),
    ],
    ids=["bias", "documents", "left padding", "gaps", "later"],
)
def test_unsupported_calls_say_why(options: dict[str, object], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        _layer("overlapping")(_tokens(), **options)


def test_caches_of_others_are_refused() -> None:
    layer, x = _layer("overlapping"), _tokens()
    with pytest.raises(TypeError, match="cache must be an EntryCache, which stores compressed entries; got KVCache"):
        layer(x, cache=KVCache())
    with pytest.raises(ValueError, match="cache must have overlap True, as the layer; got False"):
        layer(x, cache=EntryCache(4, 5))
    heads = torch.randn(2, HEADS, 3, HEAD)
    with pytest.raises(UnsupportedError, match="it does not compress blocks of tokens to entries"):
        EntryCache(4, 5).attend(Softmax(), heads, heads, heads)
    cache = _layer("compressed sparse", window=5).new_cache()
    _layer("compressed sparse")(x, cache=cache)
    with pytest.raises(ValueError, match="parts must have width 56, as in the cache; got 32"):
        layer(x, cache=cache)
    assert cache.length == N
    with pytest.raises(UnsupportedError, match="blocks are counted from position 0"):
        _layer("compressed sparse")(x, cache=cache, positions=range(N + 1, 2 * N + 1))


def test_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="it attends to compressed entries of all earlier blocks, which no rank"):
        ParallelMechanism(_layer("overlapping").mechanism, ContextParallel)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"k": 2}, "index_heads must be given with k; got None"),
        ({"index_heads": 2, "index_dim": 4}, "index_heads must be None without k; got 2"),
        ({**SPARSE, "index_dim": 3}, "index_dim must be an int of at least 4; got 3"),
        ({"output_groups": 3, "output_latent_dim": 2}, "output_groups must divide num_heads 4; got 3"),
        ({"output_latent_dim": None}, "output_latent_dim must be given with output_groups; got None"),
        ({"rotary_dim": 9}, "rotary_dim must be below 9; got 9"),
        ({"window": 0}, "window must be an int of at least 1; got 0"),
        ({"block_size": 0}, "block_size must be an int of at least 1; got 0"),
    ],
    ids=str,
)
def test_wrong_sizes_say_what_is_right(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _layer("overlapping", **wrong)
