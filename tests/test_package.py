"""What a stranger gets: the wheel, the image's steps, the metadata."""

import json
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from command_line import DRIVER, environment, run
from gguf_files import making

import ropext

ROOT = Path(__file__).parents[1]
STEPS = runpy.run_path(str(ROOT / "scripts/dockerfile_steps.py"), run_name="steps")
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")


def test_the_files_that_the_image_copies_exist_and_are_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    sources = [name for names, _ in STEPS["copied"](DOCKERFILE) for name in names]
    assert {"ropext", "recipes", "pyproject.toml", "constraints.txt"} <= set(sources)
    for name in sources:
        assert (ROOT / name).exists(), name
        assert not any(fnmatch(name, pattern) for pattern in ignored), name
    # Everything that the build of the wheel reads is among them.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    reads = [project["project"]["readme"], *project["project"]["license-files"]]
    assert set(sources) >= {*reads, *wheel["packages"], *wheel["force-include"]}


def test_the_image_runs_as_an_unprivileged_user_with_caches_outside():
    words = list(STEPS["instructions"](DOCKERFILE))
    names = [word for word, _ in words]
    users = [rest for word, rest in words if word == "USER"]
    assert users == ["10001"]  # a number: Kubernetes cannot see that a name is not root
    assert any("useradd --uid 10001 " in rest for word, rest in words if word == "RUN")
    assert names.index("USER") > max(k for k, word in enumerate(names) if word == "RUN")
    runs = [rest for word, rest in words if word == "RUN"]
    installing = [rest for rest in runs if "pip install" in rest]
    assert len(installing) == 2
    assert all("--mount=type=cache,target=/root/.cache/pip" in rest for rest in installing)
    assert "$TORCH_INDEX" in installing[0]
    assert ("ENTRYPOINT", '["ropext"]') in words
    assert "HF_HOME=/cache" in dict(words)["ENV"]


def test_the_job_on_the_page_runs_as_the_image_s_user_and_reads_the_models_only():
    """`.ci/slow image` runs it, with these rights."""
    job = yaml.safe_load(STEPS["job_of"]((ROOT / "docs/deploy.md").read_text("utf-8")))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    rights = pod["securityContext"] | container["securityContext"]
    ran_as = next(rest for word, rest in STEPS["instructions"](DOCKERFILE) if word == "USER")
    assert (rights["runAsNonRoot"], rights["runAsUser"]) == (True, int(ran_as))
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]
    }
    assert mounts == {"/models": True, "/out": False, "/tmp": False}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    rules = job["spec"]["podFailurePolicy"]["rules"]
    page = (ROOT / "docs/reference/exit-codes.md").read_text("utf-8")
    final = [int(found) for found in re.findall(r"^\| (\d+) \| [^|]* \| no \|", page, re.M)]
    assert rules[0]["onExitCodes"]["values"] == final == [1, 2, 3, 6]


def test_constraints_name_every_dependency_within_its_floor():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if matched := re.match(r"([\w-]+)==([\d.]+)", line):
            pinned[matched[1].lower().replace("_", "-")] = matched[2]
    for wish in project["dependencies"]:
        name, floor = wish.split(">=")
        have = tuple(map(int, pinned[name].split(".")))
        assert have >= tuple(map(int, floor.split("."))), wish


def test_the_lock_has_the_pins_and_hashes_and_no_address():
    """`.ci/slow airgap` installs it; pip refuses a lock that lacks a package."""
    text = (ROOT / "locks/linux-x86_64-py311-cpu.txt").read_text("utf-8")
    entries = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    entry = r"([a-z0-9.-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}\n"
    assert re.fullmatch(f"({entry})+", entries)
    locked = {found[1]: found[2] for found in re.finditer(entry, entries)}
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    pinned = {_name(found[1]): found[2] for found in re.finditer(r"([\w-]+)==(\S+)", pins)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {_name(wish) for wish in project["dependencies"]} <= {*locked}
    pinned["torch"] += "+cpu"
    assert {name: locked[name] for name in pinned if name in locked} == {
        name: version for name, version in pinned.items() if name in locked
    }


def test_a_verbose_version_names_all_that_is_installed(capsys):
    wishes = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    code, told = run("--version", "--verbose", capsys=capsys)
    named = [line.split()[0] for line in told.out.splitlines()]
    assert code == 0
    assert {_name(wish) for wish in wishes} <= {*named}
    assert {"ropext", "Python"} <= {*named}
    assert len(run("--version", capsys=capsys)[1].out.splitlines()) == 3


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == ropext.__version__
    assert cited["license"] == "Apache-2.0"
    (entry,) = re.findall(r"```bibtex\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    fields = dict(re.findall(r"(\w+) += \{(.*)\},?\n", entry))
    assert fields["version"] == ropext.__version__
    assert fields["note"].startswith(f"Version {ropext.__version__}, commit COMMIT")
    assert fields["year"] == cited["date-released"][:4]
    assert fields["author"] == f"{{{cited['authors'][0]['name']}}}"
    assert entry.count("{") == entry.count("}")
    assert "http" not in entry  # there is no address yet


@pytest.mark.slow
def test_the_wheel_has_its_data_and_runs_from_anywhere(tmp_path):
    pytest.importorskip("hatchling", reason="installed with the extra dev")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*build, "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    package = ROOT / "ropext"
    data = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    wanted = {f"ropext/{path.relative_to(package)}" for path in data}
    wanted |= {f"ropext/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == wanted
    wanted = ("py.typed", "demo/checkpoint/model.safetensors", "recipes/demo.yaml")
    assert {f"ropext/{name}" for name in wanted} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in names)
    # A bare environment that sees the dependencies, and ropext from the wheel alone.
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    (packages,) = bare.glob("lib/*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"], "utf-8")
    installing = [sys.executable, "-m", "pip", "--python", bare, "install", "--no-deps"]
    subprocess.run([*installing, "-q", "--no-index", wheel], check=True)
    asked = {
        "--version": f"ropext {ropext.__version__}",
        "plan ropext://demo --factor 4": "256 -> 1,024 tokens by yarn",
        "recipes ls": "smoke-test",
    }
    for words, answer in asked.items():
        ran = subprocess.run(
            [bare / "bin" / "ropext", *words.split()],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert answer in ran.stdout


def test_the_readmes_first_line_sets_up_as_the_test_line_does():
    """CI executes the test line unchanged; the first line differs in its last command."""
    text = (ROOT / "README.md").read_text("utf-8")
    first, tests = (
        re.search(rf"<!-- {name} -->\n```sh\n(.*)\n```", text)[1].split(" && ")
        for name in ("main job", "test line")
    )
    assert [part.replace("-e '.[dev]'", ".") for part in tests[:-1]] == first[:-1]
    assert first[-1] == "ropext demo"
    assert tests[-1] == 'OMP_NUM_THREADS=1 pytest -q -n 2 --dist loadfile -m "not slow"'
    assert text.index("```sh") == text.index("<!-- main job -->\n") + len("<!-- main job -->\n")


def test_the_workflows_run_the_tests_and_the_image_and_publish_by_trust():
    ci, release = (
        yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text("utf-8"))
        for name in ("ci", "release")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    matrix = ci["jobs"]["tests"]["strategy"]["matrix"]
    assert {system.partition("-")[0] for system in matrix["os"]} == {"ubuntu", "windows", "macos"}
    assert project["requires-python"] == f">={matrix['python'][0]}"

    def lines(workflow):
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        return "\n".join(step.get("run", "") for step in steps)

    wanted = (
        *("-m pytest", '-m "not slow"', "ruff format --check .", "ruff check ."),
        *("mypy", "mypy --platform win32", "mypy --platform darwin"),
    )
    for part in (*wanted, "docker build", "docker run --rm ropext demo"):
        assert part in lines(ci), part
    for part in ("-m build", "twine check", "ropext demo"):
        assert part in lines(release), part
    for workflow in (ci, release):
        assert workflow["permissions"] == {"contents": "read"}
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text("utf-8")


# An interpreter in which some packages are as if they were not installed.
LACKING = """
import json, sys
from importlib.machinery import PathFinder
lacks = set(json.loads(sys.argv.pop(1)))
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in lacks else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def _name(package):
    return re.match(r"[\w.-]+", package)[0].lower().replace("_", "-").replace(".", "-")


def _brought(packages):
    """Return the packages, and all that pip installs with them."""
    found, wanted = set(), [_name(package) for package in packages]
    while wanted:
        name = wanted.pop()
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another system
        if name not in found:
            found.add(name)
            wanted += [_name(need) for need in needs if "extra ==" not in need]
    return found


def test_a_gguf_is_extended_with_the_light_installation_alone(tmp_path):
    text = (ROOT / "docs/gguf.md").read_text("utf-8")
    line = re.search(r"^pip install (.+) && pip install --no-deps \.$", text, re.M)[1]
    brought = _brought(line.split())
    modules = metadata.packages_distributions().items()
    lacks = [name for name, of in modules if not brought & {*map(_name, of)} and name != "ropext"]
    assert {"torch", "transformers", "accelerate", "datasets", "matplotlib"} <= {*lacks}
    making.write(tmp_path / "model.gguf", q8=["blk.0.attn_q.weight"])
    right = (
        "inspect model.gguf",
        "plan model.gguf --factor 4",
        "extend model.gguf --factor 4 --method yarn -o long.gguf",
        "verify long.gguf --deep --against model.gguf",
        "extend long.gguf --factor 2 --again --method pi --json -o longer.gguf",
        "extend model.gguf --length-only --target 2048 -o stated.gguf",
    )
    refused = {
        "eval long.gguf --data ropext://held-out": "torch",
        "extend model.gguf --factor 4 --as directory -o directory": "torch",
        "extend model.gguf --as directory -o directory": "torch",
        "inspect model.gguf --plot spectrum.png": "matplotlib",
        "extend ropext://demo --factor 4 -o proved": "torch",
        "finetune ropext://demo --data ropext://tuning -o tuned": "torch",
    }
    lines = [words.split() for words in (*right, *refused)]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", LACKING + DRIVER, json.dumps(lacks), json.dumps(lines)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(answer) for answer in ran.stdout.splitlines()]
    for words, (code, _, said) in zip(right, answers, strict=False):
        assert code == 0, (words, said)
    for (words, package), (code, _, said) in zip(
        refused.items(), answers[len(right) :], strict=True
    ):
        final = said.splitlines()[-1]
        assert code == 2, (words, said)
        assert final.startswith(
            f"error: this needs {package}, which is not installed: pip install "
        )
        hint = final.rpartition("pip install ")[2].split()
        assert {package, "torch", "gguf", "matplotlib"} <= {*hint}  # one install, not one a try
    assert {path.name for path in tmp_path.iterdir()} >= {"long.gguf", "longer.gguf", "stated.gguf"}
    assert not (tmp_path / "proved").exists()
