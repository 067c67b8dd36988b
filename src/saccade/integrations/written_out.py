"""Find modules whose own code computes attention, by a softmax and a matrix product or torch's attention functions."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_SOFTMAX = frozenset({"softmax", "gumbel_softmax", "Softmax"})
_PRODUCTS = frozenset({"matmul", "bmm", "mm", "mv", "baddbmm", "addbmm", "einsum", "tensordot"})
_FUNCTIONS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention"})
_MULTIPLIES = "it multiplies the result of a softmax in operations of its own"
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_DEPTH = 4  # maximum depth of function calls that are followed
# Functions and modules that return weights if their input is weights.
_KEEPING = re.compile(
    r"dropout|drop|identity|to|float|half|bfloat16|double|type|type_as|contiguous|clone|detach|view|reshape|"
    r"view_as|reshape_as|transpose|permute|movedim|swapaxes|moveaxis|t|unsqueeze|squeeze|expand|expand_as|flatten|"
    r"unflatten|chunk|split|unbind|select|narrow|index_select|repeat|repeat_interleave|masked_fill|where|mul|div|add|"
    r"nan_to_num|clamp|tril|triu|pad|cat|concat|stack|normalize|rearrange|cast|_?attn_drop(out)?|attention_dropout"
)
_CALLED_ATTENTION = re.compile("att(e)?n", re.IGNORECASE)
_WEIGHTS = re.compile(r"att|weight|prob|score|alpha|coef|^[aAwWpP]$")  # usual names of weights

Shape = bool | tuple[bool, ...]
"""Whether a value is attention weights, or for a tuple, whether each element is."""


def written_out(module: nn.Module) -> str:
    """Describe how a module's ``forward`` computes attention in its own code; return "" if it does not.

    It either multiplies the result of a softmax by matmul, ``@``, bmm or einsum, or calls torch's attention functions.
    The source is followed from the softmax through assignments, casts, views, masking and dropout, and through called
    functions and methods. Weights that are multiplied elementwise, such as a router's, do not count. If there is no
    source, it is enough that the code mentions both a softmax and a product.

    The result is "" for modules of torch and saccade, and for modules that use transformers' attention interface. Of
    transformers' modules, only those that multiply and have "attention" in their name are reported.
    """
    forward, kind = inspect.unwrap(type(module).forward), type(module)
    if kind.__module__.startswith(("torch.", "saccade.")) or not isinstance(forward, FunctionType):
        return ""
    if _INTERFACE in forward.__code__.co_names:
        return ""
    tree = _tree(forward)
    if tree is None:
        return _named_in(forward.__code__)
    reader = _Reader(module, forward, frozenset(), 0)
    reader.read(tree)
    if kind.__module__.startswith("transformers.") and not _CALLED_ATTENTION.search(kind.__name__):
        return ""
    return reader.attends


class _Reader:
    """A reader that follows attention weights through the source code of one function.

    Args:
        module: the module of a method; None for a plain function.
        function: the function.
        weights: the names of the function's parameters that are attention weights.
        depth: number of nested calls that led to the function.

    Attributes:
        attends: how the function computes attention; "" if it does not.
        returned: whether the function returns weights.
    """

    def __init__(self, module: nn.Module | None, function: FunctionType, weights: frozenset[str], depth: int):
        self._module, self._function, self._depth = module, function, depth
        self._names = set(weights)
        self.attends = ""
        self.returned: Shape = False

    def read(self, tree: ast.FunctionDef) -> None:
        """Follow attention weights through the source code of the function."""
        for statement in tree.body:
            self._statement(statement)

    def _statement(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            value = self._value(node.value)
            for target in node.targets:
                self._assign(target, value, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            value = self._value(node.value)
            if isinstance(node, ast.AnnAssign) or _any(value):
                self._assign(node.target, value, node.value)
            elif isinstance(node.op, ast.MatMult) and _any(self._value(node.target)):
                self.attends = _MULTIPLIES
        elif isinstance(node, ast.Return) and node.value is not None:
            value = self._value(node.value)
            self.returned = value if not _any(self.returned) else self.returned
        elif isinstance(node, ast.For):
            self._assign(node.target, _any(self._value(node.iter)), node.iter)
            self._loop(node)
        elif isinstance(node, ast.While):
            self._loop(node)
        elif isinstance(node, ast.stmt | ast.excepthandler | ast.withitem | ast.match_case):
            self._body(node)

    def _loop(self, node: ast.AST) -> None:
        """Read a loop body twice, because attention weights may be used above the line that computes them."""
        self._body(node)
        self._body(node)

    def _body(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._value(child)
            else:
                self._statement(child)

    def _assign(self, target: ast.expr, value: Shape, source: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts = value if isinstance(value, tuple) and len(value) == len(target.elts) else None
            for number, part in enumerate(target.elts):
                self._assign(part, _any(value) if parts is None else parts[number], source)
            return
        base = target
        while isinstance(base, ast.Subscript | ast.Starred):
            base = base.value
        name, is_weights = ast.unparse(base), _any(value)
        if is_weights and _is_multiplied(source) and not _WEIGHTS.search(name.rpartition(".")[2]):
            is_weights = False  # weights times values
        if is_weights:
            self._names.add(name)
        elif base is target:
            self._names.discard(name)

    def _value(self, node: ast.expr) -> Shape:
        if isinstance(node, ast.Name | ast.Attribute):
            is_view = isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "data")
            return ast.unparse(node) in self._names or (is_view and _any(self._value(node.value)))  # type: ignore[union-attr]
        kinds: dict[tuple[type[ast.expr], ...], Callable[[Any], Shape]] = {
            (ast.Tuple, ast.List): lambda x: tuple(_any(self._value(part)) for part in x.elts),
            (ast.Subscript, ast.Starred): lambda x: _any(self._value(x.value)),
            (ast.BinOp,): self._operation,
            (ast.Call,): self._call,
            (ast.NamedExpr,): self._walrus,
            (ast.ListComp, ast.GeneratorExp): self._comprehension,
        }
        read = next((read for kind, read in kinds.items() if isinstance(node, kind)), self._other)
        return read(node)

    def _walrus(self, node: ast.NamedExpr) -> Shape:
        value = self._value(node.value)
        self._assign(node.target, value, node.value)
        return value

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> Shape:
        for one in node.generators:
            self._assign(one.target, _any(self._value(one.iter)), one.iter)
        return _any(self._value(node.elt))

    def _other(self, node: ast.expr) -> Shape:
        parts = [_any(self._value(part)) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        return isinstance(node, ast.IfExp | ast.BoolOp | ast.UnaryOp) and any(parts)

    def _operation(self, node: ast.BinOp) -> bool:
        left, right = self._value(node.left), self._value(node.right)
        is_weights = _any(left) or _any(right)
        if isinstance(node.op, ast.MatMult):
            self.attends = _MULTIPLIES if is_weights else self.attends
            return False
        return is_weights

    def _call(self, node: ast.Call) -> Shape:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        inputs = [_any(self._value(part)) for part in node.args]
        named = {part.arg or "": _any(self._value(part.value)) for part in node.keywords}
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        is_weights = any(inputs) or any(named.values()) or _any(self._value(receiver))
        if name in _SOFTMAX or self._is_softmax(node.func):
            return True
        if name in _PRODUCTS | _FUNCTIONS:
            how = _MULTIPLIES if name in _PRODUCTS and is_weights else ""
            self.attends = self.attends or (f"it calls {name} itself" if name in _FUNCTIONS else how)
            return False
        if _KEEPING.fullmatch(name.rstrip("_").lower()) or isinstance(self._part(node.func), nn.Dropout | nn.Identity):
            return is_weights
        return self._followed(node.func, inputs, named)

    def _part(self, func: ast.expr) -> object:
        """Return the attribute of the module that the source calls, as in ``self.attend(x)``; None for other calls."""
        is_attribute = isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self"
        if not is_attribute or self._module is None:
            return None
        return getattr(self._module, func.attr, None)  # type: ignore[attr-defined]

    def _is_softmax(self, func: ast.expr) -> bool:
        is_constructed = isinstance(func, ast.Call) and ast.unparse(func.func).endswith("Softmax")
        return is_constructed or isinstance(self._part(func), nn.Softmax | nn.Softmax2d)

    def _followed(self, func: ast.expr, inputs: list[bool], named: dict[str, bool]) -> Shape:
        """Follow attention weights into the method, module or function that the source calls."""
        part = self._part(func)
        module, called = self._module, getattr(part, "__func__", part)
        if isinstance(part, nn.Module):
            module, called = part, type(part).forward
            if type(part).__module__.startswith("torch."):
                return False
        elif part is None:
            module, called = None, self._function.__globals__.get(ast.unparse(func))
        called = inspect.unwrap(called) if isinstance(called, FunctionType) else None
        if not isinstance(called, FunctionType) or called.__module__.startswith(("torch.", "saccade.")):
            return False
        tree = _tree(called) if self._depth < _DEPTH else None
        if tree is None:
            return False
        parameters = [one for one in inspect.signature(called).parameters if not (one == "self" and module is not None)]
        weights = {name for name, is_weights in zip(parameters, inputs, strict=False) if is_weights}
        weights |= {name for name, is_weights in named.items() if is_weights}
        reader = _Reader(module, called, frozenset(weights), self._depth + 1)
        reader.read(tree)
        # A called module is examined separately.
        self.attends = self.attends or ("" if isinstance(part, nn.Module) else reader.attends)
        return reader.returned


def _any(value: Shape) -> bool:
    return any(value) if isinstance(value, tuple) else value


def _is_multiplied(node: ast.expr) -> bool:
    """Return whether an expression in the source of a module is an elementwise product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return _is_multiplied(node.left) or _is_multiplied(node.right)
    is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    return is_product and not any(isinstance(part, ast.Constant) for part in (node.left, node.right))  # type: ignore[attr-defined]


@functools.lru_cache(1024)
def _tree(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of a function of a module, or None if its source is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _named_in(code: CodeType) -> str:
    names = set(_all_names(code))
    if names & _FUNCTIONS:
        return f"it calls {min(names & _FUNCTIONS)} itself"
    return _MULTIPLIES if names & _SOFTMAX and names & (_PRODUCTS | {"@"}) else ""


def _all_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from (one.argrepr for one in dis.get_instructions(code) if one.opname == "BINARY_OP")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _all_names(inner)
