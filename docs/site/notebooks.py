"""Run the notebooks of docs/en and docs/zh and keep what they print and draw: ``python docs/site/notebooks.py``.

Names choose among them: ``python docs/site/notebooks.py mathematics``. What a notebook says of itself (when it was run,
and by which Python) is left out, and cells are numbered: a file changes only where a cell or what it shows does.
"""

from __future__ import annotations

import io
import os
import sys
from base64 import b64decode, b64encode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image
from traitlets.config import Config

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_KEPT = ("mystnb", "tags")  # of a cell: what a reader who cannot see its picture is told


def files(language: str) -> list[Path]:
    """Return the notebooks of a language."""
    return sorted((DOCS / language / "notebooks").glob("*.ipynb"))


def run(notebook: Any) -> Any:
    """Run a copy of a notebook from the top in an empty folder, and return it with its outputs."""
    new = nbformat.from_dict(notebook)
    with TemporaryDirectory() as folder:
        own = Path(folder) / "own"  # of the kernel: settings of whoever runs this do not count
        work = Path(folder) / "work"
        work.mkdir()
        by_file = Config(KernelManager={"transport": "ipc", "connection_file": f"{folder}/kernel.json"})  # no network
        client = NotebookClient(
            new,
            kernel_name="python3",
            config=by_file,
            timeout=300,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(work)}},
        )
        client.execute(env=_environment(own))
    for output in (output for cell in new.cells for output in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            output.data = {"image/png": smaller(output.data["image/png"])}
    return tidied(new)


def tidied(notebook: Any) -> Any:
    """Return the notebook reduced to numbered cells and their outputs."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number:02}"
        cell.metadata = nbformat.from_dict({name: cell.metadata[name] for name in _KEPT if name in cell.metadata})
        for output in cell.get("outputs", []):
            if "data" in output:
                output.metadata = {}
    return notebook


def smaller(png: str) -> str:
    """Return an image, as base64, in a palette of 256 colours: a third of the size, and almost the same."""
    written = io.BytesIO()
    with Image.open(io.BytesIO(b64decode(png))) as picture:
        few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(written, "PNG", optimize=True)
    return b64encode(written.getvalue()).decode()


def main(names: list[str]) -> None:
    """Run the notebooks in place."""
    for path in [*files("en"), *files("zh")]:
        if not names or path.stem in names:
            notebook = run(nbformat.read(path, as_version=4))
            nbformat.validate(notebook)
            path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.0f} kB")


def _environment(own: Path) -> dict[str, str]:
    """Return the environment: this checkout, one thread, the kernels that need no compiler."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own_settings = {"IPYTHONDIR": str(own), "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **own_settings, "OMP_NUM_THREADS": "1", "SACCADE_CPU": "off", "PYTHONWARNINGS": "default"}


if __name__ == "__main__":
    main(sys.argv[1:])
