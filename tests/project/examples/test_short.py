"""The short scripts run as they are, in at most 30 lines each, and show what they say."""

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "short"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def said(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    monkeypatch.chdir(folder)
    runpy.run_path(str(FOLDER / f"{name}.py"))
    return capsys.readouterr().out


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_they_are_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 30


@pytest.mark.parametrize("name", ["padded_classifier", "packed_training"])
def test_they_learn(name, capsys, monkeypatch, tmp_path):
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said(name, capsys, monkeypatch, tmp_path))]
    assert losses[-1] < 0.1 < losses[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, layers", [("torch_transformer", 6), ("gpt2_window", 2)])
def test_losses_are_those_of_before(name, layers, capsys, monkeypatch, tmp_path):
    text = said(name, capsys, monkeypatch, tmp_path)
    before, after = re.search(r"loss before ([\d.]+), after ([\d.]+)", text).groups()
    assert before == after
    assert len(re.findall(r"self_attn|multihead_attn|\.attn", text)) == layers


def test_decoding_is_the_full_run(capsys, monkeypatch, tmp_path):
    assert len(said("own_decoder", capsys, monkeypatch, tmp_path).split(",")) == 43


@pytest.mark.slow
def test_a_map_of_thousands_of_tokens_is_drawn(capsys, monkeypatch, tmp_path):
    text = said("map_of_a_text", capsys, monkeypatch, tmp_path)
    assert "shape=[1, 5, 8000, 8000]" in text
    assert len(re.findall(r"token [\d,]+, .*: \d+ looks", text)) == 4
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_own_mixers_are_trained_beside_ours(capsys, monkeypatch, tmp_path):
    found = dict(re.findall(r"(\w+): (\d+)% right", said("own_mixer", capsys, monkeypatch, tmp_path)))
    assert int(found["mine"]) > 90
    assert int(found["full"]) > 90
    assert int(found["window"]) < 50
