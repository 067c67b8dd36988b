"""A recording holds what the model attends to, over prompts and steps, and outputs are bitwise unchanged."""

import pytest
import torch
from tests.integrations import model_zoo as zoo
from tests.recording.eager_weights import close, ids_of, weights_of
from torch import nn

import saccade as sc
from saccade import masks
from saccade.recording import record
from saccade.statistics import Entropy, Pooled, Received, Statistic, TopK


def test_statistics(llama):
    ids = ids_of()
    with torch.no_grad(), record(llama) as recording:
        llama(ids)
    assert recording.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    for layer, weights in zip(recording, weights_of("llama", ids), strict=True):
        entropy, received = recording[layer].compute(Entropy(), Received())
        close(entropy, -(weights * weights.clamp_min(1e-30).log()).sum(-1))
        close(received, weights.sum(2))
    assert recording[0] is recording["model.layers.0.self_attn"]
    assert recording[1].shape == (2, 4, 11, 11)
    asked = recording.compute(Received())
    assert torch.equal(asked["model.layers.1.self_attn"][0], recording[1].compute(Received())[0])


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
    close(run.compute(TopK(8))[0].weights, weights.topk(8).values)
    close(run.compute(Pooled(64))[0], weights)
    close(run.matrix.to_dense(), weights)
    close(run.matrix.received(), weights.sum(2))
    close(run.compute(Received())[0], weights.sum(2))  # was not asked, and can be
    assert run.compute(Pooled(3, "max"))[0].shape == (2, 4, 3, 3)


def test_a_question_of_ones_own(llama):
    class Largest(Statistic):
        def start(self, info):
            return torch.zeros(info.shape[:2])

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
    close(recording[0].compute(largest)[0], weights_of("llama", ids)[0].amax((-1, -2)))


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


def test_kept_results_do_not_change(llama):
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
    close(run.compute(Received())[0], weights[1][:, [3, 0]].sum(2))
    close(run.matrix[1, 0, 5], weights[1][1, 3, 5])
    with torch.no_grad(), record(llama, layers="*.0.*", heads=2) as recording:
        llama(ids)
    close(recording["model.layers.0.self_attn"].compute(Received())[0], weights[0][:, [2]].sum(2))


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
        close(recording[0].compute(Received())[0], expected.sum(2))
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
    close(recording[0].compute(TopK(2))[0].weights, expected.topk(2).values)
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
    close(recording[0].compute(Received())[0], weights.sum(2))
    with pytest.raises(sc.UnsupportedError, match=r"Entropy\(\) was not computed while recording"):
        recording[0].compute(Entropy())
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
