"""Encoder-decoders: who sees whom among the source, among the target, and across."""

import re

import pytest
import torch
import transformers
from tests.sampled import sampled

from saccade import audit, masks, models
from saccade.auditing.encoder_decoder import EncoderDecoderUnderTest, joint_rules
from saccade.auditing.reachability import Reach

HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
LAYERS = {"vocab_size": 101, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 64}
BART = {**LAYERS, **HEADS, "pad_token_id": 1, "attn_implementation": "eager"}
T5 = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3}
OWN = {"vocab_size": 101, "max_len": 64, "embed_dim": 32, "num_heads": 4, "feed_forward_dim": 48}
MADE = {
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "mT5": lambda: transformers.MT5ForConditionalGeneration(transformers.MT5Config(**T5)),
    "UMT5": lambda: transformers.UMT5Model(transformers.UMT5Config(**T5)),
    "BART": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
    "mBART": lambda: transformers.MBartForConditionalGeneration(transformers.MBartConfig(**BART)),
    "Marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**BART)),
    "Pegasus": lambda: transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**BART)),
    "M2M-100": lambda: transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**BART)),
    "Blenderbot": lambda: transformers.BlenderbotForConditionalGeneration(transformers.BlenderbotConfig(**BART)),
    "small Blenderbot": lambda: transformers.BlenderbotSmallModel(transformers.BlenderbotSmallConfig(**BART)),
    "ours": lambda: models.EncoderDecoder(
        models.EncoderDecoderConfig(**OWN, num_encoder_layers=2, num_decoder_layers=3)
    ),
}
RULE = {"encoder": masks.Full(), "decoder": masks.Causal(), "cross": masks.Full()}
SOURCE, TARGET = 14, 10


def made(name):
    torch.manual_seed(0)
    return MADE[name]().eval()


def texts(source=SOURCE, target=TARGET):
    draw = torch.Generator().manual_seed(5)
    return {
        "input_ids": torch.randint(3, 101, (2, source), generator=draw),
        "decoder_input_ids": torch.randint(3, 101, (2, target), generator=draw),
    }


@pytest.mark.ci
@pytest.mark.parametrize("name", sampled(MADE, 3))
def test_it_holds_what_is_assumed_of_it(name):
    report = audit(made(name), length=12)
    assert report.rule == (
        "assumed from the configuration: "
        "encoder Full() in 2 layers; decoder Causal() in 3 layers; cross Full() in 3 layers"
    )
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)
    assert report.shape == (2, 20)
    assert "o" not in report.picture()
    assert "#" not in report.picture()


def with_mask(change):
    """A hook before attention that changes what is added to its scores."""

    def hook(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        return args, kwargs | {"attention_mask": change(0.0 if mask is None else mask)}

    return hook


def lower(rows, keys, hidden):
    return lambda mask: mask + torch.zeros(rows, keys).masked_fill(hidden(rows, keys), -torch.inf)


def later(rows, keys):
    return torch.ones(rows, keys, dtype=torch.bool).triu(1)


def fifth(rows, keys):
    return torch.arange(keys).expand(rows, -1) == 5


FAULTS = {
    "a layer of the decoder is not causal": (
        "model.decoder.layers.1.self_attn",
        lambda mask: torch.zeros(TARGET, TARGET),
        {"reach", "by layer"},
        "target . depends on target .",
    ),
    "a layer of the encoder is causal": (
        "model.encoder.layers.1.self_attn",
        lower(SOURCE, SOURCE, later),
        {"by layer"},
        "source 0 does not see source 1",
    ),
    "a layer hides a token of the source": (
        "model.decoder.layers.2.encoder_attn",
        lower(TARGET, SOURCE, fifth),
        {"by layer"},
        "target 0 does not see source 5",
    ),
    "a layer hides a token of the target": (
        "model.decoder.layers.0.self_attn",
        lambda mask: (
            mask + torch.zeros(TARGET, TARGET).masked_fill(fifth(TARGET, TARGET) & ~torch.eye(TARGET).bool(), -1e9)
        ),
        {"by layer"},
        "target . does not see target 5",
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_pair_and_its_layer(name):
    where, change, broken, pair = FAULTS[name]
    model = made("BART")
    model.get_submodule(where).register_forward_pre_hook(with_mask(change), with_kwargs=True)
    report = audit(model, RULE, inputs=texts())
    assert {claim.name for claim in report.claims if claim.verdict == "broken"} == broken, str(report)
    for claim in broken:
        assert report[claim].finding.module.startswith(where), str(report)
        assert re.match(pair, report[claim].finding.pair), str(report)


def padded():
    """Texts whose second source has 9 tokens, what tells a model so, and what is then right."""
    kept = torch.arange(SOURCE) < torch.tensor([[SOURCE], [9]])
    inputs = texts() | {"attention_mask": kept.long()}
    rule = {"encoder": masks.Padding([SOURCE, 9]), "decoder": masks.Causal(), "cross": masks.Padding([SOURCE, 9])}
    return inputs, rule, torch.cat([kept, torch.ones(2, TARGET, dtype=torch.bool)], 1)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["T5", "BART", "Marian"])
def test_padding_of_the_source_is_hidden_from_both_texts(name):
    inputs, rule, padding = padded()
    assert audit(made(name), rule, inputs=inputs, padding=padding).ok
    unmasked = {name: one for name, one in inputs.items() if name != "attention_mask"}
    report = audit(made(name), rule, inputs=unmasked, padding=padding)
    assert report["reach"].finding.key[1] >= 9
    assert report["reach"].finding.nouns[1] == "source"


def test_a_cross_attention_that_forgets_padding_is_named():
    inputs, rule, padding = padded()
    model, where = made("BART"), "model.decoder.layers.1.encoder_attn"
    model.get_submodule(where).register_forward_pre_hook(with_mask(lambda mask: None), with_kwargs=True)
    report = audit(model, rule, inputs=inputs, padding=padding)
    found = report["by layer"].finding
    assert (found.module, found.nouns, found.row[0]) == (where, ("target", "source"), 1)
    assert found.key == (1, 9)
    assert report["reach"].finding.module == where


@pytest.mark.ci
def test_ours_is_held_against_other_rules():
    model = made("ours")
    near = RULE | {"encoder": masks.Window(3, 3)}
    found = audit(model, near, inputs=texts())["by layer"].finding
    assert (found.kind, found.module, found.nouns) == ("leak", "encoder.layers.0.attention", ("source", "source"))
    model.encoder.layers[1].attention.mask = masks.Causal()
    found = audit(model, RULE, inputs=texts())["by layer"].finding
    assert (found.kind, found.module) == ("blind", "encoder.layers.1.attention")
    assert audit(model, RULE | {"encoder": [masks.Full(), masks.Causal()]}, inputs=texts()).ok


@pytest.mark.ci
def test_texts_may_be_of_one_length_and_alike():
    for name in ("T5", "BART", "ours"):
        inputs = texts(12, 12)
        assert audit(made(name), RULE, inputs=inputs).ok
        assert audit(made(name), RULE, inputs=inputs | {"decoder_input_ids": inputs["input_ids"]}).ok


def test_reach_is_the_product_of_the_steps():
    """Each layer of the decoder as two steps, each with its residual connection, by matrices."""
    near, across = masks.Causal() & masks.Window(2, 0), masks.Window(1, 1)
    rule = {"encoder": masks.Window(1, 0), "decoder": [near, near, masks.Window(0, 0)], "cross": across}
    subject = EncoderDecoderUnderTest(made("T5"), texts())
    reach = Reach(joint_rules(rule, subject)[0], batch=2, length=SOURCE + TARGET)
    found = torch.eye(SOURCE + TARGET)
    source, target = slice(0, SOURCE), slice(SOURCE, None)
    steps = [(source, source, rule["encoder"])] * 2
    for own in rule["decoder"]:
        steps += [(target, target, own), (target, source, across)]
    for rows, keys, own in steps:
        step = torch.eye(SOURCE + TARGET)
        sizes = [SOURCE if part is source else TARGET for part in (rows, keys)]
        step[rows, keys] += own.to_dense(*sizes)[0, 0]
        found = (step @ found).clamp_max(1)
    for place in range(SOURCE + TARGET):
        assert torch.equal(reach.sources(reach.one(0, place))[0], found[place].bool())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rule": masks.Causal()}, "rule must have the keys encoder, decoder, cross for an encoder-decoder"),
        ({"rule": {"encoder": masks.Full()}}, r"rule must have the keys encoder, decoder, .*; got \['encoder'\]"),
        (
            {"rule": RULE | {"decoder": [masks.Causal()]}},
            "rule of decoder must be one mask for each of 3 layers; got 1 masks",
        ),
        ({"layers": 3}, "layers must be left out for an encoder-decoder; got 3"),
        ({"padded": True}, "must be left out for functions, vectors, process groups, batch_first=False and"),
        ({"inputs": torch.ones(2, 4, dtype=torch.long)}, "inputs must have token ids input_ids and decoder_input_ids"),
        ({"inputs": {"input_ids": torch.ones(2, 4).long()}}, r"inputs must have token ids .*; got \['input_ids', 'use"),
        ({"inputs": texts() | {"input_ids": torch.ones(1, 4).long()}}, "inputs must have as many texts"),
        ({"padding": torch.ones(2, SOURCE)}, r"padding must have shape \[2, 24\]"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        audit(made("T5"), **{"rule": RULE, "inputs": texts()} | change)


def test_an_encoder_must_be_known():
    class Reader(torch.nn.Module):
        def forward(self, input_ids, decoder_input_ids):
            return decoder_input_ids

    with pytest.raises(ValueError, match="the model must have an encoder, or get_encoder"):
        audit(Reader(), RULE, inputs=texts())


def test_a_rule_is_a_mask():
    with pytest.raises(TypeError, match="rule of cross must be a mask, or a list with one for each layer; got 3"):
        audit(made("T5"), RULE | {"cross": 3}, inputs=texts())


def test_windows_are_not_assumed():
    sizes = T5 | {"local_radius": 3}
    model = transformers.LongT5ForConditionalGeneration(transformers.LongT5Config(**sizes))
    with pytest.raises(ValueError, match="rule must be given, since the model's configuration does not define it"):
        audit(model.eval(), inputs=texts())
