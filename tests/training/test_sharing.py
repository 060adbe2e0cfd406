"""What the processes of a launch share, as far as one process without a GPU can tell."""

import pytest
import torch
from test_finetune import RUN
from tiny_llama import new_llama
from trained import count_training, train

from ropext.base.errors import InputError, UsageError
from ropext.evaluation.costs import num_parameters
from ropext.models import processes
from ropext.training import models, trainer


@pytest.fixture
def launched(monkeypatch):
    """Set what `accelerate launch` sets for so many processes."""

    def set_up(processes, *, fsdp=False, **others):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        found = {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": size for name, size in others.items()}
        if fsdp:
            found |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 2}
            found |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
        for name, value in found.items():
            monkeypatch.setenv(name, str(value))

    return set_up


def test_several_processes_read_rows_of_their_own(launched):
    launched(16)
    assert (processes.processes_of_each_row(), processes.readers()) == (1, 16)
    launched(16, fsdp=True, cp=4)
    assert (processes.processes_of_each_row(), processes.readers()) == (4, 4)


def test_the_head_of_a_tied_model_is_no_weight_of_its_own(extended):
    from ropext.files.checkpoint import open_snapshot
    from ropext.models.load import model_without_weights

    made = model_without_weights(open_snapshot(str(extended)))
    assert num_parameters(made) == num_parameters(new_llama(tie_word_embeddings=True))


def test_rows_that_processes_cannot_share_are_refused_before_documents_are_read(
    launched, extended, base, tmp_path
):
    (tmp_path / "empty.jsonl").touch()  # another refusal, if it is read
    empty, output = str(tmp_path / "empty.jsonl"), tmp_path / "out"
    launched(3)
    words = "2 rows, which 3 processes cannot share; set --batch-tokens to a multiple of 768"
    options = {"steps": 2, "batch_tokens": 512}
    with pytest.raises(InputError, match=words):
        count_training("finetune", extended, empty, **options)
    with pytest.raises(InputError, match=words):
        train("finetune", extended, empty, output, **options)
    with pytest.raises(InputError, match=r"2 rows, which 3 .* --keep-short to one of 3"):
        count_training("fit", base, empty, factor=4, batch_tokens=256, keep_short=1)
    launched(6, fsdp=True, cp=3)
    with pytest.raises(InputError, match=r"256 tokens, .* over 3 processes.* multiple of 6"):
        count_training("finetune", extended, empty, **options)
    launched(2, fsdp=True, cp=1)
    with pytest.raises(UsageError, match="is for one process or DDP"):
        count_training("finetune", extended, empty, **options, qlora=True)


def test_an_fsdp_config_that_loads_the_model_in_every_process_is_refused(
    launched, monkeypatch, extended, tmp_path
):
    launched(1, fsdp=True)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UsageError, match="must set fsdp_version: 2 and"):
        count_training("finetune", extended, str(tmp_path / "empty.jsonl"), steps=2)


def test_nothing_is_loaded_a_second_time_to_be_read_under_fsdp(
    launched, monkeypatch, extended, stories
):
    launched(1, fsdp=True)
    monkeypatch.setattr(models, "training_device", lambda options: torch.device("cuda"))
    monkeypatch.setattr("ropext.training.objective.free_memory", lambda device: int(79e9))
    planned = count_training("finetune", extended, str(stories), **RUN)
    assert planned.judge is None
    assert "ropext eval OUT --data DATA --device-map auto" in planned.why_no_judge
    assert planned.to_json()["judging_documents"] == 0


class Seen(Exception):
    """All that the test wanted."""


def test_qlora_trains_in_bfloat16(monkeypatch, extended, stories, tmp_path):
    """Without the quantiser, which runs on GPUs: the dtype of its unpacked weights, and Trainer's
    settings."""
    settle = trainer.trainer_arguments

    def looks(job):
        embedding = job.model.get_input_embeddings().weight
        raise Seen(
            settle(job).bf16, embedding.dtype, job.model.get_output_embeddings().weight.dtype
        )

    monkeypatch.setattr(trainer, "trainer_arguments", looks)
    monkeypatch.setattr(models, "qlora_quantiser", lambda where: None)
    options = RUN | {"eval_documents": 0, "qlora": True, "dtype": "bfloat16"}
    with pytest.raises(Seen) as seen:
        train("finetune", extended, str(stories), tmp_path / "out", **options)
    assert seen.value.args == (True, torch.bfloat16, torch.bfloat16)
