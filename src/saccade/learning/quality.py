"""The quality of a mechanism or mask, measured by how well small models that use it learn a task."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable

from saccade.learning.mixers import Mixer, attention_mixer
from saccade.learning.task_presets import QUESTIONS, Question
from saccade.learning.training import DEFAULT, Settings, train
from saccade.masks import Causal, Mask
from saccade.mechanisms import Mechanism
from saccade.support.errors import type_error, value_error
from saccade.support.validation import check_int


@dataclasses.dataclass(frozen=True)
class Quality:
    """A callable that trains small models with a mechanism or mask and returns their accuracy; see `quality_on`.

    Args:
        question: the task preset.
        seeds: number of training runs, with seeds 0, 1, ...; the accuracy is averaged over them.
        settings: settings of the training runs.
    """

    question: Question
    seeds: int
    settings: Settings

    def __call__(self, mechanism: Mechanism | Mask) -> float:
        """Return the mean accuracy of models with this mechanism, or with exact attention under this mask.

        The result is NaN if the mechanism does not support causal masks and the task's sequences contain the answers.

        Raises:
            TypeError: the argument is neither a mechanism nor a mask.
            ValueError: the mechanism does not support 8 heads, each an eighth of the width, or the task's length.
        """
        if not isinstance(mechanism, Mechanism | Mask):
            raise type_error("mechanism", "be a mechanism or a mask", repr(mechanism)[:80])
        mixer = _mixer(mechanism)
        if mixer.sees_later and not self.question.hides_answers:
            return math.nan
        runs = [train(mixer, self.question, seed, self.settings) for seed in range(self.seeds)]
        return statistics.mean(run.accuracy for run in runs)


def quality_on(
    question: str | Question = "MQAR", *, seeds: int = 1, settings: Settings = DEFAULT
) -> Callable[[Mechanism | Mask], float]:
    """Return a function for ``saccade.compare(..., quality=...)`` that measures accuracy after training on a task.

    The models are as in `train`: two layers of width 64 with 8 heads, which use the mechanism, or exact attention under
    the mask. Attention is causal, except for mechanisms that do not support causal masks. Training uses the task's
    length, not the length of the compared tensors: on a task of 64 tokens, a window of 256 masks nothing beyond
    causality.

    Args:
        question: a name in `QUESTIONS`, or a custom `Question`.
        seeds: number of training runs for each mechanism or mask; their accuracies are averaged.
        settings: settings of the training runs.

    Raises:
        ValueError: the name is unknown, or ``seeds`` is below 1.
        TypeError: ``question`` is neither a name nor a `Question`.

    Cost: with the default settings, up to 600 training steps for each mechanism or mask and seed, which take half a
    minute on one core.

    Example:
        >>> from saccade.masks import sliding_window
        >>> quality = quality_on("induction", settings=Settings(steps=2, texts=64, fresh=16))
        >>> 0.0 <= quality(sliding_window(8)) <= 1.0
        True
    """
    if isinstance(question, str):
        if question not in QUESTIONS:
            raise value_error("question", f"be one of {', '.join(QUESTIONS)}", question)
        question = QUESTIONS[question]
    elif not isinstance(question, Question):
        raise type_error("question", "be the name of a task or a Question", repr(question)[:80])
    return Quality(question, check_int("seeds", seeds), settings)


def _mixer(mechanism: Mechanism | Mask) -> Mixer:
    """Return a token mixer with a mechanism, or with exact attention under a mask; causal if that is supported."""
    if isinstance(mechanism, Mask):
        rule = mechanism & Causal()
        return attention_mixer(lambda length, layer: rule)
    sees_later = bool(mechanism.reasons(Causal()))
    mask = None if sees_later else Causal()
    mixer = attention_mixer(lambda length, layer: mask, lambda: copy.deepcopy(mechanism))
    return mixer._replace(sees_later=sees_later)
