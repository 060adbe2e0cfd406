"""Every command in the README and the guide parses, and the guide's commands run unchanged."""

import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer
import yaml
from command_line import run
from tiny_checkpoint import make_llama

from ropext.cli.app import COMMANDS, build
from ropext.pipeline.recipe import RecipeSource, parse_recipe, recipe_from_source

ROOT = Path(__file__).parents[2]
# cli.md holds usage lines, no commands; it is generated from the commands themselves.
DOCS = ROOT / "docs"
PAGES = ("README.md", *sorted(p.relative_to(ROOT).as_posix() for p in DOCS.rglob("*.md")))
WITH_COMMANDS = (
    *(
        "README.md",
        "docs/install.md",
        "docs/models.md",
        "docs/quickstart.md",
        "docs/gguf.md",
        "docs/fitting.md",
        "docs/fine-tune.md",
    ),
    *(
        "docs/evaluate.md",
        "docs/kv-cache.md",
        "docs/recipes-and-ci.md",
        "docs/loaders.md",
        "docs/trainers.md",
    ),
    *("docs/position-schemes.md", "docs/methods.md", "docs/choose-a-method.md", "docs/serve.md"),
    *("docs/check-a-server.md", "docs/deploy.md", "docs/reference/tasks.md"),
    "docs/upstream-bugs.md",
)


def lines(page):
    """Return the lines of the page's fenced and indented blocks; a continued one is one."""
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    blocks = [block for language, block in fenced if language in ("", "sh")]
    for language, block in fenced:
        if language == "console":  # commands after a prompt, and their output
            blocks.append("\n".join(re.findall(r"^\$ (.*)", block, re.M)))
    indented = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return "\n".join(blocks).splitlines() + indented


def commands(page):
    """Return the words of every ropext command in the page's blocks: alone, after `&&`, in a
    container, under `accelerate launch`."""
    found = []
    for line in lines(page):
        for part in re.sub(r"\"\$\(.*?\)\"", "CONFIG", line).split("&&"):
            command = re.match(r"(?:ropext|.* -m ropext|docker run --rm ropext) (.*)", part.strip())
            found += [shlex.split(command[1], comments=True)] if command else []
    return found


# adding-a-method.md uses the knob of its example; its own test runs it as written.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ("docs/cli.md", "docs/adding-a-method.md")]
)
def test_every_command_of_a_page_parses(page):
    found = commands(page)
    assert bool(found) == (page in WITH_COMMANDS)
    check_parsed(found)


def check_parsed(found):
    group = typer.main.get_command(build())
    for words in found:
        name, command, rest = group.resolve_command(group.make_context("ropext", words[:1]), words)
        command.make_context(name, list(rest))  # fails on an unknown option or a missing one


def test_commands_finds_every_ropext_line_of_a_page():
    assert ["demo"] in commands("README.md")
    assert ["eval", "tuned", "--data"] in [words[:3] for words in commands("README.md")]
    launched = [words for words in commands("docs/fine-tune.md") if words[0] == "finetune"]
    assert ["extended", "--data", "books.jsonl", "-o", "tuned"] in [own[1:] for own in launched]
    assert ["plan", "MODEL", "--factor", "4", "--for", "vllm,llama.cpp"] in commands(
        "docs/loaders.md"
    )
    assert any("--fail-if" in words for words in commands("docs/evaluate.md"))


def test_other_programs_that_a_page_starts_are_here():
    """The development pages' own commands: their files are there, their options known."""
    seen = 0
    for page in (*PAGES, "CONTRIBUTING.md"):
        for line in lines(page):
            words = (
                shlex.split(line, comments=True) if re.search(r"\b(pytest|python) ", line) else []
            )
            for word in words:
                if re.match(r"(tests|benchmarks|scripts)/", word):
                    assert (ROOT / word).exists(), (page, line)
                    seen += 1
            module = re.search(r"python -m (tests\.\w+)(.*?)(#|$)", line)
            if module:
                source = (ROOT / module[1].replace(".", "/") / "__main__.py").read_text("utf-8")
                for flag in re.findall(r"--[\w-]+", module[2]):
                    assert f'"{flag}"' in source, (page, line)
                    seen += 1
    assert seen >= 6


def test_the_recipe_on_a_page_is_read():
    text = (ROOT / "docs/recipes-and-ci.md").read_text("utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    asked = recipe_from_source(
        RecipeSource("docs/recipes-and-ci.md", parse_recipe(block, "docs/recipes-and-ci.md"))
    )
    assert asked.stages == ("plan", "extend", "fit", "finetune", "evaluate", "report")


def test_the_overrides_on_a_page_are_read():
    text = (ROOT / "docs/recipes-and-ci.md").read_text("utf-8")
    (block,) = re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S)
    words = re.findall(r"`([a-z]+(?:\.[a-z_]+)?=[^`]+)`", text)
    assert len(words) >= 4
    for word in words:
        recipe_from_source(
            RecipeSource("docs/recipes-and-ci.md", parse_recipe(block, "docs/recipes-and-ci.md")),
            [word],
        )


def test_the_job_on_a_page_is_a_workflow_whose_commands_parse():
    text = (ROOT / "docs/recipes-and-ci.md").read_text("utf-8")
    (block,) = re.findall(r"^```yml\n(.*?)^```", text, re.M | re.S)
    job = yaml.safe_load(block)["jobs"]["gate"]
    ran = [step["run"] for step in job["steps"] if "run" in step]
    assert job["runs-on"] == "ubuntu-latest"
    assert (ROOT / "constraints.txt").exists()
    assert "-c ropext/constraints.txt ./ropext" in ran[0]
    found = [shlex.split(line)[1:] for line in ran if line.startswith("ropext ")]
    check_parsed([*found, ["eval", "MODEL", "--data", "x", "--fail-if", "short_tax > 0.02"]])
    (words,) = found
    kept = next(step["with"]["path"] for step in job["steps"] if "upload" in step.get("uses", ""))
    assert kept == f"{words[-1]}.run/report.html"


def test_the_job_of_a_cluster_parses():
    text = (ROOT / "docs/deploy.md").read_text("utf-8")
    (block,) = re.findall(r"^```yml\n(.*?)^```", text, re.M | re.S)
    spec = yaml.safe_load(block)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    check_parsed([container["args"]])  # each one a string, or it is no argument
    mounted = {volume["name"] for volume in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.slow
def test_the_gates_over_several_methods_hold_and_can_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (words,) = [own for own in commands("docs/recipes-and-ci.md") if own[0] == "eval"]
    code, heard = run(*words, capsys=capsys)
    assert code == 0, heard.err
    assert heard.out.count("\npassed  ") == 4  # two gates on each of two methods
    strict = [word.replace("-0.5", "-1") for word in words]
    code, heard = run(*strict, capsys=capsys)
    assert (code, heard.out.count("\nFAILED  ")) == (3, 1)
    said = r"error: 1 of 4 gates failed: tail@512 > -1 vs untouched \([\w-]+: -0\.\d+\)\n$"
    assert re.search(said, heard.err)


def test_the_pages_mention_every_command():
    pages = [page for page in PAGES if page != "docs/cli.md"]
    text = "".join((ROOT / page).read_text("utf-8") for page in pages)
    assert [name for name in COMMANDS if f"ropext {name}" not in text] == []


def test_the_page_of_exit_codes_has_each_code_of_an_error():
    text = (DOCS / "reference/exit-codes.md").read_text("utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)}
    source = (ROOT / "ropext/base/errors.py").read_text("utf-8")
    assert listed == {int(code) for code in re.findall(r"exit_code = (\d+)", source)} | {0, 1}


def test_the_page_of_environment_variables_is_complete():
    text = (DOCS / "reference/environment.md").read_text("utf-8")
    sources = [path.read_text("utf-8") for path in sorted((ROOT / "ropext").rglob("*.py"))]
    wanted = {name for own in sources for name in re.findall(r'environ\.get\("(\w+)"', own)}
    assert {"OLLAMA_MODELS", "ROPEXT_ENDPOINT_KEY"} <= wanted
    assert sorted(name for name in wanted if f"`{name}`" not in text) == []


def anchors(text):
    """Return the anchors that a Markdown page's headings get."""
    heads = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_between_pages_leads_somewhere(page):
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        place = (ROOT / page).parent / name if name else ROOT / page
        assert place.exists(), (page, target)
        if anchor:
            assert anchor in anchors(place.read_text("utf-8")), (page, target)


# Where each kind of reader begins, and which page answers them.
DOORS = {
    "GGUF": "docs/gguf.md",
    "serving": "docs/serve.md",
    "research": "docs/evaluate.md",
    "fine-tuning": "docs/fine-tune.md",
    "contributing": "CONTRIBUTING.md",
}


def linked(page):
    """Return the pages to which a page links."""
    text = (ROOT / page).read_text("utf-8")
    targets = re.findall(r"\]\(([^)#:\s]+\.md)[^)]*\)", text)
    return {
        ((ROOT / page).parent / name).resolve().relative_to(ROOT).as_posix() for name in targets
    }


def test_the_readme_links_to_each_door_and_the_index_to_every_page():
    """So each page is two clicks from the README, and the page of each kind of reader is one."""
    first = linked("README.md")
    wanted = {"docs/README.md", *DOORS.values()}
    assert wanted <= first, wanted - first
    assert [page for page in PAGES[1:] if page not in linked("docs/README.md")] == [
        "docs/README.md"
    ]


# The pages whose commands run one after the other, each on the last one's output.
GUIDE = ("docs/install.md", "docs/quickstart.md", "docs/choose-a-method.md", "docs/serve.md")
# Commands that take seconds; the rest of a page only has to parse.
CHEAP = ("inspect", "plan", "extend", "verify", "methods", "recipes", "schema")
LATER = ("--fit", "--finetune", "--eval", "--measure", "--endpoint", "auto")


def is_cheap(words):
    """Return whether a page's command runs here: its model exists, and nothing is trained or
    read."""
    local = [w for w in words[1:2] if w.startswith(".") or "/" in w or w.endswith(".gguf")]
    there = all(Path(word).exists() or word.startswith("ropext://") for word in local)
    placeholder = any(word.isupper() and len(word) > 2 for word in words)
    return words[0] in CHEAP and there and not placeholder and not {*LATER} & {*words}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "least"), [("README.md", 3), ("docs/recipes-and-ci.md", 2), ("docs/deploy.md", 6)]
)
def test_cheap_blocks_of_a_page_run(ropext, tmp_path, monkeypatch, page, least):
    make_llama(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    ran = []
    for words in commands(page):
        if is_cheap(words) and not (words[0] == "extend" and Path(words[-1]).exists()):
            code, out, err = ropext(*words)
            assert (code, bool(out)) == (0, True), (words, err)
            ran.append(words)
    assert len(ran) >= least, ran


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path, monkeypatch):
    import transformers

    import ropext

    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    for number, block in enumerate(blocks):
        folder = tmp_path / str(number)
        make_llama(folder / "model")
        monkeypatch.chdir(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained("./model")
        exec(block, {"model": model, "ropext": ropext})
        assert (folder / "model-4x/config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "project", "printed"),
    [
        (0, "transformers", "5.24.0 ['rope_parameters']\n"),
        (1, "peft", "llama tied\ngpt2 untied\nfalcon untied\ngpt_neo untied\n"),
        (2, "transformers", r"True 0\.00[1-9]\d*\nFalse 0\.0\n"),
    ],
)
def test_the_bugs_on_the_upstream_page_reproduce(tmp_path, number, project, printed):
    page = (DOCS / "upstream-bugs.md").read_text("utf-8")
    (version,) = {*re.findall(rf"{project} (\d+\.\d+\.\d+)", page, re.I)}
    if metadata.version(project) != version:
        pytest.skip(f"the page is about {project} {version}")
    block = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[number]
    command = [sys.executable, "-c", block]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == printed or re.fullmatch(printed, done.stdout)


@pytest.mark.slow
def test_the_commands_of_the_guide_run_as_written(ropext, tmp_path, monkeypatch):
    make_llama(tmp_path / "model")
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"factor": 8.0, "original_max_position_embeddings": 16}
    make_llama(tmp_path / "scaled", rope_scaling=llama3)
    resaved = make_llama(tmp_path / "resaved") / "config.json"
    config = json.loads(resaved.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    resaved.write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    ran = 0
    for words in [own for page in GUIDE for own in commands(page)]:
        if {"--endpoint", "--python", "push", "serve"} & {*words}:
            continue  # want a server or another environment, or are one; their own tests have it
        # Its measuring and its training are in tests/pipeline/test_auto.py, on less.
        counted = ["--dry-run"] if "auto" in words else []
        code, out, err = ropext(*words, *counted)
        assert code == 0, (words, err)
        assert out
        ran += 1
    assert ran == 19
    assert (tmp_path / "spectrum.png").stat().st_size > 10_000
    assert (tmp_path / "model-4x/model.safetensors").samefile(tmp_path / "model/model.safetensors")
