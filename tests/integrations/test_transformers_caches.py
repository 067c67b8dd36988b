"""Our caches in transformers' generate: token for token the same where they are exact, and ours where they choose."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import saccade
from saccade import models
from saccade.caches import (
    BlockSelectCache,
    Cache,
    HeavyHitterCache,
    KVCache,
    PrefixStore,
    SinkWindowCache,
    SnapKVCache,
    fingerprint,
)
from saccade.integrations.transformers_caches import install_caches, transformers_cache
from saccade.positions import Rotary

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 128}
MODELS = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "Mistral": lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=9)),
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
}
EXACT = {
    "all": KVCache,
    "blocks": lambda: BlockSelectCache(4, 64),
    "window": lambda: SinkWindowCache(2, 64),
    "heavy": lambda: HeavyHitterCache(64),
    "snap": lambda: SnapKVCache(64),
}
OTHER_ENDS = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}


def _model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # far from the start, where all tokens are about as likely
        parameter.data.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return model


def _prompt(batch: int = 1, length: int = 20) -> torch.Tensor:
    return torch.randint(1, 60, (batch, length), generator=torch.Generator().manual_seed(4))


def _with(model: torch.nn.Module, cache: Cache, prompt: torch.Tensor, **how: object) -> torch.Tensor:
    model.set_attn_implementation(install_caches())
    past = transformers_cache(cache)
    return model.generate(prompt, past_key_values=past, **({"max_new_tokens": 20} | OTHER_ENDS | how))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("name", MODELS)
def test_exact_caches_give_the_tokens_of_transformers_own(name: str, kind: str) -> None:
    model, prompt = _model(name), _prompt(2)
    expected = model.generate(prompt, max_new_tokens=20, **OTHER_ENDS)
    assert len(set(expected[0, 20:].tolist())) > 5
    cache = Cache(EXACT[kind]() for _ in range(2))
    assert torch.equal(_with(model, cache, prompt), expected)
    assert cache.length == 39


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "kind"), [("Llama", "blocks"), ("Mistral", "all"), ("GPT-2", "heavy"), ("Llama", "snap")]
)
def test_padding_on_the_left_is_no_text(name: str, kind: str) -> None:
    model, prompt = _model(name), _prompt(2)
    mask = torch.ones_like(prompt)
    mask[1, :7] = 0
    expected = model.generate(prompt, attention_mask=mask, max_new_tokens=20, **OTHER_ENDS)
    assert torch.equal(_with(model, Cache(EXACT[kind]() for _ in range(2)), prompt, attention_mask=mask), expected)


@pytest.mark.parametrize(("name", "kind"), [("Llama", "blocks"), ("Mistral", "window"), ("GPT-2", "all")])
def test_beams_are_followed(name: str, kind: str) -> None:
    model, prompt = _model(name), _prompt(2)
    expected = model.generate(prompt, max_new_tokens=12, num_beams=3, **OTHER_ENDS)
    cache = Cache(EXACT[kind]() for _ in range(2))
    assert torch.equal(_with(model, cache, prompt, num_beams=3, max_new_tokens=12), expected)


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["blocks", "window", "turned", "heavy", "snap"])
def test_caches_that_choose_are_those_of_our_own_models(kind: str, tmp_path: object) -> None:
    theirs, prompt = _model("Llama"), _prompt(1, 40)
    theirs.save_pretrained(tmp_path)
    ours = models.Decoder.from_pretrained(tmp_path)
    make = {
        "blocks": lambda: BlockSelectCache(4, 16),
        "window": lambda: SinkWindowCache(2, 6),
        "turned": lambda: SinkWindowCache(2, 6, rotary=Rotary(8)),
        "heavy": lambda: HeavyHitterCache(12),
        "snap": lambda: SnapKVCache(12, window=4),
    }[kind]
    cache = Cache(make() for _ in range(2))
    expected = models.generate(ours, prompt, 20, cache=Cache(make() for _ in range(2)))
    assert _with(theirs, cache, prompt)[0, 40:].tolist() == expected[0]
    dense = theirs.generate(prompt, max_new_tokens=20, **OTHER_ENDS)[0, 40:].tolist()
    assert expected[0] != dense  # or the test could not fail


def test_a_known_prefix_is_not_read_again(tmp_path: object) -> None:
    model, prompt = _model("Llama"), _prompt(1, 40)
    expected = model.generate(prompt, max_new_tokens=10, **OTHER_ENDS)
    store = PrefixStore(tmp_path, 1 << 20, fingerprint=fingerprint(model), block_size=8)
    cache = Cache(KVCache() for _ in range(2))
    _with(model, cache, prompt, max_new_tokens=1)
    assert store.put(prompt[0].tolist(), cache) == 5
    again = Cache(KVCache() for _ in range(2))
    assert store.restore(prompt[0].tolist(), again) == 32
    assert torch.equal(_with(model, again, prompt, max_new_tokens=10), expected)


def test_a_layer_speaks_as_transformers_expects() -> None:
    model, prompt = _model("Llama"), _prompt(2)
    cache = Cache([KVCache(64), KVCache(64)])
    _with(model, cache, prompt, max_new_tokens=2)
    past = transformers_cache(cache)
    layer = past.layers[0]
    assert (past.get_seq_length(), layer.get_max_length(), layer.get_mask_sizes(3)) == (21, 64, (24, 0))
    past.crop(-5)
    assert cache.length == 16
    past.batch_repeat_interleave(2)
    past.batch_select_indices(torch.tensor([0, 3, 1]))
    assert cache.flat[0].key.shape[0] == 3
    with pytest.raises(NotImplementedError, match="saccade's caches stay on the model's device"):
        layer.offload()
    past.reset()
    assert cache.length == 0


def test_without_such_a_cache_it_is_ordinary_attention() -> None:
    model, prompt = _model("Llama"), _prompt(2)
    expected = model(prompt).logits
    model.set_attn_implementation(install_caches())
    torch.testing.assert_close(model(prompt, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(
        model.generate(prompt, max_new_tokens=5, **OTHER_ENDS),
        _model("Llama").generate(prompt, max_new_tokens=5, **OTHER_ENDS),
    )


def test_impossible_arguments_are_refused() -> None:
    model, prompt = _model("Llama"), _prompt(2)
    mask = torch.ones_like(prompt)
    mask[1, :7] = 0
    with pytest.raises(NotImplementedError, match="its first tokens would be padding"):
        _with(model, Cache(SinkWindowCache(2, 64) for _ in range(2)), prompt, attention_mask=mask)
    with pytest.raises(TypeError, match=r"cache must be a saccade\.caches\.Cache; got KVCache"):
        transformers_cache(KVCache())
    with pytest.raises(TypeError, match="cache must contain one cache for each layer; got Cache"):
        transformers_cache(Cache([Cache([KVCache()])]))
    with pytest.raises(ValueError, match="name must be new"):
        install_caches("sdpa")
    past, written_out = transformers_cache(Cache(KVCache() for _ in range(2))), torch.ones(2, 1, 20, 20).bool()
    with pytest.raises(NotImplementedError, match="it received a materialized mask"):
        model(prompt, past_key_values=past, attention_mask=written_out)


def test_a_recording_does_not_take_the_new_keys_for_all() -> None:
    model, cache = _model("Llama"), Cache(KVCache() for _ in range(2))
    with pytest.raises(saccade.UnsupportedError, match="it uses a saccade cache"), saccade.record(model):
        _with(model, cache, _prompt())
