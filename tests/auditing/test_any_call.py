"""Models called with images, encoded audio or dictionaries are audited, or refused with the line that makes it work."""

import pytest
import torch
import transformers
from torch import nn

from saccade import audit, masks

CAUSAL = masks.Causal()
TEXT = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "patch_size": 4}


def ids(length=16):
    return torch.randint(3, 99, (2, length), generator=torch.Generator().manual_seed(3))


def llava():
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**IMAGE, image_size=8, projection_dim=32),
        image_token_id=100,
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def with_image():
    tokens = ids()
    tokens[:, 4:8] = 100
    return {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 8, 8)}


def test_placeholders_of_an_image_are_no_blind_spots():
    report = audit(llava(), CAUSAL, inputs=with_image(), tests=4)
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
    assert "no output reads the vectors of 8 tokens, such as token 4 of item 0" in report["sight"].why
    assert set(report.reaches.values()) == {"causal"}


def test_a_fault_beside_an_image_is_found():
    model = llava()
    for layer in model.model.language_model.layers:
        layer.self_attn.is_causal = False
    model.model.language_model.layers[0].self_attn.forward = _uncausal(model.model.language_model.layers[0].self_attn)
    report = audit(model, CAUSAL, inputs=with_image(), tests=4)
    assert report["by layer"].finding.module == "model.language_model.layers.0.self_attn", str(report)


def _uncausal(attention):
    inner = attention.forward
    return lambda hidden_states, **kwargs: inner(hidden_states + hidden_states.mean(1, keepdim=True), **kwargs)


def test_a_decoder_reads_encoded_audio():
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 8, "max_source_positions": 10}
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(vocab_size=101, **sizes, **heads, **layers, **special)
    whisper = transformers.WhisperForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="Hint: if the source is not a text, audit the decoder"):
        audit(whisper, CAUSAL, inputs={"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids(8)})
    inputs = {"input_ids": ids(8), "encoder_hidden_states": torch.randn(2, 10, 16)}
    assert audit(whisper.model.decoder, CAUSAL, inputs=inputs, tests=4).ok


class Nested(nn.Module):
    """Takes a dictionary and returns one in another."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(101, 8)

    def forward(self, batch):
        return {"out": {"rows": self.e(batch["ids"]).cumsum(1)}}


def test_dictionaries_are_refused_with_the_line_that_makes_it_work():
    model = Nested()
    with pytest.raises(ValueError, match=r"Hint: a function may build other arguments: audit\(lambda ids: model"):
        audit(model, CAUSAL, inputs={"batch": {"ids": ids()}})
    rows = {"inputs": ids(), "module": model, "outputs": lambda out: out["out"]["rows"], "tests": 4}
    assert audit(lambda tokens: model({"ids": tokens}), CAUSAL, **rows).ok
    assert not audit(lambda tokens: model({"ids": tokens}), masks.Window(2, 0), layers=1, **rows).ok
