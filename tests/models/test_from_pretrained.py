"""Any BERT folder loads, or is refused for reasons that are named."""

import builtins
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from saccade.masks import Padding
from saccade.models import Encoder, EncoderConfig
from saccade.support.errors import UnsupportedError

SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
    "initializer_range": 0.5,  # large enough that a wrong detail shows
}


def bert(kind=BertModel, **changes):
    torch.manual_seed(0)
    return kind(BertConfig(**{**SMALL, **changes}, attn_implementation="eager")).eval()


@pytest.fixture
def folder(tmp_path):
    bert().save_pretrained(tmp_path)
    return tmp_path


def rewrite_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


def rewrite_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(change(weights), folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_act": "gelu_new", "num_hidden_layers": 1},
        {"hidden_act": "gelu_pytorch_tanh", "type_vocab_size": 1},
        {"hidden_act": "relu", "layer_norm_eps": 1e-3},
        {"hidden_act": "silu", "num_attention_heads": 1, "pad_token_id": 3},
        {"num_attention_heads": 24, "intermediate_size": 7, "vocab_size": 11, "max_position_embeddings": 9},
    ],
    ids=str,
)
def test_random_models_equal_transformers(tmp_path, changes):
    theirs = bert(**changes)
    theirs.save_pretrained(tmp_path)
    ours = Encoder.from_pretrained(tmp_path)
    assert not ours.training
    assert ours.tokenizer is None
    tokens = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(1))
    lengths = (9, 4, 1)
    is_real = torch.arange(9) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=is_real.long(), output_attentions=True)
        hidden = ours(tokens, mask=Padding(lengths))
        matrices = ours.matrices(tokens, mask=Padding(lengths))
    torch.testing.assert_close(hidden[is_real], expected.last_hidden_state[is_real], atol=1e-5, rtol=0)
    for matrix, weights in zip(matrices, expected.attentions, strict=True):
        rows = is_real[:, None, :, None].expand_as(weights)
        torch.testing.assert_close(matrix.to_dense()[rows], weights[rows], atol=1e-5, rtol=0)


def test_sizes_are_read_into_our_words(folder):
    assert Encoder.from_pretrained(folder).config == EncoderConfig(
        vocab_size=50, max_len=16, embed_dim=24, num_heads=3, num_layers=2, feed_forward_dim=40
    )


def test_gradients_and_dropout_work_after_loading(folder):
    encoder = Encoder.from_pretrained(folder)
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in encoder.parameters())
    tokens = torch.arange(1, 9)[None]
    encoder(tokens).square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())
    encoder.train()
    assert not torch.equal(encoder(tokens), encoder(tokens))
    encoder.eval()
    assert torch.equal(encoder(tokens), encoder(tokens))


def test_weights_outlive_their_file(folder):
    encoder = Encoder.from_pretrained(folder)
    before = encoder.embeddings.word.weight.clone()
    (folder / "model.safetensors").write_bytes(b"")
    torch.testing.assert_close(encoder.embeddings.word.weight, before)


def test_prefixed_names_old_names_and_heads_of_tasks_are_understood(tmp_path):
    theirs = bert(BertForMaskedLM)
    theirs.save_pretrained(tmp_path)
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = theirs.bert(tokens).last_hidden_state
        torch.testing.assert_close(Encoder.from_pretrained(tmp_path)(tokens), expected, atol=1e-5, rtol=0)

        def age(weights):
            assert all(name.startswith(("bert.", "cls.")) for name in weights)
            old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
            for new, name in old.items():
                weights = {key.replace(new, name): value for key, value in weights.items()}
            return weights | {"bert.embeddings.position_ids": torch.arange(16)[None]}

        rewrite_weights(tmp_path, age)
        torch.testing.assert_close(Encoder.from_pretrained(tmp_path)(tokens), expected, atol=1e-5, rtol=0)


def test_half_precision_files_become_float32(folder):
    rewrite_weights(folder, lambda weights: {name: weight.half() for name, weight in weights.items()})
    assert {p.dtype for p in Encoder.from_pretrained(folder).parameters()} == {torch.float32}


def test_every_reason_is_listed(folder):
    rewrite_config(
        folder,
        model_type="roberta",
        position_embedding_type="relative_key",
        hidden_act="mish",
        is_decoder=True,
        add_cross_attention=True,
    )
    with pytest.raises(UnsupportedError, match=r"Encoder\.from_pretrained: Encoder cannot run") as caught:
        Encoder.from_pretrained(folder)
    reasons = "\n".join(caught.value.reasons)
    assert len(caught.value.reasons) == 5
    assert "model_type is 'roberta', not 'bert'" in reasons
    assert "position_embedding_type is 'relative_key', not 'absolute'" in reasons
    assert "hidden_act is 'mish', not one of gelu, gelu_new" in reasons
    assert "is_decoder is true" in reasons
    assert "add_cross_attention is true" in reasons


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("model_type", "distilbert", "model_type is 'distilbert', not 'bert'"),
        ("position_embedding_type", "relative_key_query", "position_embedding_type is 'relative_key_query'"),
        ("hidden_act", "mish", "hidden_act is 'mish'"),
        ("is_decoder", True, "is_decoder is true"),
    ],
)
def test_each_reason_alone_refuses(folder, key, value, message):
    rewrite_config(folder, **{key: value})
    with pytest.raises(UnsupportedError, match=message):
        Encoder.from_pretrained(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_size": "gone", "vocab_size": "gone"}, "got no vocab_size, hidden_size"),
        ({"hidden_size": 25}, "EncoderConfig: num_heads must divide embed_dim 25; got 3"),
        ({"num_hidden_layers": 0}, "EncoderConfig: num_layers must be an int of at least 1; got 0"),
        ({"vocab_size": "50"}, r"vocab_size in config\.json must be an int below 2\*\*31; got '50'"),
        ({"vocab_size": None}, "got no vocab_size"),
        ({"hidden_size": 2**31}, r"hidden_size in config\.json must be an int below 2\*\*31"),
        ({"hidden_act": ["gelu"]}, r"hidden_act in config\.json must be a name; got \['gelu'\]"),
        ({"layer_norm_eps": "small"}, r"layer_norm_eps in config\.json must be a number; got 'small'"),
        ({"is_decoder": "no"}, r"is_decoder in config\.json must be true or false; got 'no'"),
        ({"layer_norm_eps": 0}, "EncoderConfig: norm_eps must be a finite number above 0; got 0"),
        (
            {"hidden_dropout_prob": 1.5},
            "EncoderConfig: dropout_p must be a finite number of at least 0 and below 1; got 1.5",
        ),
        ({"pad_token_id": 50}, r"EncoderConfig: pad_token must be below 50; got 50\.\nHint: vocab_size is 50"),
    ],
)
def test_impossible_sizes_are_named(folder, changes, message):
    rewrite_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(folder)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"activation": ["gelu"]}, ValueError, r"activation must be one of 'gelu', .*; got \['gelu'\]"),
        ({"pad_token": "0"}, ValueError, "pad_token must be an int of at least 0; got '0'"),
        ({"pad_token": False}, ValueError, "pad_token must be an int"),
        ({"norm_eps": "small"}, ValueError, "norm_eps must be a finite number above 0; got 'small'"),
        ({"norm_eps": 10**400}, ValueError, "norm_eps must be a finite number above 0; got 1000"),
        ({"dropout_p": "0"}, TypeError, "dropout_p must be a finite number of at least 0 and below 1; got '0'"),
        (
            {"attention_dropout_p": None},
            TypeError,
            "attention_dropout_p must be a finite number of at least 0 and below 1; got None",
        ),
    ],
)
def test_the_config_takes_no_other_types(changes, error, message):
    sizes = {"vocab_size": 5, "max_len": 5, "embed_dim": 4, "num_heads": 2, "num_layers": 1, "feed_forward_dim": 4}
    with pytest.raises(error, match=f"EncoderConfig: .*{message}"):
        EncoderConfig(**sizes, **changes)


def test_an_unknown_activation_is_refused_by_the_config_too():
    with pytest.raises(ValueError, match=r"EncoderConfig: activation must be one of 'gelu', .*; got 'mish'"):
        EncoderConfig(
            vocab_size=5, max_len=5, embed_dim=4, num_heads=2, num_layers=1, feed_forward_dim=4, activation="mish"
        )


@pytest.mark.parametrize(
    "change, facts",
    [
        (
            lambda w: {k: v for k, v in w.items() if "1.output.dense" not in k},
            ["missing     encoder.layer.1.output.dense.bias"],
        ),
        (lambda w: w | {"encoder.layer.2.output.dense.bias": torch.ones(24)}, ["unexpected  encoder.layer.2.output"]),
        (
            lambda w: w | {"embeddings.LayerNorm.bias": torch.ones(23), "embeddings.extra": torch.ones(1)},
            ["unexpected  embeddings.extra", r"mismatched  embeddings.LayerNorm.bias \[23\], not \[24\]"],
        ),
        (
            lambda w: w | {"embeddings.LayerNorm.bias": torch.ones(24, dtype=torch.int8)},
            ["not float   embeddings.LayerNorm.bias torch.int8"],
        ),
    ],
    ids=["missing", "unexpected", "misfit", "integers"],
)
def test_weights_that_do_not_fit_are_named(folder, change, facts):
    rewrite_weights(folder, change)
    for fact in facts:
        with pytest.raises(ValueError, match=r"model\.safetensors must have the weights(.|\n)*" + fact):
            Encoder.from_pretrained(folder)


def test_many_that_do_not_fit_are_counted(folder):
    rewrite_config(folder, num_hidden_layers=9)
    with pytest.raises(ValueError, match=r"got 112 differences(.|\n)*and 100 more"):
        Encoder.from_pretrained(folder)


def test_pickled_weights_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"have its weights in one model\.safetensors; got only pytorch_model\.bin"):
        Encoder.from_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"got no weights"):
        Encoder.from_pretrained(folder)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", b"{", r"config\.json must be JSON; got Expecting"),
        ("config.json", b"[" * 100_000, r"config\.json must be JSON; got "),
        (
            "tokenizer.json",
            b"{}",
            r"tokenizer\.json must be a tokenizer file that the package tokenizers can read; got ",
        ),
        ("config.json", b"[]", r"config\.json must be a JSON object; got a list"),
        ("config.json", b"\xff\xfe", r"config\.json must be JSON; got 'utf-8' codec"),
        ("model.safetensors", b"garbage", r"model\.safetensors must be in safetensors format; got "),
    ],
)
def test_broken_files_are_named(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Encoder.from_pretrained(folder)


def test_a_folder_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"path must be a folder with config\.json; got '.*nowhere'"):
        Encoder.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("package", ["safetensors", "tokenizers"])
def test_a_missing_package_names_the_extra(folder, monkeypatch, package):
    (folder / "tokenizer.json").write_text("{}")
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ImportError, match=rf"{package} must be installed(.|\n)*pip install 'saccade-attention\[models\]'"
    ):
        Encoder.from_pretrained(folder)
