"""Mutants that only change texts, to be skipped: error messages, names in them, texts to be printed.

The arguments of a ``raise`` are left alone as a whole. So are the texts that are given to checks, those that `repr`
and similar methods write, and ``strict=True`` of zip, which would only raise.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
from accepted import accepted, is_whole
from mutmut.mutation import file_mutation
from mutmut.mutation.file_mutation import Mutation


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions that build sentences: all of a call to one.
_SPEAKERS = _set("""
    value_error type_error unsupported hidden_by_vmap missing_extra shown describe kind misfit MisfitError error_at
    TypeVar warn AssertionError _hint_for_keys cast escaped
""")
# Methods that write for the eye.
_WRITERS = _set("__repr__ __str__ _after_text _one_text _texts _misfit _sentence")
# Names that hold texts, as variables and as arguments.
_TEXTS = _set("hint rule where reason what got expected sentence instead facts equals kind schema msg more")
# Checks that are told what to say: the text literals among their arguments.
_CHECKS = _set("""
    integer number instance flag one_of size_of items_of ints_of check_field value consume answers held position
    _checked count of has written_out check_readable _check_image checked_path _sizes global_positions radii_of
    misfit Shapes check check_tensors check_grid check_crop count_or_none check_softmax says part _said
    checked_positions checked_rows checked_scale checked_sink checked_softcap check_call check_room
""")


def install() -> None:
    """Make mutmut skip these mutants."""
    create, entries = file_mutation.create_mutations, accepted()

    def heard(name: str, *args: object) -> tuple[cst.Module, list[Mutation], set[str], set[str]]:
        module, mutations, classes, functions = create(name, *args)  # type: ignore[arg-type]
        words, file = _Words(), name.removeprefix("src/saccade/")
        module.visit(words)
        whole = {node for node, own in _named(module) if is_whole(entries, file, own)}
        kept = [
            mutation
            for mutation in mutations
            if mutation.contained_by_top_level_function not in whole and not words.holds(mutation)
        ]
        return module, kept, classes, functions

    file_mutation.create_mutations = heard


class _Words(cst.CSTVisitor):
    def __init__(self) -> None:
        self.said: set[cst.CSTNode] = set()

    def holds(self, mutation: Mutation) -> bool:
        node, mutated = mutation.original_node, mutation.mutated_node
        if node in self.said:
            return True
        if isinstance(node, cst.Call) and isinstance(mutated, cst.Call):
            kept = set(mutated.args)
            gone = [arg for arg in node.args if arg not in kept]
            return bool(gone) and all(arg in self.said for arg in gone)
        return False

    def on_visit(self, node: cst.CSTNode) -> bool:
        match node:
            case cst.Raise() | cst.FormattedString() | cst.Assert():
                self._say(node)
            case cst.FunctionDef() if node.name.value in _WRITERS:
                self._say(node)
            case cst.SimpleString() if " " in node.value:
                self._say(node)
            case cst.Arg(keyword=cst.Name(value=name)) if name in _TEXTS:
                self._say(node)
            case cst.Arg(keyword=cst.Name(value="strict"), value=cst.Name(value="True")):
                self._say(node)  # a check of lengths, which are the same
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]) if name in _TEXTS:
                self._say(node)
            case cst.Call() if _name(node.func) in _SPEAKERS:
                self._say(node)
            case cst.Call() if _name(node.func) in _CHECKS:
                for arg in node.args:
                    if isinstance(arg.value, cst.SimpleString):
                        self._say(arg)
            case _:
                pass
        return True

    def _say(self, node: cst.CSTNode) -> None:
        self.said.add(node)
        for child in node.children:
            self._say(child)


def _named(module: cst.Module) -> Iterator[tuple[cst.CSTNode, str]]:
    """Yield functions and methods with their names."""
    for node in module.body:
        if isinstance(node, cst.FunctionDef):
            yield node, node.name.value
        elif isinstance(node, cst.ClassDef):
            for method in node.body.body:
                if isinstance(method, cst.FunctionDef):
                    yield method, f"{node.name.value}.{method.name.value}"


def _name(function: cst.BaseExpression) -> str:
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""
