"""Scores are read as one reads them by hand, melodies are kept apart, and chains count right."""

import collections
import itertools
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from tests.project.examples.made_scores import UPBEAT, VOICES, score_of, write_archive

PATH = Path(__file__).parents[3] / "examples" / "play_chorales.py"


@pytest.fixture
def chorales(example):
    return example.chorales


# --- scores ----------------------------------------------------------------------------------------------------------


def test_a_score_is_read_as_by_hand(chorales):
    found = chorales.read("own", ET.fromstring(score_of(UPBEAT)))
    assert found.pitch.T.tolist() == [
        [73, 71, 69, 69, 71, 71, 74, 74, 74, 74],  # the sixteenth before the fourth quarter is left out
        [64, 64, *[66] * 8],
        [0, 0, 0, 0, *[57] * 6],
        [51, 51, 51, 51, 51, 51, 48, 48, 48, 48],
    ]
    assert [np.flatnonzero(own).tolist() for own in found.starts.T] == [[0, 1, 2, 4, 6], [0, 2], [0, 4], [0, 6]]
    assert found.beat.tolist() == [6, 7, *range(8)]
    assert (len(found), found.num_notes, found.name) == (10, 10, "own")


def test_a_bar_that_a_repeat_divides_goes_on(chorales):
    bars = [[("C", 0, 4, 12)], [("C", 0, 4, 8)], [("C", 0, 4, 4)], [("C", 0, 4, 12)]]
    found = chorales.read("own", ET.fromstring(score_of(dict.fromkeys(VOICES, bars), (3, 4))))
    assert found.beat.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]


def test_scores_without_four_voices_are_left_out(chorales, tmp_path):
    missing = {voice: UPBEAT[voice] for voice in VOICES[:3]}
    divided = UPBEAT | {"Alto": [[("E", 0, 4, 4)], ["<backup><duration>0</duration></backup>", ("F", 1, 4, 16)]]}
    longer = UPBEAT | {"Alto": [[("E", 0, 4, 4)], [("F", 1, 4, 18)]]}
    higher = UPBEAT | {"Alto": [[("C", 0, 6, 20)], []]}
    more = {"Violin": UPBEAT["Bass"], **UPBEAT}
    scores = {"missing": missing, "divided": divided, "longer": longer, "higher": higher, "more": more, "own": UPBEAT}
    path = write_archive(tmp_path / "wheel", {name: score_of(parts) for name, parts in scores.items()})
    found = chorales.load(path)
    assert [own.name for own in found] == ["more", "own"]
    assert (found[0].pitch == found[1].pitch).all()


# --- texts -----------------------------------------------------------------------------------------------------------


def test_a_text_says_what_is_done_and_what_is_known(chorales):
    own = chorales.read("own", ET.fromstring(score_of(UPBEAT)))
    for key in (0, -5, 6):
        known, symbols = (part.numpy() for part in chorales.as_text(own, key))
        sounding = [0, 0, 0, 0]
        for index, symbol in enumerate(symbols):
            step, voice = divmod(index, 4)
            said_step, said_voice = divmod(index - 1, 4)
            assert known[index, 2] == own.beat[step] + 12 * voice
            assert known[index, 3] == (sounding[voice] and sounding[voice] + key - 30)
            if index:
                before = own.pitch[said_step, said_voice]
                assert known[index, 0] == (before and before + key - 30)
                assert known[index, 1] == own.starts[said_step, said_voice]
            if symbol == chorales.REST:
                sounding[voice] = 0
            elif symbol != chorales.ON:
                sounding[voice] = symbol + 31 - key
            assert sounding[voice] == own.pitch[step, voice]
            assert (symbol != chorales.ON) == own.starts[step, voice]


def test_no_melody_is_on_two_sides(chorales):
    rng = np.random.default_rng(0)
    melodies = [rng.integers(-4, 5, 30) for _ in range(24)]
    songs = []
    for index, melody in enumerate([*melodies, *melodies[:12]]):  # twelve have a twin, in another key and slower
        line = np.repeat(70 + index % 5 + np.r_[0, np.cumsum(melody)], 1 + index // 24)
        starts = np.r_[True, np.diff(np.arange(len(line)) // (1 + index // 24)) > 0]
        pitch = np.stack([line, *rng.integers(40, 70, (3, len(line)))], 1)
        songs.append(chorales.Chorale(str(index), pitch, np.stack([starts] * 4, 1), np.arange(len(line)) % 8))
    numbers = chorales.melodies(songs)
    assert numbers[24:] == numbers[:12]
    assert len(set(numbers)) == 24
    parts = chorales.split(songs, 12, 6)
    assert sorted(int(own.name) for part in parts.values() for own in part) == list(range(36))
    assert (len(parts["test"]), len(parts["validation"])) == (12, 6)
    sides = [{int(own.name) % 24 for own in part} for part in parts.values()]
    assert not any(one & other for one, other in itertools.combinations(sides, 2))
    for one, other in itertools.combinations(parts.values(), 2):
        for a, b in itertools.product(one, other):
            assert chorales.shared(chorales.turns(a), chorales.turns(b)) < 0.2


# --- chains ----------------------------------------------------------------------------------------------------------


def test_a_chain_mixes_its_orders_as_written(example):
    rng = np.random.default_rng(0)
    contexts, symbols = rng.integers(3, size=(300, 3)), rng.integers(4, size=300)
    chain = example.markov.Markov(contexts[:200], symbols[:200], base=5, num_symbols=4, first=1)
    counts = collections.Counter()
    for context, symbol in zip(contexts[:200].tolist(), symbols[:200].tolist(), strict=True):
        counts.update((tuple(context[:order]), symbol) for order in range(1, 4))

    def likely(context, symbol, order, strength):
        if order == 0:
            return 0.25
        seen = [counts[tuple(context[:order]), other] for other in range(4)]
        mixed = strength * sum(own > 0 for own in seen)
        shorter = likely(context, symbol, order - 1, strength)
        return (seen[symbol] + mixed * shorter) / (sum(seen) + mixed) if sum(seen) else shorter

    asked = np.concatenate([contexts[200:], np.full((1, 3), 4)])  # the last was never seen
    every = []
    for symbol in range(4):
        found = chain.probabilities(asked, np.full(101, symbol), 2.0)
        wanted = [[likely(own, symbol, order, 2.0) for own in asked.tolist()] for order in (1, 2, 3)]
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        every.append(found)
    np.testing.assert_allclose(sum(every), 1.0, rtol=1e-12)


def test_a_context_holds_what_sounded_so_long_ago(example, chorales):
    own = chorales.read("own", ET.fromstring(score_of(UPBEAT)))
    flat = np.where(own.pitch > 0, own.pitch - 30, 0).reshape(-1)
    found = example.markov.contexts(chorales.as_text(own), (4, 1, 6))
    assert found.shape == (40, 4)
    for index, row in enumerate(found):
        assert row[0] == own.beat[index // 4] + 12 * (index % 4)
        assert row[1:].tolist() == [flat[index - back] if index >= back else 0 for back in (4, 1, 6)]
