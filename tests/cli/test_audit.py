"""``saccade audit`` as a user runs it."""

import json
import os
import re

import pytest
from transformers import BartConfig, GPT2Config, LlamaConfig
from typer.testing import CliRunner

from saccade import models
from saccade.cli import loading
from saccade.cli.app import app


@pytest.fixture
def audit(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(app, ["audit", *arguments])


@pytest.fixture
def config(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    LlamaConfig(vocab_size=64, **sizes).save_pretrained(tmp_path)
    return str(tmp_path / "config.json")


MODELS = """
import transformers as T

def make():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return T.LlamaForCausalLM(T.LlamaConfig(vocab_size=64, **sizes)).eval()

def number():
    return 3
"""


def test_a_function_of_a_file_makes_the_model(audit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODELS, encoding="utf-8")
    result = audit("mine.py:make", "--length", "16", "--tests", "2")
    assert result.exit_code == 0, result.output
    assert "reach" in result.stdout
    for name, sentence in (
        ("mine.py:number", "MODEL must return a torch module; got int"),
        ("mine.py:none", "MODEL must name a function of mine.py; got 'none'"),
        ("other.py:make", "MODEL must name a file and its function, as in my_setup.py:make; got 'other.py:make'"),
    ):
        refused = audit(name)
        assert refused.exit_code == 2, refused.output
        assert sentence in " ".join(refused.stderr.split())


def test_a_configuration_is_enough(audit, config):
    result = audit(config, "--length", "20", "--picture")
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM, 2 x 20 tokens, float32, seed 0" in result.stdout
    assert "rule     assumed from the configuration: Causal() in 2 layers" in result.stdout
    assert "by layer  held" in result.stdout
    assert "largest: effect where there should be none; allowed: effect of rounding" in result.stdout
    rows = result.stdout.splitlines()[-20:]
    assert rows[0].split() == ["1", *"." * 19, "1", *"." * 19]
    assert "of the pairs that must not interact" in result.stdout
    assert "no leak" not in result.stdout


def test_further_claims_are_checked_by_name(audit, config):
    result = audit(config, "--length", "20", "--claim", "states", "--claim", "batch", "--tests", "2")
    assert result.exit_code == 0, result.output
    assert re.search(r"^states  +held", result.stdout, re.MULTILINE)
    assert re.search(r"^batch  +held", result.stdout, re.MULTILINE)
    result = audit(config, "--claim", "stats")
    assert result.exit_code == 2
    assert "claims must be among states, " in result.stderr


SETUP = """
import torch, transformers

def make():
    sizes = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    texts = [{"input_ids": torch.randint(3, 64, (length,)).tolist()} for length in (9, 6)]
    return model, transformers.DataCollatorWithFlattening(return_tensors="pt"), texts

def wrong():
    return 3
"""


def test_a_training_setup_is_made_by_a_function_of_a_file(audit, tmp_path):
    path = tmp_path / "my_setup.py"
    path.write_text(SETUP)
    result = audit("--trainer", f"{path}:make", "--tests", "2")
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM, as trained, 1 x 15 tokens" in result.stdout
    assert re.search(r"^collator: labels  +held", result.stdout, re.MULTILINE)
    assert re.search(r"^loss  +held", result.stdout, re.MULTILINE)
    for arguments, sentence in (
        ((f"{path}:mak",), "--trainer must name a function of "),
        ((f"{path}",), "--trainer must name a file and its function, as in my_setup.py:make"),
        ((f"{path}:wrong",), "--trainer must return a model, a collator and a list of texts; got int"),
        ((f"{path}:make", "--padded"), "--padded must be left out if --trainer is given"),
    ):
        refused = audit("--trainer", *arguments)
        assert refused.exit_code == 2
        assert sentence in " ".join(refused.stderr.split())


def test_the_budget_is_printed_without_a_model(audit):
    result = audit("--budget", "--tests", "30", "--length", "512")
    assert result.exit_code == 0
    assert "a fault in 10% of the rows or more is missed in at most 1 of 20 audits" in result.stdout
    result = audit()
    assert result.exit_code == 2
    assert "MODEL must be given, or --trainer or --budget" in result.stderr


def test_an_encoder_decoder_is_made_whole(audit, tmp_path):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    BartConfig(vocab_size=64, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, **sizes).save_pretrained(tmp_path)
    result = audit(str(tmp_path / "config.json"), "--length", "12")
    assert result.exit_code == 0, result.output
    assert "BartForConditionalGeneration, 2 x 20 tokens" in result.stdout
    assert "encoder Full() in 1 layers; decoder Causal() in 1 layers; cross Full() in 1 layers" in result.stdout


def test_a_broken_rule_ends_with_status_1(audit, config):
    result = audit(config, "--rule", "causal & window(3, 0)", "--length", "20", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["schema"] == "saccade.audit/1"
    assert told["versions"].keys() == {"saccade", "torch", "transformers", "python"}
    assert not told["ok"]
    claim = next(one for one in told["claims"] if one["name"] == "by layer")
    assert claim["verdict"] == "broken"
    (item, row), (other, key) = claim["finding"]["row"], claim["finding"]["key"]
    assert item == other
    assert row - key > 3
    assert claim["finding"]["module"].startswith("model.layers.")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["nowhere"], "MODEL must be all-MiniLM-L6-v2, chinese-encoder, small-decoder, a folder with config.json"),
        (["small-decoder", "--rule", "causal & windo(3)"], "--rule: parse: text must name known masks"),
        (["small-decoder", "--rule", "causal \x1b[2J"], "--rule: parse: text must"),
        (["small-decoder", "--packed", "3;4"], "--packed must be text lengths, as in 20,28; got 3;4."),
        (["small-decoder", "--length", "1"], "Invalid value for '--length'"),
        (["small-decoder", "--tests", "0"], "Invalid value for '--tests'"),
        (["small-decoder", "--picture", "--length", "65"], "--picture must have at most 64 tokens; got 65"),
        (["small-decoder", "--out", "a.png", "--length", "65"], "--out must have at most 64 tokens; got 65"),
        (["small-decoder", "--json", "--out", "a.png"], "--out must be left out if --json is given"),
        (["small-decoder", "--out", "nowhere/a.png"], "--out must be a picture file that can be written; got nowhere/"),
        (["small-decoder", "--json", "--script"], "--script must be left out if --json is given"),
        (["small-decoder", "--packed", "3,4", "--length", "9"], "--length must be left out if --packed is given"),
    ],
)
def test_wrong_arguments_are_refused(audit, arguments, sentence):
    result = audit(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert "\x1b" not in result.output


@pytest.mark.ci
def test_ways_of_running_are_compared(audit, config):
    result = audit(config, "--packed", "7,9", "--padded", "--cache", "--against", "eager", "--json")
    told = {one["name"]: one["verdict"] for one in json.loads(result.stdout)["claims"]}
    assert result.exit_code == 1  # beside a mask of ones packed texts see one another
    broken = ["packed, with a cache", "packed, with a mask of ones"]
    assert [name for name, verdict in told.items() if verdict == "broken"] == broken
    assert {"padded at the left", "padded at the right", "packed"} <= told.keys()
    assert len(told) > 12


def test_a_file_that_is_no_configuration_fails(audit, tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1, 2", encoding="utf-8")
    result = audit(str(path))
    assert result.exit_code == 1
    assert "MODEL must be a configuration that transformers supports" in result.output


def test_a_text_that_is_too_long_for_the_model_fails(audit, tmp_path):
    GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=16).save_pretrained(tmp_path)
    result = audit(str(tmp_path / "config.json"), "--length", "20")
    assert result.exit_code == 1
    assert "the model must run on 20 tokens; it raised IndexError: index out of range" in result.output


def test_a_right_model_has_no_script(audit, config):
    assert "no script: nothing is broken" in audit(config, "--length", "12", "--script").stdout
    result = audit(config, "--length", "12", "--script", "--rule", "causal & window(1, 0)")
    assert result.stdout.splitlines()[-1].startswith('print("output ')


@pytest.mark.ci
@pytest.mark.parametrize("name, start", [("seen.png", b"\x89PNG"), ("seen.svg", b"<?xml")])
def test_the_picture_is_written_as_a_figure(audit, config, tmp_path, monkeypatch, name, start):
    monkeypatch.chdir(tmp_path)
    result = audit(config, "--length", "12", "--rule", "causal & window(1, 0)", "--out", name)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == f"wrote {name}"
    assert (tmp_path / name).read_bytes().startswith(start)
    assert sorted(os.listdir(tmp_path)) == ["config.json", name]


def test_figures_that_cannot_be_drawn_fail(audit, monkeypatch):
    class Detached(models.Decoder):
        def forward(self, *args, **options):
            return super().forward(*args, **options).detach()

    decoder = models.small_decoder()
    decoder.__class__ = Detached
    monkeypatch.setitem(loading.NAMED, "small-decoder", lambda: decoder)
    result = audit("small-decoder", "--length", "12", "--picture")
    assert result.exit_code == 1
    assert "the model must have outputs with gradients to be drawn; got none" in result.output


@pytest.mark.slow
def test_strictly_what_was_not_answered_ends_with_status_1(audit):
    asked = ["small-decoder", "--packed", "5,7"]
    result = audit(*asked)
    assert result.exit_code == 0
    assert re.search("packed, with a mask of ones +not answered", result.stdout)
    assert audit(*asked, "--strict").exit_code == 1
    assert audit("small-decoder", "--length", "12", "--strict").exit_code == 0
