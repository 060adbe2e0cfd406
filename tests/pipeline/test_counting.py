"""The count of a demo's cost is that of the tokens a model really reads."""

import torch

from ropext.pipeline.series import Spent, counted
from scripts.demo_checkpoint.train import new_model


def test_tokens_are_counted_by_whether_gradients_are_recorded():
    model, ids, spent = new_model(0), torch.arange(1, 65).reshape(2, 32), Spent()
    calls = []
    with counted(spent, lambda: calls.append(spent.equivalents)):
        with torch.no_grad():
            model(input_ids=ids)
        with torch.inference_mode():
            model(input_ids=ids[:1])
        model(input_ids=ids, labels=ids).loss.backward()
    model(input_ids=ids)  # after the end: not counted
    assert (spent.forward, spent.trained) == (64 + 32, 64)
    assert spent.equivalents == 96 + 3 * 64
    assert calls == [64, 96, 288]


def test_layers_that_run_again_in_the_backward_pass_are_not_counted_again():
    model, ids, spent = new_model(0).train(), torch.arange(1, 65).reshape(2, 32), Spent()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with counted(spent):
        model(input_ids=ids, labels=ids).loss.backward()
    assert (spent.forward, spent.trained) == (0, 64)


def test_a_model_without_weights_costs_nothing():
    with torch.device("meta"):
        model = new_model(0)
    spent = Spent()
    with counted(spent):
        model(input_ids=torch.ones((1, 8), dtype=torch.long, device="meta"))
    assert spent.equivalents == 0


def test_costs_add_up():
    assert Spent(1, 2) + Spent(10, 20) == Spent(11, 22)
    assert Spent(11, 22).to_json() == {"forward": 11, "trained": 22, "equivalents": 77}
