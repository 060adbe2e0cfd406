"""The model card: the base's kept, our section in front, and no stranger's text active in it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ropext.families.loaders import LoaderReading, Serving
from ropext.files.checkpoint.card import (
    TAGS,
    Card,
    Table,
    code_block,
    escape,
    read_readme,
    render,
    split,
)

CARD = Card(
    title="model-yarn",
    base="org/model",
    base_is_hub_id=True,
    summary=("Extended from 2048 to 8192 tokens.",),
    facts=[("method", "yarn"), ("factor", 4.0)],
    readings=[
        LoaderReading("vLLM", "0.30-", "same"),
        LoaderReading("llama.cpp", "b1", "different"),
    ],
    serving=[Serving("vLLM", "vllm serve out --max-model-len 8192")],
    numbers=(Table("Perplexity", "", ("length", "ppl"), (("8192", "9.1 ± 0.1"),)),),
    warnings=("transformers warns about attn_factor.",),
)

BASE = """---
license: mit
# a comment
language:
- no
- en
tags: [text, "a: b"]
base_model: other/older
model-index:
- name: x
  results:
  - metrics: 5
pipeline_tag: text-generation
---

# Base model

Text with <b>HTML</b> of its own.
"""


def front(text: str) -> dict:
    return yaml.safe_load(split(text)[0])


def test_the_base_is_kept_and_the_front_matter_merged():
    text = render(CARD, BASE)
    assert text.startswith("---\nlicense: mit\nlanguage:\n- 'no'\n- en\npipeline_tag: ")
    found = front(text)
    assert found["base_model"] == "org/model"
    assert found["tags"] == ["text", "a: b", "ropext", "context-extension"]
    assert found["pipeline_tag"] == "text-generation"
    assert "model-index" not in found
    assert text.endswith("# Base model\n\nText with <b>HTML</b> of its own.\n")
    order = ["## Context extension", "| method | yarn |", "attn\\_factor", "**Perplexity**"]
    order += [
        "| llama.cpp | b1 | different |",
        "```sh\nvllm serve out --max-model-len 8192\n```",
        "# Base",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_a_second_extension_replaces_the_section():
    once = render(CARD, BASE)
    twice = render(replace(CARD, base="org/once", summary=("Again.",)), once)
    assert twice.count("## Context extension") == 1
    assert "Extended from 2048" not in twice
    assert twice.count("# Base model") == 1
    assert front(twice)["tags"].count("ropext") == 1
    assert front(twice)["base_model"] == "org/once"
    assert render(CARD, once) == once


def test_a_local_base_has_no_base_model_of_ours():
    local = replace(CARD, base="folder", base_is_hub_id=False)
    assert front(render(local, BASE))["base_model"] == "other/older"
    assert "base_model" not in front(render(local))


@pytest.mark.parametrize(
    "base",
    [None, "", "no front matter", "---\nnever closed", "---\n---\nbody", "\n---\na: 1\n---\n"],
)
def test_any_base_gives_a_card(base: str | None):
    text = render(CARD, base)
    assert front(text)["tags"] == ["ropext", "context-extension"]
    if not base:
        assert text.endswith("# model-yarn\n")


def test_the_head_is_written_from_known_keys_alone():
    """What else a stranger's head holds (gates, examples, tags of YAML) does not go on."""
    hostile = """---
license: !!python/object/apply:os.system [id]
license_name: &a "x\\ny: 1"
license_link: *a
language: {en: {}}
datasets: [a/b, [nested], {k: v}, !x c]
extra_gated_prompt: send me your token
widget: [{text: hello}]
"base_model": {a: b}
metrics: [accuracy
"""
    for broken in ("---\n", "]\nloop: &b [*b]\n---\n"):  # no YAML that is read: nothing of it
        assert set(front(render(CARD, hostile + broken))) == {"library_name", "base_model", "tags"}
    local = replace(CARD, base="folder", base_is_hub_id=False)
    assert front(render(local, hostile + "]\n---\nbody")) == {
        "license": ["id"],
        "license_name": "x y: 1",
        "license_link": "x y: 1",
        "datasets": ["a/b", "c"],
        "metrics": ["accuracy"],
        "library_name": "transformers",
        "tags": list(TAGS),
    }


def test_the_hub_reads_the_head_as_we_do(tmp_path: Path):
    from huggingface_hub import ModelCard, metadata_load

    place = tmp_path / "README.md"
    place.write_text(render(CARD, BASE), encoding="utf-8")
    ours = front(place.read_text("utf-8"))
    assert ours["language"] == ["no", "en"]  # a language, though plain YAML reads it as False
    assert metadata_load(place) == ours
    assert ModelCard.load(place).data.to_dict() == ours


def test_a_card_reads_windows_line_ends_and_replaces_broken_tags():
    assert front(render(CARD, BASE.replace("\n", "\r\n")))["license"] == "mit"
    assert front(render(CARD, "---\ntags: [a\nx: 1\n---\n"))["tags"] == list(TAGS)


HOSTILE = [
    "<script>alert(1)</script>",
    "a | b | c",
    "[x](javascript:alert(1))",
    "![x](http://evil/x.png)",
    "`code` **bold** _it_ $math$ ~~s~~",
    "# heading",
    "- item",
    "1. item",
    "line\n\n# next",
    "&lt;b&gt;",
    "\u202egnp.exe",
    "nul\x00 bell\x07 zero\u200bwidth",
    "<!-- ropext: end -->",
    "www.evil.com mail@evil.com https://evil",
    "a\\",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_escaped_text_is_text(text: str):
    found = re.sub("&#?[a-z0-9]+;", "", escape(text))
    assert not re.search(r"[<>\n\x00-\x1f\u200b\u202e]", found)
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*_\[\]$~#]", found)
    assert not re.match(r"[-+=#]|\d+\.", found)
    assert "://" not in found
    assert "www." not in found
    assert not re.search(r"(?<!\\)(?:\\\\)*\\$", found)  # it would escape the cell's own border


@pytest.mark.parametrize("text", HOSTILE)
def test_a_card_keeps_its_shape_with_hostile_text(text: str):
    hostile = replace(
        CARD,
        title=text,
        base=text,
        summary=(text,),
        facts=[(text, text)],
        readings=[LoaderReading(text, text, "same", text)],
        serving=[Serving(text, f"serve {text}")],
        numbers=(Table(text, "", (text,), ((text,),)),),
        warnings=(text,),
    )
    found = render(hostile)
    assert set(front(found)) == {"base_model", "library_name", "tags"}
    body = split(found)[1]
    outside = re.sub(r"^(`{3,})sh\n.*?^\1$", "", body, flags=re.DOTALL | re.MULTILINE)
    assert "<script" not in outside
    assert "](" not in outside.replace("\\](", "").replace("\\]\\(", "")
    assert outside.count("<!--") == 2
    headings = re.findall(r"^#.*", outside, re.MULTILINE)
    assert len(headings) == 4
    assert body.count("<!-- ropext: end -->") == 1


@given(st.text("`~a\n ") | st.text())
def test_a_code_block_cannot_be_left(text: str):
    lines = code_block(text, "sh").split("\n")
    fence = lines[-1]
    assert set(fence) == {"`"}
    assert lines[0] == fence + "sh"
    assert not [line for line in lines[1:-1] if line.strip().startswith(fence)]


def test_read_readme_names_a_card_that_is_too_large_or_not_utf8(tmp_path: Path):
    path = tmp_path / "README.md"
    assert read_readme(path) == (None, None)
    path.write_bytes("Grüße".encode("latin-1"))
    assert "UTF-8" in read_readme(path)[1]
    with open(path, "wb") as file:
        file.truncate(4 * 10**6 + 1)
    assert "4 MB" in read_readme(path)[1]
    path.write_text("# ü")
    assert read_readme(path) == ("# ü", None)
