"""The order of things: plan, write, prove. The only room that knows it.

Nothing here prints, and nothing imports torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropext import proof, recipe
from ropext.checkpoint import open_snapshot, provenance, with_weights
from ropext.checkpoint.transfer import Link
from ropext.checkpoint.writing import Written, write_checkpoint
from ropext.describing import card_of, record_of
from ropext.errors import UsageError
from ropext.looking import read_text
from ropext.planning import Plan, make_plan, require_help
from ropext.verifying import Verification, check_directory

Say = Callable[[str], None]


def _silent(sentence: str) -> None:
    pass


@dataclass(frozen=True)
class Extended:
    """What `extend` did."""

    plan: Plan
    written: Written

    @property
    def output(self) -> Path:
        return self.written.output

    def to_json(self) -> dict[str, Any]:
        notes = list(self.written.notes)
        return {
            "output": str(self.output),
            "proof": self.written.proof,
            "notes": notes,
            "left": dict(self.written.left),
            "serving": [asdict(line) for line in self.plan.serving(str(self.output))],
            "record": provenance.to_json(self.written.record),
        }


def _refuse_later_steps(wish: recipe.Recipe) -> None:
    """Training and measuring have commands of their own; asked for here, neither is skipped."""
    asked, then = [], []
    if wish.finetune:
        asked.append(f"--finetune {wish.finetune}")
        then.append(f"`ropext finetune OUT --data {wish.finetune} -o TUNED`")
    if wish.evaluate:
        asked.append(f"--eval {wish.evaluate}")
        then.append(f"`ropext eval OUT --data {wish.evaluate}`")
    if asked:
        raise UsageError(
            f"{' '.join(asked)}: extend writes and proves a checkpoint, no more; leave "
            f"{'them' if then[1:] else 'it'} out, then run {' and '.join(then)}"
        )


def extend(
    model: str,
    output: str | Path,
    *,
    revision: str | None = None,
    link: Link = "copy",
    force: bool = False,
    prove: bool = True,
    hash_weights: bool = False,
    trust_remote_code: bool = False,
    command: Sequence[str] = (),
    say: Say = _silent,
    **options: Any,
) -> Extended:
    """Write an extended checkpoint and prove it; `options` are the fields of a Recipe."""
    wish = recipe.build(options, read_text)
    _refuse_later_steps(wish)
    snapshot = open_snapshot(model, revision=revision)
    made = make_plan(snapshot.config, wish, model)
    require_help(made)
    for warning in made.warnings:
        say(f"warning: {warning}")
    snapshot = with_weights(snapshot)

    def run_proof(directory: Path) -> dict[str, Any]:
        say("proving: stock transformers builds the model from the written config")
        return proof.prove(
            directory,
            proof.expected(made.sites, made.factor),
            text_path=made.model.path,
            trust_remote_code=trust_remote_code,
        ).to_json()

    name = Path(output).name
    written = write_checkpoint(
        snapshot,
        Path(output),
        config=made.config,
        record=record_of(made, snapshot, command),
        card=lambda proved: card_of(made, snapshot, name, proved),
        link=link,
        force=force,
        hash_weights=hash_weights,
        prove=run_proof if prove else None,
    )
    return Extended(made, written)


def verify(
    directory: str | Path,
    *,
    against: str | None = None,
    deep: bool = False,
    endpoint: str | None = None,
    trust_remote_code: bool = False,
    **loading: Any,
) -> Verification:
    """Prove a directory against its own record, a saved plan, or its base.

    `endpoint` is the address of a running server that should read it alike; `loading` (dtype,
    device, attn_implementation) says how transformers runs beside it.
    """
    return check_directory(
        directory,
        against=against,
        deep=deep,
        endpoint=endpoint,
        trust_remote_code=trust_remote_code,
        **loading,
    )
