"""Options of every command that writes a checkpoint: whether the hub gets it, too."""

from typing import Self

from pydantic import model_validator

from ropext.base.errors import UsageError
from ropext.options.fields import Neutral, Options, wanted


class PushOptions(Options):
    """Where the output of a command is pushed when it is complete."""

    push_to_hub: Neutral[str | None] = wanted(
        None, "upload OUT when it is complete, as a private repository", "ORG/NAME"
    )
    public: Neutral[bool] = wanted(False, "the pushed repository is public")

    @model_validator(mode="after")
    def _check_repository(self) -> Self:
        """Refuse --public without --push-to-hub."""
        if self.push_to_hub is None:
            raise UsageError("--public needs --push-to-hub ORG/NAME")
        return self
