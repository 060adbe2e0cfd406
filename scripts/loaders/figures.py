"""Count what of the loader table was measured, for the families and forms of checkpoints.py.

    python scripts/loaders/figures.py

A cell counts where an engine read it or its own functions ran; what could not be run, or is not
known, does not.
"""

from collections import Counter

from bases import FAMILIES, SIZES, keys_of
from kit import FORMS, extended

from ropext import families, loaders
from ropext.errors import RopextError

LOADERS = ("transformers", "vllm", "sglang", "llama.cpp", "mlx")


def cells() -> dict[tuple[str, str, str], loaders.LoaderReading]:
    """(loader, family, form) -> what the table says, for every form that a family carries."""
    found = {}
    for family in FAMILIES:
        plain = {"model_type": family} | keys_of(family, SIZES, {})
        for form in FORMS:
            try:
                model = families.read(extended(plain, form))
            except RopextError:
                continue
            params = model.scaled_sites[0].params
            rows = loaders.readings(model.text_type, params, model_type=family)
            newest = {row.loader: row for row in reversed(rows)}
            found |= {(loader, family, form): newest[loader] for loader in LOADERS}
    return found


def measured(row: loaders.LoaderReading) -> bool:
    return row.verdict != "not measured" and row.evidence != "source"


def main() -> None:
    found = cells()
    of = Counter(loader for loader, *_ in found)
    for loader in LOADERS:
        mine = {key: row for key, row in found.items() if key[0] == loader and measured(row)}
        told = [{family for _, family, _ in mine}, {f for _, f, _ in mine if _by_engine(mine, f)}]
        print(
            f"{loader}: {len(mine)} of {of[loader]} cells of {len(told[0])} families,"
            f" {len(told[1])} of them by its engine"
        )
    known = sum(map(measured, found.values()))
    print(f"together: {known} of {len(found)} cells ({known / len(found):.1%})")


def _by_engine(mine: dict[tuple[str, str, str], loaders.LoaderReading], family: str) -> bool:
    return any(row.evidence == "engine" for key, row in mine.items() if key[1] == family)


if __name__ == "__main__":
    main()
