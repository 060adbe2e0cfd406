"""A stand-in for Apple's GPU, on a CPU.

Tensors made before `AppleGpu()` is entered, and tensors sent there, report the device `mps`.
Nothing there is float64, and it mixes with no tensor of the CPU. Its arithmetic is the CPU's: no
kernel of Apple's runs here.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

# Take an index or a source from the CPU.
MIXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.copy_}


def _is_device(value):
    return isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "mps"))


class AppleGpu(TorchFunctionMode):
    """Marks tensors of the CPU; all others are on the GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:
            real = func(*args)
            return torch.device("mps") if real.type == "cpu" and not self.on_cpu(args[0]) else real
        given = [value for value in tree_flatten((args, kwargs))[0] if _is_device(value)]
        sources = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
        if func is torch.Tensor.cpu or any(str(place) == "cpu" for place in given):
            host = True
        elif given:
            host = False
        elif func is torch.Tensor.to and len(sources) == 2:
            host = self.on_cpu(sources[1])
        else:
            host = all(map(self.on_cpu, sources))
            apart = [own for own in sources if self.on_cpu(own) != host and own.dim()]
            if apart and func not in MIXING:
                raise RuntimeError(f"{func} expects all tensors on one device, found cpu and mps")
        args, kwargs = tree_map(
            lambda v: torch.device("cpu") if _is_device(v) else v, (args, kwargs)
        )
        found = func(*args, **kwargs)

        def placed(value):
            if not isinstance(value, torch.Tensor):
                return value
            if value.dtype == torch.float64 and not host:
                raise TypeError("the MPS framework doesn't support float64")
            if any(value is own for own in sources) and self.on_cpu(value) != host:
                value = value.view(value.shape)
            if host:
                value.lies_on_cpu = True
            return value

        return tree_map(placed, found)

    @staticmethod
    def on_cpu(tensor):
        return getattr(tensor, "lies_on_cpu", False)
