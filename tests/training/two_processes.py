"""Run on two CPU processes: FSDP2 as accelerate prepares it, then a whole run under DDP.

    torchrun --nproc_per_node 2 two_processes.py EXTENDED UNTIED STORIES OUTPUT OPTIONS

Each process writes its findings to OUTPUT-RANK.json.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ropext.base.narration import NOBODY
from ropext.models.processes import keep_float32
from ropext.options.training import Finetune
from ropext.results import rules
from ropext.training import finetune, models, trainer
from ropext.training.loss import use_sliced_loss
from ropext.training.request import TrainingRequest
from ropext.training.rows import RowCollator

RANK = int(os.environ["RANK"])


def prepared_batch(extended, stories):
    prepared = finetune.prepare_finetune(
        extended, stories, Finetune(steps=1, batch_tokens=1024, rank=4)
    )
    rows = [prepared.rows[number] for number in range(4)]
    return prepared, RowCollator(prepared.padding)(rows)


def new_model(prepared, dtype):
    model = models.load_to_train(prepared.snapshot, Finetune(device="cpu", dtype=dtype))
    assert use_sliced_loss(model) is None
    torch.manual_seed(0)
    return models.add_adapter(model, prepared.options, prepared.settings).train()


def sharded(model, dtype, alone):
    """Shard the model with accelerate's own functions, over one process or both; accelerate gives
    FSDP only to accelerators."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=True,
    )
    mixed = "bf16" if dtype == "bfloat16" else "no"
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
        keep_float32(plugin)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("each", "one"))
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision=mixed,
        is_main_process=RANK == 0,
        device=torch.device("cpu"),
        torch_device_mesh=mesh if alone else None,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("one",)),
    )
    return fsdp2_prepare_model(accelerator, model)


def three_steps(model, inputs, dtype, share):
    """Return the losses of the whole batch, of which this process reads a share, and the trained
    adapter."""
    scored = (inputs["labels"][:, 1:] != -100).sum()
    rows = slice(None) if share == 1 else slice(2 * RANK, 2 * RANK + 2)
    own = {key: value[rows] for key, value in inputs.items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            # FSDP averages gradients over processes, so each half counts double.
            loss = model(**own, num_items_in_batch=scored * share).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() * share
        if share != 1:
            distributed.all_reduce(total)
        losses.append(float(total))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    return losses, {name: own.float() for name, own in state.items() if "lora_" in name}


def merged(prepared, state):
    """Return the merged weights as one tensor."""
    model = new_model(prepared, "float32")
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    return torch.cat([own.flatten() for own in model.merge_and_unload().state_dict().values()])


def fsdp2(prepared, inputs, dtype):
    """Compare one plain process with FSDP2 over one and over two."""
    base = merged(prepared, {})
    losses, state = three_steps(new_model(prepared, dtype), inputs, dtype, 1)
    wanted = merged(prepared, state)
    found = {"losses": losses}
    for name, count in (("one", 1), ("both", 2)):
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        model = new_model(prepared, dtype)
        devices = {p.device.type for p in model.get_base_model().model.embed_tokens.parameters()}
        model = sharded(model, dtype, count == 1)
        del os.environ["ACCELERATE_USE_FSDP"]
        assert all(isinstance(p, DTensor) for p in model.parameters())
        own = sum(p.to_local().numel() for p in model.parameters())
        whole = sum(p.numel() for p in model.parameters())
        losses, state = three_steps(model, inputs, dtype, 1 / count)
        moved = (wanted - base).norm()
        found[name] = {
            "losses": losses,
            "devices": sorted(devices),
            "share": own / whole,
            "moved": float(moved),
            # The first process has the whole state.
            "apart": float((merged(prepared, state) - wanted).norm() / moved),
        }
    return found


def ddp(extended, stories, output, options):
    seen = {}
    own_step = trainer._Trainer.training_step

    def looks(self, model, *args, **kwargs):
        seen["wrapper"] = type(model).__name__
        seen["world"] = distributed.get_world_size()
        seen["accelerate"] = str(self.accelerator.distributed_type)
        return own_step(self, model, *args, **kwargs)

    trainer._Trainer.training_step = looks
    values = iter((3.0, 3.5 - RANK))
    rules.far_loss = lambda *_: next(values)
    request = TrainingRequest(extended, stories, Finetune(**options))
    with request.prepared(Path(output), NOBODY) as job:
        done = job.make(Path(output), NOBODY)
    return seen | {"losses": done.by_step, "evaluations": done.evaluations}


def main():
    extended, untied, stories, output, options = sys.argv[1:]
    distributed.init_process_group("gloo")
    found = {"fsdp2": {}}
    for name, model in (("tied", extended), ("untied", untied)):
        prepared, inputs = prepared_batch(model, stories)
        for dtype in ("float32", "bfloat16"):
            found["fsdp2"][f"{name} {dtype}"] = fsdp2(prepared, inputs, dtype)
    found["ddp"] = ddp(extended, stories, output, json.loads(options))
    Path(f"{output}-{RANK}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
