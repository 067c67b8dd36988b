"""RedirectMode: pass the attention calls in a running model's own code to a handler that evaluates them."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from saccade.fusion.arguments import tensors_in
from saccade.fusion.checkpoints import Context, enter_when_recomputed, running_checkpoint
from saccade.fusion.lazy import LazyTensor, materialised
from saccade.fusion.mode import FuseAttention, is_eager
from saccade.fusion.recovered_call import AttentionCall
from saccade.integrations.forward_proxy import Running
from saccade.integrations.matrix_hooks import report_product
from saccade.integrations.mha_function import reason_against_function, run_mha_function
from saccade.integrations.other_packages import VisibleFunction
from saccade.integrations.packed_heads import is_packed, run_packed
from saccade.integrations.redirected_call import Call, Redirected
from saccade.integrations.sdpa_matrix import run_sdpa, sdpa_arguments, unsupported_sdpa
from saccade.matrix import Matrix
from saccade.support.errors import unsupported
from saccade.support.torch_modes import in_backward

CALLED_AS = "replace_attention"  # the name in error messages


@dataclass(eq=False)
class Site:
    """A running module whose own code may compute attention.

    Attributes:
        name: the module's name in the model.
        module: the module.
        args, kwargs: the arguments of its forward call.
        checkpoint: identifies the innermost checkpoint around the module; see `running_checkpoint`.
        outer: the enclosing running module with the same handler; None for the outermost.
        calls: number of attention calls so far, if the handler counts them.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoint: int = 0
    outer: Site | None = None
    calls: int = 0


class Handler(Protocol):
    """An object that evaluates a model's attention calls, or leaves them to the model's own code."""

    @property
    def rank(self) -> float:
        """The priority of the handler; of several handlers, the one with the largest rank receives a call first."""

    def attend(self, site: Site, call: Call) -> Redirected | None:
        """Evaluate a running module's attention call, or return None to leave it to the module's own code."""

    def leave(self, site: Site, reason: str) -> None:
        """Handle attention that is left to the model's own code for the given reason."""

    def finish(self, site: Site) -> None:
        """Handle the end of the outermost module's run."""


OBSERVERS: list[Callable[[Redirected, Call], None]] = []
"""Callbacks that receive the result and the inputs of each redirected call after it has run."""


class _Running(NamedTuple):
    """The state of `RedirectMode`: the running module and the handler of its calls.

    Both are None within `left_to_module`.
    """

    handler: Handler | None
    site: Site | None


_running = Running()
_NOT_EAGER = "torch transforms or traces this run (torch.func, forward-mode derivatives, tracing, CUDA graphs)"
_MULTIPLIES = "it multiplies the result of a softmax in a way that is not softmax attention of queries and keys"


class RedirectMode(FuseAttention):
    """A torch function mode that passes the attention calls in a model's own code to a handler.

    It redirects attention written as matmul, softmax and matmul, and calls to ``F.scaled_dot_product_attention``,
    ``F.multi_head_attention_forward`` and other packages' attention functions. It leaves saccade's kernels alone.

    Args:
        handler: evaluates the calls.
    """

    def __init__(self, handler: Handler):
        def keep() -> None:
            self._leave(_MULTIPLIES if is_eager() else _NOT_EAGER)

        super().__init__(self._run_call, on_weights=lambda weights: keep(), on_unknown=keep)
        self.handler, self._allow_non_finite = handler, True
        self._changed: Matrix | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            if is_engine(sys._getframe(1)):
                if not any(type(x) is LazyTensor for x in tensors_in((args, kwargs))):
                    return func(*args, **kwargs)
            elif (type(func) is VisibleFunction or func in _FUNCTIONS) and not (
                in_backward() and not self._thread.recomputed
            ):
                args, kwargs = materialised((args, kwargs))
                out = self._run_function(func, args, kwargs)
                if out is not None:
                    return out
        return super().__torch_function__(func, types, args, kwargs)

    def recompute_context(self) -> Context:
        """Return the context in which to recompute a checkpoint: this mode, and the module that ran the checkpoint."""
        site = self._site()
        if site is None or site.checkpoint == running_checkpoint():
            return self._recomputed
        return _WithinModule(self._recomputed, self.handler, site, site.calls)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Activate the mode within the block, even if a backward pass is recomputing a checkpointed module."""
        with self._recomputed() if in_backward() else self._entered():
            yield

    def _entered(self) -> AbstractContextManager[Any]:
        return beneath_redirection(self, lambda other: other.handler.rank > self.handler.rank)

    def _run_function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let the handler evaluate a call to an attention function; return None if the model must run it."""
        site = self._site()
        if site is None:
            return None
        if not is_eager():
            self.handler.leave(site, f"it calls {func.__name__}, and {_NOT_EAGER}")
            return None
        if type(func) is VisibleFunction:
            arguments = func.arguments(args, kwargs)
            reason, run = func.other.unsupported(arguments), functools.partial(func.other.run, arguments)
        else:
            run_call, reason_against = _FUNCTIONS[func]
            reason = reason_against(args, kwargs)
            if func is F.scaled_dot_product_attention and not reason:
                inputs = list(tensors_in((site.args, site.kwargs)))
                args, kwargs = self._with_shared_heads(args, kwargs)
                run_call = run_packed if is_packed(inputs, site.module, args, kwargs) else run_call
            run = functools.partial(run_call, args, kwargs)
        if reason:
            self.handler.leave(site, f"it calls {func.__name__}, and {reason}")
            return None
        if not enter_when_recomputed(self.recompute_context()):
            reason = "hooks for saved tensors hide a checkpoint, which would recompute the attention without saccade"
            raise unsupported(site.name, [reason], hint="run the checkpoint outside of the hooks")

        return run(functools.partial(self._attend, site))

    def _with_shared_heads(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of an SDPA call; if the model has repeated its key and value heads, drop the copies."""
        arguments = sdpa_arguments(args, kwargs)
        found = {self._repeats.find(arguments[name]) for name in ("key", "value")}
        repeated = found.pop() if len(found) == 1 else None
        axis = arguments["key"].dim() - 3
        if repeated is None or repeated.axis != axis or arguments["query"].shape[:-2] != arguments["key"].shape[:-2]:
            return args, kwargs
        once = {
            name: arguments[name].unflatten(axis, (-1, repeated.copies)).select(axis + 1, 0)
            for name in ("key", "value")
        }
        return (), arguments | once | {"enable_gqa": True}

    def _run_call(self, call: AttentionCall) -> Tensor | None:
        site = self._site()
        if site is None:
            return None
        redirected = self._attend(site, Call(call.matrix, call.value, call.query.shape[2], call.dropout_p))
        self._changed = redirected.matrix if redirected is not None and redirected.is_changed else None
        return None if redirected is None else redirected.out

    def _changed_matrix(self) -> Matrix | None:
        return self._changed

    def _attend(self, site: Site, call: Call) -> Redirected | None:
        with torch._C.DisableTorchFunction():
            redirected = self.handler.attend(site, call)
        if redirected is not None:
            report_product(redirected.matrix, redirected.value, redirected.out, call.dropout_p)
            for observe in OBSERVERS:
                observe(redirected, call)
        return redirected

    def _leave(self, reason: str) -> None:
        site = self._site()
        if site is not None:
            self.handler.leave(site, reason)

    def _site(self) -> Site | None:
        """Return this handler's innermost running module, or None within `left_to_module`."""
        running = (
            entry for entry in reversed(_running.stack) if entry.handler is None or entry.handler is self.handler
        )
        return next((entry.site for entry in running), None)


# For each of torch's attention functions: a function that runs a call, and one that returns why a call cannot run.
_FUNCTIONS: dict[Any, tuple[Callable[..., Any], Callable[..., str]]] = {
    F.scaled_dot_product_attention: (run_sdpa, unsupported_sdpa),
    F.multi_head_attention_forward: (run_mha_function, reason_against_function),
}


def run_redirected(handler: Handler, site: Site, forward: Callable[..., Any]) -> Any:
    """Run a module's ``forward`` and pass the attention calls in its own code to a handler."""
    site.checkpoint = running_checkpoint()
    site.outer = next((entry.site for entry in reversed(_running.stack) if entry.handler is handler), None)
    with _running.within(_Running(handler, site)):
        modes = torch.overrides._get_current_function_mode_stack()
        is_on = any(isinstance(mode, RedirectMode) and mode.handler is handler for mode in modes)
        with nullcontext() if is_on else RedirectMode(handler).on():
            out = forward(*site.args, **site.kwargs)
    if site.outer is None:
        handler.finish(site)
    return out


@dataclass(frozen=True)
class _WithinModule:
    """The context in which checkpoints inside a module are recomputed.

    Attributes:
        recomputed: activates the mode.
        handler: evaluates the calls.
        site: the module's run.
        calls: number of the module's attention calls before the checkpoint.
    """

    recomputed: Context
    handler: Handler
    site: Site
    calls: int = field(compare=False)  # equal for all calls in a checkpoint, so that the first one is kept

    @contextmanager
    def __call__(self) -> Iterator[None]:
        site = replace(self.site, calls=self.calls, checkpoint=running_checkpoint())
        with _running.within(_Running(self.handler, site)), self.recomputed():
            yield


@contextmanager
def beneath_redirection(
    mode: TorchFunctionMode, is_above: Callable[[RedirectMode], bool] = lambda other: True
) -> Iterator[None]:
    """Activate a mode beneath the topmost redirecting modes, so that it receives only calls they do not redirect."""
    active = reversed(torch.overrides._get_current_function_mode_stack())
    above = [*itertools.takewhile(lambda other: isinstance(other, RedirectMode) and is_above(other), active)]
    with ExitStack() as stack:
        for other in above:
            super(FuseAttention, other).__exit__(None, None, None)
            stack.callback(other.__enter__)
        stack.enter_context(mode)
        for other in reversed(above):
            other.__enter__()
            stack.callback(super(FuseAttention, other).__exit__, None, None, None)
        yield


@contextmanager
def left_to_module() -> Iterator[None]:
    """Disable redirection within the block, while a saccade module computes its attention."""
    with _running.within(_Running(None, None)):
        yield


def is_engine(frame: Any) -> bool:
    """Return whether a torch call comes directly from a saccade kernel; such calls must not be observed."""
    return str(frame.f_globals.get("__name__")).startswith("saccade.engine.")
