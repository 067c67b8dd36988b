"""Our kernels inside transformers: what the models say is what they say with the eager implementation."""

import copy

import pytest
import torch
from tests.integrations import model_zoo as zoo
from transformers import (
    AttentionInterface,
    BartForConditionalGeneration,
    Qwen2MoeConfig,
    Qwen2MoeModel,
    StaticCache,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)
from transformers.masking_utils import create_causal_mask

import saccade as sc
from saccade import masks
from saccade.integrations.lazy_mask import LazyMask
from saccade.integrations.transformers import install


@pytest.fixture(autouse=True)
def _installed():
    install()


@pytest.fixture
def calls(monkeypatch):
    """The matrices that our attention function made."""
    made = []
    original = sc.AttentionMatrix.matmul
    monkeypatch.setattr(
        sc.AttentionMatrix, "matmul", lambda self, *a, **k: made.append(self) or original(self, *a, **k)
    )
    return made


@pytest.fixture
def never_written_out(monkeypatch):
    def refuse(mask):
        raise AssertionError(f"{mask} was written out")

    monkeypatch.setattr(LazyMask, "written_out", refuse)


def close(ours, theirs, tolerance=2e-5):
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", zoo.ALL)
def test_outputs_equal_eager_attention(name, calls, never_written_out):
    network, inputs = zoo.model(name), zoo.batch(name)
    with torch.no_grad():
        expected = zoo.output(name, network(**inputs))
        assert calls == []
        network.set_attn_implementation("saccade")
        got = zoo.output(name, network(**inputs))
    assert len(calls) == (6 if name in zoo.PAIRED else 2)
    close(got, expected)


@pytest.mark.parametrize("name", zoo.ALL)
def test_replace_attention_runs_what_the_implementation_runs(name):
    ours, replaced, inputs = zoo.model(name, "saccade"), zoo.model(name), zoo.batch(name)
    assert len(sc.replace_attention(replaced)) >= 2
    with torch.no_grad():
        expected = zoo.output(name, ours(**inputs))
        torch.testing.assert_close(zoo.output(name, replaced(**inputs)), expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", zoo.ALL)
def test_gradients(name):
    theirs = zoo.model(name)
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("saccade")
    grads = []
    for network in (theirs, ours):
        zoo.output(name, network(**zoo.batch(name))).sin().sum().backward()
        grads.append({key: parameter.grad for key, parameter in network.named_parameters()})
    scale = max(grad.abs().max() for grad in grads[0].values() if grad is not None)
    for key, grad in grads[0].items():
        assert (grad is None) == (grads[1][key] is None), key
        if grad is not None:
            torch.testing.assert_close(grads[1][key] / scale, grad / scale, atol=2e-5, rtol=0, msg=key)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_an_ordinary_training_step(name):
    losses = []
    for implementation in ("eager", "saccade"):
        network = zoo.model(name, implementation).train()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        ids = zoo.batch(name)["input_ids"]
        for _ in range(3):
            loss = network(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[0] > losses[2]
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-4)


def test_with_gradient_checkpointing():
    network = zoo.model("llama", "saccade").train()
    ids = zoo.batch("llama")["input_ids"]
    grads = []
    for _ in range(2):
        network(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append(network.model.embed_tokens.weight.grad)
        network.zero_grad()
        network.gradient_checkpointing_enable()
    close(grads[1], grads[0], 1e-6)


@pytest.mark.parametrize("name", zoo.CAUSAL)
@pytest.mark.parametrize("sizes", [(11,), (4, 1, 6), (1,) * 11])
def test_a_growing_cache(name, sizes, never_written_out):
    ours, theirs = zoo.model(name, "saccade"), zoo.model(name)
    ids, cache, parts = zoo.batch(name)["input_ids"], None, []
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        for part in ids.split(list(sizes), 1):
            result = ours(input_ids=part, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            parts.append(result.logits)
    close(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("name", zoo.CAUSAL)
def test_a_static_cache(name):
    ours, theirs = zoo.model(name, "saccade"), zoo.model(name)
    ids = zoo.batch(name)["input_ids"]
    cache, parts = StaticCache(config=ours.config, max_cache_len=16), []
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        for part in ids.split([6, 1, 4], 1):
            parts.append(ours(input_ids=part, past_key_values=cache, use_cache=True).logits)
    close(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_padding_on_the_left(name, cache):
    inputs = zoo.batch(name)
    texts = [
        zoo.model(name, implementation).generate(
            **inputs, max_new_tokens=8, do_sample=False, cache_implementation=cache, disable_compile=True
        )
        for implementation in ("eager", "saccade")
    ]
    assert texts[0].shape == (2, 19)
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])  # GPT-OSS makes no packed masks
def test_packed_documents(name, calls, never_written_out):
    theirs, ours = zoo.model(name), zoo.model(name, "saccade")
    ids = zoo.batch(name)["input_ids"]
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        packed = ours(input_ids=ids, position_ids=position_ids, use_cache=False).logits
        close(packed, theirs(input_ids=ids, position_ids=position_ids, use_cache=False).logits)
        close(packed[:1, 6:9], theirs(input_ids=ids[:1, 6:9]).logits)
    assert "Documents" in str(calls[0].mask)
    assert "Predicate" not in str(calls[0].mask)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_documents_that_do_not_count_from_0(name):
    theirs, ours = zoo.model(name), zoo.model(name, "saccade")
    ids = zoo.batch(name)["input_ids"]
    position_ids = torch.tensor([[3, 4, 5, 6, 7, 8, 1, 2, 3, 5, 6]]).expand(2, -1)
    with torch.no_grad():
        results = [n(input_ids=ids, position_ids=position_ids, use_cache=False).logits for n in (theirs, ours)]
    close(results[1], results[0])


def test_a_mask_of_the_users_own():
    theirs, ours = zoo.model("llama"), zoo.model("llama", "saccade")
    ids = zoo.batch("llama")["input_ids"]
    allowed = (torch.rand(2, 1, 11, 11) < 0.5) | torch.eye(11, dtype=torch.bool)
    hidden = torch.zeros(2, 1, 11, 11).masked_fill(~allowed, torch.finfo(torch.float32).min)
    terms = torch.randn(2, 1, 11, 11)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=hidden).logits
        close(ours(input_ids=ids, attention_mask=allowed).logits, expected)
        close(ours(input_ids=ids, attention_mask=hidden).logits, expected)
        with_terms = (hidden + terms).clamp_min(torch.finfo(torch.float32).min)
        close(
            ours(input_ids=ids, attention_mask=with_terms).logits,
            theirs(input_ids=ids, attention_mask=with_terms).logits,
        )


def test_a_model_that_asks_for_no_mask():
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, image_size=16, patch_size=4
    )
    config._attn_implementation = "eager"
    network, x = ViTModel(config).eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = network(x).last_hidden_state
        network.set_attn_implementation("saccade")
        close(network(x).last_hidden_state, expected)


@pytest.mark.parametrize(
    "name, mask",
    [
        ("bert", masks.longformer(2, [0])),
        ("llama", masks.streaming(1, 3)),
        ("llama", masks.Blocks(torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool), 4)),
        ("mistral", masks.Strided(2)),
        ("gpt2", masks.Window(1, 1)),
    ],
    ids=lambda x: str(x)[:20],
)
def test_any_mask_inside_their_model(name, mask):
    network, inputs = zoo.model(name), zoo.batch(name, padded=0)
    dense = mask.to_dense(11)
    causal = masks.Causal().to_dense(11) if name != "bert" else masks.Full().to_dense(11)
    near = masks.Window(3, None).to_dense(11) if name == "mistral" else causal
    additive = torch.zeros(1, 1, 11, 11).masked_fill(~(dense & causal & near), torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = zoo.output(name, network(inputs["input_ids"], attention_mask=additive.expand(2, -1, -1, -1)), 0)
        network.set_attn_implementation(install("saccade-own", mask=mask))
        got = zoo.output(name, network(**inputs), 0)
        network.set_attn_implementation("saccade")
        other = zoo.output(name, network(**inputs), 0)
    close(got, expected)
    assert (got - other).abs().max() > 1e-3


def test_a_mask_for_some_layers(calls):
    network, inputs = zoo.model("t5"), zoo.batch("t5")
    near = masks.Window(1, 1)
    network.set_attn_implementation(
        install(
            "saccade-own",
            mask=lambda layer: near if layer.has_relative_attention_bias and not layer.is_decoder else None,
        )
    )
    network(**inputs)
    assert [str(near) in str(matrix.mask) for matrix in calls] == [True, False, False, False, False, False]


def test_a_mask_is_read_at_positions_while_decoding():
    mask = masks.streaming(2, 3)
    network = zoo.model("llama", install("saccade-own", mask=mask))
    ids = zoo.batch("llama")["input_ids"]
    with torch.no_grad():
        expected = network(input_ids=ids).logits
        first = network(input_ids=ids[:, :7], use_cache=True)
        rest = network(input_ids=ids[:, 7:], past_key_values=first.past_key_values).logits
    close(torch.cat([first.logits, rest], 1), expected)


def test_dropout_in_training():
    network = zoo.model("gpt2", "saccade", attn_pdrop=0.9, resid_pdrop=0.0, embd_pdrop=0.0)
    ids = zoo.batch("gpt2")["input_ids"]
    with torch.no_grad():
        still = network(input_ids=ids).logits
        assert torch.equal(still, network(input_ids=ids).logits)
        network.train()
        network.transformer.h[0].attn.attn_dropout.p = 0.9
        assert not torch.allclose(still, network(input_ids=ids).logits, atol=1e-2)


def test_half_precision():
    theirs, ours = zoo.model("llama").bfloat16(), zoo.model("llama", "saccade").bfloat16()
    ids = zoo.batch("llama")["input_ids"]
    with torch.no_grad():
        expected, got = theirs(input_ids=ids).logits, ours(input_ids=ids).logits
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=0.15, rtol=0.05)


def function_of_pairs(b, h, q, kv):
    """Return whether a pair is allowed, as users write it: for single numbers, with tables."""
    group = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    return (group[q] == group[kv]) | (torch.stack([q, kv]).min() == 0)


def test_a_function_of_single_pairs():
    config = zoo.configured("llama")[1]
    masks_made = []
    for implementation in ("sdpa", "saccade"):
        config._attn_implementation = implementation
        embeddings = torch.zeros(2, 11, 32)
        mask = create_causal_mask(config, embeddings, None, past_key_values=None, and_mask_function=function_of_pairs)
        masks_made.append(mask)
    assert isinstance(masks_made[1], LazyMask)
    assert torch.equal(masks_made[1].written_out(), masks_made[0])


def test_a_mask_that_a_model_works_on_is_written_out():
    config = zoo.configured("mistral")[1]
    made = []
    for implementation in ("sdpa", "saccade"):
        config._attn_implementation = implementation
        made.append(
            create_causal_mask(config, torch.zeros(2, 5, 32), None, past_key_values=None, allow_is_causal_skip=False)
        )
    dense, lazy = made
    assert isinstance(lazy, LazyMask)
    assert isinstance(lazy.detach(), LazyMask)
    assert type(lazy[..., :3]) is torch.Tensor
    assert torch.equal(lazy[..., :3], dense[..., :3])
    assert torch.equal(lazy & ~dense, torch.zeros_like(dense))


PADDING = {
    "none": None,
    "left": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]),
    "right": torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7]),
    "a hole": torch.tensor([[1, 1, 0, 0, 1, 1, 1], [1] * 7]),
}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generation_with_padding_anywhere(name, cache, padding):
    ids, texts = zoo.batch(name)["input_ids"][:, :7], []
    for implementation in ("sdpa", "saccade"):
        how = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        texts.append(zoo.model(name, implementation).generate(ids, attention_mask=PADDING[padding], **how))
    assert torch.equal(*texts)


def test_a_window_of_nothing_that_no_layer_uses():
    config = Qwen2MoeConfig(
        vocab_size=zoo.WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
    )  # fmt: skip
    assert config.sliding_window == 0
    outputs, torch_state = [], torch.get_rng_state()
    for implementation in ("eager", "saccade"):
        torch.set_rng_state(torch_state)
        config._attn_implementation = implementation
        with torch.no_grad():
            outputs.append(Qwen2MoeModel(config).eval()(**zoo.batch("llama", padded=0)).last_hidden_state)
    close(outputs[1], outputs[0])


@pytest.mark.parametrize("q_len, kv_len", [(9, 4), (4, 9), (4, 4)])
@pytest.mark.parametrize("shape", [(2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("rows", ["each", "one"])
@pytest.mark.parametrize("value", [bool, torch.finfo(torch.float32).min, -torch.inf])
def test_masks_that_are_written_out(q_len, kv_len, shape, rows, value):
    layer = torch.nn.Module()
    query, key, content = (torch.randn(2, 4, length, 8) for length in (q_len, kv_len, kv_len))
    allowed = torch.rand(*shape, q_len if rows == "each" else 1, kv_len) < 0.6
    allowed[..., 1] = True
    mask = allowed if value is bool else torch.zeros(allowed.shape).masked_fill(~allowed, value)
    ours, theirs = (AttentionInterface()[name] for name in ("saccade", "sdpa"))
    expected = theirs(layer, query, key, content, mask, scaling=0.3, is_causal=False)[0]
    close(ours(layer, query, key, content, mask, scaling=0.3, is_causal=False)[0], expected)


def test_a_users_mask_of_what_a_text_sees_of_a_shorter_one():
    aligned, inputs = torch.ones(2, 1, 7, 5).tril(), zoo.batch("bart")
    hidden = torch.zeros(2, 1, 7, 5).masked_fill(aligned == 0, torch.finfo(torch.float32).min)
    outputs = []
    for implementation in ("eager", "saccade"):
        network = zoo.model("bart", implementation)
        with torch.no_grad():
            source = network.encoder(inputs["input_ids"][:, :5]).last_hidden_state
            outputs.append(
                network.decoder(
                    input_ids=inputs["decoder_input_ids"], encoder_hidden_states=source, encoder_attention_mask=hidden
                ).last_hidden_state
            )
    close(outputs[1], outputs[0])


@pytest.mark.parametrize("made, name", [(BartForConditionalGeneration, "bart"), (T5ForConditionalGeneration, "t5")])
def test_a_prompt_in_pieces_for_an_encoder_and_decoder(made, name):
    config, ids, texts = zoo.configured(name)[1], zoo.batch(name)["input_ids"][:, :7], []
    for pieces in ({}, {"prefill_chunk_size": 3}):
        torch.manual_seed(0)
        config._attn_implementation = "saccade"
        how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
        texts.append(made(config).eval().generate(ids, decoder_input_ids=ids[:, :5], **how, **pieces))
    assert torch.equal(*texts)
