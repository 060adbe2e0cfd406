"""The bundled model on the device, compared with the CPU: losses, gradients, and a patched model.

The model patched in memory is compared with the same one saved and loaded.
"""

import importlib.util
from functools import partial
from typing import Any

from gpu_pieces import STAND_IN, Case, Day, LeftOut, at_most, extended

PLACE = 64  # tokens: the figures are means over so many, because single ones round by more
FACTOR, ROW = 4, 1024


def load(place: Any, device: str, dtype: str = "float32", attention: str = "sdpa") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        place, dtype=kind, attn_implementation=attention
    )
    return model.to(device).eval()


def long(day: Day, device: str, dtype: str = "float32", attention: str = "sdpa") -> Any:
    return load(extended(day, STAND_IN, FACTOR, "bundled-4x"), device, dtype, attention)


def bundled() -> Any:
    from ropext.base.bundled import MODELS

    return MODELS[STAND_IN]


def rows(count: int = 4) -> Any:
    """Rows of the held-out documents, four times the context."""
    import torch
    from transformers import AutoTokenizer

    from ropext.evaluation.corpus import Source, read_documents

    tokenizer = AutoTokenizer.from_pretrained(bundled())
    source = read_documents(Source("ropext://held-out"))
    read = (tokenizer(document.content)["input_ids"] for document in source)
    return torch.tensor([ids[:ROW] for ids in read if len(ids) >= ROW][:count])


def losses(model: Any) -> Any:
    """Return the losses by row and position, in float64, on the CPU."""
    import torch

    ids = rows()
    with torch.no_grad():
        logits = model(ids.to(model.device), use_cache=False).logits[:, :-1].float()
    wanted = ids[:, 1:].to(logits.device)
    nll = torch.nn.functional.cross_entropy(logits.mT, wanted, reduction="none")
    return nll.double().cpu()


def apart(nll: Any, truth: Any, bound: float) -> dict[str, Any]:
    """Differences by position, and of the token that differs most."""
    cut = truth.shape[1] // PLACE * PLACE
    means = (nll - truth)[:, :cut].unflatten(1, (-1, PLACE)).mean((0, 2))
    return {
        f"by position, means over {PLACE}": at_most(float(means.abs().max()), bound),
        "largest difference of a token's loss": float((nll - truth).abs().max()),
    }


def loss(day: Day, dtype: str, attention: str = "sdpa") -> dict[str, Any]:
    """Compare the loss by position with the CPU's in float32."""
    if attention != "sdpa" and (day.dry or not importlib.util.find_spec("flash_attn")):
        why = "its kernels need CUDA" if day.dry else "the package flash-attn is not installed"
        raise LeftOut(f"{attention}: {why}")
    truth, nll = losses(long(day, "cpu")), losses(long(day, day.device, dtype, attention))
    return apart(nll, truth, 1e-5 if dtype == "float32" else 1e-2)


def in_memory(day: Day) -> dict[str, Any]:
    """Compare the model patched in memory on the device with the output of `extend`, loaded
    there."""
    from ropext.models import patching

    patched = patching.patch(load(bundled(), day.device), method="yarn", factor=FACTOR)
    return apart(losses(patched), losses(long(day, day.device)), 0)


def self_extend(day: Day) -> dict[str, Any]:
    from ropext.models import patching

    models = (load(bundled(), device) for device in (day.device, "cpu"))
    how: dict[str, Any] = {"method": "self-extend", "factor": FACTOR}
    nll, truth = (losses(patching.patch(model, **how)) for model in models)
    return apart(nll, truth, 1e-5)


def tuning(day: Day, device: str, dtype: str, sliced: bool) -> tuple[float, Any]:
    """Loss of a step, and the gradient of all of its LoRA."""
    import torch

    from ropext.options.training import Finetune
    from ropext.training import defaults, models
    from ropext.training.loss import use_sliced_loss

    options, model = Finetune(steps=1), long(day, device, dtype)
    if sliced:
        assert use_sliced_loss(model) is None
    joined = models.add_adapter(
        model, options, defaults.finetune_settings(options, defaults.ModelSize(1_000_000, 256, ROW))
    )
    generator = torch.Generator().manual_seed(0)  # a generator of the CPU, whatever the device
    moving = [parameter for parameter in joined.parameters() if parameter.requires_grad]
    with torch.no_grad():  # the half that begins as zero would give the other no gradient
        for parameter in moving:
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    ids = rows(2).to(device)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = joined(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
    return gradients(loss, moving)


def fitting(device: str) -> tuple[float, Any]:
    """Loss of a step, and the gradient of its spectrum."""
    from ropext.models import patching
    from ropext.training import spectrum

    model = load(bundled(), device).requires_grad_(False)
    plan: Any = patching.plan_for_loaded(model, method="yarn", factor=FACTOR)
    learned = spectrum.learned_spectrum("longrope", plan.main, plan.target, 4.0).to(device)
    patching.patch(model, method=learned.method, factor=FACTOR, **learned.knobs())
    spectrum.install_learned_spectrum(model, plan.sites, plan.target, learned)
    ids = rows(2).to(device)
    learner = spectrum.SpectrumLearner(model, learned, sliced=True, tail=plan.target - 64)
    return gradients(learner(ids, ids)["loss"], list(learned.parameters()))


def gradients(loss: Any, moving: list[Any]) -> tuple[float, Any]:
    import torch

    loss.backward()
    parts = [parameter.grad for parameter in moving if parameter.grad is not None]
    return float(loss.detach()), torch.cat([part.double().flatten().cpu() for part in parts])


def beside(one: Case | Any, other: Any, bound: float) -> dict[str, Any]:
    """Two losses with their gradients."""
    (loss, gradient), (truth, expected) = one(), other()
    relative = float((gradient - expected).norm() / expected.norm())
    return {
        "difference of the loss": at_most(abs(loss - truth), bound),
        "gradients, relative": at_most(relative, bound),
    }


def cases(day: Day) -> dict[str, Case]:
    here, cpu = day.device, "cpu"
    step = partial(partial, tuning, day)
    full, half = "float32", "bfloat16"
    pairs = {
        "sliced loss, float32": (step(here, full, True), step(here, full, False), 1e-5),
        "sliced loss, bfloat16": (step(here, half, True), step(here, half, False), 1e-2),
        "a tuning step": (step(here, full, True), step(cpu, full, True), 1e-5),
        "a step of a fit": (partial(fitting, here), partial(fitting, cpu), 1e-5),
    }
    return {
        "loss, float32, sdpa": partial(loss, day, full),
        "loss, bfloat16, sdpa": partial(loss, day, half),
        "loss, bfloat16, flash": partial(loss, day, half, "flash_attention_2"),
        **{name: partial(beside, *pair) for name, pair in pairs.items()},
        "patched = saved and loaded": partial(in_memory, day),
        "Self-Extend": partial(self_extend, day),
    }
