"""What is recorded is what the model attends to, over prompts and steps; and the model says the same to the bit."""

import subprocess
import sys

import pytest
import torch
from tests.integrations import model_zoo as zoo
from torch import nn
from torch.nn import functional as F
from transformers import T5ForConditionalGeneration

import saccade as sc
from saccade import caches, masks
from saccade.recording import record
from saccade.statistics import Entropy, Fold, Pooled, Received, TopK


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=3e-6)


def weights_of(name, ids, **changes):
    """Weights of every layer for one text, from eager attention."""
    with torch.no_grad():
        return zoo.model(name, **changes)(input_ids=ids, output_attentions=True, use_cache=False).attentions


def ids_of(length=11):
    return torch.randint(3, zoo.WORDS, (2, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def llama():
    return zoo.model("llama", "sdpa")


# what is kept


def test_statistics(llama):
    ids = ids_of()
    with torch.no_grad(), record(llama) as recording:
        llama(ids)
    assert recording.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    for layer, weights in zip(recording, weights_of("llama", ids), strict=True):
        entropy, received = recording[layer].ask(Entropy(), Received())
        close(entropy, -(weights * weights.clamp_min(1e-30).log()).sum(-1))
        close(received, weights.sum(2))
    assert recording[0] is recording["model.layers.0.self_attn"]
    assert recording[1].shape == (2, 4, 11, 11)
    asked = recording.ask(Received())
    assert torch.equal(asked["model.layers.1.self_attn"][0], recording[1].ask(Received())[0])


def test_summaries(llama):
    ids = ids_of()
    with torch.no_grad(), record(llama) as recording:
        llama(ids)
    dense = weights_of("llama", ids)[1]
    statistics, summary = recording[1].statistics, recording[1].summary()
    close(statistics["previous_mass"][:, :, 1:], dense.diagonal(-1, 2, 3))
    close(statistics["largest_weight"], dense.amax(-1))
    close(statistics["received"], dense.sum(2))
    close(summary.named("first_mass").values, dense[..., 0].mean(-1))
    close(summary.named("first_mass").uniform[0, 0], (1 / torch.arange(1.0, 12)).mean())
    with torch.no_grad(), record(llama, keep="qk") as later:
        llama(ids)
    close(later[1].statistics["distance"], statistics["distance"])
    assert str(later[1].summary()) == str(summary)


def test_a_grid_of_layers_and_heads(llama):
    ids = ids_of()
    with torch.no_grad(), record(llama) as recording:
        llama(ids)
    grid = recording.by_head("first_mass")
    assert grid.shape == (2, 2, 4)
    close(grid, torch.stack([weights[..., 0].mean(-1) for weights in weights_of("llama", ids)]))
    with pytest.raises(KeyError, match=r"name must be one of entropy, .*; got mass"):
        recording.by_head("mass")


def test_layers_that_make_no_grid():
    model = nn.Sequential(*(sc.nn.MultiHeadAttention(16, heads) for heads in (2, 4)))
    with record(model) as recording:
        model(torch.randn(1, 3, 16))
    with pytest.raises(ValueError, match=r"layers must have equal batches and heads; got \(1, 2\), \(1, 4\)"):
        recording.by_head("entropy")


def test_everything_else_that_has_a_name(llama):
    ids = ids_of()
    with torch.no_grad(), record(llama, keep=("topk", "pooled", Pooled(3, "max"), "qk")) as recording:
        llama(ids)
    weights = weights_of("llama", ids)[1]
    run = recording[1]
    close(run.ask(TopK(8))[0].weights, weights.topk(8).values)
    close(run.ask(Pooled(64))[0], weights)
    close(run.matrix.to_dense(), weights)
    close(run.matrix.received(), weights.sum(2))
    close(run.ask(Received())[0], weights.sum(2))  # was not asked, and can be
    assert run.ask(Pooled(3, "max"))[0].shape == (2, 4, 3, 3)


def test_a_question_of_ones_own(llama):
    class Largest(Fold):
        def start(self, outline):
            return torch.zeros(outline.shape[:2])

        def add(self, state, block):
            here = state[block.batch, block.heads]
            state[block.batch, block.heads] = torch.maximum(here, block.weights.amax((-1, -2)))
            return state

        def merge(self, state, other):
            return torch.maximum(state, other)

        def finish(self, state):
            return state

    largest, ids = Largest(), ids_of()
    with torch.no_grad(), record(llama, keep=[largest]) as recording:
        llama(ids)
    close(recording[0].ask(largest)[0], weights_of("llama", ids)[0].amax((-1, -2)))


def test_a_stream(llama):
    heard = {}
    ids = ids_of()
    with (
        torch.no_grad(),
        record(llama, keep=(), callback=lambda name, A: heard.update({name: A.to_dense()})) as recording,
    ):
        llama(ids)
    assert recording.layers == ()
    for weights, expected in zip(heard.values(), weights_of("llama", ids), strict=True):
        close(weights, expected)


def test_what_is_kept_does_not_change_any_more(llama):
    ids = ids_of()
    with record(llama, keep="qk") as recording:
        llama(ids)
    before = recording[0].matrix.to_dense()
    assert not before.requires_grad
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.zero_()
        llama(ids)
    assert torch.equal(recording[0].matrix.to_dense(), before)


def test_chosen_layers_and_heads(llama):
    ids = ids_of()
    weights = weights_of("llama", ids)
    with torch.no_grad(), record(llama, layers=1, heads=[3, 0], keep=("statistics", "qk")) as recording:
        llama(ids)
    assert recording.layers == ("model.layers.1.self_attn",)
    run = recording[0]
    assert run.shape == (2, 2, 11, 11)
    close(run.matrix.to_dense(), weights[1][:, [3, 0]])
    close(run.ask(Received())[0], weights[1][:, [3, 0]].sum(2))
    close(run.matrix[1, 0, 5], weights[1][1, 3, 5])
    with torch.no_grad(), record(llama, layers="*.0.*", heads=2) as recording:
        llama(ids)
    close(recording["model.layers.0.self_attn"].ask(Received())[0], weights[0][:, [2]].sum(2))


@pytest.mark.parametrize("name", ["gpt_oss", "t5", "gemma2"])
def test_heads_of_models_with_sinks_biases_and_caps(name):
    network, inputs = zoo.model(name), zoo.batch(name, padded=0)
    found = []
    for heads in (None, [2, 1]):
        with torch.no_grad(), record(network, heads=heads, keep=("statistics", "qk")) as recording:
            network(**inputs)
        found.append(recording)
    for layer in found[0]:
        every, few = found[0][layer], found[1][layer]
        close(few.matrix.to_dense(), every.matrix.to_dense()[:, [2, 1]])
        for key, values in every.statistics.items():
            close(few.statistics[key], values[:, [2, 1]])


def test_heads_of_our_own_layers():
    mask = masks.Predicate(lambda b, h, q, kv: (kv <= q) & ((q - kv) % (h + 1) == 0))
    bias = sc.positions.ALiBi(4)
    x = torch.randn(2, 9, 16)
    for mechanism in (sc.mechanisms.Softmax(bias=bias), sc.mechanisms.Softmax(score=sc.scores.Additive(4, 4, 4)), None):
        layer = sc.nn.MultiHeadAttention(16, 4, num_kv_heads=2, mechanism=mechanism)
        with torch.no_grad(), record(layer, heads=[3, 0, 1], keep=("qk", Received())) as recording:
            layer(x, mask=mask)
        expected = layer.matrix(x, mask=mask).to_dense()[:, [3, 0, 1]]
        close(recording[0].matrix.to_dense(), expected)
        close(recording[0].ask(Received())[0], expected.sum(2))
        close(recording[0].matrix[1, 1, 5], expected[1, 1, 5])
        assert not recording[0].matrix.to_dense().requires_grad


def test_heads_of_other_mechanisms():
    layer = sc.nn.MultiHeadAttention(16, 4, mechanism=sc.mechanisms.Linear(), mask=masks.Causal())
    x = torch.randn(2, 9, 16)
    with torch.no_grad(), record(layer, heads=[3, 0], keep=("qk", TopK(2))) as recording:
        layer(x)
        expected = layer.matrix(x).to_dense()[:, [3, 0]]
    matrix = recording[0].matrix
    close(matrix.to_dense(), expected)
    close(recording[0].ask(TopK(2))[0].weights, expected.topk(2).values)
    value = torch.randn(2, 2, 9, 3)
    close(matrix @ value, expected @ value)
    assert matrix.positions(range(9), (range(9),))[0].shape == (1, 1, 9, 1)


def test_rows_with_a_sink_are_no_distributions():
    network = zoo.model("gpt_oss")
    ids = ids_of()
    with torch.no_grad(), record(network) as recording:
        network(ids)
    weights = weights_of("gpt_oss", ids)[0]
    assert weights.sum(-1).max() < 0.999
    close(recording[0].ask(Received())[0], weights.sum(2))
    with pytest.raises(sc.UnsupportedError, match=r"Entropy\(\) was not asked while recording"):
        recording[0].ask(Entropy())
    with torch.no_grad(), record(network, keep=Entropy()), pytest.raises(sc.UnsupportedError, match="do not sum to 1"):
        network(ids)


def test_memory_of_a_recording_does_not_grow_with_pairs(llama):
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.append(out.untyped_storage().nbytes() if type(out) is torch.Tensor else 0)
            return out

    ids = torch.randint(3, zoo.WORDS, (1, 2048))
    sizes = {}
    for keep in ("statistics", "qk"):
        largest.clear()
        with torch.no_grad(), record(llama, layers=0, keep=keep), Watch():
            llama(ids)
        sizes[keep] = max(largest)
    # 4 heads of 2048 × 2048 weights are 67 MB; a block is one, the logits of 50 words half of one.
    assert max(sizes.values()) < 8e6


# runs


def test_each_forward_pass_is_a_run(llama):
    texts = [ids_of(11), ids_of(11), ids_of(7)]
    with torch.no_grad(), record(llama) as recording:
        for ids in texts:
            llama(ids)
    runs = recording.runs(0)
    assert [run.shape[2] for run in runs] == [11, 11, 7]
    for ids, run in zip(texts, runs, strict=True):
        close(run.ask(Received())[0], weights_of("llama", ids)[0].sum(2))


def generated(network, input_ids, **options):
    return network.generate(
        input_ids, max_new_tokens=6, do_sample=False, disable_compile=True, eos_token_id=-1, **options
    )


@pytest.mark.parametrize("keep", ["qk", ("statistics", "topk")])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saccade"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_rows_of_a_generation_accumulate(keep, implementation, cache):
    sc.integrations.transformers.install()
    network = zoo.model("llama", implementation)
    ids = ids_of()
    expected = generated(network, ids, cache_implementation=cache)
    with record(network, keep=keep) as recording:
        text = generated(network, ids, cache_implementation=cache)
    assert torch.equal(text, expected)
    assert len(recording.runs(0)) == 1
    width = text.shape[1] - 1  # the last token was never asked about
    for layer, weights in enumerate(weights_of("llama", text[:, :-1])):
        run = recording[layer]
        assert len(run.calls) == 6
        assert run.shape[2] == width
        received, entropy = run.ask(Received(), Entropy())
        close(received[:, :, :width], weights.sum(2))
        assert (received[:, :, width:] == 0).all()
        close(entropy, -(weights * weights.clamp_min(1e-30).log()).sum(-1))
        strongest = run.ask(TopK(8))[0]
        close(strongest.weights, weights.topk(8).values)
        sure = strongest.weights > 0
        assert torch.equal(strongest.indices[sure], weights.topk(8).indices[sure])
        near = run.statistics
        close(near["first_mass"], weights[..., 0])
        close(near["self_mass"], weights.diagonal(0, 2, 3))
        close(near["previous_mass"][:, :, 1:], weights.diagonal(-1, 2, 3))
        assert near["received"].shape[2] == run.shape[3]


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_generation_with_padding_on_the_left(name, cache):
    inputs, network = zoo.batch(name), zoo.model(name)
    with record(network, keep="qk") as recording:
        text = generated(network, **inputs, cache_implementation=cache)
    attention_mask = torch.cat([inputs["attention_mask"], torch.ones(2, 5, dtype=torch.int64)], 1)
    places = (attention_mask.cumsum(1) - 1).clamp_min(0)
    options = {"attention_mask": attention_mask, "position_ids": places, "use_cache": False}
    with torch.no_grad():
        expected = zoo.model(name)(text[:, :-1], output_attentions=True, **options).attentions
    for layer, weights in enumerate(expected):
        dense = recording[layer].matrix.to_dense()[..., :16]
        close(dense[0, :, 3:], weights[0, :, 3:])
        close(dense[1], weights[1])


def bytes_held(matrix):
    """Of queries and keys, whatever they share counted once."""
    parts = [part for part, _ in matrix._parts] if hasattr(matrix, "_parts") else [matrix]
    tensors = [x for part in parts for x in (part.ingredients.query, part.ingredients.key)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("implementation", ["sdpa", "saccade"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_keys_are_held_once(implementation, cache):
    network = zoo.model("llama", implementation)
    with record(network, keep="qk", layers=0) as recording:
        network.generate(
            ids_of(),
            max_new_tokens=60,
            do_sample=False,
            disable_compile=True,
            cache_implementation=cache,
            eos_token_id=-1,
        )
    tokens, query, key = 70, 2 * 4 * 8 * 4, 2 * 2 * 8 * 4
    assert len(recording[0].calls) == 60
    assert bytes_held(recording[0].matrix) <= tokens * (query + 2 * key)  # room for twice as many keys


@pytest.mark.parametrize("keep", ["qk", ("statistics", "topk")])
def test_a_cache_that_lets_go_of_keys(keep):
    network, ids = zoo.model("mistral", "sdpa"), ids_of()
    with record(network, keep=keep) as recording:
        text = generated(network, ids)
    run = recording[1]
    weights = weights_of("mistral", text[:, :-1])[1]
    assert len(recording.runs(1)) == 1
    assert run.calls[-1].shape[3] < weights.shape[3]
    close(run.ask(Received())[0], weights.sum(2))
    close(run.statistics["previous_mass"][:, :, 1:], weights.diagonal(-1, 2, 3))
    strongest = run.ask(TopK(8))[0]
    sure = strongest.weights > 0
    close(strongest.weights, weights.topk(8).values)
    assert torch.equal(strongest.indices[sure], weights.topk(8).indices[sure])


def test_cross_attention_in_a_generation():
    network = T5ForConditionalGeneration(zoo.configured("t5")[1]).eval()
    ids = ids_of()
    with record(network, keep="qk") as recording:
        text = generated(network, ids)
    with torch.no_grad():
        network.set_attn_implementation("eager")
        result = network(ids, decoder_input_ids=text[:, :-1], output_attentions=True, use_cache=False)
    cross = recording["decoder.block.1.layer.1.EncDecAttention"]
    own = recording["decoder.block.1.layer.0.SelfAttention"]
    assert len(cross.calls) == len(own.calls) == text.shape[1] - 1
    close(cross.matrix.to_dense(), result.cross_attentions[1])
    close(own.matrix.to_dense(), result.decoder_attentions[1])
    assert len(recording["encoder.block.0.layer.0.SelfAttention"].calls) == 1


@pytest.mark.parametrize("max_len", [None, 32])
def test_our_own_decoder(max_len):
    block = sc.nn.MultiHeadAttention(16, 4, num_kv_heads=2, mask=masks.sliding_window(5), rotary=sc.positions.Rotary(4))
    cache, x = caches.KVCache(max_len), torch.randn(2, 11, 16)
    with torch.no_grad(), record(block, keep=("statistics", "qk")) as recording:
        for part in x.split([6, 1, 1, 3], 1):
            block(part, cache=cache)
    cache.crop(2)
    with torch.no_grad():
        block(torch.randn(2, 5, 16), cache=cache)  # other tokens in the same memory
        expected = block.matrix(x).to_dense()
    run = recording[0]
    assert [call.shape[2:] for call in run.calls] == [(6, 6), (1, 7), (1, 8), (3, 11)]
    close(run.matrix.to_dense(), expected)
    close(run.matrix.pooled(4), sc.AttentionMatrix.pooled(block.matrix(x), 4))
    x = torch.randn(2, 4, 11, 3)
    close(run.matrix.mT @ x, expected.mT @ x)
    close(run.matrix[1, 2, 9], expected[1, 2, 9])
    assert len(recording.runs(0)) == 1


def test_another_text_in_a_cache_is_another_run():
    block = sc.nn.MultiHeadAttention(16, 4, mask=masks.Causal())
    first, second, x = caches.KVCache(), caches.KVCache(), torch.randn(2, 2, 6, 16)
    with torch.no_grad(), record(block) as recording:
        block(x[0, :, :5], cache=first)
        block(x[1, :, :5], cache=second)
        block(x[0, :, 5:], cache=first)  # not after the last call
    assert [len(run.calls) for run in recording.runs(0)] == [1, 1, 1]


def test_a_table_for_each_step():
    network, ids = zoo.model("llama"), ids_of()
    with record(network) as recording:
        generated(network, ids)
    assert recording[0].calls[3].summary.named("entropy").values.shape == (2, 4)
    with pytest.raises(sc.UnsupportedError, match=r"one for each of 6 calls(.|\n)*Run.statistics joins"):
        recording[0].summary()
    with record(network, keep=Entropy()) as recording:
        generated(network, ids)
    with pytest.raises(sc.UnsupportedError, match=r"statistics of model.layers.0.self_attn were not kept"):
        recording[0].summary()


def test_answers_that_do_not_make_one():
    network, ids = zoo.model("llama"), ids_of()
    with record(network, keep=Pooled(4)) as recording:
        generated(network, ids)
    assert len(recording[0].calls) == 6
    assert recording[0].calls[2].answers[0].shape == (2, 4, 1, 4)
    with pytest.raises(sc.UnsupportedError, match=r'Pooled(.|\n)*do not make one answer(.|\n)*keep="qk"'):
        recording[0].ask(Pooled(4))


# what is refused


class Own(nn.Module):
    """Attention in operations of its own: nothing to hear."""

    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Fused(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_a_model_that_cannot_be_heard():
    with (
        pytest.raises(sc.UnsupportedError, match=r"record: Own cannot run(.|\n)*no call(.|\n)*set_fused_attn"),
        record(Own()) as _,
    ):
        Own()(torch.zeros(1, 2, 3))


def test_an_error_of_the_model_comes_first():
    with pytest.raises(ZeroDivisionError, match="own"), record(Own()):
        raise ZeroDivisionError("own")


def test_a_layer_that_never_spoke():
    model = Fused()
    with (
        pytest.raises(sc.UnsupportedError, match=r"7, decoder.* was not heard; Fused were"),
        record(model, layers=[0, 7, "decoder.*"]),
    ):
        model(torch.zeros(1, 2, 3, 4))


def test_a_head_that_is_not_there(llama):
    with pytest.raises(ValueError, match=r"heads must be 0 to 3; got \[4\]"), record(llama, heads=4):
        llama(ids_of())
    assert "forward" not in vars(llama)


@pytest.mark.parametrize(
    "options, error, rule",
    [
        ({"keep": "entropy"}, TypeError, 'keep must be questions of saccade.statistics, or of "statistics"'),
        ({"keep": Entropy}, TypeError, "got Entropy.\nHint: give instances"),
        ({"keep": 3}, TypeError, "keep must be questions"),
        ({"keep": ()}, ValueError, "keep must name something where there is no callback; got nothing"),
        ({"layers": 1.5}, TypeError, "layers must be ints and names, or None for all; got 1.5"),
        ({"layers": []}, ValueError, "layers must name at least one; got none"),
        ({"layers": -1}, ValueError, r"layers must be at least 0; got \[-1\]"),
        ({"layers": True}, TypeError, "layers must be ints and names"),
        ({"heads": "0"}, TypeError, "heads must be ints, or None for all; got '0'"),
        ({"heads": [1, 1]}, ValueError, "heads must name each head once"),
        ({"callback": 3}, TypeError, r"callback must be a function \(name, matrix\), or None; got int"),
    ],
)
def test_bad_arguments_are_caught_before_anything_runs(llama, options, error, rule):
    with pytest.raises(error, match=f"record: .*{rule}" if "Hint" not in rule else rule):
        record(llama, **options)


@pytest.mark.parametrize("model", [None, nn.Linear, lambda x: x])
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match="record: model must be a torch module"):
        record(model)


def test_questions_that_nothing_was_kept_for(llama):
    with torch.no_grad(), record(llama) as recording:
        llama(ids_of())
    with pytest.raises(
        sc.UnsupportedError, match=r'queries and keys of model.layers.0.self_attn were not kept(.|\n)*keep="qk"'
    ):
        recording[0].matrix.entropy()
    with pytest.raises(sc.UnsupportedError, match=r"TopK\(k=3\) was not asked(.|\n)*name it in keep= or keep="):
        recording[0].ask(TopK(3))
    with pytest.raises(KeyError, match=r"layer must be one of model.layers.0.self_attn, .*; got 'decoder'"):
        recording["decoder"]
    with pytest.raises(KeyError, match="got 2"):
        recording[2]
    assert "2 layers" in repr(recording)
    assert "kept=statistics" in repr(recording[0])


def test_without_transformers():
    code = """
import sys
sys.modules["transformers"] = None
import torch, saccade
layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
with saccade.record(layer, keep="qk") as recording:
    layer(torch.zeros(1, 3, 8))
print(recording["self_attn"].matrix[0, 0, 0].tolist()[0] > 0.3)
try:
    saccade.integrations.transformers.install()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "install: transformers must be installed; got no such package.",
        "Hint: pip install 'saccade[transformers]'",
    ]
