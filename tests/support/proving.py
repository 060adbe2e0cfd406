"""The proof's own code in this interpreter: a fresh one for each proof takes seconds.

The fresh one is what tests/test_proof.py and tests/test_proof_forward.py are about, and
`first_apart` leaves it to the first proof of an interpreter that a test starts, `none_apart` to
none.
"""

import json
import warnings
from logging import CRITICAL, NOTSET, getLogger

from ropext.families import stock

apart = stock.ask_child


def here(job, directories, timeout, task, forward=True):
    """Return the fresh process's answer for each directory, by its code; without its forward pass,
    too."""
    if job["trust_remote_code"]:
        return apart(job, directories, timeout, task)
    import torch
    import transformers

    from ropext.models.load import silenced
    from ropext.verifying.proof import child

    job, found = json.loads(json.dumps(job)), []
    said = [*getLogger("transformers").handlers]  # nobody reads the fresh process's messages
    for entry, directory in zip(job["directories"], directories, strict=True):
        answer = {"transformers": transformers.__version__, "error": None}
        entry |= {} if forward else {"target": 0}
        try:
            with (
                silenced(),
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(action="ignore"),
            ):
                for handler in said:
                    handler.setLevel(CRITICAL)
                answer |= child.build_directory(job, entry)
        except Exception as error:
            answer["error"] = child.sentence_of_error(error)
        for handler in said:
            handler.setLevel(NOTSET)
        found.append(json.loads(json.dumps(answer)) | {"directory": str(directory)})
    return found


def first_apart():
    """Make the next proof in its own process, and all later ones here."""

    def first(*args):
        stock.ask_child = here
        return apart(*args)

    stock.ask_child = first


def none_apart():
    """Make all proofs here from now on."""
    stock.ask_child = here
