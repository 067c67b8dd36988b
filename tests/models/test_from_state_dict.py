"""Models of weights in memory, in any dtype of floats; and of packed texts, each as if it were alone."""

import re

import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import saccade as sc
from saccade.models import Decoder, Encoder, EncoderConfig, EncoderDecoder, EncoderDecoderConfig
from saccade.support.errors import UnsupportedError

LENGTH = 9
SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "initializer_range": 0.5,  # large enough that a wrong detail shows
}


def bert():
    config = BertConfig(**SIZES, max_position_embeddings=LENGTH)
    return Encoder, BertModel(config).eval(), lambda model, tokens: model(tokens).last_hidden_state


def gpt2():
    sizes = {"n_positions": LENGTH, "n_embd": 24, "n_layer": 2, "n_head": 3, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=50, initializer_range=0.5, **sizes)
    return Decoder, GPT2LMHeadModel(config).eval(), lambda model, tokens: model(tokens).logits


def llama():
    config = LlamaConfig(**SIZES)
    return Decoder, LlamaForCausalLM(config).eval(), lambda model, tokens: model(tokens).logits


@pytest.mark.ci
@pytest.mark.parametrize("told", [dict, lambda config: config], ids=["dict", "config"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", [bert, gpt2, llama])
def test_the_model_is_the_published_one(family, given, told):
    torch.manual_seed(0)
    kind, theirs, run = family()
    theirs = theirs.to(given)
    config = theirs.config.to_dict() if told is dict else theirs.config
    ours = kind.from_state_dict(config, theirs.state_dict(), dtype=torch.float64)
    tokens = torch.randint(1, 50, (2, LENGTH))
    wide = type(theirs)(theirs.config).eval().double()  # made anew: in a narrow model the rotary table is rounded too
    wide.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(tokens), run(wide, tokens), atol=1e-5, rtol=1e-5)
    assert not ours.training
    narrow = kind.from_state_dict(config, theirs.state_dict(), dtype=torch.bfloat16)
    assert {x.dtype for x in narrow.parameters()} == {torch.bfloat16}
    assert narrow(tokens).isfinite().all()


def test_weights_are_copied():
    kind, theirs, _ = bert()
    ours = kind.from_state_dict(theirs.config, theirs.state_dict())
    before = ours(torch.tensor([[1, 2]]))
    with torch.no_grad():
        for x in theirs.parameters():
            x.zero_()
    torch.testing.assert_close(ours(torch.tensor([[1, 2]])), before)


def translator():
    config = EncoderDecoderConfig(50, LENGTH, 24, 3, 1, 2, 40, position_encoding="learned", dropout_p=0.0)
    model, source = EncoderDecoder(config).eval().double(), torch.tensor([[1, 2, 3]])
    return lambda tokens, **facts: model(source, tokens, **facts)


MODELS = {
    "bert": lambda: Encoder.from_state_dict(bert()[1].config, bert()[1].state_dict(), dtype=torch.float64),
    "gpt2": lambda: Decoder.from_state_dict(gpt2()[1].config, gpt2()[1].state_dict(), dtype=torch.float64),
    "llama": lambda: Decoder.from_state_dict(llama()[1].config, llama()[1].state_dict(), dtype=torch.float64),
    "encoder-decoder": translator,
}


@pytest.mark.parametrize("rule", [sc.masks.Full(), sc.masks.Full() & sc.masks.Full()], ids=["alone", "joined"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_texts_are_read_as_if_each_were_alone(name, rule):
    torch.manual_seed(0)
    model = MODELS[name]()
    texts = [torch.randint(1, 50, (length,)) for length in (7, 1, LENGTH)]  # together longer than the model reads
    packed = sc.pack(texts)
    mask = packed.mask() if rule == sc.masks.Full() else packed.mask() & rule
    for own, text in zip(packed.unpack(model(packed.tokens, mask=mask)), texts, strict=True):
        torch.testing.assert_close(own, model(text[None])[0])


def test_a_packed_text_that_is_too_long_is_refused():
    packed = sc.pack([torch.zeros(3, dtype=torch.int64), torch.zeros(LENGTH + 1, dtype=torch.int64)])
    with pytest.raises(ValueError, match=f"be at most {LENGTH} long; got {LENGTH + 1}"):
        MODELS["bert"]()(packed.tokens, mask=packed.mask())


@pytest.mark.parametrize("positions", [torch.tensor([0, 1, 2, 0, 1]), torch.tensor([[0, 1, 2, 0, 1]])], ids=["", "b"])
def test_restarting_positions_are_refused_if_they_separate_sequences(positions):
    packed = sc.pack([torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)])
    model = MODELS["llama"]()
    with pytest.raises(ValueError, match="be distinct within each whole row"):
        model(packed.tokens, mask=packed.mask(), positions=positions)
    with pytest.raises(ValueError, match="got 0 twice"):
        model(packed.tokens, mask=packed.mask() & sc.masks.Causal(), positions=positions)
    torch.testing.assert_close(
        model(packed.tokens, mask=packed.mask(), positions=torch.arange(5)), model(packed.tokens, mask=packed.mask())
    )


REFUSED = {
    "no config": (
        lambda: Encoder.from_state_dict(None, {}),
        TypeError,
        "config must be a dict with the contents of config.json",
    ),
    "ours": (
        lambda: Encoder.from_state_dict(EncoderConfig(9, 9, 8, 2, 1, 8), {}),
        TypeError,
        "config must be a dict with the contents of config.json",
    ),
    "a wrong word": (
        lambda: Encoder.from_state_dict({"hidden_size": "wide"}, {}),
        ValueError,
        "hidden_size in config.json must be an int",
    ),
    "another family": (
        lambda: Decoder.from_state_dict(bert()[1].config, {}),
        UnsupportedError,
        "model_type is 'bert', not one of gpt2",
    ),
    "no weights": (lambda: Encoder.from_state_dict(bert()[1].config, {}), ValueError, "2 layers, but 0 tensors"),
    "a list": (lambda: Encoder.from_state_dict(bert()[1].config, [1]), TypeError, "state_dict must be a state dict"),
    "numbers": (
        lambda: Encoder.from_state_dict(bert()[1].config, {"x": 1}),
        TypeError,
        "state_dict['x'] must be a tensor; got int",
    ),
    "ints": (
        lambda: Encoder.from_state_dict(bert()[1].config, bert()[1].state_dict(), dtype=torch.int8),
        TypeError,
        "dtype must be a float dtype",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_no_model_is_refused(name):
    wrong, kind, words = REFUSED[name]
    with pytest.raises(kind, match=re.escape(words)):
        wrong()
