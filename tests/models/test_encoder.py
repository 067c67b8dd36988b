"""Tests of the inputs that an encoder takes and refuses, for any weights."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from saccade.masks import Causal, Padding
from saccade.models import Encoder, EncoderConfig

CONFIG = EncoderConfig(
    vocab_size=20, max_len=6, embed_dim=8, num_heads=2, num_layers=2, feed_forward_dim=16, pad_token=3
)


@pytest.fixture(scope="module")
def encoder():
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "cat": 4, "fish": 5}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    torch.manual_seed(0)
    return Encoder(CONFIG, tokenizer).eval()


def test_sentences_are_padded_on_the_right(encoder):
    tokens, lengths = encoder.tokenize(["cat fish", "fish", "zebra cat fish cat"])
    assert lengths == (4, 3, 6)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [[1, 4, 5, 2, 3, 3], [1, 5, 2, 3, 3, 3], [1, 0, 4, 5, 4, 2]]


def test_padding_changes_nothing(encoder):
    tokens, lengths = encoder.tokenize(["cat fish", "fish"])
    with torch.no_grad():
        together = encoder.embed(tokens, lengths)
        alone = torch.cat([encoder.embed(tokens[b : b + 1, :n], (n,)) for b, n in enumerate(lengths)])
    torch.testing.assert_close(together, alone)


def test_a_sequence_without_tokens_is_zero(encoder):
    tokens = torch.tensor([[1, 4, 2], [3, 3, 3]])
    with torch.no_grad():
        vectors = encoder.embed(tokens, (3, 0))
    assert vectors[0].norm() == pytest.approx(1)
    assert torch.equal(vectors[1], torch.zeros(8))


def test_masks_reach_every_layer(encoder):
    tokens = torch.tensor([[1, 4, 5, 2]])
    with torch.no_grad():
        for matrix in encoder.matrices(tokens, mask=Causal()):
            assert torch.equal(matrix.to_dense() > 0, torch.ones(4, 4).tril().bool().expand(1, 2, 4, 4))
        changed = torch.tensor([[1, 4, 5, 0]])
        causal = [encoder(t, mask=Causal())[:, :3] for t in (tokens, changed)]
        full = [encoder(t)[:, :3] for t in (tokens, changed)]
    assert torch.equal(*causal)
    assert not torch.allclose(*full, atol=1e-4)


def test_matrices_are_those_that_forward_multiplies_by(encoder):
    tokens = torch.tensor([[1, 4, 5, 2]])
    with torch.no_grad():
        hidden = encoder.embeddings(tokens)
        for layer, matrix in zip(encoder.layers, encoder.matrices(tokens), strict=True):
            torch.testing.assert_close(matrix.to_dense(), layer.attention.with_weights(hidden)[1])
            hidden = layer(hidden)


def test_a_new_encoder_starts_small_and_pads_with_zero():
    torch.manual_seed(0)
    encoder = Encoder(CONFIG)
    assert encoder.layers[0].feed_forward.expand.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert torch.equal(encoder.embeddings.word.weight[3], torch.zeros(8))
    assert all(not layer.feed_forward.contract.bias.any() for layer in encoder.layers)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e: e(torch.ones(1, 7, dtype=torch.int64)), "Encoder: tokens must be at most 6 long; got 7"),
        (lambda e: e(torch.ones(7, dtype=torch.int64)), r"Encoder: tokens must have shape \[batch, len\]; got \[7\]"),
        (
            lambda e: e.matrices(torch.ones(1, 2, dtype=torch.int64), token_types=torch.ones(1, 3, dtype=torch.int64)),
            r"Encoder.matrices: token_types must have shape \[batch, len\] = \[1, 2\]; got \[1, 3\]",
        ),
        (
            lambda e: e.embed(torch.ones(2, 3, dtype=torch.int64), (3,)),
            "lengths must be one for each of the 2 sequences",
        ),
        (lambda e: e.embed(torch.ones(1, 3, dtype=torch.int64), (4,)), r"at most 3; got \[4\]"),
        (lambda e: e.tokenize([]), "Encoder.tokenize: sentences must contain at least one sentence; got none"),
        (
            lambda e: e.tokenize(["cat", "cat " * 5]),
            r"sentences must have at most 6 tokens each; got 7 \(sentence 2\)",
        ),
        (lambda e: Encoder(CONFIG).tokenize(["cat"]), r"tokenizer must be present(.|\n)*no tokenizer\.json"),
    ],
)
def test_bad_values_are_named(encoder, call, message):
    with pytest.raises(ValueError, match=message):
        call(encoder)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e: e(torch.ones(1, 2)), r"Encoder: tokens must be int64 or int32; got torch\.float32"),
        (lambda e: e([[1, 2]]), "Encoder: tokens must be a tensor; got list"),
        (lambda e: e.tokenize("cat"), r"sentences must be a list of strings; got one string\.\nHint: \[sentence\]"),
    ],
)
def test_bad_types_are_named(encoder, call, message):
    with pytest.raises(TypeError, match=message):
        call(encoder)


def test_forward_agrees_with_the_padding_mask(encoder):
    tokens = torch.tensor([[1, 4, 2, 3, 3]])
    with torch.no_grad():
        torch.testing.assert_close(encoder(tokens, mask=Padding([3]))[:, :3], encoder(tokens[:, :3]))
