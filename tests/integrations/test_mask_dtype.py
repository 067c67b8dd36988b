"""Models that read their mask themselves get the mask that transformers made their code for, or an error."""

import pytest
import torch
from tests.integrations import model_zoo as zoo
from tests.integrations import small_models
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoformerModel,
    FalconModel,
    Gemma2Model,
    GitModel,
    GptOssModel,
    InformerModel,
    LlamaModel,
    TimeSeriesTransformerModel,
)
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask

import saccade as sc
from saccade import masks
from saccade.integrations.lazy_mask import LazyMask, mask_dtype
from saccade.integrations.transformers import install

# They add the mask to scores, join it with a bias, or compare it with 0.
READING = ("bloom", "deepseek_v4", "falcon", "gemma4_audio", "git", "gpt_neo", "gptj", "mpt", "xglm")


@pytest.fixture(autouse=True)
def _installed():
    install()


def faults(name, model, batch, expected):
    """Describe how a model differs from its eager outputs; nothing where it equals them, or is refused."""
    model.config._attn_implementation = "saccade"  # as from_pretrained(attn_implementation=) sets it
    try:
        outputs = small_models.run(model, batch)
    except sc.UnsupportedError:
        return []
    except Exception as error:
        return [f"{name}: {type(error).__name__}: {error}"]
    size = max(1.0, *(float(theirs.abs().max()) for theirs in expected))
    largest = max(float((ours - theirs).abs().max()) for ours, theirs in zip(outputs, expected, strict=True))
    return [] if largest <= 1e-4 * size else [f"{name}: off by {largest:.3g} of {size:.3g}"]


@pytest.mark.parametrize("name", READING)
def test_models_that_read_their_mask_equal_eager(name):
    model = small_models.build(name)
    batch, expected = small_models.accepted(model)
    model.config._attn_implementation = "saccade"
    for ours, theirs in zip(small_models.run(model, batch), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_every_architecture_equals_eager_or_is_refused():
    found, compared = [], 0
    for name in small_models.architectures():
        model = small_models.build(name)
        tried = None if model is None else small_models.accepted(model)
        if tried is None or not all(bool(x.isfinite().all()) for x in tried[1]):
            continue
        compared += 1
        found += faults(name, model, *tried)
    assert found == []
    assert compared > 250


@pytest.mark.parametrize("kind", [AutoformerModel, InformerModel, TimeSeriesTransformerModel])
def test_a_later_value_does_not_reach_an_earlier_output(kind):
    torch.manual_seed(0)
    config = kind.config_class(
        prediction_length=5, context_length=8, lags_sequence=[1], d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        num_time_features=1, init_std=0.5, **({"label_length": 5} if kind is AutoformerModel else {}),
    )  # fmt: skip
    model = kind(config).eval()
    times = {"past_time_features": torch.zeros(1, 9, 1), "future_time_features": torch.zeros(1, 5, 1)}
    batch = {"past_values": torch.randn(1, 9), "past_observed_mask": torch.ones(1, 9), **times}
    future = torch.randn(1, 5)
    changed = future.clone()
    changed[:, 3] += 9
    outputs = {}
    for implementation in ("eager", "saccade"):
        model.config._attn_implementation = implementation
        outputs[implementation] = [small_models.run(model, {**batch, "future_values": x})[0] for x in (future, changed)]
    before, after = outputs["saccade"]
    torch.testing.assert_close(before, outputs["eager"][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after, outputs["eager"][1], atol=1e-4, rtol=1e-4)
    if kind is not AutoformerModel:  # its attention is not causal
        assert torch.equal(before[:, :3], after[:, :3])
        assert not torch.equal(before, after)


def float_mask(**changes):
    facts = {"batch_size": 1, "q_length": 4, "kv_length": 6, "q_offset": 2, "mask_function": causal_mask_function}
    facts |= {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]]).bool(), "dtype": torch.float32, **changes}
    return AttentionMaskInterface()["saccade"](config=GitModel.config_class(), **facts), eager_mask(**facts)


SCORES = torch.randn(1, 2, 4, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "read",
    [
        lambda mask: SCORES + mask,
        lambda mask: mask + SCORES,
        lambda mask: SCORES.clone().add_(mask),
        lambda mask: SCORES + mask[:, :, :, :6],
        lambda mask: SCORES - -mask,
        lambda mask: SCORES.masked_fill(mask != 0, -9.0),
        lambda mask: torch.where(mask < -1, mask, SCORES),
        lambda mask: torch.nn.functional.pad(mask, (0, 3)),
        lambda mask: torch.cat([mask, torch.ones(1, 1, 4, 2)], -1),
        lambda mask: mask.to(torch.float64) + SCORES.double(),
        lambda mask: torch.finfo(mask.dtype).min + mask.expand(1, 2, 4, 6),
        lambda mask: torch.max(SCORES, mask),
        lambda mask: torch.baddbmm(mask[0], SCORES[:, 0], torch.ones(1, 6, 6)),
    ],
)
def test_a_float_mask_reads_as_that_of_transformers(read):
    ours, theirs = float_mask()
    assert isinstance(ours, LazyMask)
    assert torch.equal(read(ours), read(theirs))
    assert ours.placed.rule == float_mask()[0].placed.rule


def test_code_that_reads_its_mask_gets_none_where_nothing_is_hidden():
    facts = {"mask_function": bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    padding = torch.ones(1, 6, dtype=torch.bool)
    assert float_mask(**facts, attention_mask=padding) == (None, None)
    ours, theirs = float_mask(**facts)
    assert torch.equal(ours + 0, theirs)


def test_terms_that_are_written_into_a_float_mask_are_added_to_the_scores():
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    outputs = []
    for mask in float_mask(kv_length=4, q_offset=0, attention_mask=None):
        mask[..., 0] += 2.0
        outputs.append(AttentionInterface()["saccade"](torch.nn.Identity(), x, x, x, mask)[0])
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "add",
    [
        lambda mask: SCORES + mask,
        lambda mask: mask + SCORES,
        lambda mask: SCORES - mask,
        lambda mask: mask - SCORES,
        lambda mask: SCORES.clone().add_(mask),
        lambda mask: torch.add(SCORES, mask, alpha=-1e9),
    ],
)
def test_a_bool_mask_is_not_added_to_scores(add):
    mask = LazyMask(float_mask()[0].placed, 1, torch.device("cpu"))
    with pytest.raises(sc.UnsupportedError, match=r'adds its mask to its scores(.|\n)*implementation\("eager"\)'):
        add(mask)
    assert int((mask + mask.long()).sum()) == 2 * int(mask.sum())
    assert torch.equal(torch.where(mask, SCORES, 0.0), SCORES * mask)


def test_a_pattern_that_cannot_reach_the_scores_is_refused():
    model = small_models.build("git")
    batch, _ = small_models.accepted(model)
    model.config._attn_implementation = install("saccade-near", mask=masks.Window(2, 0))
    with pytest.raises(sc.UnsupportedError, match=r"models of GitConfig read their mask themselves(.|\n)*eager"):
        small_models.run(model, batch)
    llama = zoo.model("llama", "saccade-near")
    assert llama(**zoo.batch("llama")).logits.isfinite().all()


@pytest.mark.parametrize(
    "model, expected",
    [
        (LlamaModel, torch.bool),
        (GptOssModel, torch.bool),  # no sdpa, but FlexAttention
        (Gemma2Model, torch.bool),
        (FalconModel, torch.bfloat16),  # sdpa, by code of its own
        (GitModel, torch.bfloat16),
        (InformerModel, torch.bfloat16),
    ],
)
def test_dtype_of_masks(model, expected):
    assert mask_dtype(model.config_class(), torch.bfloat16) == expected
    assert mask_dtype(None, torch.bfloat16) == torch.bool
