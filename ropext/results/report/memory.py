"""Write as text and one small table which lengths fit into a memory."""

from ropext.base.table import columns, wrapped_line
from ropext.planning.memory import LONGEST, CacheRow, MemoryFit
from ropext.results.report.text import bytes_text

NOT_COUNTED = (
    "not counted: the engine's compute buffers (llama.cpp for SmolLM2-135M at 16,384 tokens: 30 MiB"
    " with flash attention, 326 MiB without), an image part, and other programs"
)


def memory_text(fit: MemoryFit) -> str:
    """Write `ropext plan --memory` as text: the answer first."""
    lines = [_memory_verdict(fit), _memory_left(fit)]
    if fit.rows:
        header = ("KV cache", "per token", f"{fit.length:,} tokens", "longest that fits")
        rows = [_cache_cells(row) for row in fit.rows]
        lines.append(columns(header, rows))
    if fit.flags:
        lines.append(
            f"counted for llama-server {fit.flags}; without -np it starts four slots, and layers"
            " with a window take more"
        )
    lines.append(NOT_COUNTED)
    if fit.no_attention:
        lines.append(
            f"also not counted: the states of {fit.no_attention} layers without attention, which do"
            " not grow with the text"
        )
    return "\n".join(wrapped_line(line) if "\n" not in line else line for line in lines)


def _memory_verdict(fit: MemoryFit) -> str:
    """Say first in `ropext plan --memory` whether the length fits, and with which cache."""
    if fit.unknown:
        return f"the size of the KV cache is not known: {fit.unknown}"
    if fit.room is None:
        return f"not known whether {fit.length:,} tokens fit: there are no weights here to count"
    holding = [row.cache for row in fit.rows if row.fits]
    memory = bytes_text(fit.memory)
    several = _sequences_remark(fit)
    if not holding:
        return f"{fit.length:,} tokens do not fit into {memory}{several}"
    how = "with a KV cache of " + " or ".join(holding)
    return f"{fit.length:,} tokens fit into {memory} {how}{several}"


def _sequences_remark(fit: MemoryFit) -> str:
    """Return the remark of `ropext plan --memory` that several sequences are read at once; "" for
    one sequence."""
    return f", {fit.parallel} sequences at once" if fit.parallel > 1 else ""


def _memory_left(fit: MemoryFit) -> str:
    """Say in `ropext plan --memory` how much the weights take and how much is left for the KV
    cache."""
    if fit.weights is None:
        return f"{bytes_text(fit.memory)}: the weights are not known"
    if fit.room == 0:
        return f"{bytes_text(fit.memory)}: the weights alone take {bytes_text(fit.weights)}"
    several = "" if fit.parallel == 1 else f" of {fit.parallel} sequences"
    left = bytes_text(fit.room or 0)
    return f"weights {bytes_text(fit.weights)}, which leaves {left} for the KV cache{several}"


def _cache_cells(row: CacheRow) -> tuple[str, ...]:
    """Return the row of a KV cache in the table of `ropext plan --memory`."""
    if row.bytes_at_length is None:
        return (row.cache, "-", "-", "cannot hold this model's heads")
    if row.longest is None:
        longest = "not known"
    elif row.longest >= LONGEST:
        longest = "any: only sliding windows"
    elif row.longest == 0:
        longest = "none"
    else:
        longest = f"{row.longest:,}"
    return (row.cache, bytes_text(row.bytes_a_token), bytes_text(row.bytes_at_length), longest)
