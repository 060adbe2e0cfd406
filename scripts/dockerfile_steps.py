"""Do the steps of the Dockerfile one by one without a container engine, in a bare folder.

    python scripts/dockerfile_steps.py FOLDER [--build-arg NAME=VALUE]... -- demo
    python scripts/dockerfile_steps.py FOLDER [--build-arg NAME=VALUE]... --job

FOLDER must not exist. It gets a virtual environment in place of the base image, a home of its own,
and only the copied files. The step that adds a user is left out, and so is `chown`. The words after
`--` are given to the entry point.

With `--job` (Linux, as root) the entry point gets the words of the Job in docs/deploy.md, and then
MORE. It runs with the rights of that Job: its user, no capability, its volumes in FOLDER/volumes,
and everything else read-only. The user must be able to read FOLDER and the Python that runs this.
This does not show that the image builds, and does not test the Job's seccomp profile.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOAD = "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)"
# Further commands of the same pod; the recipe trains and evaluates.
MORE = (
    ["verify", "/out/base-4x", "--against", "/models/base"],
    ["run", "smoke-test", "-o", "/out/smoke"],
)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield (instruction, its text) with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def copied(text: str) -> list[tuple[list[str], str]]:
    """Return (sources, target) of every COPY."""
    found = [rest.split() for word, rest in instructions(text) if word == "COPY"]
    return [(words[:-1], words[-1]) for words in found]


def shell(rest: str) -> str:
    """Return the command of a RUN without its mounts."""
    return re.sub(r"^(--mount=\S+\s+)+", "", rest)


def job_of(page: str) -> str:
    """Return the YAML of the Job on a page."""
    return next(part for part in re.findall(r"```yml\n(.*?)```", page, re.S) if "kind: Job" in part)


def with_rights(pod: dict, folder: Path) -> list[str]:
    """Return the beginning of a command that runs the rest with the rights of a pod's only
    container: in a mount namespace, as its user."""
    (container,) = pod["containers"]
    rights = pod["securityContext"] | container["securityContext"]
    user, group = rights["runAsUser"], rights["runAsGroup"]
    lines = []
    for mount in container["volumeMounts"]:
        place = shlex.quote(f"{folder}/volumes{mount['mountPath']}")
        lines.append(f"mount --bind {place} {place}")
        if mount.get("readOnly"):
            lines.append(f"mount -o remount,bind,ro {place}")
        else:  # what fsGroup does
            lines.append(f"chgrp {pod['securityContext']['fsGroup']} {place} && chmod 2775 {place}")
    assert rights["readOnlyRootFilesystem"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    lines.append("mount -o remount,bind,ro /")
    no_more = "--clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    lines.append(f'exec setpriv --reuid {user} --regid {group} {no_more} "$@"')
    return ["unshare", "--mount", "sh", "-ec", "\n".join(lines), "sh"]


def run_job(entry: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Run the Job, and MORE, on a bundled model."""
    page = (ROOT / "docs/deploy.md").read_text("utf-8")
    python = folder / "venv/bin/python"
    loaded = subprocess.run([python, "-I", "-c", LOAD], input=job_of(page).encode(), check=True,
                            stdout=subprocess.PIPE)  # fmt: skip
    pod = json.loads(loaded.stdout)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = folder / "volumes"
    for mount in container["volumeMounts"]:
        (volumes / mount["mountPath"].lstrip("/")).mkdir(parents=True)
    subprocess.run(
        ["cp", "-r", ROOT / "ropext/demo/checkpoint", volumes / "models/base"], check=True
    )

    def placed(word: str) -> str:
        """Return the place of a volume's path here."""
        return re.sub(r"^(/(?:models|out|tmp)\b)", rf"{volumes}\1", word)

    environment |= {one["name"]: placed(one["value"]) for one in container["env"]}
    environment["TMPDIR"] = placed("/tmp")
    begin = with_rights(pod, folder)
    user = str(pod["securityContext"]["runAsUser"])
    for denied in (f"touch {volumes}/models/x", f"touch {folder}/src/x", f"chown 1 {volumes}/out"):
        said = subprocess.run([*begin, *denied.split()], capture_output=True, text=True)
        sys.stderr.write(said.stderr)
        assert said.returncode != 0, denied
        assert re.search("Read-only|not permitted", said.stderr), denied
    assert subprocess.check_output([*begin, "id", "-u"], text=True).strip() == user
    for words in (container["args"], *MORE):
        own = [placed(word) for word in words]
        sys.stderr.write(f"{' '.join(own)}\n")
        subprocess.run([*begin, *entry, *own], cwd="/", env=environment, check=True)
    sys.stderr.write(f"{1 + len(MORE)} commands ran as user {user} with a read-only root\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--build-arg", action="append", default=[])
    parser.add_argument("--job", action="store_true")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, words = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    folder = options.folder.resolve()
    given = dict(own.split("=", 1) for own in options.build_arg)
    for name in ("home", "src", "data"):
        (folder / name).mkdir(parents=True)
    subprocess.run([sys.executable, "-P", "-m", "venv", folder / "venv"], check=True)
    environment = {"PATH": f"{folder}/venv/bin:{os.environ['PATH']}", "HOME": str(folder / "home")}
    environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    entry: list[str] = []
    for word, rest in instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        sys.stderr.write(f"{word} {rest}\n")
        if word == "ARG":
            name, _, default = rest.partition("=")
            environment[name] = given.get(name, default)
        elif word == "ENV":
            environment |= dict(own.split("=", 1) for own in rest.split())
            environment["HF_HOME"] = str(folder / "home/cache")
        elif word == "COPY":
            *sources, target = rest.split()
            place = folder / "src" / target
            subprocess.run(["cp", "-r", *sources, place], cwd=ROOT, check=True)
        elif word == "RUN" and "useradd" not in rest:
            subprocess.run(
                ["sh", "-ec", shell(rest)], cwd=folder / "src", env=environment, check=True
            )
        elif word == "ENTRYPOINT":
            entry = json.loads(rest)
    if options.job:
        run_job(entry, folder, environment)
        return
    done = subprocess.run([*entry, *words], cwd=folder / "data", env=environment)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
