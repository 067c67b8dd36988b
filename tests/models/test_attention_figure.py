"""An encoder draws what it looks at in a text."""

import re
import warnings

import numpy as np
import pytest
import torch
from matplotlib.text import Annotation
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from saccade.models import Encoder, EncoderConfig, attention_figure
from saccade.statistics import unexplained_information
from saccade.text import merge, words

NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60)), "小狗"]


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(3)
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    config = EncoderConfig(
        vocab_size=len(NAMES), max_len=900, embed_dim=32, num_heads=4, num_layers=3, feed_forward_dim=32
    )
    encoder = Encoder(config, tokenizer).eval()
    for layer in encoder.layers:
        layer.attention.query_projection.weight.data *= 40  # so that heads differ
    return encoder


def map_and_title(figure):
    axes = figure.axes[0]
    return np.asarray(axes.images[0].get_array()), axes.get_title(loc="left").replace("\n", " ")


def test_the_head_that_tells_most_is_drawn_among_words(small):
    text = "w1 w5 小狗 w7 w1 w9 w30"
    encoding = small.tokenizer.encode(text)
    found = words(encoding, text)
    with torch.no_grad():
        weights = torch.stack([merge(A.to_dense()[0], found) for A in small.matrices(torch.tensor([encoding.ids]))])
    numbers = unexplained_information(weights[..., 1:-1, 1:-1])
    layer, head = divmod(int(numbers.argmax()), 4)
    figure = small.show(text)
    cells, title = map_and_title(figure)
    np.testing.assert_allclose(cells, weights[layer, head], atol=1e-6)
    assert title.endswith(f"layer {layer}, head {head}")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["[CLS]", *text.split(), "[SEP]"]
    assert len(figure.axes[0].texts) == 81

    cells, title = map_and_title(small.show(text, layer=2, head=1))
    np.testing.assert_allclose(cells, weights[2, 1], atol=1e-6)
    best = int(numbers[1].argmax())
    assert map_and_title(small.show(text, layer=1))[1].endswith(f"layer 1, head {best}")


def test_special_tokens_can_be_hidden(small):
    text = "w1 w5 小狗 w7"
    shown, hidden = (
        small.show(text, layer=1, head=2),
        small.show(text, layer=1, head=2, hide_special=True, title="Mine"),
    )
    cells, title = map_and_title(hidden)
    np.testing.assert_array_equal(cells, map_and_title(shown)[0][1:-1, 1:-1])
    assert title == "Mine"
    (below,) = (text.get_text() for text in hidden.axes[0].texts if isinstance(text, Annotation))
    assert below.replace("\n", " ") == map_and_title(shown)[1]  # which head it is
    assert [label.get_text() for label in hidden.axes[0].get_yticklabels()] == text.split()


def test_a_long_text_is_drawn_token_by_token_and_never_written_out(small, monkeypatch):
    text = " ".join(f"w{i * i % 53}" for i in range(800))
    monkeypatch.setattr("saccade.AttentionMatrix.to_dense", lambda *_, **__: pytest.fail("written out"))
    figure = small.show(text)
    axes = figure.axes[0]
    assert axes.images[0].get_extent() == [-0.5, 801.5, 801.5, -0.5]
    shown = [label.get_text() for label in axes.get_yticklabels()]
    rows = axes.get_yticks().astype(int)
    assert [["[CLS]", *text.split(), "[SEP]"][row] for row in rows] == shown


@pytest.mark.parametrize(
    "text, options, error, message",
    [
        (["a"], {}, TypeError, "Encoder.show: text must be a string"),
        ("", {}, ValueError, "Encoder.show: text must have at least one word"),
        ("w1", {"layer": 3}, ValueError, "Encoder.show: layer must be from 0 to 2; got 3"),
        ("w1", {"head": -1}, ValueError, "Encoder.show: head must be from 0 to 3; got -1"),
        ("w1 " * 1000, {}, ValueError, "at most 900 tokens"),
        ("w1 " * 511, {"hide_special": True}, ValueError, "hide_special must be False for a text of more than 512 tok"),
        ("w1", {"hide_special": 1}, TypeError, "hide_special must be"),
    ],
)
def test_bad_values_are_named(small, text, options, error, message):
    with pytest.raises(error, match=message):
        small.show(text, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w1 w2 w3 小狗", None),
        ("w1 w2 w3 new", None),
        ("w1 w2 new newer", "the model does not know 2 of 4 words, so their attention .*; choose another model"),
        ("小狗 看见 一只猫 了", "the model does not know 3 of 4 words, .*; saccade.models.chinese_encoder"),
    ],
)
def test_words_that_the_model_does_not_know_are_warned_of_once(small, monkeypatch, text, message):
    monkeypatch.setattr(attention_figure, "_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for _ in range(2):
            small.show(text)
    caught = [one for one in caught if "does not know" in str(one.message)]
    assert len(caught) == (message is not None)
    if message is not None:
        assert re.search(message, str(caught[0].message))
        assert caught[0].filename == __file__


def test_a_tokenizer_is_needed(small):
    with pytest.raises(ValueError, match="tokenizer must be present"):
        Encoder(small.config).show("w1")
