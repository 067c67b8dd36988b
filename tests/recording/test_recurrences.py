"""Recordings of recurrent layers: what can be asked, steps that join, and what is refused."""

import copy
import warnings

import pytest
import torch
from tests.integrations import recurrent_models as zoo
from tests.recording.eager_weights import close
from transformers.models.mamba2 import modeling_mamba2 as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

import saccade as sc
from saccade import caches, masks, mechanisms, nn
from saccade.recording import UnrecordedLayersWarning, record
from saccade.statistics import Entropy, Pooled, Received, TopK
from saccade.viz import heatmap


def generated(network, inputs, **options):
    return network.generate(
        **inputs, max_new_tokens=6, do_sample=False, disable_compile=True, eos_token_id=None, **options
    )


def products(calls):
    return (torch.cat(one, 2) for one in zip(*calls, strict=True))


@pytest.mark.parametrize("name", zoo.ALL)
def test_a_generation_is_one_matrix(name, monkeypatch):
    network, inputs = zoo.model(name), zoo.batch()
    expected = generated(network, inputs)
    with zoo.cores(network, monkeypatch) as cores, record(network, keep="qk") as recording:
        assert torch.equal(generated(network, inputs), expected)
    for layer, calls in cores.items():
        (run,) = recording.runs(layer)
        value, out = products(calls)
        assert [call.shape[2:] for call in run.calls] == [(21, 21), *((1, 22 + i) for i in range(5))]
        assert run.matrix.shape == (2, out.shape[1], 26, 26)
        torch.testing.assert_close(run.matrix @ value, out, atol=1e-5, rtol=1e-5)
        dense = run.matrix.to_dense()
        close(run.matrix[1, 2, 24], dense[1, 2, 24])
        close(run.compute(Received())[0].float(), dense.sum(2))


@pytest.mark.ci
@pytest.mark.parametrize("keep", ["statistics", "qk"])
@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_statistics_of_rows_of_any_sign(name, keep):
    network, inputs = zoo.model(name), zoo.batch()
    with record(network, keep=(keep, TopK(3), Pooled(4))) as recording:
        generated(network, inputs)
    with record(network, keep="qk") as kept:
        generated(network, inputs)
    layer = next(iter(zoo.recurrent_layers(network)))
    run, dense = recording[layer], kept[layer].matrix.to_dense()
    found = run.statistics
    close(found["received"].float(), dense.sum(2))
    close(found["given_mass"], dense.sum(3))
    close(found["largest_weight"], dense.amax(3))
    close(found["squared_norm"], dense.square().sum(3))
    close(found["self_mass"], dense.diagonal(0, 2, 3))
    close(found["first_mass"], dense[..., 0])
    close(run.compute(Received())[0].float(), dense.sum(2))
    close(run.compute(TopK(3))[0].weights, dense.topk(3).values)
    with pytest.raises(sc.UnsupportedError, match="sum to 1"):
        run.summary()
    with pytest.raises(sc.UnsupportedError, match="sum to 1" if keep == "qk" else "was not computed"):
        run.compute(Entropy())
    assert ("statistics" if keep == "statistics" else "queries and keys") in repr(run)


def test_all_layers_of_a_hybrid_by_default():
    network = zoo.model("qwen3_next")
    with torch.no_grad(), record(network) as recording:
        network(**zoo.batch())
    assert recording.layers == tuple(
        f"model.layers.{i}.{one}_attn" for i, one in enumerate(("linear", "self", "linear"))
    )
    assert "first_mass" in str(recording[1].summary())
    with pytest.raises(sc.UnsupportedError, match=r"Recording.by_head.*\n.*linear_attn do not sum to 1(.|\n)*layers="):
        recording.by_head("first_mass")
    with torch.no_grad(), record(network, layers="*self_attn") as recording:
        network(**zoo.batch())
    assert recording.by_head("first_mass").shape == (1, 2, 4)


@pytest.mark.parametrize("name", ["kimi_linear", "bamba", "minimax"])
def test_layers_and_heads_can_be_chosen(name):
    network, inputs = zoo.model(name), zoo.batch()
    layer = [*zoo.recurrent_layers(network)][-1]
    with record(network, keep="qk") as whole:
        generated(network, inputs)
    with record(network, layers=layer, heads=[3, 0], keep="qk") as recording:
        generated(network, inputs)
    assert recording.layers == (layer,)
    assert recording[layer].matrix.shape == (2, 2, 26, 26)
    assert recording[layer].matrix.kv_heads == 2
    close(recording[layer].matrix.to_dense(), whole[layer].matrix.to_dense()[:, [3, 0]])


def test_a_figure():
    network = zoo.model("mamba2")
    with torch.no_grad(), record(network, keep="qk") as recording:
        network(**zoo.batch())
    assert heatmap(recording[0].matrix, head=2) is not None


def step(network, cache, ids):
    return network(ids, cache_params=cache, use_cache=True)


def test_beams_that_change_places():
    network, ids = zoo.model("mamba2"), zoo.batch()["input_ids"]
    with torch.no_grad():
        with record(network, keep="qk") as recording:
            cache = network(ids[:, :9], use_cache=True).cache_params
            cache.reorder_cache(torch.tensor([1, 1]))
            step(network, cache, ids[:, 9:10])
        with record(network, keep="qk") as expected:
            cache = network(ids[[1, 1], :9], use_cache=True).cache_params
            step(network, cache, ids[:, 9:10])
    for layer in recording:
        assert len(recording.runs(layer)) == 2
        close(recording[layer].matrix.to_dense(), expected[layer].matrix.to_dense()[:, :, 9:])


def test_a_beam_search_is_recorded():
    for name in ("qwen3_next", "minimax"):
        network, inputs = zoo.model(name), zoo.batch()
        expected = generated(network, inputs, num_beams=3)
        with record(network) as recording:
            assert torch.equal(generated(network, inputs, num_beams=3), expected)
        assert len(recording) == 3


def test_copies_of_a_cache_go_on_from_its_prompt():
    network, ids = zoo.model("mamba2"), zoo.batch()["input_ids"]
    with torch.no_grad(), record(network, keep="qk") as recording:
        prompt = network(ids[:, :9], use_cache=True).cache_params
        one, two = copy.deepcopy(prompt), copy.deepcopy(prompt)
        for cache, places in ((one, [9]), (two, [10]), (one, [11])):
            step(network, cache, ids[:, places])
        network(ids[:, [*range(10), 11]])
        network(ids[:, [*range(9), 10]])
        step(network, prompt, ids[:, :1])
        late = copy.deepcopy(prompt)
        step(network, prompt, ids[:, :1])
        with pytest.raises(sc.UnsupportedError, match="continues from a state"):
            step(network, late, ids[:, :1])
    first, second, third, *whole = [run.matrix.to_dense() for run in recording.runs(0)[:5]]
    close(first, whole[0][:, :, :10, :10])
    close(second, whole[1][:, :, 9:])
    close(third, whole[0][:, :, 10:])


def test_a_state_from_before_the_recording_is_refused():
    network, ids = zoo.model("qwen3_next"), zoo.batch()["input_ids"]
    with torch.no_grad():
        cache = network(ids[:, :9], use_cache=True).past_key_values
        refused = pytest.raises(
            sc.UnsupportedError, match=r"layers.0.linear_attn continues from a state(.|\n)*before the"
        )
        with record(network), refused:
            network(ids[:, 9:10], past_key_values=cache)
        with record(network, layers="*self_attn") as recording:
            network(ids[:, 10:11], past_key_values=cache)
    assert recording[0].shape[2] == 1


def test_a_cache_that_is_emptied_begins_anew():
    network, ids = zoo.model("mamba2"), zoo.batch()["input_ids"]
    with torch.no_grad(), record(network, keep="qk") as recording:
        cache = network(ids[:, :9], use_cache=True).cache_params
        cache.reset()
        step(network, cache, ids[:, :5])
    assert recording[0].shape == (2, 8, 5, 5)


def test_packed_documents_for_a_kernel_are_refused(monkeypatch):
    network, ids = zoo.model("qwen3_next"), zoo.batch()["input_ids"]
    slow = qwen.torch_chunk_gated_delta_rule.__wrapped__  # as if a kernel were there that knows documents
    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", slow)
    lengths = torch.tensor([0, 9, 21], dtype=torch.int32)
    with record(network), pytest.raises(sc.UnsupportedError, match="cu_seqlens"):
        network(ids[:1], cu_seq_lens_q=lengths, use_cache=False)
    mixer, x = network.model.layers[0].linear_attn, torch.zeros(1, 21, 32)
    with record(mixer), pytest.raises(sc.UnsupportedError, match="cu_seqlens"):
        mixer(x, cu_seq_lens_q=lengths)


def test_a_fused_kernel_is_reported_as_not_recorded(monkeypatch):
    network = zoo.model("bamba").train()
    kernel = lambda *args, **kwargs: torch.zeros(2, 21, 32)  # noqa: E731
    monkeypatch.setattr("transformers.models.bamba.modeling_bamba.mamba2_split_conv1d_scan_combined", kernel)
    with pytest.warns(UnrecordedLayersWarning, match=r"layers.0.mamba \(BambaMixer\)"), record(network) as recording:
        network(**zoo.batch(), use_cache=False)
    assert recording.layers == ("model.layers.1.self_attn",)
    assert mamba.mamba2_chunk_scan.__name__ == "mamba2_chunk_scan"


def test_recorded_layers_raise_no_warning():
    network = zoo.model("kimi_linear")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UnrecordedLayersWarning)
        with record(network) as recording:
            network(**zoo.batch())
    assert recording.not_recorded == ()


@pytest.mark.parametrize("bad", ["key", "query"])
def test_rows_of_our_own_recurrences_join(bad):
    layer = nn.MultiHeadAttention(32, 4, mask=masks.Causal(), mechanism=mechanisms.GatedLinear.retnet(4))
    x, cache = torch.randn(2, 12, 32), caches.KVCache()
    with torch.no_grad():
        with record(layer, keep="qk") as recording:
            for piece in x.split([7, 1, 4], 1):
                layer(piece, cache=cache)
        whole = layer.matrix(x)
    assert len(recording[0].calls) == 3
    close(recording[0].matrix.to_dense(), whole.to_dense())
    rule, tokens = mechanisms.Delta(), {one: torch.randn(2, 2, 9, 4) for one in ("query", "key")}
    tokens[bad][0, 1, 3] = torch.nan
    query, key = tokens.values()
    gates = [-torch.rand(2, 2, 9), torch.rand(2, 2, 9)]

    def made(rows, length):
        decay, beta = (gate[:, :, :length] for gate in gates)
        return rule(query[:, :, rows], key[:, :, :length], decay=decay, beta=beta, mask=masks.Causal())

    joined = made(slice(5, 9), 9).below(made(slice(0, 5), 5))
    torch.testing.assert_close(joined.to_dense(), made(slice(0, 9), 9).to_dense(), equal_nan=True)
    few = joined.of_heads([1])
    torch.testing.assert_close(few.to_dense(), joined.to_dense()[:, 1:], equal_nan=True)
    assert made(slice(8, 9), 9).below(made(slice(0, 5), 5)) is None
