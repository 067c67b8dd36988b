"""Where measurements of a machine are kept between runs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["MachineFile"]

_VERSION = 1


class MachineFile(NamedTuple):
    """A file of measurements. What is broken, or was measured elsewhere, is measured anew."""

    path: Path

    @classmethod
    def here(cls) -> MachineFile:
        """In the folder for caches: ``$SACCADE_CACHE``, ``$XDG_CACHE_HOME/saccade`` or ``~/.cache/saccade``."""
        own = os.environ.get("SACCADE_CACHE")
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = hashlib.sha256(json.dumps(_told()).encode()).hexdigest()[:16]
        return cls((Path(own) if own else base / "saccade") / f"machine-{name}.json")

    def read(self) -> dict[str, list[list[float]]]:
        """What was measured; nothing where there is no file that can be believed."""
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
            known = told["measured"]
            if told["machine"] == _told() and told["sum"] == _sum(known):
                return {str(name): [[float(x) for x in row] for row in rows] for name, rows in known.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return {}

    def write(self, known: dict[str, list[list[float]]]) -> None:
        """Keep it, whole or not at all; where nothing can be written it is measured anew next time."""
        text = json.dumps({"machine": _told(), "measured": known, "sum": _sum(known)})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                file.write(text)
            Path(file.name).replace(self.path)
        except OSError:
            return


def _told() -> dict[str, object]:
    """What measurements depend on, threads aside."""
    return {
        "version": _VERSION,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "level": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _sum(known: object) -> str:
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
