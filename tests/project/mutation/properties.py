"""Properties too: mutmut leaves out what has decorators, so they are written ``name = property(name)`` in the copy.

The type checker would not follow, and is left out; and only properties are changed then.
"""

from __future__ import annotations

import libcst as cst
from mutmut.mutation import file_mutation
from mutmut.mutation.file_mutation import Mutation

_KINDS = ("property", "cached_property")


def install() -> None:
    """Make mutmut change properties, and nothing else."""
    create = file_mutation.create_mutations

    def of_properties(name: str, code: str, *rest: object) -> tuple[cst.Module, list[Mutation], set[str], set[str]]:
        rewritten = cst.parse_module(code).visit(_Rewritten())
        module, mutations, classes, functions = create(name, rewritten.code, *rest)  # type: ignore[arg-type]
        own = _Properties()
        module.visit(own)
        kept = [mutation for mutation in mutations if mutation.contained_by_top_level_function in own.found]
        return module, kept, classes, functions

    file_mutation.create_mutations = of_properties


class _Rewritten(cst.CSTTransformer):
    def leave_FunctionDef(self, original: cst.FunctionDef, updated: cst.FunctionDef) -> cst.CSTNode:
        kind = _kind(updated)
        if kind is None:
            return updated
        name = updated.name.value
        after = cst.parse_statement(f"{name} = {kind}({name})")
        return cst.FlattenSentinel([updated.with_changes(decorators=[]), after])


class _Properties(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: set[cst.CSTNode] = set()

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        for function, after in zip(node.body, node.body[1:], strict=False):
            match function, after:
                case cst.FunctionDef(), cst.SimpleStatementLine(body=[cst.Assign(value=cst.Call(func=cst.Name(kind)))]):
                    if kind in _KINDS:
                        self.found.add(function)


def _kind(function: cst.FunctionDef) -> str | None:
    match function.decorators:
        case [cst.Decorator(decorator=cst.Name(value=kind))] if kind in _KINDS:
            return kind
    return None
