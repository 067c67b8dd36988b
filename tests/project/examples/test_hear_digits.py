"""The example hears what an independent ear hears, knows nobody of the test, reads right, and learns."""

import dataclasses
import itertools
import json
import struct
import types
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "hear_digits.py"
NAMES = ("attention", "convolutions", "line")


@pytest.fixture
def sounds(example):
    return example.spoken_digits


def _said(rng, digits, rate=11025, speed=1.0):
    """Every digit is two tones at once, as on a telephone, with a pause after each."""
    time = np.arange(int(0.12 * rate / speed)) / rate
    parts = []
    for digit in map(int, digits):
        low, high = 300 * 1.25 ** (digit % 4), 1200 * 1.3 ** (digit // 4)
        parts += [np.sin(2 * np.pi * low * time) + np.sin(2 * np.pi * high * time), np.zeros(len(time) // 2)]
    return torch.from_numpy(8000 * np.concatenate(parts) * rng.uniform(0.5, 1)).short()


@pytest.fixture
def telephone(sounds, tmp_path):
    """A file of utterances that are easily told apart."""
    rng, parts = np.random.default_rng(0), {}
    for part, count in (("train", 200), ("validation", 20), ("test", 40)):
        digits = ["".join(map(str, rng.integers(10, size=3))) for _ in range(count)]
        waves = [_said(rng, own, speed=rng.uniform(0.8, 1.25)) for own in digits]
        parts[part] = sounds.Utterances(waves, digits, ["telephone"] * count)
    path = tmp_path / "telephone.safetensors"
    sounds.keep(path, parts)
    return path


# --- who speaks ------------------------------------------------------------------------------------------------------


def test_no_test_speaker_is_in_training(sounds):
    heard, told, measured = (sounds.SPEAKERS[part] for part in ("train", "validation", "test"))
    names = [[name.lower() for name in speakers.variants] for speakers in (heard, told, measured)]
    assert not set(names[0]) & set(names[2])
    assert not set(names[0]) & set(names[1])
    assert not set(names[1]) & set(names[2])
    # iven and iven3 are one person; m1 and m2 are not.
    people = [{name.rstrip("0123456789") for name in own if len(name) > 2} for own in names]
    assert not people[0] & people[1] | people[0] & people[2] | people[1] & people[2]
    for own in (told, measured):
        for mine, theirs in ((own.speeds, heard.speeds), (own.pitches, heard.pitches)):
            assert all(low > last or high < first for low, high in mine for first, last in theirs)
    assert sum(map(len, names)) == 64


def test_requests_are_the_same_each_time_and_of_their_part(sounds):
    wanted = sounds.requests("test", 200)
    assert wanted == sounds.requests("test", 200)
    own = sounds.SPEAKERS["test"]
    for request in wanted:
        language, _, variant = request.voice.partition("+")
        assert language in sounds.LANGUAGES
        assert variant in own.variants
        assert any(low <= request.speed <= high for low, high in own.speeds)
        assert any(low <= request.pitch <= high for low, high in own.pitches)
        assert 3 <= len(request.digits) <= 5
    assert {digit for request in wanted for digit in request.digits} == set("0123456789")


def test_a_sound_comes_out_of_a_pipe_at_its_rate(sounds, monkeypatch):
    asked = []
    tone = np.round(5000 * np.sin(2 * np.pi * 440 * np.arange(2204) / 22050)).astype("<i2")

    def run(command, **_):
        asked.append(command)
        # As espeak-ng writes to a pipe: it does not know yet how long it will be.
        head = (
            b"RIFF"
            + struct.pack("<I", 0x7FFFF024)
            + b"WAVEfmt "
            + struct.pack("<IHHIIHH", 16, 1, 1, 22050, 44100, 2, 16)
        )
        return types.SimpleNamespace(stdout=head + b"data" + struct.pack("<I", 0x7FFFF000) + tone.tobytes())

    monkeypatch.setattr(sounds.subprocess, "run", run)
    found = sounds.say(sounds.Request("307", "de+m3", 150, 40))
    assert asked == [["espeak-ng", "-v", "de+m3", "-s", "150", "-p", "40", "--stdout", "3 0 7"]]
    wanted = 5000 * np.sin(2 * np.pi * 440 * np.arange(1102) / 11025)
    assert found.dtype == torch.int16
    # At its ends a tone that stops rings.
    torch.testing.assert_close(found[50:1052].double(), torch.from_numpy(wanted[50:1052]), atol=60.0, rtol=0.0)


def test_another_rate_is_that_of_scipy(sounds):
    signal = pytest.importorskip("scipy.signal")
    spectrum = np.fft.rfft(np.random.default_rng(0).integers(-3000, 3000, 2000))
    spectrum[500] = 0  # the very edge of what is kept
    wave = torch.from_numpy(np.fft.irfft(spectrum).round()).short()
    wanted = signal.resample(wave.double().numpy(), 1000)
    torch.testing.assert_close(sounds.at_rate(wave, 22050).double(), torch.from_numpy(wanted), atol=1.0, rtol=0.0)


def test_missing_files_are_named(sounds, monkeypatch, tmp_path):
    monkeypatch.setattr(sounds.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="apt-get install espeak-ng"):
        sounds.spoken({"train": 1}, tmp_path)
    monkeypatch.setattr(sounds.shutil, "which", lambda name: name)
    listed = " 5  variant         --/M      Adam               !v/adam              \n"
    monkeypatch.setattr(sounds.subprocess, "run", lambda *_, **__: types.SimpleNamespace(stdout=listed))
    with pytest.raises(SystemExit, match=r"lacks the voices Alex, Alicia.*m1"):
        sounds.spoken({"train": 1}, tmp_path)


def test_stored_data_is_restored(sounds, telephone):
    parts = sounds.kept(telephone)
    assert {part: len(own.waves) for part, own in parts.items()} == {"train": 200, "validation": 20, "test": 40}
    again = telephone.with_name("again")
    sounds.keep(again, parts)
    for part, own in sounds.kept(again).items():
        assert (own.digits, own.voices) == (parts[part].digits, parts[part].voices)
        assert all(map(torch.equal, own.waves, parts[part].waves))


# --- what is heard ---------------------------------------------------------------------------------------------------


def test_a_spectrogram_is_what_numpy_makes_of_each_window(sounds):
    wave = np.random.default_rng(0).standard_normal(3000)
    padded = np.pad(wave, sounds.WINDOW // 2)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    mels = np.linspace(*(2595 * np.log10(1 + f / 700) for f in (60.0, 5500.0)), 42)
    edges = 700 * (10 ** (mels / 2595) - 1)
    bins = np.arange(129) * 11025 / 256
    triangles = [np.interp(bins, edges[i : i + 3], [0, 1, 0], left=0, right=0) for i in range(40)]
    rows = [np.abs(np.fft.rfft(padded[i : i + 256] * hann)) ** 2 for i in range(0, len(wave) + 1, 110)]
    wanted = np.log(np.maximum(np.array(rows) @ np.array(triangles).T, 1e-6))
    found = sounds.spectrogram(torch.from_numpy(wave)[None].float())[0]
    torch.testing.assert_close(found, torch.from_numpy(wanted).float(), atol=1e-3, rtol=1e-3)


def test_noise_has_the_requested_level_and_loudness_has_no_effect(sounds):
    wave = (1000 * torch.sin(torch.arange(11025) * 0.3)).short()
    both = sounds.Utterances([wave, wave * 8, wave[:6000]], ["1", "1", "1"], [""] * 3)
    quiet, loud = (sounds.heard(both, np.array([i]), np.array([200.0]), np.random.default_rng(0))[0] for i in (0, 1))
    torch.testing.assert_close(quiet, loud, atol=1e-3, rtol=0.0)
    signal, rows = sounds.heard(both, np.array([0, 2]), np.array([200.0, 200.0]), np.random.default_rng(0))
    assert rows == [101, 55]
    torch.testing.assert_close(signal[1, :55].mean(), torch.tensor(0.0), atol=1e-4, rtol=0.0)
    # Outside of the tone there is only noise: 20 decibels are log(100) of its power.
    high = [
        sounds.heard(both, np.array([0]), np.array([level]), np.random.default_rng(0))[0][0, 5:95]
        for level in (0.0, 20.0)
    ]
    contrast = [(own[:, :25].amax(1) - own[:, 30:].mean(1)).mean() for own in high]
    assert contrast[1] - contrast[0] == pytest.approx(np.log(100), abs=0.3)


def test_stretching_plays_faster_and_higher(sounds):
    wave = (1000 * torch.sin(2 * torch.pi * 1000 * torch.arange(11025) / 11025)).short()
    one = sounds.Utterances([wave], ["1"], [""])
    peaks, edges = [], sounds.band_edges()[1:-1]
    for seed in range(5):
        signal, (rows,) = sounds.heard(one, np.array([0]), np.array([40.0]), np.random.default_rng(seed), 1.5)
        peaks.append((rows - 1) * float(edges[signal[0, 10:40].mean(0).argmax()]) / 1000)
    assert np.ptp(peaks) < 15  # as much higher as shorter
    assert np.mean(peaks) == pytest.approx(100, abs=8)


# --- what is written -------------------------------------------------------------------------------------------------


def test_repeated_outputs_are_one_digit(example):
    logits = torch.randn(60, 11, generator=torch.Generator().manual_seed(0))
    logits[:, 10] += 1
    logits[20:24, 3] += 9
    said, where = example.written(logits)
    groups = [list(own) for _, own in itertools.groupby(range(60), key=lambda i: int(logits[i].argmax()))]
    groups = [own for own in groups if int(logits[own[0]].argmax()) != 10]
    assert said == "".join(str(int(logits[own[0]].argmax())) for own in groups)
    assert where == [max(own, key=lambda i: float(logits[i].max())) for own in groups]
    assert "3" in said
    assert len(said) < 40


@pytest.mark.parametrize("name", NAMES)
def test_padding_does_not_change_an_utterance(example, name):
    torch.manual_seed(0)
    module = example.Listener(name, example.QUICK).double().eval()
    signal = torch.randn(2, 90, example.BANDS, dtype=torch.float64)
    both, alone = module(signal, [90, 41]), module(signal[1:, :41], [41])
    assert both.shape == (2, 23, 11)
    assert example.frames([90, 41]) == [23, 11]
    torch.testing.assert_close(both[1:, :11], alone, atol=1e-12, rtol=0.0)


def test_convolutions_have_as_many_parameters(example):
    ours, theirs = (
        sum(own.numel() for own in example.Listener(name, example.Settings()).parameters()) for name in NAMES[:2]
    )
    assert theirs == pytest.approx(ours, rel=0.02)


def test_right_means_every_digit(example, sounds, telephone):
    test = sounds.kept(telephone)["test"]

    def listener(signal, rows):
        logits = torch.zeros(len(rows), max(example.frames(rows)), 11)
        logits[..., 10] = 1
        for own, digits in zip(logits, listener.left[: len(rows)], strict=True):
            own[range(1, 2 * len(digits), 2), list(map(int, digits))] = 2
        del listener.left[: len(rows)]
        return logits

    listener.left = [*test.digits[:39], "1"]
    assert example.right(listener, test, 20.0) == pytest.approx(39 / 40)


# --- the run ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_improves_recognition(example, telephone, monkeypatch, tmp_path):
    settings = dataclasses.replace(example.QUICK, steps=250, batch_size=8, warm_up=20, embed_dim=32, stretch=1.05)
    monkeypatch.setattr(example, "QUICK", settings)
    rows = example.main(["--quick", "--out", str(tmp_path), "--data", str(telephone)])
    assert [row["who"] for row in rows] == list(example.PEERS.values())
    assert rows[0]["20"] > 0.6
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == rows
    assert told["settings"]["steps"] == 250
    assert (tmp_path / "looks.png").read_bytes().startswith(b"\x89PNG")
    # A trained model is not trained again.
    monkeypatch.setattr(example.study.Run, "_learn", None)
    assert example.main(["--quick", "--out", str(tmp_path), "--data", str(telephone)]) == rows


def test_an_utterance_that_is_not_there_is_refused(example, telephone, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--quick", "--out", str(tmp_path), "--data", str(telephone), "--utterance", "40"])
    assert "--utterance must be at least 0 and below 40; got 40." in capsys.readouterr().err
