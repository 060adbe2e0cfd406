"""The light installation can ask a server: neither torch nor transformers is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

from fake_server import Fake, serving

import ropext

PROBE = """
import json, os, runpy, sys
sys.argv = ["ropext", *json.loads(os.environ["WORDS"])]
try:
    runpy.run_module("ropext", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The sky is blue. The sun is warm. " * 50, "utf-8")
    with serving(Fake(limit=512)) as url:
        words = ["eval", "--endpoint", url, "--lengths", "256", "--items", "1", "-o", "out"]
        words += ["--against", "ropext://demo", "--data", "text.txt", "--haystack", "text"]
        home = str(Path(ropext.__file__).parents[1])
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"WORDS": json.dumps(words), "PYTHONPATH": home},
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {"torch", "transformers", "accelerate", "peft", "datasets"}
    assert "The sun is warm." in next(tmp_path.glob("out/variants/questions-*/*.json")).read_text()
