"""Bach's chorales from scores in MusicXML: four voices on a grid of eighths, split by melody."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zipfile
from collections.abc import Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

import numpy as np
import torch
from torch import Tensor

import fetching

VOICES = ("Soprano", "Alto", "Tenor", "Bass")
OF_STEP = dict(zip("CDEFGAB", (0, 2, 4, 5, 7, 9, 11), strict=True))
BEATS = 12  # eighths in the longest bar
LOW, HIGH = 31, 87  # MIDI's numbers of the lowest bass and the highest soprano in any key
SYMBOLS = HIGH - LOW + 3  # a pitch starts, continues, or is a rest
ON, REST = SYMBOLS - 2, SYMBOLS - 1
BAR = 8 * len(VOICES)  # symbols in a bar of four quarters


@dataclasses.dataclass(frozen=True, eq=False)
class Chorale:
    """Four voices, eighth by eighth.

    Attributes:
        name: name of the file: ``bwv66.6``.
        pitch: MIDI number of each voice, 0 for a rest: int ``[steps, 4]``.
        starts: whether a note starts or continues: bool ``[steps, 4]``.
        beat: index of each step in its bar: int ``[steps]``.
    """

    name: str
    pitch: np.ndarray
    starts: np.ndarray
    beat: np.ndarray

    def __len__(self) -> int:
        return len(self.beat)

    @property
    def num_notes(self) -> int:
        """Return the number of notes that start."""
        return int((self.starts & (self.pitch > 0)).sum())


class Note(NamedTuple):
    """A pitch, its start and end in eighths, and whether it continues the note before."""

    pitch: int
    start: Fraction
    end: Fraction
    is_tied: bool


def load(wheel: Path | None = None) -> list[Chorale]:
    """Load all chorales with four monophonic voices, by name."""
    found = []
    with zipfile.ZipFile(wheel or fetching.fetched(fetching.MUSIC21)) as archive:
        for name in sorted(archive.namelist()):
            folder, _, file = name.rpartition("/")
            if folder.endswith("corpus/bach") and file.endswith(".mxl"):
                chorale = read(file.removesuffix(".mxl"), _score(archive.read(name)))
                if chorale is not None:
                    found.append(chorale)
    return found


def _score(packed: bytes) -> ET.Element:
    """Read the score of an .mxl file, whose container names it."""
    with zipfile.ZipFile(BytesIO(packed)) as archive:
        container = ET.fromstring(archive.read("META-INF/container.xml"))
        path = next(own.attrib["full-path"] for own in container.iter() if own.tag.endswith("rootfile"))
        return ET.fromstring(archive.read(path))


def read(name: str, score: ET.Element) -> Chorale | None:
    """Read the first part of each voice; None if one is missing, divides, is longer, or exceeds the range of voices.

    A note that starts between two eighths counts from the second if it still sounds then (1.3 % of all notes).
    """
    named = {part.get("id"): (part.findtext("part-name") or "?").split()[0] for part in score.iter("score-part")}
    parts = {named[part.get("id")]: part for part in reversed(score.findall("part"))}
    if not set(VOICES) <= set(parts):
        return None
    voices, bars = [], []
    for voice in VOICES:
        if parts[voice].find("measure/backup") is not None or parts[voice].find("measure/note/chord") is not None:
            return None
        notes, own = _notes(parts[voice])
        voices.append(notes)
        bars.append(own)
    if any(own[-1] != bars[0][-1] for own in bars) or bars[0][-1][1].denominator != 1:
        return None
    steps = int(bars[0][-1][1])
    pitch, starts = np.zeros((steps, 4), np.int64), np.zeros((steps, 4), bool)
    for column, notes in enumerate(voices):
        for note in notes:
            first, last = math.ceil(note.start), math.ceil(note.end)
            pitch[first:last, column] = note.pitch
            starts[first : min(first + 1, last), column] = not note.is_tied
        # Rests start as well.
        silent = pitch[:, column] == 0
        starts[silent & ~np.r_[False, silent[:-1]], column] = True
    sung = pitch[pitch > 0]
    # It must fit into the range in other keys as well.
    if not len(sung) or sung.min() - 5 < LOW or sung.max() + 6 > HIGH:
        return None
    return Chorale(name, pitch, starts, _beats(bars[0], steps))


def _notes(part: ET.Element) -> tuple[list[Note], list[tuple[Fraction, Fraction, Fraction]]]:
    """Return the notes of a part, and for each bar its start, its end, and its length in this metre."""
    now, divisions, full = Fraction(0), 1, Fraction(8)
    notes, bars = [], []
    for measure in part.iter("measure"):
        start = now
        for event in measure:
            if event.tag == "attributes":
                divisions = int(event.findtext("divisions") or divisions)
                if event.find("time") is not None:
                    full = Fraction(int(event.findtext("time/beats")) * 8, int(event.findtext("time/beat-type")))
            elif event.tag in ("note", "forward") and event.find("grace") is None:
                end = now + Fraction(int(event.findtext("duration")) * 2, divisions)
                if event.find("pitch") is not None:
                    is_tied = any(tie.get("type") == "stop" for tie in event.iter("tie"))
                    notes.append(Note(_number(event.find("pitch")), now, end, is_tied))
                now = end
        bars.append((start, now, full))
    return notes, bars


def _number(pitch: ET.Element) -> int:
    """Return the MIDI number of a pitch: 60 is middle C."""
    octave, alter = int(pitch.findtext("octave")), float(pitch.findtext("alter") or 0)
    return 12 * (octave + 1) + OF_STEP[pitch.findtext("step")] + int(alter)


def _beats(bars: Sequence[tuple[Fraction, Fraction, Fraction]], steps: int) -> np.ndarray:
    """Return the position of each step in its bar: an upbeat ends a bar, and a bar split by a repeat continues."""
    beat, goes_on = np.zeros(steps, np.int64), Fraction(0)
    for index, (start, end, full) in enumerate(bars):
        first = Fraction(0) if end - start >= full else full - (end - start) if index == 0 else goes_on
        goes_on = (first + end - start) % full
        for step in range(math.ceil(start), math.ceil(end)):
            beat[step] = int(first + step - start) % 12
    return beat


# --- as a text -------------------------------------------------------------------------------------------------------


class Text(NamedTuple):
    """A chorale as a sequence of symbols from soprano to bass, with the context of each.

    Attributes:
        known: the pitch that sounds in the voice before (0 a rest, 1 is `LOW`), whether it started in this step, the
            voice and the place in the bar that are due, and the pitch that this voice had: int ``[4 * steps, 4]``.
        symbols: what the voice does: int ``[4 * steps]``, below `SYMBOLS`.
    """

    known: Tensor
    symbols: Tensor


def as_text(chorale: Chorale, key: int = 0) -> Text:
    """Return the symbols of a chorale that is transposed by some semitones."""
    pitch = np.where(chorale.pitch > 0, chorale.pitch - LOW + 1 + key, 0)
    said = np.where(chorale.starts, np.where(pitch > 0, pitch - 1, REST), ON).reshape(-1)
    voices = np.arange(len(VOICES))
    place = (chorale.beat[:, None] + BEATS * voices).reshape(-1)
    # One symbol before the first, and a whole step.
    last, started = (np.r_[0, own.reshape(-1)[:-1]] for own in (pitch, chorale.starts))
    had = np.r_[[0] * len(VOICES), pitch.reshape(-1)[: -len(VOICES)]]
    return Text(torch.from_numpy(np.stack([last, started, place, had], 1)), torch.from_numpy(said))


# --- a split without twins -------------------------------------------------------------------------------------------

TURN = 6  # intervals
SHARED = 0.2


def turns(chorale: Chorale) -> set[tuple[int, ...]]:
    """Return all runs of six intervals of the soprano, independent of key and rhythm."""
    sung = chorale.pitch[chorale.starts[:, 0] & (chorale.pitch[:, 0] > 0), 0]
    steps = np.diff(sung).tolist()
    return {tuple(steps[i : i + TURN]) for i in range(len(steps) - TURN + 1)}


def shared(one: set[tuple[int, ...]], other: set[tuple[int, ...]]) -> float:
    """Return the share of the shorter melody's runs that the other melody has too."""
    return len(one & other) / max(min(len(one), len(other)), 1)


def melodies(chorales: Sequence[Chorale]) -> list[int]:
    """Return a number for each chorale, equal for all that are connected by shared melodies."""
    own = list(map(turns, chorales))
    number = list(range(len(chorales)))
    for i, j in itertools.combinations(range(len(chorales)), 2):
        if number[i] != number[j] and shared(own[i], own[j]) >= SHARED:
            old, new = number[j], number[i]
            number = [new if n == old else n for n in number]
    return number


def split(chorales: Sequence[Chorale], test: int, validation: int) -> dict[str, list[Chorale]]:
    """Split chorales by melody into parts for testing, for choosing settings and for training.

    Frequent melodies are in the training part: none of the smaller parts has more than a sixth of one melody.
    """
    families: dict[int, list[Chorale]] = {}
    for number, chorale in zip(melodies(chorales), chorales, strict=True):
        families.setdefault(number, []).append(chorale)
    in_order = list(families.values())
    parts: dict[str, list[Chorale]] = {"test": [], "validation": [], "train": []}
    wanted = {"test": test, "validation": validation}
    for index in np.random.default_rng(0).permutation(len(in_order)):
        own = in_order[index]
        fits = (part for part, n in wanted.items() if len(own) <= n / 6 and len(parts[part]) + len(own) <= n)
        parts[next(fits, "train")] += own
    return parts
