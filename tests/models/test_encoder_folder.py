"""An encoder's folder gives it back, to us and to transformers."""

import pytest
import torch
from transformers import BertModel

from saccade.models import Encoder, EncoderConfig

SIZES = {"vocab_size": 30, "max_len": 16, "embed_dim": 16, "num_heads": 4, "num_layers": 3, "feed_forward_dim": 24}


@pytest.mark.parametrize("changes", [{}, {"num_token_types": 1, "activation": "relu", "norm_eps": 1e-5}], ids=str)
def test_a_folder_gives_the_model_back(changes, tmp_path):
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(**SIZES, **changes)).eval()
    encoder.save_pretrained(tmp_path)
    read = Encoder.from_pretrained(tmp_path)
    assert read.config == encoder.config
    tokens = torch.randint(30, (2, 9))
    with torch.no_grad():
        assert torch.equal(read(tokens), encoder(tokens))
        theirs = BertModel.from_pretrained(tmp_path, add_pooling_layer=False, local_files_only=True).eval()
        torch.testing.assert_close(read(tokens), theirs(tokens).last_hidden_state, atol=1e-5, rtol=1e-5)
    assert not list(tmp_path.glob("*.part"))
