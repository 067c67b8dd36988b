"""A mutation run: each package is changed in one place at a time, and some test must notice.

``python tests/project/mutation/run.py [package ...]`` makes a scratch copy for each package, runs mutmut in it, and
prints a table. What survives is compared with the lists in ``accepted/``: a survivor that stands in none of them fails
the run. A run that was stopped goes on where it was.

Not changed: what only changes sentences (`words`), functions with decorators other than property, and modules' tables.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

from accepted import accepted, is_whole
from results import Survivor, counts, survivors

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class Package(NamedTuple):
    """The files to change, and a few fast tests to run for them.

    Attributes:
        files: of saccade, as patterns.
        types: packages that the type checker reads.
        tests: as pytest takes them.
    """

    files: tuple[str, ...]
    types: tuple[str, ...]
    tests: tuple[str, ...]


_WRITTEN_DOWN = "tests/masks/convert/test_serialization.py::test_masks_survive_as_numbers_and_tensors"
_NUMBERS = (
    "inputs dispatch nonfinite autograd dropout to_device tiles/tile_scores tiles/tile_splitting tiles/grouped_heads "
    "check_inputs bias/term bias/sink_logit bias/score_mod"
)
_KERNELS = "tiled tiled_blocks fused fused_bias fused_calls reference sdpa"
_TESTS_OF_NUMBERS = (
    "test_autograd test_dispatch test_dropout test_inputs test_nonfinite test_nonfinite_unmasked bias/test_sink_logit "
    "bias/test_term tiles/test_grouped_heads tiles/test_stable_topk tiles/test_tile_scores tiles/test_tile_splitting"
)
_TESTS_OF_KERNELS = (
    "fused fused_inputs fused_bias fused_threads tiled overflow nonfinite hidden_pairs default_device empty_rows "
    "grouped_decoding sdpa native"
)
_BY_CASE = "tests/project/mutation/case_by_case.py"
_USERS_OF_CACHES = (
    "tests/mechanisms/test_compressive.py",
    "tests/nn/test_latent_attention.py",
    "tests/nn/test_recurrent_layers.py",
)
# A new process does not find the copy, and what is traced holds what notes which test runs what.
_LEFT_OUT = (
    "tests/caches/files/test_serialize.py::test_a_new_process_goes_on_with_the_same_tokens",
    "tests/engine/kernels/test_native.py::test_every_level_keeps_the_definition",
    "tests/engine/kernels/test_native.py::test_it_is_asked_first_and_can_be_left_out",
    "tests/engine/kernels/test_sdpa.py::test_in_a_program_it_stays_outside",
)
PACKAGES = {
    "masks": Package(
        ("masks/*", "plan/*"),
        ("masks", "plan"),
        ("tests/masks", "tests/plan/test_plan.py", "tests/plan/test_key_ranges.py", _WRITTEN_DOWN),
    ),
    "engine": Package(
        (
            *(f"engine/{name}.py" for name in _NUMBERS.split()),
            *(f"engine/kernels/{name}.py" for name in _KERNELS.split()),
        ),
        ("engine",),
        (
            _BY_CASE,
            "tests/project/test_torch_tools.py",
            "tests/scores/test_score_mod.py",
            "tests/support/test_errors.py",
            "tests/matrix",
            *(f"tests/engine/{name}.py" for name in _TESTS_OF_NUMBERS.split()),
            *(f"tests/engine/kernels/test_{name}.py" for name in _TESTS_OF_KERNELS.split()),
        ),
    ),
    "positions": Package(
        (
            "engine/positions/positioned_mask.py",
            "engine/positions/position_index.py",
            "engine/positions/row_permutation.py",
            "engine/block_sparse/selected_blocks.py",
            "engine/bias/relative.py",
        ),
        ("engine",),
        (
            _BY_CASE,
            "tests/engine/positions/test_positioned_mask.py",
            "tests/engine/block_sparse/test_selected_blocks.py",
            "tests/support/test_errors.py",
            "tests/masks/test_domain.py",
            "tests/engine/positions/test_plans_at_positions.py",
            "tests/engine/positions/test_row_permutation.py",
            "tests/engine/bias/test_term.py",
            "tests/positions/test_bias.py",
            "tests/mechanisms/test_topk.py",
            "tests/caches/test_indexed_cache.py",
            "tests/caches/test_block_select_in_place.py",
        ),
    ),
    "caches": Package(
        ("caches/*",),
        ("caches",),
        ("tests/caches", *_USERS_OF_CACHES),
    ),
}
_SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {files}
pytest_add_cli_args_test_selection = {tests}
pytest_add_cli_args = ["-m", "{marks}", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not compiled"]
process_isolation = "forkserver"
use_git_change_detection = false
track_dependencies = false
timeout_multiplier = 4.0
timeout_constant = 10.0
type_check_command = {types}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=list(PACKAGES), help=f"of {', '.join(PACKAGES)}; all by default")
    parser.add_argument("--scratch", type=Path, default=ROOT / "out" / "mutants", help="where the copies are made")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="of tests for a mutant, of the most telling ones")
    parser.add_argument("--share", type=int, default=100, help="of a hundred mutants; a larger one goes on later")
    parser.add_argument("--no-types", dest="types", action="store_false", help="do not ask the type checker first")
    parser.add_argument("--only", choices=["functions", "properties"], help="one half of the run")
    parser.add_argument("--again", action="store_true", help="only those that survived and stand in no list")
    parser.add_argument("--look", action="store_true", help="run nothing, tell what has been found so far")
    options = parser.parse_args()
    rows, unknown = [], []
    for package in options.packages:
        for properties in {"functions": (False,), "properties": (True,)}.get(options.only, (False, True)):
            scratch = (options.scratch / (package + "-properties" * properties)).resolve()
            if not options.look:
                _prepare(package, scratch, types_too=options.types and not properties)
                names = [survivor.name for survivor in _unaccepted(scratch)] if options.again else []
                if names or not options.again:
                    _run(scratch, options, names, properties=properties)
            if (scratch / "mutants").exists():
                own = list(_unaccepted(scratch))
                rows.append((scratch.name, counts(scratch), len(own)))
                unknown += own
    for survivor in unknown:
        print(f"{survivor.file} {survivor.function}\n- {survivor.before}\n+ {survivor.after}")
    print(f"\n{'':20}{'mutants':>9}{'by types':>9}{'by tests':>9}{'timeout':>9}{'survive':>9}{'new':>9}{'left':>9}")
    for name, found, new in rows:
        tests, timeouts = found["killed"] + found["segfault"] + found["suspicious"], found["timeout"]
        survive, left = found["survived"] + found["no tests"], found["not checked"]
        cells = (found.total(), found["caught by type check"], tests, timeouts, survive, new, left)
        print(f"{name:20}" + "".join(f"{cell:>9}" for cell in cells))
    sys.exit(1 if unknown else 0)


def _unaccepted(scratch: Path) -> Iterator[Survivor]:
    entries = accepted()
    known = {entry[1:] for entry in entries}
    with chdir(scratch):
        for survivor in survivors(scratch):
            if survivor[1:] not in known and not is_whole(entries, survivor.file, survivor.function):
                yield survivor


def _prepare(package: str, scratch: Path, *, types_too: bool) -> None:
    """Bring the scratch copy up to date; what mutmut has found in it stays."""
    scratch.mkdir(parents=True, exist_ok=True)
    for name in ("src", "tests"):
        _copy(ROOT / name, scratch / name)
    if (scratch / "mutants" / "tests").exists():
        _copy(ROOT / "tests", scratch / "mutants" / "tests")
    own = PACKAGES[package]
    types = [sys.executable, "-m", "mypy", "--output=json", "--no-warn-unused-ignores"]
    types = types + [word for name in own.types for word in ("-p", f"saccade.{name}")] if types_too else []
    files = [f"src/saccade/{name}" for name in own.files]
    tests = [*own.tests, *(f"--deselect={name}" for name in _LEFT_OUT)]
    settings = _SETTINGS.format(files=files, tests=tests, types=types, marks="(many or not slow) and not gpu")
    (scratch / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)


def _copy(source: Path, target: Path) -> None:
    """Copy only files that differ, so that the others keep their time."""
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            own = target / path.relative_to(source)
            if not own.exists() or own.read_bytes() != path.read_bytes():
                own.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, own)


def _run(scratch: Path, options: argparse.Namespace, names: list[str], *, properties: bool) -> None:
    command = [sys.executable, str(HERE / "mutmut_here.py"), "run", "--max-children", str(options.processes), *names]
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": ""}
    own |= {"MUTATION_SECONDS": str(options.seconds), "MUTATION_SHARE": str(options.share)}
    own |= {"MUTATION_PROPERTIES": "1"} if properties else {}
    subprocess.run(command, cwd=scratch, env=os.environ | own, check=False)


if __name__ == "__main__":
    main()
