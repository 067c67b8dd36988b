"""Refuse gradient checkpointing of a call that changes a cache: its replay would change the cache again."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch

from saccade.support.errors import unsupported

__all__ = ["OUTSIDE", "Region", "refuse_replay"]


class Region(NamedTuple):
    """The part of a run that gradient checkpointing repeats, as far as it can be recognised.

    A replay runs inside a backward pass, which has a number. In its first run, a region of the non-reentrant
    checkpoint is recognised by torch's hooks for saved tensors; one of the reentrant checkpoint cannot be.

    Args:
        graph_task: number of the backward pass; -1 outside of all.
        hook: id of the checkpoint's hook; 0 outside of all.
    """

    graph_task: int = -1
    hook: int = 0

    @classmethod
    def current(cls) -> Region:
        """Return the innermost region that runs now."""
        if torch.compiler.is_compiling():
            return OUTSIDE
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        is_checkpoint = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        return cls(torch._C._current_graph_task_id(), id(hooks[0]) if is_checkpoint else 0)

    def repeats(self, made_in: Region) -> bool:
        """Return whether a replay of this region repeats a change of what was made in another region."""
        is_other_pass = self.graph_task not in (-1, made_in.graph_task)
        return is_other_pass or self.hook not in (0, made_in.hook)


OUTSIDE = Region()


def refuse_replay() -> NoReturn:
    """Raise the error of a call that is, or will be, replayed.

    Raises:
        UnsupportedError: always.
    """
    reason = "the backward pass runs this call again, and its tokens would be added to the cache a second time"
    hint = "train without a cache, or make it inside the checkpointed function: layer.new_cache() or cache.fork()"
    raise unsupported("gradient checkpointing", [reason], hint=hint)
