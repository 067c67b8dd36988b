"""Molecules as graphs with properties: computed once by RDKit from the SMILES that it ships, stored as JSON.

Only `made` needs RDKit (``pip install rdkit``; BSD-3-Clause, and so are the files of its wheel that are read here: the
first 5,000 molecules of the National Cancer Institute's open database, and 10,000 of a screening library of the Walter
and Eliza Hall Institute, which test the filter for assay interference).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import study

ELEMENTS = ["other", "C", "N", "O", "S", "Cl", "F", "Br", "I", "P", "B", "Si"]
BONDS = ["none", "SINGLE", "DOUBLE", "TRIPLE", "AROMATIC"]
TARGETS = ("balaban", "logp")
MOST_CHARGE, MOST_HYDROGENS, MOST_NEIGHBOURS = 1, 4, 6
KINDS = (len(ELEMENTS), MOST_HYDROGENS + 1, MOST_NEIGHBOURS + 1, 2 * MOST_CHARGE + 1)
"""The number of values of each number that an atom has."""


class Molecule(NamedTuple):
    """A graph of atoms.

    ``atoms [n, 4]``: element, hydrogens, neighbours and charge, as counted by `KINDS`. ``bonds [n, n]``: 0 for none,
    then as in `BONDS`. ``fragments`` and ``pairs``: how often each Morgan fragment of radius 2 and each pair of kinds
    of atoms at some distance is in it, by number. ``places [n, 2]``: where a chemist would draw the atoms.
    """

    smiles: str
    scaffold: str
    atoms: np.ndarray
    bonds: np.ndarray
    targets: dict[str, float]
    fragments: dict[str, int]
    pairs: dict[str, int]
    places: np.ndarray


def read(path: Path, most: int | None = None) -> list[Molecule]:
    """Read the first ``most`` molecules of a file of JSON lines."""
    with path.open(encoding="utf-8") as lines:
        return [_molecule(json.loads(line)) for line, _ in zip(lines, range(most or 10**9), strict=False)]


def _molecule(told: dict[str, Any]) -> Molecule:
    atoms = np.array(told["atoms"], np.int64)
    bonds = np.zeros((len(atoms), len(atoms)), np.int64)
    for a, b, kind in told["bonds"]:
        bonds[a, b] = bonds[b, a] = kind
    return Molecule(**{**told, "atoms": atoms, "bonds": bonds, "places": np.array(told["places"])})


def made(folder: Path, fewest_atoms: int = 6, most_atoms: int = 40) -> Path:
    """Write the file of all molecules that RDKit ships as SMILES, without duplicates, in random order.

    Raises:
        SystemExit: RDKit is not installed.
    """
    try:
        import rdkit  # noqa: PLC0415  only needed once
        from rdkit import Chem, RDLogger  # noqa: PLC0415
    except ImportError:
        raise SystemExit(
            "the molecules come with RDKit: pip install rdkit, or give a file of molecules by --data"
        ) from None
    path = folder / f"molecules-rdkit-{rdkit.__version__}-{fewest_atoms}-{most_atoms}.jsonl"
    if path.exists():
        return path
    RDLogger.DisableLog("rdApp.*")
    found = {}
    for smiles in _shipped():
        # Without stereochemistry, which neither graphs nor properties include.
        molecule = Chem.MolFromSmiles(smiles)
        if molecule is not None and fewest_atoms <= molecule.GetNumAtoms() <= most_atoms:
            name = Chem.MolToSmiles(molecule, isomericSmiles=False)
            if "." not in name:
                found.setdefault(name, molecule)
    names = sorted(found)
    lines = (json.dumps(_told(names[i], found[names[i]])) for i in np.random.default_rng(0).permutation(len(names)))
    folder.mkdir(parents=True, exist_ok=True)
    study.write_whole(path, lambda beside: beside.write_text("\n".join(lines) + "\n", encoding="utf-8"))
    return path


def _shipped() -> Iterator[str]:
    from rdkit import RDConfig  # noqa: PLC0415  as in made

    data = Path(RDConfig.RDDataDir)
    for line in (data / "NCI" / "first_5K.smi").read_text().splitlines():
        yield line.split()[0]
    with (data / "Pains" / "test_data" / "wehi_mols.csv").open() as file:
        for row in csv.reader(file):
            yield row[0]


def _told(name: str, molecule: Any) -> dict[str, Any]:
    """Return the JSON object of a molecule."""
    from rdkit.Chem import AllChem, Crippen, GraphDescriptors, rdFingerprintGenerator  # noqa: PLC0415  as in made
    from rdkit.Chem.Scaffolds import MurckoScaffold  # noqa: PLC0415

    AllChem.Compute2DCoords(molecule)
    fragments = rdFingerprintGenerator.GetMorganGenerator(radius=2).GetSparseCountFingerprint(molecule)
    pairs = rdFingerprintGenerator.GetAtomPairGenerator().GetSparseCountFingerprint(molecule)
    bonds = [(own.GetBeginAtomIdx(), own.GetEndAtomIdx(), str(own.GetBondType())) for own in molecule.GetBonds()]
    return {
        "smiles": name,
        "scaffold": MurckoScaffold.MurckoScaffoldSmiles(mol=molecule),
        "atoms": [_atom(own) for own in molecule.GetAtoms()],
        "bonds": [(a, b, BONDS.index(kind) if kind in BONDS else 1) for a, b, kind in bonds],
        "targets": {"balaban": GraphDescriptors.BalabanJ(molecule), "logp": Crippen.MolLogP(molecule)},
        "fragments": fragments.GetNonzeroElements(),
        "pairs": pairs.GetNonzeroElements(),
        "places": np.round(molecule.GetConformer().GetPositions()[:, :2], 3).tolist(),
    }


def _atom(own: Any) -> tuple[int, int, int, int]:
    element, charge = own.GetSymbol(), own.GetFormalCharge()
    return (
        ELEMENTS.index(element) if element in ELEMENTS else 0,
        min(own.GetTotalNumHs(), MOST_HYDROGENS),
        min(own.GetDegree(), MOST_NEIGHBOURS),
        MOST_CHARGE + max(-MOST_CHARGE, min(charge, MOST_CHARGE)),
    )
