"""Input from outside (names, tokens, files) is shown as plain text, and broken files give a one-sentence message."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from typer.testing import CliRunner, Result

from saccade import viz
from saccade.cli.app import app
from saccade.models import Decoder, DecoderConfig
from saccade.viz import fonts

ORDERS = "\x1b]0;title\x07\x1b[31m\u202e\u2066\x9b1m\x08\r"  # colours, a window's title, right to left, back
NAME = f"a model{ORDERS}"
COMMANDS = {
    "look": ("look",),
    "look at one head": ("look", "--layer", "0", "--head", "1"),
    "statistics": ("look", "--stats", "json"),
    "statistics as lines": ("look", "--stats", "csv"),
    "compare": ("compare", "--out", "error.png"),
    "generate": ("generate", "--max-new-tokens", "30"),
    "generate with a trace": ("generate", "--max-new-tokens", "5", "--trace"),
    "generate with beams": ("generate", "--max-new-tokens", "5", "--beams", "2"),
}


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, also = f"<begin{ORDERS}>", f"<also{ORDERS}>"
    tokenizer.add_special_tokens([AddedToken(begin, special=True), AddedToken(also, special=True)])
    template = f"{begin} {also} $A"
    tokenizer.post_processor = processors.TemplateProcessing(template, None, [(begin, 256), (also, 257)])
    return tokenizer


def _config() -> DecoderConfig:
    return DecoderConfig(vocab_size=258, max_len=64, embed_dim=8, num_heads=2, num_layers=2, feed_forward_dim=8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fonts, "_warned", False)
    torch.manual_seed(0)
    model = Decoder(_config(), _tokenizer()).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    model.save_pretrained(tmp_path / NAME)
    return tmp_path / NAME


def _run(name: str) -> Result:
    command, *options = COMMANDS[name]
    return CliRunner().invoke(app, [command, f"the{ORDERS} cat", "sat", "--model", NAME, *options])


def _orders(text: str) -> list[str]:
    return [character for character in text if not (character.isprintable() or character in "\n\t")]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::saccade.models.UntrainedLengthWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_no_text_is_an_order_to_the_terminal(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    save = viz.save

    def saved(figure, path):
        written.extend(text.get_text() for text in figure.findobj(lambda part: hasattr(part, "get_text")))
        return save(figure, path)

    monkeypatch.setattr(viz, "save", saved)
    result = _run(name)
    assert result.exit_code == 0, result.output
    assert _orders(result.stdout) == []
    assert _orders(result.stderr) == []
    assert _orders("".join(written)) == []
    assert bool(written) == (name.startswith("look") or name == "compare")


@pytest.mark.ci
def test_special_tokens_and_folders_are_escaped(folder: Path) -> None:
    result = _run("look")
    assert r"of a model\x1b]0;title\x07\x1b[31m\u202e\u2066\x9b1m\x08\r, the" in result.stdout.replace("\n", " ")
    assert r"<begin\x1b]0;title" in result.stdout


BREAKS = {
    "brackets": lambda folder: (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000),
    "brackets inside": lambda folder: (folder / "config.json").write_text(
        '{"model_type": ' + "[" * 100_000 + "]" * 100_000 + "}"
    ),
    "a number": lambda folder: (folder / "config.json").write_text('{"model_type": ' + "9" * 5000 + "}"),
    "no text": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe{"),
    "a kind": lambda folder: _told(folder, model_type=f"bert{ORDERS}"),
    "a setting": lambda folder: _told(folder, hidden_act=f"silu{ORDERS}"),
    "NaN": lambda folder: _weights(folder, **{"model.norm.weight": torch.full((8,), torch.nan)}),
    "inf": lambda folder: _weights(folder, **{"model.norm.weight": torch.full((8,), torch.inf)}),
    "layers": lambda folder: _told(folder, num_hidden_layers=20_000),
    "layers of others": lambda folder: _told(folder, num_hidden_layers=20_000, model_type="gpt_neox"),
    "a tokenizer": lambda folder: (folder / "tokenizer.json").write_text("[" * 100_000),
}


def _told(folder: Path, **words: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | words))


def _weights(folder: Path, **weights: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | weights, path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # other people's code warns of what it finds
@pytest.mark.parametrize("name", ["look", "statistics", "compare", "generate"])
@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_model_is_a_sentence(broken: str, name: str, folder: Path) -> None:
    BREAKS[broken](folder)
    result = _run(name)
    assert isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == 1
    assert result.stderr.startswith(f"saccade {COMMANDS[name][0]}: ")
    assert result.stdout == ""
    assert _orders(result.stderr) == []
    assert r"\n" not in result.stderr
    if broken in ("NaN", "inf"):
        assert "--model must have finite weights; got NaN or inf in " in result.stderr


def test_a_model_of_which_only_the_text_makes_nan_is_a_sentence(folder: Path) -> None:
    _weights(folder, **{"model.norm.weight": torch.ones(8)})
    large = {f"model.layers.0.self_attn.{name}_proj.weight": torch.full((8, 8), 3e38) for name in "qk"}
    _weights(folder, **large)
    result = _run("look")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "saccade look: --model must give finite numbers for TEXT; got NaN in the attention of la"
    )


def test_a_sentence_of_several_lines_has_several_lines(folder: Path) -> None:
    _weights(folder, **{f"more{ORDERS}": torch.zeros(1)})
    result = _run("generate")
    assert _orders(result.stderr) == []
    lines = result.stderr.splitlines()
    assert lines[0].startswith("saccade generate: Decoder.from_pretrained: model.safetensors must have the weights")
    assert lines[1].startswith(r"    unexpected  model.more\x1b]0;title")
