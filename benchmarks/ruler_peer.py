"""RULER's own prompts, asked by ropext, next to ropext's tasks of the same names.

    python benchmarks/ruler_peer.py RULER --samples 10 --page benchmarks/results/ruler-peer-DATE.md
    python benchmarks/ruler_peer.py RULER --model MODEL --tasks niah_single_1,vt --lengths 4096

RULER is a checkout of github.com/NVIDIA/RULER; nothing of it is copied. Its generators make the
prompts with the model's tokenizer, and its string_match_all scores ropext's answers a second time.
They need wonderwords, nltk, tenacity and tqdm (fwe: scipy). A task whose packages or texts are
missing is left out, with the reason.
"""

import argparse
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from ropext.base.bundled import MODELS
from ropext.base.lengths import length_text, parse_lengths
from ropext.models.dequantising import dequantised_directory
from ropext.pipeline.public import evaluate
from ropext.pipeline.python_results import Evaluated
from ropext.results.retrieval import group_answers
from ropext.results.values import Value

SEED = 42  # of RULER's generators, its default
PACKAGES = ("wonderwords", "nltk", "tenacity", "tqdm", "yaml", "transformers")
PATIENCE = 600  # seconds; a generator tries for ever if no prompt fits a length
DEPTHS = 5  # of ropext's tasks: the default
BEGUN = {"essay": "PaulGrahamEssays.json", "squad": "squad.json", "hotpotqa": "hotpotqa.json"}


@dataclass(frozen=True)
class Ruler:
    """A checkout of RULER."""

    root: Path

    @property
    def scripts(self) -> Path:
        return self.root / "scripts/data/synthetic"

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Its thirteen tasks, each with its generator and arguments."""
        read: dict[str, dict[str, Any]] = yaml.safe_load(
            (self.root / "scripts/synthetic.yaml").read_text()
        )
        return read

    @property
    def commit(self) -> str:
        git = subprocess.run(
            ["git", "-C", self.root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        return git.stdout.strip() or "unknown"

    def missing(self, task: str) -> str:
        """Return why a task's prompts cannot be made here; empty if they can."""
        config = self.tasks[task]
        needed = list(PACKAGES)
        if config["task"] == "freq_words_extraction":
            needed.append("scipy")
        for package in needed:
            if importlib.util.find_spec(package) is None:
                return f"the package {package}"
        arguments = config["args"]
        texts = BEGUN.get(arguments.get("dataset") or arguments.get("type_haystack"))
        if config["task"] == "common_words_extraction":
            texts = "english_words.json"
        if texts is None:
            return ""
        file = self.scripts / "json" / texts
        if not file.is_file() or file.read_bytes()[:8] == b"version ":  # a pointer of Git LFS
            return f"scripts/data/synthetic/json/{texts}"
        return ""

    def prompts(self, task: str, tokenizer: str, length: int, samples: int) -> list[dict[str, Any]]:
        """Return the rows that its generator writes into validation.jsonl, called as its prepare.py
        does; nothing if it does not end."""
        config = self.tasks[task]
        base = _module(self.scripts / "constants.py").TASKS[config["task"]]
        with tempfile.TemporaryDirectory() as folder:
            words: dict[str, Any] = {
                "save_dir": folder,
                "save_name": task,
                "subset": "validation",
                "tokenizer_path": tokenizer,
                "tokenizer_type": "hf",
                "max_seq_length": length,
                "tokens_to_generate": base["tokens_to_generate"],
                "num_samples": samples,
                "random_seed": SEED,
                "template": base["template"] + base["answer_prefix"],
            } | config["args"]
            command = [sys.executable, str(self.scripts / f"{config['task']}.py")]
            for name, value in words.items():
                command += [f"--{name}", str(value)]
            try:
                subprocess.run(
                    command, cwd=self.scripts, check=True, capture_output=True, timeout=PATIENCE
                )
            except subprocess.TimeoutExpired:
                return []
            file = Path(folder, task, "validation.jsonl")
            return [json.loads(line) for line in file.read_text("utf-8").splitlines()]

    @property
    def string_match_all(self) -> Callable[[list[str], list[list[str]]], float]:
        """Its score of answers, in percent."""
        match: Callable[[list[str], list[list[str]]], float]
        match = _module(self.root / "scripts/eval/synthetic/constants.py").string_match_all
        return match


def _module(file: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"ruler_{file.parent.name}", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def cleaned(answer: str) -> str:
    """Return an answer as RULER's evaluate.py cleans it before it scores it."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip()


@dataclass(frozen=True)
class Peers:
    """An evaluation of RULER's prompts and of ropext's tasks, and RULER's files."""

    done: Evaluated
    tasks: tuple[str, ...]
    outputs: dict[str, list[str]]  # references of each prompt, by its hash
    unmade: list[str]  # prompts whose generator did not end

    def rows(self, match: Callable[[list[str], list[list[str]]], float]) -> Iterator[list[str]]:
        """Yield a row for each task, length and model: ropext's task, RULER's prompts, RULER's
        score."""
        for task in self.tasks:
            for length in self.done.frame.lengths:
                for label, model in self.done.models.items():
                    values = self.done.values(label)
                    name = own_name(task)
                    if f"{name}@{length}" not in values:
                        continue
                    answers = group_answers(model.items, "task", "length")[name, length]
                    said = [cleaned(answer.said or "") for answer in answers]
                    references = [self.outputs[answer.text_hash] for answer in answers]
                    score = match(said, references) / 100
                    yield [
                        task,
                        length_text(length),
                        label,
                        _text(values.get(f"{task}@{length}")),
                        _text(values[f"{name}@{length}"]),
                        f"{score:.4f}",
                    ]


def _text(value: Value | None) -> str:
    """Return a share with its interval and its number of questions."""
    if value is None:
        return ""
    low, high = value.ci95 or (0.0, 1.0)
    return f"{value.value:.3f} [{low:.2f}, {high:.2f}], {value.n}"


def own_name(task: str) -> str:
    return f"ruler_{task}"


def measured(ruler: Ruler, tasks: Sequence[str], options: argparse.Namespace) -> Peers:
    """Make RULER's prompts, and ask them and ropext's own tasks in one evaluation."""
    lengths = parse_lengths(options.lengths)
    outputs = dict[str, list[str]]()
    unmade = list[str]()
    with dequantised_directory(options.model) as model, tempfile.TemporaryDirectory() as folder:
        tokenizer = str(MODELS.get(model, model))
        files = list[str]()
        for task in tasks:
            rows = list[dict[str, Any]]()
            for length in lengths:
                print(f"{task} at {length}", file=sys.stderr)
                made = ruler.prompts(task, tokenizer, length, options.samples)
                if not made:
                    unmade.append(f"{task} at {length}: RULER's generator did not end")
                rows += made
            if not rows:
                continue
            name = own_name(task)
            file = Path(folder, f"{name}.jsonl")
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            files.append(str(file))
            for row in rows:
                prompt = row["input"] + row["answer_prefix"]
                outputs[hashlib.sha256(prompt.encode()).hexdigest()[:32]] = row["outputs"]
        done = evaluate(
            model,
            method=options.method,
            factor=options.factor,
            context=options.context,
            tasks=[*tasks, *files],
            lengths=lengths,
            items=max(1, options.samples // DEPTHS),
            say=lambda line: print(line, file=sys.stderr),
        )
    return Peers(done, tuple(tasks), outputs, unmade)


HEAD = "| task | length | model | ropext's task | RULER's prompts | RULER's score of the answers |"


def page(ruler: Ruler, peers: Peers, left_out: dict[str, str], command: str) -> str:
    """Return the result as Markdown."""
    today = datetime.now(UTC).date()
    lines = [f"    python benchmarks/ruler_peer.py {command}", ""]
    lines.append(f"{today:%-d %B %Y}, RULER {ruler.commit}. Share, 95 % interval, questions.")
    lines += ["", HEAD, "|---|---|---|---|---|---|"]
    for row in peers.rows(ruler.string_match_all):
        lines.append(f"| {' | '.join(row)} |")
    lines.append("")
    for task, reason in left_out.items():
        lines.append(f"- {task} is left out: this machine lacks {reason}.")
    for warning in (*peers.unmade, *peers.done.facts.warnings):
        lines.append(f"- {warning}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ruler", type=Path)
    parser.add_argument("--model", default="ropext://demo")
    parser.add_argument("--method", default="yarn")
    parser.add_argument("--factor", type=float, default=4)
    parser.add_argument("--context", type=int)
    parser.add_argument("--lengths", default="512,1024")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--tasks", help="of RULER, with commas; all that can be made")
    parser.add_argument("--page", type=Path, help="append the result to this file")
    options = parser.parse_args()
    ruler = Ruler(options.ruler.resolve())
    wanted = list(ruler.tasks)
    if options.tasks:
        wanted = options.tasks.split(",")
    left_out = {task: reason for task in wanted if (reason := ruler.missing(task))}
    tasks = [task for task in wanted if task not in left_out]
    if not tasks:
        raise SystemExit(f"no task of RULER can be made: {left_out}")
    peers = measured(ruler, tasks, options)
    result = page(ruler, peers, left_out, " ".join(sys.argv[1:]))
    print(result)
    if options.page is not None:
        with options.page.open("a", encoding="utf-8") as file:
            file.write(f"\n{result}")


main()
