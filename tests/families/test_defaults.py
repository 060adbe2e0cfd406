"""The two data files against the transformers version that they name."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from building import release
from transformers import __version__ as transformers_version

from ropext.families import config
from ropext.families.described import NO_FACTS
from ropext.families.table import MROPE

ROOT = Path(__file__).parents[2]
NAMES = "from transformers import CONFIG_MAPPING, __version__; print(__version__, *CONFIG_MAPPING)"


@pytest.mark.slow
def test_the_defaults_equal_the_scripts_output(tmp_path):
    """Compare the data with the installed transformers; a newer one may know more types."""
    installed = subprocess.check_output([sys.executable, "-W", "ignore", "-c", NAMES], text=True)
    version, *types = installed.split()
    if release(version) < release(config.census_version()):
        pytest.skip(
            f"the data is of transformers {config.census_version()}, installed is {version}"
        )
    made = tmp_path / "defaults.json"
    script = ROOT / "scripts" / "make_defaults.py"
    subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(made)],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    stored = json.loads((ROOT / "ropext" / "families" / "defaults.json").read_text())
    assert json.loads(made.read_text()) == stored | {"transformers": version}
    assert set(config.census()) <= set(types)
    if version == config.census_version():
        assert set(config.census()) == set(types)


def test_each_type_is_loaded_by_the_class_that_lists_it():
    from transformers.models.auto import modeling_auto

    if release(transformers_version) < release(config.census_version()):
        pytest.skip(f"the data is of transformers {config.census_version()}")
    listed = {
        "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForMaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "AutoModelForMultimodalLM": modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    }
    for model_type in filter(tiny.text_part, config.census()):
        first = next((name for name, types in listed.items() if model_type in types), "")
        assert config.auto_class(model_type, NO_FACTS) == first, model_type
    assert config.auto_class("qwen3_vl", NO_FACTS) == "AutoModelForImageTextToText"


def test_every_refusal_has_its_sentence():
    schemes = {known.scheme for known in config.census().values()} - {"rotary", "composite"}
    # For a type that the census lacks, transformers tells whether it computes an embedding.
    assert schemes | {"not computed"} == set(config.REFUSALS)
    assert len(config.census()) == 804


def test_composites_lead_to_known_types():
    for name, known in config.census().items():
        if known.scheme == "composite":
            assert known.text in config.census(), name
            assert known.path, name


def test_the_types_with_mrope_are_those_with_it_in_their_code():
    models = Path(importlib.util.find_spec("transformers").origin).parent / "models"
    code = {file.parent.name: file.read_text("utf-8") for file in models.glob("*/modeling_*.py")}

    def makes(model_type):
        return "mrope_section" in code.get(
            max(filter(model_type.startswith, code), key=len, default=""), ""
        )

    found = {name for name, known in config.census().items() if known.scheme == "rotary"}
    found = {name for name in found if makes(name)}
    there = {name for name in MROPE if any(map(name.startswith, code))}  # others are newer
    assert found - {"qwen3_omni_moe_talker_code_predictor"} == there  # which has one axis
