"""Compare losses of ropext's Self-Extend with llama.cpp's completion program, which shifts its
cache.

    python scripts/loaders/convert_gguf.py CONVERTER DIRECTORY OUT.gguf
    python benchmarks/self_extend_llama_cpp.py DIRECTORY OUT.gguf DATA --factor 4

Run it in an environment with ropext and llama-cpp-python; DIRECTORY is a Llama. `llama-completion
-gan G -gaw W` turns no keys for a query: when W tokens have come since the last time it divides the
positions of those W in the cache by G, for all later queries. So the number of ungrouped keys rises
from none to W in the rhythm of W, and queries inside the context are folded too. The same three
calls are made here before each batch, in the order of tools/completion/completion.cpp.

The script also does the same to transformers' cache, once as intended and once with the sign in
`llama_kv_cells::pos_div`: the second has to agree with llama.cpp.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import llama_cpp as c
import numpy as np
import torch
import transformers
from self_extend import documents, losses, through_window

from ropext.base.bundled import MODELS
from ropext.models.patching import patch, unpatch

Shift = tuple[str, int, int, int]  # the operation, from a position, up to another, by how much


def shifts(past: int, grouped: int, group: int, window: int) -> tuple[list[Shift], int, int]:
    """Return the shifts of the cache when `past` positions are taken, and both counts
    afterwards."""
    done: list[Shift] = []
    while group > 1 and past >= grouped + window:
        before = group * grouped // window
        gain = window // group * (group - 1)
        back = window // group - before * gain - window
        edge = grouped + before * gain
        done += [("add", grouped, past, before * gain), ("div", edge, edge + window, group)]
        done += [("add", edge + window, past + before * gain, back)]
        past, grouped = past - gain, grouped + window // group
    return done, past, grouped


def batches(ids: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    yield from (ids[start : start + size] for start in range(0, len(ids), size))


def nll(logits: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    return (
        torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none").double().numpy()
    )


class Engine:
    """A GGUF in llama.cpp; its cache in float32."""

    def __init__(self, path: str, length: int, batch: int) -> None:
        self.model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = length, batch, 1, 1
        params.type_k = params.type_v = c.GGML_TYPE_F32
        params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = c.llama_init_from_model(self.model, params)
        self.memory = c.llama_get_memory(self.context)
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.size, self.batch = batch, c.llama_batch_init(batch, 0, 1)

    def losses(self, ids: torch.Tensor, group: int = 1, window: int = 512) -> np.ndarray:
        """Nats of every token but the first; a group of 1 shifts nothing."""
        c.llama_memory_clear(self.memory, True)
        past, grouped, parts = 0, 0, []
        for tokens in batches(ids, self.size):
            done, past, grouped = shifts(past, grouped, group, window)
            for what, start, stop, by in done:
                change = c.llama_memory_seq_add if what == "add" else c.llama_memory_seq_div
                change(self.memory, 0, start, stop, by)
            parts.append(self.decode(tokens.tolist(), past))
            past += len(tokens)
        return nll(torch.from_numpy(np.concatenate(parts)), ids)

    def decode(self, tokens: list[int], past: int) -> np.ndarray:
        self.batch.n_tokens = len(tokens)
        for at, token in enumerate(tokens):
            self.batch.token[at], self.batch.pos[at], self.batch.logits[at] = token, past + at, True
            self.batch.n_seq_id[at], self.batch.seq_id[at][0] = 1, 0
        if c.llama_decode(self.context, self.batch):
            raise SystemExit(f"llama.cpp fails at position {past}")
        rows = c.llama_get_logits(self.context)
        return np.ctypeslib.as_array(rows, (len(tokens), self.vocabulary)).copy()


def turned(keys: torch.Tensor, by: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Turn the keys of a Llama on, each by a number of positions."""
    angle = torch.cat([by[:, None].double() * inv_freq.double()] * 2, -1)
    low, high = keys.chunk(2, -1)
    return keys * angle.cos().float() + torch.cat([-high, low], -1) * angle.sin().float()


@torch.no_grad()
def shifted(
    model: Any, ids: torch.Tensor, group: int, window: int, size: int, sign: int
) -> np.ndarray:
    """Shift transformers' cache in the same way. `sign` is -1 if a division turns the wrong way."""
    cache: Any = transformers.DynamicCache(config=model.config)
    at, past, grouped, parts = torch.empty(0, dtype=torch.long), 0, 0, []
    for tokens in batches(ids, size):
        done, past, grouped = shifts(past, grouped, group, window)
        by = torch.zeros_like(at)
        for what, start, stop, number in done:
            moved = (at >= start) & (at < stop)
            change = at[moved] // number - at[moved] if what == "div" else number
            at[moved] += change
            by[moved] += change * (sign if what == "div" else 1)
        for layer in cache.layers if done else ():
            layer.keys = turned(layer.keys, by, model.model.rotary_emb.inv_freq)
        new = torch.arange(past, past + len(tokens))
        read = model(input_ids=tokens[None], position_ids=new[None], past_key_values=cache)
        parts.append(read.logits[0])
        at, past = torch.cat([at, new]), past + len(tokens)
    return nll(torch.cat(parts), ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("gguf")
    parser.add_argument("data")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="tokens between two looks (-b)")
    given = parser.parse_args()
    place = str(MODELS.get(given.model, given.model))
    model = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    context = int(model.config.max_position_embeddings)
    target = int(context * given.factor)
    texts = documents(place, given.data, target, given.documents)
    engine = Engine(given.gguf, target, given.batch)
    print(f"llama.cpp {c.llama_version().decode()}, {target} tokens, {len(texts)} documents\n")
    inside = [np.abs(losses(model, ids) - engine.losses(ids)).max() for ids in texts]
    print(f"Nothing folded, its losses and stock's differ by at most {max(inside):.1e} nats.\n")
    print("| | inside | far half | tail |\n|---|---|---|---|")

    def show(name: str, read: Callable[[torch.Tensor], np.ndarray]) -> list[np.ndarray]:
        every = [read(ids) for ids in texts]
        spans = (slice(0, context - 1), slice(target // 2 - 1, None), slice(-target // 8, None))
        cells = (f"{np.mean([one[span].mean() for one in every]):.4f}" for span in spans)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        return every

    show("base, its window", partial(through_window, model, context=context))
    gaps = [0.0]
    for window in (context // 4, context // 2):
        least = -(-(target - window) // (context - window))
        group = 2 ** (least - 1).bit_length()  # it has to divide the window
        how: dict[str, Any] = {"group": group, "window": window}
        ours = f"window {window}, group {group}"
        patch(model, method="self-extend", factor=given.factor, **how)
        show(f"ropext, {ours}", partial(losses, model))
        unpatch(model)
        theirs = f"`-gan {group} -gaw {window}`"
        read = show(f"llama.cpp, {theirs}", partial(engine.losses, **how))
        again = partial(shifted, model, size=given.batch, **how)
        wrong = show(f"transformers, {theirs}, sign turned", partial(again, sign=-1))
        show(f"transformers, {theirs}, as meant", partial(again, sign=1))
        gaps += [float(np.abs(a - b).max()) for a, b in zip(read, wrong, strict=True)]
    print(f"\nllama.cpp and the turned sign differ by at most {max(gaps):.1e} nats a token.")


if __name__ == "__main__":
    main()
