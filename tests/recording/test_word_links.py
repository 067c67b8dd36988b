"""Heads that link words: which tokens a word has, and how much attention goes between them in each head."""

import pytest
import torch
from tests.integrations import model_zoo as zoo
from tests.recording.eager_weights import ids_of, weights_of
from transformers import T5ForConditionalGeneration

import saccade as sc
from saccade import masks, models, text
from saccade.recording import Link, record


def test_the_attention_between_two_words_is_summed_over_keys_and_averaged_over_queries(llama):
    ids = ids_of(11)
    with torch.no_grad(), record(llama, keep="qk") as recording:
        llama(ids)
    links = recording.find([(range(8, 10), range(2, 5)), (7, 3)], batch=1, k=None)
    weights = torch.stack(weights_of("llama", ids))[:, 1]  # [layers, heads, queries, keys]
    both = torch.stack([weights[:, :, 8:10, 2:5].sum(-1).mean(-1), weights[:, :, 7, 3]], -1)
    assert len(links) == both[..., 0].numel()
    for link in links:
        torch.testing.assert_close(torch.tensor(link.weights), both[link.layer_index, link.head], rtol=1e-5, atol=1e-5)
        assert link.value == pytest.approx(float(both[link.layer_index, link.head].mean()), abs=1e-5)
        assert link.uniform == pytest.approx(((3 / 9 + 3 / 10) / 2 + 1 / 8) / 2, abs=1e-6)
        assert link.layer == recording.layers[link.layer_index]
    assert [link.value for link in links] == sorted((link.value for link in links), reverse=True)
    assert recording.find([(7, 3)], batch=1, k=3) == recording.find([(7, 3)], batch=1, k=None)[:3]


def test_the_excess_is_over_what_the_second_word_receives_on_average(llama):
    ids = ids_of(11)
    with torch.no_grad(), record(llama, keep="qk") as recording:
        llama(ids)
    found = recording.find([(range(8, 10), range(2, 5)), (7, 3)], batch=1, k=None, rank_by="excess")
    weights = torch.stack(weights_of("llama", ids))[:, 1].double()  # [layers, heads, queries, keys]
    even = torch.ones(11, 11).tril().double()
    even /= even.sum(-1, keepdim=True)
    usual = even * (weights.sum(-2) / even.sum(-2))[..., None, :]
    both = torch.stack([usual[:, :, 8:10, 2:5].sum(-1).mean(-1), usual[:, :, 7, 3]], -1).mean(-1)
    for link in found:
        assert link.expected == pytest.approx(float(both[link.layer_index, link.head]), abs=1e-5)
    excess = [link.value - link.expected for link in found]
    assert excess == sorted(excess, reverse=True)
    plain = recording.find([(range(8, 10), range(2, 5)), (7, 3)], batch=1, k=None)
    assert {link._replace(expected=None) for link in found} == set(plain)


def test_a_head_that_attends_to_one_word_everywhere_ranks_low_by_excess():
    layer = sc.nn.MultiHeadAttention(8, 2, projection_bias=False)
    x = torch.zeros(1, 4, 8)
    x[0, :, 0], x[0, 1, 1], x[0, 3, 2] = 1.0, 1.0, 1.0  # every token has feature 0, the noun 1, the pronoun 2
    with torch.no_grad():
        for projection in (layer.query_projection, layer.key_projection):
            projection.weight.zero_()
        layer.query_projection.weight[0, 0] = layer.key_projection.weight[0, 1] = 6.0  # head 0: all see the noun
        layer.query_projection.weight[4, 2] = layer.key_projection.weight[4, 1] = 2.0  # head 1: the pronoun does
        with record(layer, keep="qk") as recording:
            layer(x)
    assert [link.head for link in recording.find([(3, 1)])] == [0, 1]
    popular, pronoun = sorted(recording.find([(3, 1)], rank_by="excess"), key=lambda link: link.head)
    assert popular.value == pytest.approx(popular.expected, abs=1e-6)
    assert pronoun.value > pronoun.expected + 0.1
    assert recording.find([(3, 1)], rank_by="excess") == [pronoun, popular]


def test_a_key_that_no_query_sees_has_no_usual_attention():
    layer = sc.nn.MultiHeadAttention(8, 2, mask=masks.Causal() & masks.Window(1, 0))
    with torch.no_grad(), record(layer, keep="qk") as recording:
        layer(torch.randn(1, 1, 8), torch.randn(1, 4, 8))
    (link, other) = recording.find([(3, 3), (3, 0)], rank_by="excess")
    for each in (link, other):
        assert each.weights[1] == 0
        assert each.expected == pytest.approx(each.value)


def test_chosen_heads_keep_their_numbers(llama):
    ids = ids_of(9)
    with torch.no_grad(), record(llama, keep="qk", heads=[3, 0]) as recording:
        llama(ids)
    weights = weights_of("llama", ids)
    for link in recording.find([(5, 2)]):
        assert link.head in (0, 3)
        assert link.value == pytest.approx(float(weights[link.layer_index][0, link.head, 5, 2]), abs=1e-5)


def test_words_of_a_model_with_a_tokenizer():
    model = models.small_decoder()
    encoded = model.tokenizer.encode("The cat saw the dog, and it ran away.")
    with torch.no_grad(), record(model, keep="qk") as recording:
        model(torch.tensor([encoded.ids]))
    found = recording.find([("it", "cat")], tokens=encoded.tokens)
    assert isinstance(found[0], Link)
    assert found == recording.find([(11, range(1, 3))])
    words = [word.text for word in text.words(encoded, "The cat saw the dog, and it ran away.")]
    merged = text.merge(
        recording[found[0].layer].matrix[0, found[0].head],
        text.words(encoded, "The cat saw the dog, and it ran away."),
    )
    assert found[0].value == pytest.approx(float(merged[words.index("it"), words.index("cat")]), abs=1e-5)


def test_steps_with_a_cache_have_the_last_tokens_as_queries(llama):
    ids = ids_of(11)
    with torch.no_grad():
        past = llama(ids[:, :8], use_cache=True).past_key_values
        with record(llama, keep="qk") as recording:
            llama(ids[:, 8:], past_key_values=past)
    tokens = [f"w{place}" for place in range(11)]
    weights = weights_of("llama", ids)
    for link in recording.find([("w9", "w2")], tokens=tokens):
        assert link.value == pytest.approx(float(weights[link.layer_index][0, link.head, 9, 2]), abs=1e-5)
    with pytest.raises(ValueError, match=r"have a recorded query, at token 8 or later; got 'w3' at token 3"):
        recording.find([("w3", "w2")], tokens=tokens)


def test_two_texts_are_given_by_layer():
    network = T5ForConditionalGeneration._from_config(zoo.configured("t5")[1], attn_implementation="eager").eval()
    source, target = ids_of(7), ids_of(4)
    with torch.no_grad(), record(network, keep="qk") as recording:
        weights = network(source, decoder_input_ids=target, output_attentions=True).cross_attentions
    texts = ([f"t{place}" for place in range(4)], [f"s{place}" for place in range(7)])
    links = recording.find([("t1", "s6")], tokens={"*EncDecAttention": texts}, k=None)
    assert {link.layer for link in links} == {name for name in recording if name.endswith("EncDecAttention")}
    by_place = sorted((link.layer_index, link.head, link.value) for link in links)
    want = [float(x) for layer in weights for x in layer[0, :, 1, 6]]
    assert [value for *_, value in by_place] == pytest.approx(want, abs=1e-5)
    with pytest.raises(ValueError, match="tokens must have a pattern that matches one of"):
        recording.find([("t1", "s6")], tokens={"nothing*": texts})


def test_what_cannot_be_ranked_is_refused():
    layer = sc.nn.MultiHeadAttention(8, 2, mask=masks.Causal())
    with torch.no_grad(), record(layer, keep="qk") as recording, record(layer) as summaries:
        layer(torch.zeros(1, 4, 8))
    tokens = ["it", "is", "a", "camera"]
    with pytest.raises(
        ValueError, match=r"a query and a key that the mask allows; got \('it', 'camera'\)(.|\n)*causal"
    ):
        recording.find([("it", "camera")], tokens=tokens)
    with pytest.raises(TypeError, match=r"find: pairs must be pairs \(query word, key word\); got 'it'"):
        recording.find(["it"], tokens=tokens)
    with pytest.raises(TypeError, match="pairs must be pairs"):
        recording.find([(1.5, 2)])
    with pytest.raises(ValueError, match="pairs must contain at least one pair; got none"):
        recording.find([])
    with pytest.raises(ValueError, match="be token indices if tokens= is not given; got 'it'"):
        recording.find([("it", "camera")])
    for place in (4, -1, range(0), range(0, 4, 2)):
        with pytest.raises(ValueError, match="each of pairs must be tokens from 0 to 3"):
            recording.find([(place, 0)])
    with pytest.raises(ValueError, match="batch must be from 0 to 0; got 1"):
        recording.find([(3, 0)], batch=1)
    with pytest.raises(ValueError, match="k must be"):
        recording.find([(3, 0)], k=0)
    with pytest.raises(ValueError, match="find: rank_by must be one of 'value', 'excess'; got 'mean'"):
        recording.find([(3, 0)], rank_by="mean")
    with pytest.raises(sc.UnsupportedError, match=r'queries and keys(.|\n)*keep="qk"'):
        summaries.find([(3, 0)])
