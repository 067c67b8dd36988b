"""The example says what is likely, never looks ahead, plays, and learns."""

import dataclasses
import json
import math
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from tests.project.examples.made_scores import UPBEAT, score_of, song_of, write_archive

from saccade import models

PATH = Path(__file__).parents[3] / "examples" / "play_chorales.py"


@pytest.fixture
def chorales(example):
    return example.chorales


@pytest.fixture(scope="module")
def player(example):
    torch.manual_seed(0)
    module = example.Player("relative", dataclasses.replace(example.QUICK, num_layers=2)).double().eval()
    for name, own in module.named_parameters():
        if "bias" in name and own.ndim == 3:  # vectors of distances start at 0
            torch.nn.init.normal_(own)
    return module


# --- what plays ------------------------------------------------------------------------------------------------------


def test_a_leap_counts_from_where_the_voice_is(example, player):
    known = torch.stack([torch.randint(size, (2, 9)) for size in (58, 2, 48, 58)], -1)
    known[0, 0, 3] = 0
    with torch.no_grad():
        found, x = player(known), player.body(player.embed(known))
        pitch, leap = player.pitch(x), player.leap(x)
    for item, place in np.ndindex(2, 9):
        had = int(known[item, place, 3])
        for symbol in range(example.SYMBOLS):
            wanted = pitch[item, place, symbol]
            if had and symbol < example.ON:
                wanted = wanted + leap[item, place, 24 + min(max(symbol + 1 - had, -24), 24)]
            assert found[item, place, symbol] == pytest.approx(float(wanted), abs=1e-12)


@pytest.mark.parametrize("name", ["relative", "bag", "gru"])
def test_no_note_sees_later_notes(example, chorales, name):
    torch.manual_seed(0)
    module = example.Player(name, example.QUICK).double().eval()
    known = chorales.as_text(chorales.read("own", ET.fromstring(score_of(UPBEAT)))).known[None]
    other = known.clone()
    other[:, 20:, 0] = 5
    torch.testing.assert_close(module(known)[:, :20], module(other)[:, :20], atol=1e-12, rtol=0.0)
    assert not torch.allclose(module(known)[:, 20:], module(other)[:, 20:])


def test_bits_are_the_logarithm_of_what_is_likely(example, chorales, player):
    own = chorales.read("own", ET.fromstring(score_of(UPBEAT)))
    text, found = chorales.as_text(own), example.bits(player, own)
    likely = player(text.known[None])[0].softmax(-1).tolist()
    wanted = [-math.log2(likely[i][symbol]) for i, symbol in enumerate(text.symbols)]
    np.testing.assert_allclose(found.reshape(-1), wanted, rtol=1e-10)
    row = example.row_of("who", {"0": [found, found], "1": [2 * found, found]}, [own, own])
    assert row["lowest"] == pytest.approx(sum(wanted) / own.num_notes)
    assert row["mean"] == pytest.approx(1.25 * sum(wanted) / own.num_notes)
    assert row["Tenor"] == pytest.approx(1.25 * found[:, 2].sum() / 1)


def test_continuations_are_drawn_from_the_full_run(example, chorales, player):
    own = chorales.read("own", ET.fromstring(score_of(UPBEAT)))
    sampler = models.Sampler(top_k=1)
    played = example.goes_on(player, own, 14, sampler)
    assert (played.pitch[:10] == own.pitch).all()
    assert played.beat[10:].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    text = chorales.as_text(played)
    likeliest = player(text.known[None])[0].argmax(-1)
    assert text.symbols[40:].tolist() == likeliest[40:].tolist()
    start = example.until(own, 3)
    assert (len(start), start.pitch.tolist()) == (3, own.pitch[:3].tolist())


def test_notes_attend_to_earlier_notes(example, chorales, player):
    own = chorales.read("own", ET.fromstring(score_of(UPBEAT)))
    found = example.looks(player, own, 3, 2)
    matrices = player.body.matrices(player.embed(chorales.as_text(own).known[None]))
    heads = torch.cat([matrix.to_dense()[0, :, 14, 1:15] for matrix in matrices]).detach()
    mean, sharpest = found.values()
    np.testing.assert_allclose(mean, heads[4:].mean(0))
    entropies = -(heads * heads.log()).nansum(1)
    np.testing.assert_allclose(sharpest, heads[entropies.argmin()])
    assert mean.shape == (14,)


def test_how_far_back_heads_look_is_counted_from_the_note(example, chorales, player):
    own = chorales.read("own", ET.fromstring(score_of(UPBEAT)))
    found = example.distances(player, own, 5)
    matrices = player.body.matrices(player.embed(chorales.as_text(own).known[None]))
    heads = torch.cat([matrix.to_dense()[0] for matrix in matrices]).detach()
    for back in range(1, 6):  # at its own place stands what was said before a symbol
        rows = [heads[:, index, index + 1 - back] for index in range(5, 40)]
        torch.testing.assert_close(found[:, back - 1], torch.stack(rows).mean(0))


def test_a_midi_file_plays_what_is_written(example, chorales):
    own = chorales.read("own", ET.fromstring(score_of(UPBEAT)))
    data = example.as_midi(own.pitch, own.starts, tempo=100)
    assert data[:14] == b"MThd\x00\x00\x00\x06\x00\x01\x00\x05\x01\xe0"
    heard, place = [], 14
    while place < len(data):
        assert data[place : place + 4] == b"MTrk"
        end = place + 8 + int.from_bytes(data[place + 4 : place + 8], "big")
        place, tick, began = place + 8, 0, {}
        while place < end:
            wait = 0
            while data[place] & 0x80:
                wait, place = (wait << 7) + (data[place] & 0x7F), place + 1
            tick += (wait << 7) + data[place]
            kind = data[place + 1]
            if kind == 0xFF:
                place += 4 + data[place + 3]
            elif kind >> 4 == 0xC:
                place += 3
            else:
                if kind >> 4 == 9:
                    began[data[place + 2]] = tick
                else:
                    heard.append((kind & 15, data[place + 2], began.pop(data[place + 2]) // 240, tick // 240))
                place += 4
        assert not began
    assert int.from_bytes(data[14 + 12 : 14 + 15], "big") == 600_000
    assert heard == [
        *((0, 73, 0, 1), (0, 71, 1, 2), (0, 69, 2, 4), (0, 71, 4, 6), (0, 74, 6, 10)),
        *((1, 64, 0, 2), (1, 66, 2, 10), (2, 57, 4, 10), (3, 51, 0, 6), (3, 48, 6, 10)),
    ]


# --- the run ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_learns_what_comes_again(example, monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    songs = {f"song{i}": score_of(song_of(rng, 2)) for i in range(300)}
    path = write_archive(tmp_path / "wheel", songs)
    settings = dataclasses.replace(
        example.QUICK, steps=400, batch_size=8, embed_dim=32, warm_up=20, test=6, validation=6, learning_rate=1e-2
    )
    monkeypatch.setattr(example, "QUICK", settings)
    rows = example.main(["--quick", "--out", str(tmp_path), "--data", str(path)])
    assert [row["who"] for row in rows[:3]] == list(example.PEERS.values())
    assert len(rows) == 5
    # Half a bar ago is farther than a chain remembers, and a bag does not know where it was.
    assert rows[0]["mean"] < 0.8 * min(row["mean"] for row in rows[1:])
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == rows
    for name in ("looks.png", "distances.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "goes-on.mid").read_bytes().startswith(b"MThd")
