"""Count the measured cells of the loader table, for the families and forms of checkpoints.py.

    python scripts/loaders/figures.py

A cell counts if an engine read it or its own functions ran. A family that an engine refuses is
counted apart, and an unknown cell does not count.
"""

from collections import Counter

from bases import FAMILIES, SIZES, keys_of
from kit import FORMS, extended

from ropext import families
from ropext.base.errors import RopextError
from ropext.families import loaders

LOADERS = ("transformers", "vllm", "sglang", "llama.cpp", "mlx")


def cells() -> dict[tuple[str, str, str], loaders.LoaderReading]:
    """Return (loader, family, form) -> the table's verdict, for every form that a family
    carries."""
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


def refused(row: loaders.LoaderReading) -> bool:
    return row.verdict == "not measured" and "could not be run" in row.why


def main() -> None:
    found = cells()
    of = Counter(loader for loader, *_ in found)
    for loader in LOADERS:
        mine = {key: row for key, row in found.items() if key[0] == loader and measured(row)}
        no = sum(refused(row) for key, row in found.items() if key[0] == loader)
        told = [{family for _, family, _ in mine}, {f for _, f, _ in mine if _by_engine(mine, f)}]
        print(
            f"{loader}: {len(mine)} of {of[loader]} cells of {len(told[0])} families,"
            f" {len(told[1])} of them by its engine; {no} refused"
        )
    known, no = (sum(map(what, found.values())) for what in (measured, refused))
    print(
        f"together: {known} of {len(found)} cells ({known / len(found):.1%}), {no} refused, of"
        f" {len(FAMILIES)} families"
    )


def _by_engine(mine: dict[tuple[str, str, str], loaders.LoaderReading], family: str) -> bool:
    return any(row.evidence == "engine" for key, row in mine.items() if key[1] == family)


if __name__ == "__main__":
    main()
