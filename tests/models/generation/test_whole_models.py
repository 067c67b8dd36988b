"""Generation by whole models: as transformers generates, and from a text that another was read of."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from saccade.models import Decoder, EncoderDecoder, EncoderDecoderConfig, beam_search, generate

VOCAB, PROMPTS = 23, [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Decoder]:
    """Return a model of transformers and ours with the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    theirs = LlamaForCausalLM(config).eval()
    for parameter in theirs.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.4)
    folder = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return theirs, Decoder.from_pretrained(folder)


def _theirs(model: LlamaForCausalLM, prompt: list[int], **options: object) -> torch.Tensor:
    tokens = torch.tensor([prompt])
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **options)[:, len(prompt) :]


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
def test_greedy_texts_are_those_of_transformers(pair: tuple[LlamaForCausalLM, Decoder]) -> None:
    theirs, ours = pair
    expected = [_theirs(theirs, prompt, max_new_tokens=12)[0].tolist() for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) == 3
    assert generate(ours, PROMPTS, 12) == expected


@pytest.mark.filterwarnings("ignore::UserWarning:transformers.*")
@pytest.mark.parametrize("beams", [2, 4])
def test_beams_are_those_of_transformers(pair: tuple[LlamaForCausalLM, Decoder], beams: int) -> None:
    theirs, ours = pair
    for prompt, found in zip(PROMPTS, beam_search(ours, PROMPTS, 6, beams=beams), strict=True):
        expected = _theirs(theirs, prompt, max_new_tokens=6, num_beams=beams, num_return_sequences=beams)
        assert [one.tokens for one in found] == expected.tolist()


def test_a_text_is_written_from_another() -> None:
    torch.manual_seed(0)
    config = EncoderDecoderConfig(
        vocab_size=VOCAB,
        max_len=64,
        embed_dim=16,
        num_heads=4,
        num_encoder_layers=1,
        num_decoder_layers=2,
        feed_forward_dim=24,
    )
    model = EncoderDecoder(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    source = torch.randint(2, VOCAB, (2, 7))
    text = torch.ones(2, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(6):
            text = torch.cat([text, model(source, text)[:, -1:].argmax(-1)], 1)
    assert generate(model.given(source), [[1], [1]], 6) == text[:, 1:].tolist()
    assert [own[0].tokens for own in beam_search(model.given(source), [[1], [1]], 6, beams=1)] == text[:, 1:].tolist()
    best = beam_search(model.given(source), [[1], [1]], 4, beams=3)
    alone = [beam_search(model.given(source[i : i + 1]), [[1]], 4, beams=3)[0] for i in range(2)]
    assert [[one.tokens for one in own] for own in best] == [[one.tokens for one in own] for own in alone]
