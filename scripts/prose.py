"""Count how plain the words of pages, README, docstrings, messages and help are.

    python scripts/prose.py [WORST]

prints each count per 1,000 sentences and the WORST sentences of each count. tests/test_prose.py
holds the ceilings. Code blocks, tables, headings and targets of links are left out, and a line
break changes no count. Each pattern is a regular expression that also matches some good sentences:
read a count as a size, and never write for it.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GENERATED = ("cli.md", "loaders-in-detail.md")
MOST_WORDS = 35
PATTERNS = {
    "where for if": (
        r"(?:^|[,;:(] ?)where (?!to\b)"
        r"|\bwhere (?:it|that|they|there|this|one|none|no|a|an|the|some|its|each)\b"
    ),
    "one/that/those + clause": (
        r"\b(?:one|that|those|these) (?:that|which|whose|of which|who)\b"
        r"|\b(?:those|that) (?:of|in|with|by)\b"
    ),
    "said, told, asked": (
        r"\b(?:is|are|was|were|be|been) (?:said|told|asked|named|shown)\b|\bit is said\b"
    ),
    "stands, lies, goes on": (
        r"\b(?:stands?|stood|lies?|lay|goes on|went on|gone on|held against|anew|beside)\b"
    ),
    "what as a noun": (
        r"\bwhat (?:is|are|was|were|it|they|a|an|the|ropext|stock|no|one|each|some|of|has|have|had"
        r"|can|may|must|does|do|did|stands|lies|follows|comes)\b"
    ),
    "of at the beginning": (
        r"(?:^|[;:(] ?)[Oo]f (?:a|an|the|each|it|these|those|which|what|whom|one)\b"
    ),
}
WORDS = "words a sentence"
LONG = f"above {MOST_WORDS} words"
# The calls and the names whose texts a user reads.
SPEAKING = (
    r"([eE]rror|Exists|Kept|Refusal|Failed|Stopped)$"
    r"|^(say|warn|warning|note|wanted|Option|Argument|Remark|Note)$"
)
SPOKEN = ("reason", "said", "note", "why", "remedy")
FEWEST_WORDS = 3


@dataclass(frozen=True)
class Sentence:
    """One sentence and the file that has it."""

    place: str
    text: str

    @property
    def words(self) -> int:
        return len(self.text.split())

    def matches(self, count: str) -> int:
        """Return how often the sentence does what this count counts."""
        if count == WORDS:
            return self.words
        if count == LONG:
            return int(self.words > MOST_WORDS)
        return len(re.findall(PATTERNS[count], self.text))


def counts_of(sentences: list[Sentence]) -> dict[str, float]:
    """Return each count: words a sentence, all others per 1,000 sentences."""
    counts = {WORDS: sum(own.words for own in sentences) / len(sentences)}
    for name in (LONG, *PATTERNS):
        counts[name] = 1000 * sum(own.matches(name) for own in sentences) / len(sentences)
    return counts


def worst(sentences: list[Sentence], count: str, most: int = 5) -> list[Sentence]:
    """Return the sentences with most matches of this count, the longest first among equals."""
    found = [own for own in sentences if own.matches(count)]
    return sorted(found, key=lambda own: (-own.matches(count), -own.words))[:most]


def sentences_of(text: str, place: str) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown text or a docstring, their code shortened to one word."""
    for paragraph in paragraphs_of(text):
        plain = re.sub(r"\]\([^)]*\)", "]", paragraph).replace("[", "").replace("]", "")
        plain = re.sub(r"`[^`]*`", "CODE", plain)
        plain = re.sub(r"[*_]{1,2}(\S[^*_]*)[*_]{1,2}", r"\1", plain)
        for part in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9*(\"'])", plain):
            if len(part.split()) >= FEWEST_WORDS:
                yield Sentence(place, part)


def paragraphs_of(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a text, each in one line."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        item = re.match(r"(?:[-*]|\d+\.) ", bare)
        is_text = not (
            not bare or bare.startswith(("#", "|", "![", "<")) or line.startswith("    ")
        )
        if is_text and not item:
            paragraph.append(bare)
            continue
        yield " ".join(paragraph)
        paragraph = [bare[item.end() :]] if item and is_text else []


def of_pages() -> Iterator[Sentence]:
    """Yield the sentences of the pages that people write."""
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ):
        if path.name not in GENERATED:
            yield from sentences_of(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())


def of_readme() -> Iterator[Sentence]:
    """Yield the sentences of the README."""
    yield from sentences_of((ROOT / "README.md").read_text("utf-8"), "README.md")


def trees() -> Iterator[tuple[str, str, ast.Module]]:
    """Yield place, text and syntax tree of each file of the package."""
    for path in sorted((ROOT / "ropext").rglob("*.py")):
        text = path.read_text("utf-8")
        yield path.relative_to(ROOT).as_posix(), text, ast.parse(text)


def of_docstrings() -> Iterator[Sentence]:
    """Yield the sentences of the package's docstrings and comments."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for place, text, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
                yield from sentences_of(docstring, place)
        for comment in re.findall(r"(?m)(?:^|\s)#\s+([^#\n]{12,})$", text):
            yield from sentences_of(comment, place)


def of_messages() -> Iterator[Sentence]:
    """Yield the sentences of errors, warnings, notes and help."""
    for place, _, tree in trees():
        for node in ast.walk(tree):
            for value in spoken_values(node):
                text = text_of(value)
                if len(text.split()) > FEWEST_WORDS:
                    yield from sentences_of(text, place)


def spoken_values(node: ast.AST) -> Iterable[ast.expr]:
    """Return the expressions in one statement or call whose text a user reads."""
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in SPOKEN:
        return [node.value]
    if not isinstance(node, ast.Call):
        return []
    called = ast.unparse(node.func).rsplit(".", 1)[-1]
    if not re.search(SPEAKING, called):
        return []
    named = [word.value for word in node.keywords if word.arg in (None, "help", "help_text")]
    return [*node.args, *named]


def text_of(value: ast.expr) -> str:
    """Return the text of a string or an f-string, with X for each part that is computed."""
    if isinstance(value, ast.Constant):
        return str(value.value)
    if not isinstance(value, ast.JoinedStr):
        return ""
    parts = [part.value if isinstance(part, ast.Constant) else "X" for part in value.values]
    return "".join(str(part) for part in parts)


KINDS = {
    "pages": of_pages,
    "README": of_readme,
    "docstrings and comments": of_docstrings,
    "messages and help": of_messages,
}


def main(most: int) -> None:
    for kind, find in KINDS.items():
        sentences = list(find())
        print(f"{kind}: {len(sentences):,} sentences")
        for count, value in counts_of(sentences).items():
            print(f"   {count:26}{value:7.1f}")
            for own in worst(sentences, count, most):
                print(f"      {own.place}: {own.text}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
