"""Scores as MusicXML, written by hand, in an archive such as the one that is fetched."""

import zipfile
from io import BytesIO

VOICES = ("Soprano", "Alto", "Tenor", "Bass")


def score_of(parts, meter=(4, 4)):
    """MusicXML of ``{voice: bars}``; a bar is a list of ``(step, alter, octave, quarters * 4[, tie])``, or of texts."""
    names = "".join(
        f'<score-part id="P{i}"><part-name>{voice}</part-name></score-part>' for i, voice in enumerate(parts)
    )
    written = ""
    for i, bars in enumerate(parts.values()):
        written += f'<part id="P{i}">'
        for number, bar in enumerate(bars):
            beats = f"<beats>{meter[0]}</beats><beat-type>{meter[1]}</beat-type>"
            head = f"<attributes><divisions>4</divisions><time>{beats}</time></attributes>"
            notes = "".join(own if isinstance(own, str) else _note(*own) for own in bar)
            written += f"<measure>{head if number == 0 else ''}{notes}</measure>"
        written += "</part>"
    return f"<score-partwise><part-list>{names}</part-list>{written}</score-partwise>"


def _note(step, alter, octave, duration, *ties):
    tie = "".join(f'<tie type="{kind}"/>' for kind in ties)
    return (
        f"<note><pitch><step>{step}</step><alter>{alter}</alter><octave>{octave}</octave></pitch>"
        f"<duration>{duration}</duration>{tie}</note>"
    )


REST = "<note><rest/><duration>4</duration></note>"
UPBEAT = {
    "Soprano": [
        [("C", 1, 5, 2), ("B", 0, 4, 2)],
        [("A", 0, 4, 4), ("B", 0, 4, 3), ("C", 0, 5, 1), ("D", 0, 5, 8, "start")],
    ],
    "Alto": [[("E", 0, 4, 4)], [("F", 1, 4, 16)]],
    "Tenor": [[REST], ["<forward><duration>4</duration></forward>", ("A", 0, 3, 12)]],
    "Bass": [[("E", -1, 3, 4, "start")], [("E", -1, 3, 8, "stop"), ("C", 0, 3, 8)]],
}


def song_of(rng, bars):
    """Four voices, each of which does again what it did half a bar before."""
    motifs = [[("CDEFGAB"[rng.integers(7)], 0, octave, 2) for _ in range(4)] * 2 for octave in (4, 4, 3, 3)]
    return {voice: [motif] * bars for voice, motif in zip(VOICES, motifs, strict=True)}


def write_archive(path, scores):
    container = '<container><rootfiles><rootfile full-path="score.xml"/></rootfiles></container>'
    with zipfile.ZipFile(path, "w") as archive:
        for name, score in scores.items():
            packed = BytesIO()
            with zipfile.ZipFile(packed, "w") as inner:
                inner.writestr("META-INF/container.xml", container)
                inner.writestr("score.xml", score)
            archive.writestr(f"music21/corpus/bach/{name}.mxl", packed.getvalue())
        archive.writestr("music21/corpus/haydn/other.mxl", b"not one of Bach's")
    return path
