"""The order of things: plan, write, prove. The only room that knows it.

Every public function of ropext is here or one call away; nothing prints, nothing imports torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ropext import families, proof, recipe
from ropext.checkpoint import Snapshot, open_snapshot, provenance
from ropext.checkpoint.jsontext import read_bytes
from ropext.checkpoint.transfer import Link
from ropext.checkpoint.writing import Written, write_checkpoint
from ropext.describing import card_of, record_of
from ropext.families import Model, Site
from ropext.planning import Plan, make_plan, require_help
from ropext.verifying import Served, Verification, check_directory, read_again

Say = Callable[[str], None]

PAIR_FACTORS_LIMIT = 16 << 20  # bytes
# transformers writes int(1e30) where a tokenizer has no limit.
NO_LIMIT = 10**9


def _silent(sentence: str) -> None:
    pass


@dataclass(frozen=True)
class Inspection:
    """What a model has, from its config files alone."""

    name: str
    model: Model
    target: int
    limits: dict[str, Any]

    @property
    def main(self) -> Site:
        """The embedding that an extension would scale."""
        return next(iter(self.model.scaled_sites), self.model.sites[0])

    def to_json(self) -> dict[str, Any]:
        sites = []
        for site in self.model.sites:
            spectrum = site.rope.spectrum
            sites.append(
                asdict(site)
                | {
                    "inv_freq": spectrum.inv_freq,
                    "wavelengths": spectrum.wavelengths,
                }
            )
        facts = asdict(self.model) | {"sites": sites}
        kv = {"kv_bytes_per_token": self.model.kv_bytes_per_token}
        return {"model": self.name, "target": self.target} | facts | kv | {"limits": self.limits}


def inspect(
    model: str,
    *,
    factor: float | None = None,
    target: int | None = None,
    context: int | None = None,
    revision: str | None = None,
) -> Inspection:
    """What position scheme a model has, and what follows from it."""
    snapshot = open_snapshot(model, revision=revision)
    read = families.read(snapshot.config, context=context)
    wish = recipe.Recipe(factor=factor, target=target)
    if factor is None and target is None:
        wish = recipe.Recipe(factor=4.0)
    return Inspection(model, read, recipe.resolve_target(wish, read.context), _limits(snapshot))


def _limits(snapshot: Snapshot) -> dict[str, Any]:
    """What besides the rotary embedding caps a sequence, or decides how it is extended."""
    tokenizer = (snapshot.tokenizer_config or {}).get("model_max_length")
    generation = (snapshot.generation_config or {}).get("max_length")
    return {
        "tokenizer": tokenizer if isinstance(tokenizer, int) and tokenizer < NO_LIMIT else None,
        "generation": generation,
        "quantised": snapshot.quantisation,
    }


def plan(model: str, *, revision: str | None = None, **options: Any) -> Plan:
    """What `extend` would do; `options` are the fields of ropext.recipe.Recipe."""
    snapshot = open_snapshot(model, revision=revision)
    return make_plan(snapshot.config, recipe.build(options, _read_text), model)


def serving(model: str, *, revision: str | None = None) -> Served | None:
    """How each loader reads a directory that ropext extended; None where it is not one."""
    served = read_again(open_snapshot(model, revision=revision))
    return served if served.record else None


def _read_text(path: str) -> str:
    return read_bytes(Path(path), PAIR_FACTORS_LIMIT).decode("utf-8", errors="replace")


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
    wish = recipe.build(options, _read_text)
    snapshot = open_snapshot(model, revision=revision)
    made = make_plan(snapshot.config, wish, model)
    require_help(made)
    for warning in made.warnings:
        say(f"warning: {warning}")
    if snapshot.hub_id and not snapshot.weight_files:
        say(f"fetching the weights of {model}")
        snapshot = open_snapshot(model, revision=revision, weights=True)

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
