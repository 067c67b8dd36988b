"""Voices as a MIDI file."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

TICKS = 480  # ticks per quarter


def as_midi(pitch: np.ndarray, starts: np.ndarray, *, tempo: int = 80, program: int = 19) -> bytes:
    """Return a file with one track for each voice.

    Args:
        pitch: what sounds in each eighth, 0 for nothing: int ``[steps, voices]``.
        starts: whether it starts there: bool ``[steps, voices]``.
        tempo: quarters in a minute.
        program: General MIDI's number of the instrument, from 0; 19 is a church organ.
    """
    first = [(0, b"\xff\x51\x03" + round(60_000_000 / tempo).to_bytes(3, "big"))]
    tracks = [
        first,
        *(_events(*own, channel, program) for channel, own in enumerate(zip(pitch.T, starts.T, strict=True))),
    ]
    return b"MThd" + struct.pack(">IHHH", 6, 1, len(tracks), TICKS) + b"".join(map(_track, tracks))


def _events(pitch: np.ndarray, starts: np.ndarray, channel: int, program: int) -> list[tuple[int, bytes]]:
    """Return the events of a voice, with their ticks."""
    events, sounding = [(0, bytes([0xC0 + channel, program]))], 0
    for step, (own, is_new) in enumerate([*zip(pitch.tolist(), starts.tolist(), strict=True), (0, True)]):
        tick = step * TICKS // 2
        if sounding and (is_new or own != sounding):
            events.append((tick, bytes([0x80 + channel, sounding, 0])))
        if own and (is_new or own != sounding):
            events.append((tick, bytes([0x90 + channel, own, 80])))
        sounding = own
    return events


def _track(events: Sequence[tuple[int, bytes]]) -> bytes:
    """Return a track: each event after its delay, then the end."""
    data, now = b"", 0
    for tick, event in [*events, (events[-1][0], b"\xff\x2f\x00")]:
        data, now = data + _length(tick - now) + event, tick
    return b"MTrk" + struct.pack(">I", len(data)) + data


def _length(ticks: int) -> bytes:
    """Return a variable-length number: seven bits per byte, the highest first; all but the last set the eighth bit."""
    own = [ticks & 0x7F]
    while ticks := ticks >> 7:
        own.append(ticks & 0x7F | 0x80)
    return bytes(reversed(own))
