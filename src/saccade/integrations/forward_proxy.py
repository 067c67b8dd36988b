"""ForwardProxy: replace a module's ``forward`` while its calls are captured."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

from saccade.integrations.capture_context import Capture, Listener


class CapturedCall(NamedTuple):
    """A call to a captured module.

    Attributes:
        module: the module.
        forward: the original ``forward`` of the module.
        listeners: the module's listeners when the call began.
        args, kwargs: the arguments of the call.
    """

    module: nn.Module
    forward: Callable[..., Any]
    listeners: tuple[Listener, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Run the original ``forward`` of the captured module."""
        return self.forward(*self.args, **self.kwargs)


Handler = Callable[[CapturedCall], Any]
"""A function that runs a captured call and emits its matrices to the listeners."""

PATCH_LOCK = threading.RLock()
"""A lock held while proxies and patches of any model are added or removed."""


class ForwardProxy:
    """A replacement for a module's ``forward``; listeners can be added and removed in any order.

    Listeners are looked up when a call begins, so a listener added during a call does not receive that call. Without
    listeners, a proxy runs the original ``forward``.

    A hook would not work, because torch's encoder layers leave their fast path when they have hooks (pytorch#82919),
    which changes the bits of their output. Nested wrappers would not work either: removing the outer wrapper would also
    remove the inner ones.

    Args:
        module: the module whose ``forward`` is replaced.
        handler: runs a call and emits its matrices to the listeners.

    Attributes:
        listeners: the current listeners; the tuple is replaced, never mutated.
    """

    listeners: tuple[Listener, ...]

    def __init__(self, module: nn.Module, handler: Handler):
        functools.update_wrapper(self, module.forward)  # first, as it copies another proxy's attributes
        self._original = module.forward
        self._module, self._before = module, vars(module).get("forward")
        self.handler, self.listeners = handler, ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        listeners = self.listeners
        if not listeners:
            return self._original(*args, **kwargs)
        return self.handler(CapturedCall(self._module, self._original, listeners, args, kwargs))

    def __reduce__(self) -> Any:
        """Let copies and pickles hold the original ``forward``, so that copies of a recorded model are not recorded."""
        return (getattr, (self._module, "forward")) if self._before is None else (copy.copy, (self._before,))

    def add(self, listener: Listener) -> None:
        """Add a listener for the module's calls."""
        self.listeners = (*self.listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Remove a listener, and restore the module's original ``forward`` if it was the last.

        If other code has wrapped the proxy in the meantime, the proxy stays in place without listeners.
        """
        with PATCH_LOCK:
            self.listeners = tuple(other for other in self.listeners if other is not listener)
            attributes = vars(self._module)
            if self.listeners or attributes.get("forward") is not self:
                return
            if self._before is None:
                del attributes["forward"]
            else:
                attributes["forward"] = self._before

    @classmethod
    def at(cls, module: nn.Module, handler: Handler) -> ForwardProxy:
        """Return a module's ``forward`` proxy with the given handler; add a proxy if there is none."""
        forward: object = vars(module).get("forward")
        while isinstance(forward, ForwardProxy):
            if forward.handler is handler:
                return forward
            forward = forward._before
        proxy = cls(module, handler)
        vars(module)["forward"] = proxy
        return proxy


class Running(threading.local):
    """For each thread, a stack of the captured calls in progress, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []

    @contextmanager
    def within(self, *items: Any) -> Iterator[None]:
        """Push items onto this thread's stack of running calls within the block."""
        before = len(self.stack)
        self.stack.extend(items)
        try:
            yield
        finally:
            del self.stack[before:]


@contextmanager
def capture_forwards(modules: Iterable[tuple[nn.Module, str, Handler]], capture: Capture) -> Iterator[None]:
    """Capture the ``forward`` calls of modules, each with its own name and handler."""
    with ExitStack() as stack:
        for module, name, handler in modules:
            listener = Listener(name, capture)
            with PATCH_LOCK:
                proxy = ForwardProxy.at(module, handler)
                proxy.add(listener)
            stack.callback(proxy.remove, listener)
        yield
