"""A matrix captured from a recurrent layer is the one that it multiplies by, and its output is bitwise unchanged."""

import copy
import functools
import gc
import importlib
import inspect
import threading
from unittest.mock import Mock

import pytest
import torch
from tests.integrations import model_zoo
from tests.integrations import recurrent_models as zoo
from torch import nn
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

import saccade as sc
from saccade.integrations import recurrences_capture
from saccade.integrations.capture_all import capture_all
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def heard(network, run):
    found = []
    with capture_all(network, lambda name, make: found.append((name, make()))):
        out = run()
    return out, found


def attending(network):
    """Return the names of all layers that mix tokens, in order."""
    ends = (*zoo.recurrent_layers(network), "self_attn")
    return [name for name, _ in network.named_modules() if name.endswith(ends)]


@pytest.mark.parametrize("name", zoo.ALL)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_padded_batch(name, side, grad, monkeypatch):
    network, inputs = zoo.model(name), zoo.batch(side=side)
    with torch.set_grad_enabled(grad):
        plain = network(**inputs).logits
        with zoo.cores(network, monkeypatch) as cores:
            out, found = heard(network, lambda: network(**inputs).logits)
    assert torch.equal(out, plain)
    assert [one for one, _ in found] == attending(network)
    for layer, matrix in found:
        assert isinstance(matrix, RecurrenceMatrix) == (layer in cores)
        for value, expected in cores.get(layer, []):
            product = matrix @ value
            assert not product.requires_grad
            close(product, expected)
            close(matrix.to_dense() @ value.repeat_interleave(matrix.shape[1] // value.shape[1], 1), expected)
    assert not any("forward" in vars(module) for module in network.modules())


@pytest.mark.parametrize("name", zoo.ALL)
def test_no_query_reads_left_padding(name):
    network, inputs = zoo.model(name), zoo.batch()
    with torch.no_grad():
        _, found = heard(network, lambda: network(**inputs))
        _, alone = heard(network, lambda: network(inputs["input_ids"][:1, 3:]))
    for (layer, matrix), (_, expected) in zip(found, alone, strict=True):
        if layer in zoo.recurrent_layers(network):
            dense = matrix.to_dense()[:1]
            assert not dense[..., :3].any()
            close(dense[:, :, 3:, 3:], expected.to_dense())


WIDE = ("qwen3_5", "olmo_hybrid", "mamba2", "bamba")  # torch mixes no experts in float64


@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.bfloat16) for name in zoo.ALL), *((name, torch.float64) for name in WIDE)]
)
def test_weights_in_other_dtypes(name, dtype, monkeypatch):
    network, inputs = zoo.model(name).to(dtype), zoo.batch()
    with torch.no_grad(), zoo.cores(network, monkeypatch) as cores:
        _, found = heard(network, lambda: network(**inputs))
    matrices = dict(found)
    tolerance = {torch.float64: 1e-5, torch.bfloat16: 5e-2}[dtype]  # theirs is rounded
    for layer, ((value, expected),) in cores.items():
        assert matrices[layer].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        out = matrices[layer] @ value.to(matrices[layer].dtype)
        scale = expected.abs().max().to(out.dtype)
        assert ((out - expected).abs() <= tolerance * scale).all()


def in_pieces(network, ids):
    """Return the logits of the second piece of a text."""
    name = "cache_params" if network.config.model_type == "mamba2" else "past_key_values"
    cache = network(ids[:, :9], use_cache=True)[name]
    return network(ids[:, 9:], use_cache=True, **{name: cache}).logits


@pytest.mark.parametrize("name", zoo.ALL)
def test_a_prompt_in_pieces(name, monkeypatch):
    network, ids = zoo.model(name), zoo.batch()["input_ids"]
    with torch.no_grad():
        expected = in_pieces(network, ids)
        with zoo.cores(network, monkeypatch) as cores, sc.record(network, keep="qk") as recording:
            assert torch.equal(in_pieces(network, ids), expected)
    for layer, calls in cores.items():
        values, products = (torch.cat(one, 2) for one in zip(*calls, strict=True))
        assert [call.shape[2:] for call in recording[layer].calls] == [(9, 9), (12, 21)]
        close(recording[layer].matrix @ values, products)


class Doubled(qwen.Qwen3NextGatedDeltaNet):
    """A user's layer on top of one of transformers."""

    def forward(self, hidden_states, **options):
        return 2 * super().forward(hidden_states, **options)


class Older(nn.Module):
    """A layer of an older version, which holds its functions as attributes."""

    def __init__(self):
        super().__init__()
        self.chunk_gated_delta_rule = qwen.torch_chunk_gated_delta_rule

    def forward(self, query, key, value, g, beta):
        return self.chunk_gated_delta_rule(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


RELATIVES = {
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", qwen),
    "falcon_h1": ("FalconH1Mixer", mamba),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", mamba),
    "nemotron_h": ("NemotronHMamba2Mixer", mamba),
    "zamba2": ("Zamba2MambaMixer", mamba),
    "glm5_next": ("Glm5NextTextLinearAttention", kimi),
    "bailing_hybrid": ("BailingHybridDeltaAttention", kimi),
}


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_call_the_same_functions(name):
    kind, checked = RELATIVES[name]
    home = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    own = [one for one in recurrences_capture.FUNCTIONS if one in vars(checked)]
    assert {one for _, one in recurrences_capture._namespaces_of_class(getattr(home, kind))} == set(own)
    for one in own:
        sources = [inspect.getsource(inspect.unwrap(getattr(file, one))) for file in (home, checked)]
        assert sources[0] == sources[1]


def test_a_subclass_and_a_layer_with_its_function_as_an_attribute():
    config = zoo.MODELS["qwen3_next"][1]()
    layer, x = Doubled(config, 0).eval(), torch.randn(2, 9, 32)
    _, found = heard(layer, lambda: layer(x))
    assert [name for name, _ in found] == ["Doubled"]
    older = Older()
    own, tokens = older.chunk_gated_delta_rule, torch.randn(3, 2, 9, 4, 8)
    gates = (-torch.rand(2, 9, 4), torch.rand(2, 9, 4))
    out, found = heard(older, lambda: older(*tokens, *gates))
    close((found[0][1] @ tokens[2].transpose(1, 2)).transpose(1, 2), out)
    assert older.chunk_gated_delta_rule is own
    with capture_all(older, lambda *_: None):
        twin = copy.deepcopy(older)
        assert older.chunk_gated_delta_rule is not own
    assert twin.chunk_gated_delta_rule is own


def test_a_fast_kernel_instead_of_their_function_is_captured(monkeypatch):
    network, inputs, calls = zoo.model("qwen3_next"), zoo.batch(), []
    slow = qwen.torch_chunk_gated_delta_rule
    fast = lambda *args, **kwargs: calls.append(1) or slow(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", fast)
    _, found = heard(network, lambda: network(**inputs))
    assert len(found) == 3
    assert len(calls) == 2
    assert qwen.torch_chunk_gated_delta_rule is fast


def test_the_functions_are_put_back_also_after_an_error_and_in_any_order():
    own = qwen.torch_chunk_gated_delta_rule
    network, other, inputs, names = zoo.model("qwen3_next"), zoo.model("qwen3_next"), zoo.batch(), []
    with (
        pytest.raises(IndexError, match="out of range"),
        capture_all(network, lambda *_: names.append(qwen.torch_chunk_gated_delta_rule)),
    ):
        network(torch.tensor([[3, zoo.WORDS]]))
    assert names == []
    with pytest.raises(RuntimeError, match="own"), capture_all(network, Mock(side_effect=RuntimeError("own"))):
        network(**inputs)
    assert qwen.torch_chunk_gated_delta_rule is own
    first = capture_all(network, lambda name, make: names.append(f"first {name}"))
    second = capture_all(network, lambda name, make: names.append(f"second {name}"))
    first.__enter__()
    second.__enter__()
    other(**inputs)
    assert names == []
    network(**inputs)
    assert [name.split()[0] for name in names] == ["first", "second"] * 3
    first.__exit__(None, None, None)
    network(**inputs)
    assert [name.split()[0] for name in names[6:]] == ["second"] * 3
    theirs = qwen.torch_chunk_gated_delta_rule
    assert theirs is not own
    on_top = functools.partial(theirs)  # who patches it meanwhile
    qwen.torch_chunk_gated_delta_rule = on_top
    second.__exit__(None, None, None)
    assert qwen.torch_chunk_gated_delta_rule is on_top
    _, found = heard(network, lambda: network(**inputs))
    assert len(found) == 3
    assert qwen.torch_chunk_gated_delta_rule is on_top
    qwen.torch_chunk_gated_delta_rule = own


def test_a_checkpointed_layer_is_handed_out_once():
    for name in ("qwen3_next", "minimax"):
        network = zoo.model(name).train()
        network.gradient_checkpointing_enable()
        ids, names = zoo.batch()["input_ids"], []
        with capture_all(network, lambda name, make, names=names: names.append((name, make()))):
            network(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert [one for one, _ in names] == attending(network)


def test_threads_generate_side_by_side(monkeypatch):
    network, ids = zoo.model("qwen3_next"), zoo.batch()["input_ids"]
    texts = [ids[:1, :7], ids[1:, :12]]
    options = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True, "eos_token_id": None}
    expected = []
    for text in texts:
        with sc.record(network, keep="qk") as alone:
            network.generate(text, **options)
        expected.append(alone[0].matrix.to_dense())
    with sc.record(network, keep="qk") as recording:
        threads = [threading.Thread(target=network.generate, args=(text,), kwargs=options) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    runs = sorted(recording.runs(0), key=lambda run: run.shape[2])
    assert len(runs) == 2
    for run, dense in zip(runs, expected, strict=True):
        close(run.matrix.to_dense(), dense)


@pytest.mark.slow
def test_keys_are_held_as_long_as_their_cache_lives():
    network, ids, held = zoo.model("mamba2"), zoo.batch()["input_ids"], []
    with torch.no_grad(), capture_all(network, lambda name, make: make()) as capture:
        cache = network(ids, use_cache=True).cache_params
        held = recurrences_capture._histories[capture]._states
        assert len(held) == 1
        network(ids[:, :1], cache_params=cache)
        assert len(held) == 1
        del cache
        gc.collect()
        assert len(held) == 0


def test_a_model_without_recurrences_is_left_as_it_is():
    network = model_zoo.model("llama", "sdpa")
    with capture_all(network, lambda *_: None):
        assert not recurrences_capture._proxies
        handlers = {vars(one)["forward"].handler for one in network.modules() if "forward" in vars(one)}
        assert not {one for one in handlers if one.__module__ == recurrences_capture.__name__}


def test_methods_that_wrap_a_compiled_function():
    class Wrapped(torch.nn.Module):
        @functools.wraps(str.upper)
        def helper(self):
            return ""

        def forward(self, x):
            return x.softmax(-1) @ x

    with capture_all(Wrapped(), lambda name, make: None) as capture:
        Wrapped()(torch.eye(3))
    assert not capture.not_recorded
