"""Every rotary type: tiny config -> read -> extend -> stock transformers builds the same spectrum.

One process for all of them, which cannot import ropext. A type that stock cannot build here is
skipped with stock's reason, and the number that was built is held against the census.
"""

import functools
import sys

import pytest
from building import Stock, cases, differences, rotary_types
from tiny import text_part

from ropext import families, forms
from ropext.families import config

# The census ran 127 decoder and 10 masked-LM types of transformers 5.23 (gemma3n needs timm, the
# two assistants are drafters): these task heads must be built for at least so many.
BUILT_AT_LEAST = 137

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stock():
    process = Stock()
    yield process
    process.close()


@functools.cache
def outcome(process, model_type):
    """(reason why this type is left out or "", list of (case, differences))."""
    if model_type not in process.tasks:
        return f"transformers {process.version} has no model of this type by itself", []
    found = []
    for case in cases(model_type, process.has_head(model_type)):
        answer = process.build(case)
        if case.name == "modern" and "error" in answer and not case.error:
            return answer["error"].strip().splitlines()[0], []
        found.append((case, differences(case, answer)))
    return "", found


@pytest.mark.parametrize("model_type", rotary_types())
def test_stock_builds_what_was_read_and_written(stock, model_type):
    left_out, found = outcome(stock, model_type)
    if left_out:
        pytest.skip(left_out)
    wrong = [f"{case.id}: {sentence}" for case, bad in found for sentence in bad]
    assert not wrong, "\n".join(wrong)


def test_the_census_is_covered(stock, capsys):
    left_out, built = {}, {"AutoModelForCausalLM": 0, "AutoModelForMaskedLM": 0, "AutoModel": 0}
    for model_type in rotary_types():
        reason, _ = outcome(stock, model_type)
        if reason:
            left_out[model_type] = reason
        else:
            built[stock.tasks[model_type]] += 1
    with capsys.disabled():
        print(f"\nbuilt by transformers {stock.version}: {built}", file=sys.stderr)
        for model_type, reason in left_out.items():
            print(f"left out: {model_type}: {reason}", file=sys.stderr)
    if stock.version != config.version():
        pytest.skip(f"the count is of transformers {config.version()}")
    assert built["AutoModelForMaskedLM"] >= 10
    assert built["AutoModelForCausalLM"] + built["AutoModelForMaskedLM"] >= BUILT_AT_LEAST


@pytest.mark.parametrize("model_type", [t for t in rotary_types() if not text_part(t)[1]])
def test_what_was_written_reads_back(model_type):
    for case in cases(model_type):
        model = families.read(case.config)
        for site, wanted in zip(model.sites, case.wanted.values(), strict=True):
            assert forms.same(site.rope.spectrum, wanted), case.id
        again = families.read(families.respell(case.config))
        for site, wanted in zip(again.sites, case.wanted.values(), strict=True):
            assert forms.same(site.rope.spectrum, wanted), f"{case.id} respelled"
