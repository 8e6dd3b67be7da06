"""A pretended GPU: its tensors lie in the CPU's memory, but are not CPU tensors.

What would fail on a GPU fails here, too: an operation on tensors of both devices. What would make
the host wait for a GPU is counted: a number or a list asked of a tensor, a result whose size
depends on values (nonzero, boolean masks), a copy from one device to the other without
``non_blocking``. Autocast casts as on CUDA, which is not as on the CPU. Values are computed by the
CPU.

PyTorch calls its way to declare such a device experimental, and cannot undo it: use this in a
process of its own.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

# A wait is attributed to the innermost line of these.
PLACES = ("/revela/", "/transformers/", "/sentence_transformers/", "/research/benchmarks/")
SIZE_BY_VALUE = ("nonzero", "masked_select", "bincount", "_unique2", "repeat_interleave")
JOINING = ("cat", "stack")  # elsewhere a number of the CPU is taken beside tensors
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")

# What CUDA's autocast does (ATen/autocast_mode.h), as far as it concerns us: cast to bf16, cast to
# fp32, give a result in fp32.
LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")
LOWER += ("scaled_dot_product_attention",)
SINGLE = ("exp", "log", "reciprocal", "rsqrt", "pow.Tensor_Scalar", "pow.Tensor_Tensor")
SINGLE += ("layer_norm", "nll_loss", "logsumexp", "kl_div")
WIDE = ("softmax.int", "log_softmax.int", "cumsum", "linalg_vector_norm")
WIDE += ("sum", "sum.dim_IntList", "prod")
AUTOCAST = "AutocastPrivateUse1"


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A value with its tensors changed: what PyTorch's tree_map does, in a tenth of the time."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([_mapped(change, part) for part in value])
    if type(value) is dict:
        return {name: _mapped(change, part) for name, part in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(found.append, value)
    return found


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()  # the CPU draws for it

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


_setup_privateuseone_for_python_backend("pretend", backend_module=_Module())
DEVICE = torch.device("pretend", 0)
waits: Counter[str] = Counter()

_everything_else = torch.library.Library("_", "IMPL", AUTOCAST)
_everything_else.fallback(torch.library.fallthrough_kernel, AUTOCAST)
_casts = torch.library.Library("aten", "IMPL", AUTOCAST)


def _casting(name: str, dtype: torch.dtype | None, wide: bool = False) -> None:
    """Let autocast cast this operation's tensors, or ask it for a result in fp32."""
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def cast(t: Any) -> Any:
        if not isinstance(t, OnDevice) or not t.is_floating_point() or t.dtype == torch.float64:
            return t
        return t.to(dtype or torch.get_autocast_dtype(DEVICE.type))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, AUTOCAST))
        ):
            if not wide:
                args, kwargs = _mapped(cast, (args, kwargs))
            elif args[0].dtype in (torch.bfloat16, torch.float16) and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
            return operation(*args, **kwargs)

    _casts.impl(name, run)


for _name in LOWER:
    _casting(_name, None)
for _name in SINGLE:
    _casting(_name, torch.float32)
for _name in WIDE:
    _casting(_name, torch.float32, wide=True)


class OnDevice(Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, data: Tensor) -> OnDevice:
        places = data.size(), data.stride(), data.storage_offset()
        kind = dict(dtype=data.dtype, layout=data.layout, device=DEVICE)
        with torch.inference_mode(False):  # inside, a view of a tensor from outside cannot be made
            return Tensor._make_wrapper_subclass(cls, *places, **kind)

    def __init__(self, data: Tensor) -> None:
        self.on_host = data

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return _run(function, *args, **kwargs or {})

    @property
    def data(self) -> Any:
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, other: OnDevice) -> None:
        Tensor.data.__set__(self, other)
        self.on_host = other.on_host

    def tolist(self) -> Any:
        _wait("tolist")
        return self.on_host.tolist()

    def __repr__(self) -> str:
        return f"OnDevice({self.on_host})"


_tensor = torch.tensor


def _made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    made = _tensor(*args, **kwargs)
    return made if device is None else made.to(device)


# A parameter of two modules stays one when they are moved, as it does for a GPU.
torch.__future__.set_swap_module_params_on_conversion(True)
_device_constructors()  # PyTorch's own is known as one, for ``with torch.device("meta")``
torch.tensor = _made  # PyTorch's own copies what it has made in C++, where no Python is asked


def _wait(kind: str) -> None:
    frames = (f for f in reversed(traceback.extract_stack()) if f.filename != __file__)
    ours = (f for f in frames if any(place in f.filename for place in PLACES))
    lines = (f"{'/'.join(f.filename.split('/')[-2:])}: {f.line}" for f in ours)
    waits[f"{kind} in {next(lines, 'the backward pass')}"] += 1


def _run(function: Any, *args: Any, **kwargs: Any) -> Any:
    name = function.overloadpacket.__name__
    tensors = _tensors((args, kwargs))
    ours = [t for t in tensors if isinstance(t, OnDevice)]
    others = [t for t in tensors if not isinstance(t, OnDevice)]
    target = kwargs.get("device")
    on_device = bool(ours) if target is None else torch.device(target).type == DEVICE.type
    by_value = name in SIZE_BY_VALUE or (
        name in INDEXING and any(t.dtype == torch.bool for t in _tensors(args[1]))
    )
    if name == "copy_":
        on_device = isinstance(args[0], OnDevice)
    if ours and (name == "_local_scalar_dense" or by_value):
        _wait(name)
    elif name == "copy_":
        if ours and others and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            _wait("copy")
    elif name == "_to_copy" and on_device != bool(ours) and not kwargs.get("non_blocking"):
        _wait("copy")
    elif ours and others and name in INDEXING and isinstance(args[0], OnDevice):
        _wait("indices from the host")  # a GPU fetches them
    elif ours and name != "_to_copy" and any(t.dim() or name in JOINING for t in others):
        raise RuntimeError(f"{function} of tensors on two devices")
    if target is not None:
        kwargs["device"] = torch.device("cpu")
    given = _mapped(lambda t: t.on_host if isinstance(t, OnDevice) else t, (args, kwargs))
    out = function(*given[0], **given[1])
    if not on_device:
        return out
    wrapped = _mapped(lambda t: t if isinstance(t, OnDevice) else OnDevice(t), out)
    if not function._schema.is_mutable:
        return wrapped
    return return_and_correct_aliasing(function, args, kwargs, wrapped)


# What is made on the device from nothing has no tensor there yet to be dispatched by.
_from_nothing = torch.library.Library("_", "IMPL", "PrivateUse1")
_from_nothing.fallback(_run, "PrivateUse1")
