"""The most bytes that a training step's tensors take at once, counted one by one and never held:
every tensor is a fake one, so that the real widths of large models can be asked for.
"""

import weakref
from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ropext.options.training import Finetune
from ropext.training import defaults, models
from ropext.training.loss import sliced_cross_entropy
from ropext.training.rows import Collator


class Counter(TorchDispatchMode):
    """Storages that are alive, from the moment an operator makes them to their end."""

    def __init__(self, known):
        super().__init__()
        self.sizes = dict.fromkeys((own.untyped_storage()._cdata for own in known), 0)
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for own in tree_leaves(made):
            if isinstance(own, torch.Tensor):
                self._add(own.untyped_storage())
        return made

    def _add(self, storage):
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += self.sizes[key]
        self.most = max(self.most, self.now)

        def ended():
            self.now -= self.sizes.pop(key)

        weakref.finalize(storage, ended)


def most_bytes(config, tokens, monkeypatch, *, dtype=torch.bfloat16, lora=True, recompute=True):
    """Above the weights, of one row in a step of Trainer's; without a LoRA the rotation learns."""
    import sys

    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    # Where no token is padding, real tensors need no mask; of fake ones nobody can know it.
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "create_causal_mask", lambda *args, **kwargs: None)
    trained = model.requires_grad_(False)
    if lora:
        with torch.device("meta"):
            settings = defaults.settings(Finetune(), 7e9, tokens // 4, tokens)
            trained = models.add_adapter(model, Finetune(), settings.lora)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for own in trained.modules():
            _imitate(own)
        if not lora:
            _learn_rotation(model, monkeypatch)
        if recompute:
            trained.gradient_checkpointing_enable({"use_reentrant": False})
        trained.train()
        ids = torch.zeros((1, tokens), dtype=torch.long)
        counter = Counter([*trained.parameters(), *trained.buffers()])
        mixed = torch.autocast("cpu", torch.bfloat16) if dtype == torch.bfloat16 else nullcontext()
        with counter:
            with mixed:
                loss = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.sum()
            loss.backward()
    return counter.most


def most_bytes_of_rows(model, rows):
    """Above the weights, of one step over real rows: what is fake cannot depend on positions."""
    counter = Counter([*model.parameters(), *model.buffers()])
    with counter:
        read = Collator(0)(rows)
        labels = read.pop("labels")
        hidden = model.base_model(**read, use_cache=False).last_hidden_state
        head = model.get_output_embeddings()
        sliced_cross_entropy(hidden[0], head.weight, head.bias, labels[0]).backward()
    return counter.most


def _imitate(module):
    for name, own in module._parameters.items():
        if own is not None:
            fake = torch.empty(own.shape, dtype=own.dtype)
            module._parameters[name] = torch.nn.Parameter(fake, requires_grad=own.requires_grad)
    for name, own in module._buffers.items():
        if own is not None:
            module._buffers[name] = torch.empty(own.shape, dtype=own.dtype)


def _learn_rotation(model, monkeypatch):
    rotary = model.base_model.rotary_emb
    factor = torch.nn.Parameter(torch.ones(()))

    def forward(x, position_ids, layer_type=None):
        name = f"{layer_type}_inv_freq" if layer_type else "inv_freq"
        angles = position_ids.float()[..., None] * getattr(rotary, name) * factor
        both = torch.cat([angles, angles], -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    monkeypatch.setattr(rotary, "forward", forward)
