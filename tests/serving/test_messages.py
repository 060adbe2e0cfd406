"""Conversations through published chat templates, as transformers' own function renders them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from small_tokenizer import make_tokenizer

TEMPLATES = sorted((Path(__file__).parents[1] / "evaluation/chat_templates").glob("*.jinja"))
USER = {"role": "user", "content": " Where is it?\n"}
ASSISTANT = {"role": "assistant", "content": "There, {{ 7 }}."}


@pytest.mark.parametrize("messages", [[USER], [USER, ASSISTANT, USER, ASSISTANT, USER]])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_published_template_loses_nothing_of_a_conversation(template, messages):
    pytest.importorskip("uvicorn")
    from ropext.serving.messages import rendered_chat

    tokenizer = make_tokenizer()
    tokenizer.chat_template = template.read_text("utf-8")
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    served = SimpleNamespace(name="tiny", tokenizer=tokenizer)
    assert rendered_chat(served, {"messages": messages}) == wanted
