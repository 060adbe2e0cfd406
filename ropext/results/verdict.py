"""What `--method auto` says in the end: two numbers and a sentence, from documents that took no
part in choosing; and why one was taken."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropext.lengths import length_text
from ropext.results.overlap import mark_of, marked
from ropext.results.rounds import UNTOUCHED, Round
from ropext.results.values import MARGIN, Value


@dataclass(frozen=True)
class AutoVerdict:
    """What came of a choice: two numbers and a sentence."""

    gain: Value | None  # nats a token over the base's short window, at the target
    short_tax: Value | None  # nats a token lost inside the context
    sentence: str
    mark: str = ""  # which of its documents were trained or chosen on


def verdict(choice: Mapping[str, Any], results: Mapping[str, Any], final: str) -> AutoVerdict:
    """On the finished checkpoint, from an evaluation; the share of its documents that trained or
    chose it is said."""
    metrics: Mapping[str, Any] = results["variants"][final]["metrics"]
    target = int(choice["target"])

    def number(name: str) -> Value | None:
        return Value.from_json(metrics[name]) if name in metrics else None

    gain, tax = number(f"gain@{target}"), number("short_tax")
    mark = mark_of(results["variants"][final])
    said = marked(
        _sentence(choice, gain, final, length_text(target)), mark and f"documents: {mark}"
    )
    return AutoVerdict(gain, tax, said, mark)


def _sentence(choice: Mapping[str, Any], gain: Value | None, final: str, length: str) -> str:
    taken = choice["taken"]
    if gain is None:
        return f"{taken} was taken; what it gains at {length} was not measured"
    worse = gain.ci95 is not None and gain.ci95[1] < 0
    if taken == UNTOUCHED and not worse:
        return (
            f"leave this model as it is: it reads {length} untouched as well as by any method "
            "tried; what was written raises the stated length alone"
        )
    later = {"fitted": ", then a fitted spectrum", "tuned": ", then trained"}.get(final, "")
    extended = f"extended by {taken}{later}: {choice['because']}"
    if gain.gains is None:
        return (
            f"not known whether extending gains anything over truncation at {length} "
            f"({gain.why_not_known}); {extended}"
        )
    if gain.gains:
        return extended
    how = "better" if worse else f"as well, to within {MARGIN} nats a token"
    return (
        f"extending gains nothing on these texts: truncation predicts the last tokens before "
        f"{length} {how}; written all the same"
    )


def because(last: Round, taken: str) -> str:
    """Why one was taken, by the documents that chose."""
    lowest, count = next(iter(last.behind)), last.documents
    on = f"on {count} document{'s' if count > 1 else ''}"
    others = [label for label in last.behind if label != taken]
    if taken != lowest:
        return f"as low as {lowest} {on}, and the plainer form"
    if not others:
        return f"lowest loss at the target {on}"
    ahead = last.behind[others[0]].value
    return f"lowest loss at the target {on}, {ahead:.4f} nats a token below {others[0]}"
