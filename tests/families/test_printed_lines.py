"""The printed `from_pretrained` lines, run in stock transformers for every type that gets one.

On the meta device, without weights: the class must take the type, and its rotary modules must turn
as the plan says.
"""

import json

import pytest
import transformers
from accelerate import init_empty_weights
from building import Case, differences, rotary_types
from stock import describe
from tiny import modern, text_part, wrapped

from ropext.base.errors import RopextError
from ropext.options.extend import Extend
from ropext.planning import make_plan

QUICK = ("llama", "qwen3_vl", "qwen2_5_vl", "mistral3", "gemma3")


class Loader:
    """A class of transformers whose from_pretrained builds without weights."""

    def __init__(self, name):
        self.auto = getattr(transformers, name)

    def from_pretrained(self, directory, **keys):
        config = transformers.AutoConfig.from_pretrained(directory, **keys)
        with init_empty_weights(include_buffers=False):
            return self.auto.from_config(config), config


CLASSES = {name: Loader(name) for name in dir(transformers) if name.startswith("AutoModel")}


def builds(name, directory):
    """Return whether stock builds the base itself, by a class that takes its type."""
    try:
        CLASSES[name].from_pretrained(directory)
    except Exception as error:
        return "Unrecognized configuration class" in str(error)
    return True


def run(model_type, directory):
    """Return sentences about different values that the printed line builds; None if no line is
    printed."""
    text_type, path = text_part(model_type)
    config = wrapped(model_type, modern(text_type))
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    try:
        made = make_plan(config, Extend(factor=4.0, even_so=True), str(directory))
    except RopextError:
        return None
    line = next((line for line in made.overrides() if line.loader == "transformers"), None)
    if line is None:
        return None
    try:
        model, config = eval(line.command, CLASSES)
    except Exception:
        if model_type in QUICK or builds(line.command.partition(".")[0], directory):
            raise
        return []
    for key in path:
        config = getattr(config, key)
    case = Case(model_type, f"{model_type} by {line.command[:60]}", made.config)
    case.wanted = {site.label: site.wanted for site in made.sites}
    case.thetas = {site.label: site.params["rope_theta"] for site in made.sites}
    case.factor = made.factor
    return differences(case, describe(model, [text_type]))


@pytest.mark.parametrize("model_type", QUICK)
def test_the_printed_serve_lines_of_a_few_types_work(tmp_path, model_type):
    assert run(model_type, tmp_path) == []


@pytest.mark.slow
def test_the_printed_serve_lines_of_every_type_work(tmp_path):
    wrong, printed = {}, 0
    for model_type in rotary_types():
        try:
            found = run(model_type, tmp_path)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"[:200]]
        printed += found is not None
        if found:
            wrong[model_type] = found
    assert not wrong, json.dumps(wrong, indent=1)
    assert printed > 100
