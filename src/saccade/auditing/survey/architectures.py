"""The language models of the installed transformers, each small and with random weights."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import nn

from saccade.auditing.survey.small_configs import small_sizes

Kind = Literal["causal", "masked"]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A class of transformers that reads text.

    Attributes:
        name: of its kind of configuration, such as "gpt2".
        model: the name of its class.
        kind: whether it reads from left to right, or fills in what is hidden.
    """

    name: str
    model: str
    kind: Kind

    @property
    def key(self) -> str:
        """Its name, told apart from the other kind of the same name."""
        return self.name if self.kind == "causal" else f"{self.name} (masked)"

    def expression(self) -> str:
        """Python that makes the model, with transformers as ``T``."""
        config = self._class().config_class
        sizes = small_sizes(config)
        if self.kind == "causal" and hasattr(config(), "is_decoder"):
            sizes["is_decoder"] = True
        told = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
        return f"T.{self.model}(T.{config.__name__}({told}))"

    def make(self, implementation: str, seed: int = 0) -> nn.Module:
        """The model in evaluation mode, by this implementation of attention.

        Raises:
            ValueError: it has no such implementation. What cannot be told one, as recurrences, runs as "eager".
        """
        import transformers  # noqa: PLC0415  # an extra

        torch.manual_seed(seed)
        model = eval(self.expression(), {"T": transformers}).eval()  # the text that the page prints, so that it is true
        for name, own in model.named_parameters():  # what is drawn for training is small, and so would be what leaks
            if own.dim() > 1 and own.requires_grad and "embed" not in name:  # the row of padding stays 0
                nn.init.xavier_normal_(own)
        if implementation != "eager":
            model.set_attn_implementation(implementation)
            if model.config._attn_implementation != implementation:
                raise ValueError("its implementation of attention cannot be changed")
        elif model.config._attn_implementation != "eager":
            model.set_attn_implementation("eager")
        return model

    def _class(self) -> Any:
        import transformers  # noqa: PLC0415  # an extra

        return getattr(transformers, self.model)


def architectures() -> list[Architecture]:
    """Every class that transformers lists as a causal or as a masked language model and that reads one text."""
    from transformers.models.auto import configuration_auto  # noqa: PLC0415
    from transformers.models.auto import modeling_auto as auto  # noqa: PLC0415  # an extra

    configs: dict[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    listed: list[tuple[Kind, Any]] = [
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ]
    found: dict[tuple[str, Kind], Architecture] = {}
    for kind, names in listed:
        for name, model in names.items():
            first = model if isinstance(model, str) else model[0]
            if "ConditionalGeneration" in first:  # reads pictures, sound, or a second text
                continue
            is_its_own = first.startswith(configs[name].removesuffix("Config"))
            if is_its_own or (first, kind) not in found:
                found[first, kind] = Architecture(name, first, kind)
    return sorted(found.values(), key=lambda one: one.key)
