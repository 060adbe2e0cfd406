"""A byte-level BPE of 300 entries, with an optional BOS in front as with Llama."""


def make_tokenizer(bos=True):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def wrapping_tokenizer():
    """Make a tokenizer like RoBERTa's: a text is between two special tokens, and 1 fills up
    rows."""
    from tokenizers import processors

    tokenizer = make_tokenizer(bos=False)
    tokenizer.add_special_tokens({"mask_token": "<mask>", "sep_token": "<sep>"})
    after = tokenizer.sep_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <sep>", special_tokens=[("<s>", 0), ("<sep>", after)]
    )
    return tokenizer
