"""Recorded prompts and steps make runs, which accumulate to what the model attends to."""

import copy

import pytest
import torch
from tests.integrations import model_zoo as zoo
from tests.recording.eager_weights import close, ids_of, weights_of
from torch import nn
from torch.nn import functional as F
from transformers import T5ForConditionalGeneration

import saccade as sc
from saccade import caches, masks
from saccade.recording import record
from saccade.statistics import Entropy, Pooled, Received, TopK


def test_each_forward_pass_is_a_run(llama):
    texts = [ids_of(11), ids_of(11), ids_of(7)]
    with torch.no_grad(), record(llama) as recording:
        for ids in texts:
            llama(ids)
    runs = recording.runs(0)
    assert [run.shape[2] for run in runs] == [11, 11, 7]
    for ids, run in zip(texts, runs, strict=True):
        close(run.compute(Received())[0], weights_of("llama", ids)[0].sum(2))


def generated(network, input_ids, **options):
    return network.generate(
        input_ids, max_new_tokens=6, do_sample=False, disable_compile=True, eos_token_id=-1, **options
    )


@pytest.mark.ci
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
        received, entropy = run.compute(Received(), Entropy())
        close(received[:, :, :width], weights.sum(2))
        assert (received[:, :, width:] == 0).all()
        close(entropy, -(weights * weights.clamp_min(1e-30).log()).sum(-1))
        strongest = run.compute(TopK(8))[0]
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
    """Return the bytes of queries and keys, with shared storage counted once."""
    parts = [part for part, _ in matrix._parts] if hasattr(matrix, "_parts") else [matrix]
    tensors = [x for part in parts for x in (part.inputs.query, part.inputs.key)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize("implementation", ["sdpa", "saccade"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_keys_are_held_once(implementation, cache):
    sc.integrations.transformers.install()
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
    close(run.compute(Received())[0], weights.sum(2))
    close(run.statistics["previous_mass"][:, :, 1:], weights.diagonal(-1, 2, 3))
    strongest = run.compute(TopK(8))[0]
    sure = strongest.weights > 0
    close(strongest.weights, weights.topk(8).values)
    assert torch.equal(strongest.indices[sure], weights.topk(8).indices[sure])


CROSS = "decoder.block.1.layer.1.EncDecAttention"


def test_cross_attention_in_a_generation():
    network = T5ForConditionalGeneration(zoo.configured("t5")[1]).eval()
    ids = ids_of()
    with record(network, keep="qk") as recording, record(network, layers=CROSS, keep="qk") as alone:
        text = generated(network, ids)
    with torch.no_grad():
        network.set_attn_implementation("eager")
        result = network(ids, decoder_input_ids=text[:, :-1], output_attentions=True, use_cache=False)
    cross = recording[CROSS]
    assert torch.equal(alone[CROSS].matrix.to_dense(), cross.matrix.to_dense())
    own = recording["decoder.block.1.layer.0.SelfAttention"]
    assert len(cross.calls) == len(own.calls) == text.shape[1] - 1
    close(cross.matrix.to_dense(), result.cross_attentions[1])
    close(own.matrix.to_dense(), result.decoder_attentions[1])
    assert len(recording["encoder.block.0.layer.0.SelfAttention"].calls) == 1


@pytest.mark.parametrize("layers", [None, CROSS])
def test_a_second_generation_from_one_text_is_a_second_run(layers):
    network, ids = T5ForConditionalGeneration(zoo.configured("t5")[1]).eval(), ids_of()
    with record(network, layers=layers) as recording:
        generated(network, ids)
        generated(network, ids)
    assert [len(run.calls) for run in recording.runs(CROSS)] == [6, 6]


class Pool(nn.Module):
    """One query, the same for all inputs, over all tokens."""

    def __init__(self):
        super().__init__()
        self.query, self.kv = nn.Parameter(torch.randn(1, 4, 1, 4)), nn.Linear(16, 32)

    def forward(self, x):
        key, value = self.kv(x).unflatten(-1, (2, 4, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(self.query.expand(len(x), -1, -1, -1), key, value)


@pytest.mark.parametrize("x", [torch.randn(2, 9, 16), torch.zeros(2, 9, 16)], ids=["random", "alike"])
@pytest.mark.parametrize("before", [False, True])
def test_two_passes_over_one_input_are_two_runs(before, x):
    body = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    network = nn.Sequential(*([body] if before else []), Pool()).eval()
    with torch.no_grad(), record(network, keep="qk") as recording:
        network(x)
        network(x)
    runs = recording.runs(-1)
    assert [run.shape for run in runs] == [(2, 4, 1, 9)] * 2
    close(runs[0].matrix.to_dense(), runs[1].matrix.to_dense())


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
    with record(network, keep="qk") as other:
        generated(network, ids)
    joined, whole = recording[0].summary(), other[0].matrix.summary()
    for measure in whole.measures:
        close(joined.named(measure.name).values, measure.values)
        assert torch.allclose(joined.named(measure.name).uniform, measure.uniform, equal_nan=True)
    for name, rows in whole.rows.items():
        close(joined.rows[name], rows)
    close(joined.received_index, whole.received_index)
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
    with pytest.raises(sc.UnsupportedError, match=r'Pooled(.|\n)*cannot be combined(.|\n)*keep="qk"'):
        recording[0].compute(Pooled(4))


def test_a_run_says_what_was_asked_and_its_copy_stays_as_it_is():
    layer = sc.nn.MultiHeadAttention(16, 2, mask=masks.Causal()).eval()
    cache = caches.KVCache()
    with torch.no_grad(), record(layer, keep=("topk", "statistics", Pooled(4))) as recording:
        layer(torch.randn(1, 5, 16), cache=cache)
        before = copy.copy(recording[0])
        layer(torch.randn(1, 1, 16), cache=cache)
    assert recording[0].kept == (TopK(8), Pooled(4))
    assert before.kept == recording[0].kept
    assert (before.shape, recording[0].shape) == ((1, 2, 5, 5), (1, 2, 6, 6))
    assert before.statistics["received"].shape == (1, 2, 5)
    assert recording[0].statistics["received"].shape == (1, 2, 6)
