"""What `finetune --hold` holds to: the base, inside of the model that is trained.

Its weights are those of the model without the LoRA, its spectrum is that of before the extension,
so that it takes no memory beside them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ropext.errors import UnsupportedModel
from ropext.evaluation.forward import replaced_forward


class Hold:
    """The base's hidden states of the windows that are held, and the weight of the divergence;
    `skeleton` is the base without weights."""

    def __init__(self, model: Any, skeleton: Any, weight: float) -> None:
        self.model, self.weight = model, weight
        modules = dict(skeleton.named_modules())
        where = model.get_input_embeddings().weight.device
        self.rotary = []
        for name, own in model.named_modules():
            if getattr(own, "scaling", None) != getattr(modules[name], "scaling", None):
                raise UnsupportedModel(
                    "--hold: the extension scales this model's softmax, which the base beside it "
                    "would need unscaled; leave --hold out (--keep-short alone works)"
                )
            if any(key.endswith("inv_freq") for key in own._buffers):
                self.rotary.append((own, modules[name].to(where)))

    @contextmanager
    def _as_base(self) -> Iterator[None]:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        kinds = BaseTunerLayer, AuxiliaryTrainingWrapper  # a LoRA, and a copy of a norm
        adapted = [own for own in self.model.modules() if isinstance(own, kinds)]
        with ExitStack() as stack:
            for own, before in self.rotary:
                stack.enter_context(replaced_forward(own, before.forward))
            for own in adapted:
                own.enable_adapters(False)
            try:
                yield
            finally:
                for own in adapted:
                    own.enable_adapters(True)

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """The base's last hidden states."""
        with self._as_base():
            output = self.model.base_model(input_ids=ids, use_cache=False, **inputs)
        found: torch.Tensor = output.last_hidden_state
        return found
