"""The values of config.json are checked against the weights' files before any tensor of their sizes is made."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from saccade.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from saccade.nn import DecoderLayer, EncoderLayer

SIZES = {"vocab_size": 9, "max_len": 8, "embed_dim": 8, "num_heads": 2, "num_layers": 2, "feed_forward_dim": 12}
BERT = {
    "model_type": "bert",
    "vocab_size": 9,
    "max_position_embeddings": 8,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 12,
    "hidden_act": "gelu",
}


def _llama(folder: Path) -> None:
    Decoder(DecoderConfig(**SIZES)).save_pretrained(folder)


def _gpt2(folder: Path) -> None:
    words = {"position_encoding": "learned", "norm": "layer", "gated": False}
    Decoder(DecoderConfig(**SIZES, **words, attention_bias=True, feed_forward_bias=True)).save_pretrained(folder)


def _own(folder: Path) -> None:
    Decoder(DecoderConfig(**SIZES, position_encoding="alibi")).save_pretrained(folder)


def _qwen2(folder: Path) -> None:
    Decoder(DecoderConfig(**SIZES, attention_bias=True)).save_pretrained(folder)
    _told(folder, model_type="qwen2")
    path = folder / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if not name.endswith("o_proj.bias")}, path)


def _bert(folder: Path) -> None:
    from saccade.models.text_formats import Bert  # noqa: PLC0415  the format has no writer

    encoder = Encoder(EncoderConfig(**SIZES)).eval()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BERT))
    state = encoder.state_dict()
    save_file(Bert().write_weights(state), folder / "model.safetensors")


FORMS: dict[str, tuple[Callable[[Path], None], type[Decoder] | type[Encoder]]] = {
    "llama": (_llama, Decoder),
    "gpt2": (_gpt2, Decoder),
    "qwen2": (_qwen2, Decoder),
    "saccade-decoder": (_own, Decoder),
    "bert": (_bert, Encoder),
}
WORDS = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "embed_dim": ("hidden_size", "n_embd", "embed_dim"),
    "vocab_size": ("vocab_size",),
    "feed_forward_dim": ("intermediate_size", "n_inner", "feed_forward_dim"),
    "max_len": ("max_position_embeddings", "n_positions", "max_len"),
}
HUGE = {"num_layers": 20_000, "embed_dim": 2**31 - 16, "vocab_size": 2**31 - 1, "feed_forward_dim": 2**30}


def _told(folder: Path, **words: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | words))


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Return a list that gets every layer of a decoder or encoder as it is made."""
    made: list[nn.Module] = []
    for kind in (DecoderLayer, EncoderLayer):

        def begin(
            self: nn.Module, *arguments: object, own: Callable[..., None] = kind.__init__, **options: object
        ) -> None:
            made.append(self)
            own(self, *arguments, **options)

        monkeypatch.setattr(kind, "__init__", begin)
    return made


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("form", FORMS)
def test_a_size_that_no_file_bears_out_is_refused_before_it_is_made(
    form: str, size: str, tmp_path: Path, layers: list[nn.Module]
) -> None:
    write, kind = FORMS[form]
    write(tmp_path / "model")
    told = json.loads((tmp_path / "model" / "config.json").read_text())
    changed = {word: HUGE[size] for word in WORDS[size] if word in told}
    _told(tmp_path / "model", **changed, **({"head_dim": None} if "head_dim" in told else {}))
    layers.clear()
    with pytest.raises(ValueError, match=r"from_pretrained: config\.json must state sizes that match the weights; got"):
        kind.from_pretrained(tmp_path / "model")
    assert layers == []


@pytest.mark.parametrize("form", ["gpt2", "bert"])
def test_positions_that_are_learned_count_as_well(form: str, tmp_path: Path, layers: list[nn.Module]) -> None:
    write, kind = FORMS[form]
    write(tmp_path / "model")
    told = json.loads((tmp_path / "model" / "config.json").read_text())
    _told(tmp_path / "model", **{word: 2**31 - 1 for word in WORDS["max_len"] if word in told})
    layers.clear()
    with pytest.raises(ValueError, match="got max_len 2147483647, but no tensor with a dimension above"):
        kind.from_pretrained(tmp_path / "model")
    assert layers == []


@pytest.mark.parametrize("form", FORMS)
def test_one_layer_says_what_all_are_like(form: str, tmp_path: Path, layers: list[nn.Module]) -> None:
    write, kind = FORMS[form]
    write(tmp_path / "model")
    layers.clear()
    model = kind.from_pretrained(tmp_path / "model")
    assert len(layers) == 1 + 2
    assert all(not x.is_meta for x in model.state_dict().values())
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name, x in weights.items() if ".1." in name and x.dim() == 2)
    save_file(weights | {name: weights[name][:-1].contiguous()}, path)
    layers.clear()
    with pytest.raises(ValueError, match=r"1 difference\.\n    mismatched  "):
        kind.from_pretrained(tmp_path / "model")
    assert len(layers) == 1


def test_weights_without_floats_or_sizes_are_named(tmp_path: Path) -> None:
    _llama(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"other": torch.zeros(1, dtype=torch.complex64)}, path)
    with pytest.raises(
        ValueError, match=r"model\.safetensors must have the weights(.|\n)*not float   model\.other torch\.complex64"
    ):
        Decoder.from_pretrained(tmp_path / "model")
    header = b'{"other":{"dtype":"F32","shape":[9223372036854775813,0],"data_offsets":[0,0]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"model\.safetensors must be in safetensors format; got .*\.$"):
        Decoder.from_pretrained(tmp_path / "model")


def test_a_second_head_that_is_no_copy_is_still_found(tmp_path: Path) -> None:
    _llama(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, path)
    assert torch.equal(
        Decoder.from_pretrained(tmp_path / "model").embedding.weight, weights["model.embed_tokens.weight"]
    )
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(ValueError, match=r"lm_head\.weight must be equal to model\.embed_tokens\.weight"):
        Decoder.from_pretrained(tmp_path / "model")
