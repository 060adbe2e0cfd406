"""The loss of every token as one parquet file, for analyses of one's own."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropext import guard
from ropext.files import write_whole
from ropext.results.comparison import Contender

Texts = Iterable[tuple[str, npt.NDArray[Any]]]  # name and token ids of each document read


def write_losses(path: Path, texts: Texts, contenders: Mapping[str, Contender]) -> None:
    """Write a row for each token that a variant scored, as read at the longest length."""
    import pyarrow
    from pyarrow import parquet

    names = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    schema = pyarrow.schema(
        {
            "document": names,
            "position": pyarrow.int32(),
            "token": pyarrow.int32(),
            "loss": pyarrow.float32(),
            "variant": names,
        },
        {"made": guard.LOSSES},
    )
    texts = list(texts)

    def write(stream: Any) -> None:
        with parquet.ParquetWriter(stream, schema) as writer:
            for label, own in contenders.items():
                assert own.reading is not None, label  # with documents all variants have one
                losses = own.reading.tokens(0, own.frame.longest)  # from position 1 on
                for (name, ids), nll in zip(texts, losses, strict=True):
                    scored = np.flatnonzero(np.isfinite(nll))
                    columns = (
                        [name] * len(scored),
                        scored + 1,
                        ids[scored + 1],
                        nll[scored],
                        [label] * len(scored),
                    )
                    writer.write_table(pyarrow.table(list(columns), schema=schema))

    write_whole(path, write)
