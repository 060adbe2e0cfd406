"""Run by torchrun on two CPU processes: FSDP2 by hand, then a whole run under DDP.

    torchrun --nproc_per_node 2 two_processes.py EXTENDED STORIES OUTPUT OPTIONS

Each process writes what it saw to OUTPUT-RANK.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed

from ropext.training import adapters, engine, loading, run, run_finetune
from ropext.training.collating import Collator
from ropext.training.loss import use_sliced_loss
from ropext.training.options import Options

RANK = int(os.environ["RANK"])


def prepared_batch(extended, stories):
    prepared = run.prepare(extended, stories, Options(steps=1, batch_tokens=1024, rank=4))
    rows = [prepared.rows[number] for number in range(4)]
    return prepared, Collator(prepared.padding)(rows)


def new_model(prepared):
    model = loading.load(prepared.origin.snapshot, prepared.options)
    assert use_sliced_loss(model) is None
    torch.manual_seed(0)
    joined = adapters.add_adapter(model, prepared.options, prepared.settings)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in joined.named_parameters():
            if "lora_B" in name:  # zero at the start, which would leave lora_A without gradient
                parameter.normal_(std=0.02, generator=generator)
    return joined.train()


def step(model, inputs, scored):
    loss = model(**inputs, num_items_in_batch=scored).loss
    loss.backward()
    return float(loss.detach())


def fsdp2(extended, stories):
    """One process with the whole batch against two with a half each and shared weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import DTensor

    prepared, inputs = prepared_batch(extended, stories)
    scored = (inputs["labels"][:, 1:] != -100).sum()
    whole = new_model(prepared)
    loss = step(whole, inputs, scored)
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.requires_grad}

    mesh = init_device_mesh("cpu", (2,))
    shared = new_model(prepared)
    for layer in shared.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(shared, mesh=mesh)
    assert isinstance(shared, FSDPModule)
    assert all(isinstance(p, DTensor) for p in shared.parameters())
    half = {key: value[2 * RANK : 2 * RANK + 2] for key, value in inputs.items()}
    # FSDP averages gradients over processes, so each half counts double.
    half_loss = step(shared, half, scored / 2)
    total = torch.tensor(half_loss / 2)
    distributed.all_reduce(total)
    found = {n: p.grad.full_tensor() for n, p in shared.named_parameters() if p.requires_grad}
    local = sum(p.to_local().numel() for p in shared.parameters())
    return {
        "loss": loss,
        "shared_loss": float(total),
        "worst": max(float((found[n] - wanted[n]).abs().max()) for n in wanted),
        "largest": max(float(gradient.abs().max()) for gradient in wanted.values()),
        "compared": len(wanted),
        "local_share": local / sum(p.numel() for p in whole.parameters()),
    }


def ddp(extended, stories, output, options):
    seen = {}
    own_step = engine._Trainer.training_step

    def looks(self, model, *args, **kwargs):
        seen["wrapper"] = type(model).__name__
        seen["world"] = distributed.get_world_size()
        seen["accelerate"] = str(self.accelerator.distributed_type)
        return own_step(self, model, *args, **kwargs)

    engine._Trainer.training_step = looks
    done = run_finetune(extended, stories, output, **options)
    return seen | {"losses": done.losses, "evaluations": done.evaluations}


def main():
    extended, stories, output, options = sys.argv[1:]
    distributed.init_process_group("gloo")
    found = {"fsdp2": fsdp2(extended, stories)}
    found["ddp"] = ddp(extended, stories, output, json.loads(options))
    Path(f"{output}-{RANK}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
