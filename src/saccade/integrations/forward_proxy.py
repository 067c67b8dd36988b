"""Post: stands in for a module's ``forward`` while somebody listens to its calls."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn

from saccade.integrations.capture_context import Ear, Valve


class HeardCall(NamedTuple):
    """A call of a module that somebody listens to.

    Attributes:
        module: the module.
        forward: its own forward pass.
        ears: who listens.
        args, kwargs: what the call was given.
    """

    module: nn.Module
    forward: Callable[..., Any]
    ears: tuple[Ear, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """What the module says."""
        return self.forward(*self.args, **self.kwargs)


Kind = Callable[[HeardCall], Any]
"""Runs a call, and tells all who listen."""

CHANGING = threading.RLock()
"""Held by whoever begins or ends to listen, to any model."""


class Post:
    """A module's ``forward`` with listeners, who may come and go in any order.

    Who begins to listen while a call runs does not hear that call: listeners are looked up when a call begins. Without
    listeners a post is the forward pass that it stands for.

    Not a hook: torch's encoder layers leave their fast path where hooks are (pytorch#82919), and say other bits then.
    And not one function around another for each who listens: the first to leave would take the others along.

    Args:
        module: whose ``forward`` it is.
        kind: runs a call and tells the listeners.

    Attributes:
        ears: who listens; replaced, never changed.
    """

    ears: tuple[Ear, ...]

    def __init__(self, module: nn.Module, kind: Kind):
        functools.update_wrapper(self, module.forward)  # first: it takes over the attributes of another post
        self._original = module.forward
        self._module, self._before = module, vars(module).get("forward")
        self.kind, self.ears = kind, ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ears = self.ears
        if not ears:
            return self._original(*args, **kwargs)
        return self.kind(HeardCall(self._module, self._original, ears, args, kwargs))

    def __reduce__(self) -> Any:
        """A copy of a model that somebody listens to is a model to which nobody does."""
        return (getattr, (self._module, "forward")) if self._before is None else (copy.copy, (self._before,))

    def add(self, ear: Ear) -> None:
        """Begin to listen."""
        self.ears = (*self.ears, ear)

    def remove(self, ear: Ear) -> None:
        """Stop to listen; the last to leave puts the module's own ``forward`` back.

        Where somebody else has put a function on top of the post meanwhile, it stays where it is, without listeners.
        """
        with CHANGING:
            self.ears = tuple(other for other in self.ears if other is not ear)
            own = vars(self._module)
            if self.ears or own.get("forward") is not self:
                return
            if self._before is None:
                del own["forward"]
            else:
                own["forward"] = self._before

    @classmethod
    def at(cls, module: nn.Module, kind: Kind) -> Post:
        """The post of this kind that stands on a module, put there if it has none."""
        there: object = vars(module).get("forward")
        while isinstance(there, Post):
            if there.kind is kind:
                return there
            there = there._before
        post = cls(module, kind)
        vars(module)["forward"] = post
        return post


class Running(threading.local):
    """The calls that each thread is in the middle of, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []

    @contextmanager
    def within(self, *items: Any) -> Iterator[None]:
        """Put these on the stack of this thread meanwhile."""
        before = len(self.stack)
        self.stack.extend(items)
        try:
            yield
        finally:
            del self.stack[before:]


@contextmanager
def listening(heard: Iterable[tuple[nn.Module, str, Kind]], valve: Valve) -> Iterator[None]:
    """Listen to modules, each under a name and in a way of its own."""
    with ExitStack() as stack:
        for module, name, kind in heard:
            ear = Ear(name, valve)
            with CHANGING:
                post = Post.at(module, kind)
                post.add(ear)
            stack.callback(post.remove, ear)
        yield
