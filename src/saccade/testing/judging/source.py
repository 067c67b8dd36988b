"""`Source`: the location of a kernel, from which this process or a script can load it."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import itertools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from saccade.support.errors import value_error

_LIBRARIES = (".so", ".dylib", ".dll")
_COUNT = itertools.count()


@dataclasses.dataclass(frozen=True)
class Source:
    """The location of a kernel.

    Attributes:
        location: a Python file, a shared library, or the name of a module.
        name: the kernel's name at this location; ``namespace::name`` for an operator registered with ``torch.library``.
    """

    location: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse ``file.py::name``, ``library.so::name`` or ``module:name``.

        Raises:
            ValueError: the text has none of these forms, or the file does not exist.
        """
        location, separator, name = text.partition("::")
        if not separator:
            location, separator, name = text.partition(":")
            if not separator or location.endswith((".py", *_LIBRARIES)):
                rule = "be file.py::name, library.so::name or module:name"
                raise value_error("KERNEL", rule, text)
            return cls(location, name)
        if not Path(location).is_file():
            raise value_error("KERNEL", "name a file that exists", location)
        return cls(location, name)

    @property
    def is_library(self) -> bool:
        """Whether the source is a shared library."""
        return self.location.endswith(_LIBRARIES)

    @property
    def is_operator(self) -> bool:
        """Whether the source is an operator registered with ``torch.library``."""
        return "::" in self.name

    def load(self, name: str | None = None) -> Any:
        """Load the kernel, or another object by name from the same source. A Python file is run again each time.

        Raises:
            ValueError: the source cannot be loaded, or does not define the name.
        """
        if self.is_library:
            return ctypes.CDLL(str(Path(self.location).resolve()))
        module = self._module()
        if self.is_operator and name is None:
            namespace, _, short = self.name.partition("::")
            return getattr(getattr(torch.ops, namespace), short).default
        target: Any = module
        for part in (name or self.name).split("."):
            if not hasattr(target, part):
                raise value_error("KERNEL", f"be defined in {self.location}", name or self.name)
            target = getattr(target, part)
        return target

    def lines(self) -> list[str]:
        """Return the lines of a script that load ``kernel``; paths inside the current folder are relative."""
        whole = Path(self.location).resolve()
        is_inside = whole.is_relative_to(Path.cwd())
        path = f"./{whole.relative_to(Path.cwd()).as_posix()}" if is_inside else str(whole)
        where = ["# Run this script in the folder where the judge ran."] if is_inside else []
        if self.is_library:
            return [*where, "import ctypes", f"kernel = ctypes.CDLL({path!r})"]
        lines = ["import importlib.util, sys"]
        if self.location.endswith(".py"):
            lines = [*where, *lines]
            lines += [
                f"sys.path.insert(0, {os.path.dirname(path)!r})",
                f"spec = importlib.util.spec_from_file_location('judged', {path!r})",
                "module = importlib.util.module_from_spec(spec)",
                "spec.loader.exec_module(module)",
            ]
            if _uses_triton(Path(self.location)) and os.environ.get("TRITON_INTERPRET") == "1":
                lines = ["# Run with TRITON_INTERPRET=1.", *lines]
        else:
            lines += ["import importlib", f"module = importlib.import_module({self.location!r})"]
        if self.is_operator:
            return [*lines, f"kernel = torch.ops.{self.name.replace('::', '.')}.default"]
        return [*lines, f"kernel = module.{self.name}"]

    def _module(self) -> ModuleType:
        if not self.location.endswith(".py"):
            try:
                return importlib.import_module(self.location)
            except ImportError as error:
                raise value_error(
                    "KERNEL", "name a module that can be imported", f"{self.location} ({error})"
                ) from None
        path = Path(self.location)
        spec = importlib.util.spec_from_file_location(f"judged_{next(_COUNT)}", path)
        assert spec is not None  # a Python file always has a spec
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a user's file may raise any error
            first = str(error).strip().partition("\n")[0]
            got = f"{path} ({type(error).__name__}: {first})"
            raise value_error("KERNEL", "be in a file that runs without errors", got) from error
        return module


def check_interpreter(source: Source, device: str) -> None:
    """Raise an error if a Triton file would run on the CPU without Triton's interpreter.

    The interpreter must be selected before torch imports Triton, so only an environment variable can select it.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1" or torch.device(device).type != "cpu"
    if not is_interpreted and source.location.endswith(".py") and _uses_triton(Path(source.location)):
        rule, got = "be 1 for a Triton kernel on the CPU", os.environ.get("TRITON_INTERPRET", "nothing")
        raise value_error("TRITON_INTERPRET", rule, got, hint="TRITON_INTERPRET=1 saccade judge ...")


def _uses_triton(path: Path) -> bool:
    return "import triton" in path.read_text(encoding="utf-8", errors="replace")
