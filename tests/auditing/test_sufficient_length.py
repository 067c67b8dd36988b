"""A text within a window cannot tell the window from no window: the audit says so, and which length can."""

import pytest
import torch
import transformers
from tests.auditing.small_transformer import small
from typer.testing import CliRunner

from saccade import audit, masks, models
from saccade.auditing import audit_setup
from saccade.auditing.sufficient_length import shortest_that_differs
from saccade.cli.app import app
from saccade.testing import assert_reach

CAUSAL, FULL = masks.Causal(), masks.Full()
NEAR = CAUSAL & masks.Window(12, 0)
RULES = {
    "window": (NEAR, CAUSAL, 8),
    "window and sinks": (masks.streaming(3, 9), CAUSAL, 10),
    "both sides": (masks.Window(10, 13), FULL, 6),
    "window and global": (masks.longformer(7, [0]), FULL, 5),
    "function": (masks.Predicate(lambda b, h, q, kv: (kv <= q) & (q - kv < 11)), CAUSAL, 9),
}


@pytest.mark.parametrize("name", RULES)
def test_the_length_is_the_shortest_at_which_the_rules_differ(name):
    rule, plain, length = RULES[name]
    found = shortest_that_differs(rule, length)
    assert found is not None
    assert (type(found[0]), found[1] > length) == (type(plain), True)
    same = [torch.equal(rule.to_dense(n), plain.to_dense(n)) for n in (found[1] - 1, found[1])]
    assert same == [True, False]


@pytest.mark.parametrize(
    "rule",
    [CAUSAL, FULL, FULL & CAUSAL, CAUSAL & masks.Window(3, 0), CAUSAL | masks.Strided(2), masks.Documents([4, 4])],
    ids=str,
)
def test_rules_that_hide_more_already_or_never_are_not_accused(rule):
    assert shortest_that_differs(rule, 8) is None


def test_a_dense_model_does_not_pass_for_one_with_a_window():
    model = models.small_decoder()
    with pytest.raises(AssertionError, match=r"at 8 tokens the rule hides .* Causal\(\) does; pass length=14 or more"):
        assert_reach(model, NEAR, length=8, tests=2)
    with pytest.raises(AssertionError, match="pass inputs with 14 or more"):
        assert_reach(model, NEAR, inputs=torch.randint(3, 50, (2, 8)), tests=2)
    report = audit(model, NEAR, length=14, tests=2)  # the length that was named is enough
    assert report["by layer"].verdict == "broken"
    assert report.too_short == ""


def test_a_rule_that_was_assumed_is_told_about_and_does_not_fail():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.MistralConfig(vocab_size=64, num_key_value_heads=2, sliding_window=20, **sizes)
    report = assert_reach(transformers.MistralForCausalLM(config).eval(), length=8, tests=2)
    assert report.ok
    assert [claim.name for claim in report.unanswered] == ["length"]
    assert "pass length=21 or more" in str(report)


def test_layers_are_named_if_their_rules_differ():
    rules = [NEAR, CAUSAL, CAUSAL & masks.Window(30, 0)]
    report = audit(small(CAUSAL, layers=3), rules, inputs=torch.randint(40, (2, 8)), tests=2)
    assert report.too_short.startswith("at 8 tokens the rule of layers 1, 3 hides nothing more than Causal() does")
    assert "inputs with 32 or more" in report.too_short


def test_source_and_target_have_lengths_of_their_own():
    sizes = {"vocab_size": 50, "max_len": 64, "embed_dim": 16, "num_heads": 2, "feed_forward_dim": 24}
    config = models.EncoderDecoderConfig(**sizes, num_encoder_layers=1, num_decoder_layers=1)
    model = models.EncoderDecoder(config).eval()
    rule = {"encoder": masks.Window(20, 20), "decoder": NEAR, "cross": FULL}
    report = audit(model, rule, length=12, tests=2)
    assert "at 12 tokens the encoder rule hides nothing more than Full() does; pass length=22" in report.too_short
    assert "at 8 tokens the decoder rule hides nothing more than Causal() does; pass length=21" in report.too_short
    assert audit(model, rule, length=22, tests=2).too_short == ""


def test_texts_of_a_training_setup_can_be_too_short():
    report = audit_setup(
        models.small_decoder(), torch.stack, [torch.arange(3, 12), torch.arange(5, 14)], NEAR, claims=(), tests=2
    )
    assert "at 9 tokens the rule hides" in report.too_short
    assert "pass texts of 14 tokens or more" in report.too_short


def test_strict_ends_with_status_1():
    command = ["audit", "small-decoder", "--rule", "causal & window(12, 0)", "--length", "8", "--tests", "2"]
    runner = CliRunner()
    loose, strict = runner.invoke(app, command), runner.invoke(app, [*command, "--strict"])
    assert (loose.exit_code, strict.exit_code) == (0, 1), strict.output
    assert "pass length=14 or more" in " ".join(strict.output.split())
