"""The two small models that come with the package: what their cards say, and that they have learned."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import BertModel, LlamaForCausalLM

from saccade.models import chinese_encoder, chinese_encoder_card, generate, small_decoder, small_decoder_card
from saccade.models.bundled import bundled_folder

ENGLISH = "Return a list of the names in the current local scope. With an argument, return a list of valid attributes."
CHINESE = "却说曹操回到寨中，与众将商议。玄德曰：“此人不可不防。”众皆称是，于是引兵而去。"


@pytest.fixture(scope="module")
def model():
    return small_decoder()


def nats(model, tokens):
    tokens = torch.tensor([[*model.config.end_tokens, *tokens]])
    with torch.no_grad():
        return F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:]).item()


def test_the_card_tells_of_this_model(model):
    card = small_decoder_card()
    assert card["parameters"] == sum(p.numel() for p in model.parameters())
    assert model.config.vocab_size == model.tokenizer.get_vocab_size() == card["settings"]["vocab_size"]
    assert model.tokenizer.id_to_token(model.config.end_tokens[0]) == "<|end|>"
    for text in card["texts"]:
        assert text["source"]
        assert text["licence"] == ("PSF-2.0" if text["language"] == "English" else "public domain")
    for row in card["held_out"]:
        bits = row["held_out_tokens"] * row["model"]["nats_per_token"] / math.log(2)
        assert row["model"]["bits_per_byte"] == pytest.approx(bits / row["held_out_bytes"])
        assert row["model"]["nats_per_token"] == pytest.approx(row["before_rounding"]["nats_per_token"], abs=1e-3)
    assert sum(path.stat().st_size for path in bundled_folder("small_decoder").iterdir()) < 6_000_000


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_it_has_learned_both_languages(model, text):
    tokens = model.tokenizer.encode(text).ids
    assert model.tokenizer.decode(tokens) == text
    shuffled = [tokens[index] for index in torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))]
    assert nats(model, tokens) < 0.6 * math.log(model.config.vocab_size)
    assert nats(model, tokens) < nats(model, shuffled) - 2


def test_reading_with_a_cache_equals_reading_at_once(model):
    tokens = torch.tensor([model.tokenizer.encode(ENGLISH + CHINESE).ids])
    with torch.no_grad():
        full = model(tokens)
        cache = model.new_cache()
        parts = [model(part, cache=cache) for part in tokens.split(7, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-4, rtol=1e-4)
    assert len(generate(model, tokens, 5)[0]) == 5


def test_others_load_it_with_equal_logits(model):
    theirs = LlamaForCausalLM.from_pretrained(
        bundled_folder("small_decoder"), dtype=torch.float32, local_files_only=True
    ).eval()
    tokens = torch.tensor([model.tokenizer.encode(CHINESE).ids])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_the_chinese_encoder_is_what_its_card_says():
    encoder, card = chinese_encoder(), chinese_encoder_card()
    assert card["parameters"] == sum(p.numel() for p in encoder.parameters())
    assert {text["licence"] for text in card["texts"]} == {"public domain"}
    assert encoder.config.vocab_size == encoder.tokenizer.get_vocab_size()
    assert encoder.tokenizer.encode("小狗看见了一只猫").tokens == ["[CLS]", *"小狗看见了一只猫", "[SEP]"]
    assert sum(path.stat().st_size for path in bundled_folder("chinese_encoder").iterdir()) < 6_000_000
    ours, neighbours, often = (row["mean"] for row in card["held_out"]["rows"])
    assert ours > neighbours > 3 * often


def test_a_character_depends_on_both_sides():
    encoder = chinese_encoder()
    with torch.no_grad():
        before, after = (
            encoder(torch.tensor([encoder.tokenizer.encode(text).ids]))[0, 4] for text in ("人看见了我", "狗看见了我")
        )
        same = encoder(torch.tensor([encoder.tokenizer.encode("人看见了他").ids]))[0, 4]
    assert (before - after).norm() > 0.05 * before.norm()
    assert (before - same).norm() > 0.05 * before.norm()


def test_transformers_reads_the_chinese_encoder():
    theirs = BertModel.from_pretrained(
        bundled_folder("chinese_encoder"), dtype=torch.float32, local_files_only=True, add_pooling_layer=False
    ).eval()
    encoder = chinese_encoder()
    tokens = torch.tensor([encoder.tokenizer.encode("话说天下大势，分久必合，合久必分。").ids])
    with torch.no_grad():
        torch.testing.assert_close(encoder(tokens), theirs(tokens).last_hidden_state, atol=1e-4, rtol=1e-4)
