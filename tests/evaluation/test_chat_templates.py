"""Tasks asked through the chat templates of eight families, in their published form.

The tokens equal the output of stock's `apply_chat_template`.
"""

from pathlib import Path

import pytest

from ropext.evaluation.corpus import DocumentEncoder
from ropext.evaluation.documents import encoder_of
from ropext.files.checkpoint import open_snapshot
from ropext.options.evaluate import Evaluate
from ropext.tasks import find_task
from ropext.tasks.asking import sentences

TEMPLATES = Path(__file__).parent / "chat_templates"
QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
GPT_OSS_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>")
# Template: the BOS that its tokenizer puts in front, if any, and the tokens that stay whole.
FAMILIES = {
    "llama-3": ("<|begin_of_text|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "qwen-3": (None, QWEN_TOKENS),
    "mistral": ("<s>", ()),  # its [INST] is plain text
    "gemma-3": ("<bos>", ("<start_of_turn>", "<end_of_turn>")),
    "phi-4": (None, ("<|im_start|>", "<|im_end|>", "<|im_sep|>")),
    "deepseek": ("<｜begin▁of▁sentence｜>", ("<｜User｜>", "<｜Assistant｜>")),
    "smollm2": (None, ("<|im_start|>", "<|im_end|>")),
    "gpt-oss": (None, GPT_OSS_TOKENS),
}


def tokenizer_of(family):
    """Build a small BPE that cuts text as the family's does.

    The tokenizers of Mistral and Gemma write spaces into their tokens, and Mistral's puts one
    before a text that no special token precedes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bos, whole = FAMILIES[family]
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = " ".join(sentences()[:200])
    if family in ("mistral", "gemma-3"):
        scheme = "first" if family == "mistral" else "never"
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        bpe.decoder = decoders.Metaspace(prepend_scheme=scheme)
        alphabet = sorted({*map(chr, range(32, 127)), *text, "\n"})
    special = ["<unk>", "<|end|>" if family == "gpt-oss" else "</s>", *whole]
    special += [bos] if bos else []
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos, eos_token=special[1])
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_tokens_that_stock_gives(family, monkeypatch):
    """The answer begins where stock continues an assistant's message."""
    tokenizer = tokenizer_of(family)
    encoder = DocumentEncoder(tokenizer, chat=True)
    asked = []
    render = encoder.render

    def remembering(content, opening):
        asked.append((content, opening))
        return render(content, opening)

    monkeypatch.setattr(encoder, "render", remembering)
    (item,) = find_task("vt").build(encoder, None, length=1500, depths=(0.5,), index=0, seed=1)
    content, opening = asked[-1]
    question = {"role": "user", "content": content}
    answer = {"role": "assistant", "content": opening}
    stock = tokenizer.apply_chat_template([question, answer], continue_final_message=True)
    bos = [] if encoder.bos is None else [encoder.bos]
    assert bos + list(item.prompt) == stock["input_ids"]
    assert len(stock["input_ids"]) > 1000


def test_a_choice_of_methods_renders_conversations_with_the_arguments_of_the_template():
    options = Evaluate(tasks=("vt",), chat=True, chat_args=("enable_thinking=false",))
    encoder = encoder_of(open_snapshot("ropext://demo"), options, trust_remote_code=False)
    encoder.tokenizer.chat_template = "{{ enable_thinking }}"
    assert encoder.converse([{"role": "user", "content": "a"}]) == "False"
