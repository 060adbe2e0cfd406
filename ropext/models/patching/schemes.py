"""Give a loaded model that does not rotate other rows, or other slopes, as a plan says."""

from typing import TYPE_CHECKING

from ropext.base.errors import InputError
from ropext.scaling.tables import Growth

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

SLOPED = ("BloomBlock", "FalconDecoderLayer", "MptBlock")  # layers that take ALiBi's bias
SLOPES = "_ropext_slopes"  # attribute of a model whose ALiBi slopes were patched: its hooks
ROWS = "_ropext_rows"  # attribute of an embedding whose rows were patched: its weight before
STORED = {"torch.float64": "F64", "torch.float32": "F32"}
STORED |= {"torch.float16": "F16", "torch.bfloat16": "BF16"}


def position_tables_of(live: "PreTrainedModel", growth: Growth | None) -> dict[str, "nn.Module"]:
    """Return the position tables of a model in memory that a patch gave other rows, or will give:
    modules by their names."""
    tables = dict[str, "nn.Module"]()
    for name, module in live.named_modules():
        is_grown = growth is not None and growth.positions.is_table(f"{name}.weight")
        if is_grown or ROWS in vars(module):
            tables[name] = module
    return tables


def set_table_rows(table: "nn.Module", growth: Growth | None) -> None:
    """Give a position table in memory other rows, computed from its rows before any patch; without
    a growth, restore these."""
    import torch

    from ropext.files.schemes.growing import grown  # late: no rotary model needs it

    old: torch.Tensor = vars(table).pop(ROWS, table.weight)
    table.weight = old
    if growth is None:
        return
    if len(old) != growth.positions.rows:
        raise InputError(
            f"the position table in memory has {len(old)} rows, not the {growth.positions.rows} "
            "that its config says"
        )
    data = old.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    made = bytearray(grown(data, STORED[str(old.dtype)], growth))
    rows = torch.frombuffer(made, dtype=old.dtype).view(-1, old.shape[1]).to(old.device)
    vars(table)[ROWS] = old
    table.weight = torch.nn.Parameter(rows, requires_grad=old.requires_grad)


def set_alibi_slopes(live: "PreTrainedModel", growth: Growth | None) -> None:
    """Scale the ALiBi slopes in the bias that each layer in memory receives; without a growth,
    restore stock's."""
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    for hook in vars(live).pop(SLOPES, ()):
        hook.remove()
    if growth is None or growth.slopes is None:
        return
    factor = growth.target / growth.positions.context
    factors = torch.tensor(growth.slopes(live.config.num_attention_heads, factor))

    def scale(
        _: nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]
    ) -> tuple[tuple[object, ...], dict[str, torch.Tensor]]:
        """Multiply the slopes in the bias of a layer in memory by the planned factors, the steepest
        first."""
        name = "position_bias" if "position_bias" in kwargs else "alibi"
        bias = kwargs[name]
        by_head = bias.reshape(-1, len(factors), bias.shape[-1])
        slopes = (by_head.amax(2) - by_head.amin(2)).amax(0)  # in the row with most tokens
        steepest = slopes.argsort(descending=True)
        ratios = torch.empty_like(slopes)
        ratios[steepest] = factors.to(ratios)
        ratios = ratios.repeat(1 if bias.dim() == 4 else len(bias) // len(factors))[:, None, None]
        changed = {name: bias * ratios}
        if bias.dim() == 4:  # Falcon holds it in its mask as well
            mask = kwargs["attention_mask"]
            hidden = mask == torch.finfo(mask.dtype).min
            changed["attention_mask"] = torch.where(hidden, mask, mask * ratios)
        return args, kwargs | changed

    hooks = list[RemovableHandle]()
    for module in live.modules():
        if type(module).__name__ in SLOPED:
            hooks.append(module.register_forward_pre_hook(scale, with_kwargs=True))
    setattr(live, SLOPES, hooks)
