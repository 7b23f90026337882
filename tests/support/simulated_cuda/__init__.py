"""A simulated CUDA device: records what a GPU would execute, without a GPU.

Tensors on `cuda` are tracked by PyTorch's FakeTensorMode (shape, dtype, device, no data); tensors
on the CPU are real. `guard.cpp` registers the device, so it must be loaded before torch: run tests
with the environment of `environment()`. Within `SimulatedCuda`, an operation that mixes devices
raises as it would on a GPU, Triton kernels are recorded instead of launched, and every host
synchronization and blocking copy is recorded.

Needs g++, once per torch version.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from typing_extensions import Self

from tests.support.simulated_cuda.traffic import (
    Cost,
    operator_cost,
    operator_launches,
    tensors_in,
    triton_cost,
)

GUARD_SOURCE = Path(__file__).with_name("guard.cpp")
ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT_KEY = "SIMULATED_CUDA"
aten = torch.ops.aten

# Operations that return a view or an uninitialized tensor: they launch no kernel.
NO_KERNEL = {
    *(
        "alias",
        "as_strided",
        "detach",
        "expand",
        "narrow",
        "permute",
        "reshape",
        "_reshape_alias",
        "select",
        "slice",
    ),
    *(
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
    ),
    *(
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "lift_fresh",
        "is_same_size",
    ),
    *(
        "_unsafe_view",
        "chunk",
        "diagonal",
        "view_as_real",
        "view_as_complex",
        "_has_same_storage_numel",
    ),
    *("_efficientzerotensor", "to"),  # `to` calls `_to_copy` if necessary
}
# Operations whose output size depends on data: the host waits for the device.
DATA_DEPENDENT = (
    "nonzero",
    "masked_select",
    "unique",
    "_unique",
    "_unique2",
    "repeat_interleave.Tensor",
)


def build_guard() -> Path:
    """Compile `guard.cpp` for the installed torch, or return the library compiled before.

    Raises RuntimeError if g++ is missing or fails.
    """
    source = GUARD_SOURCE.read_bytes()
    key = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"simulated_cuda-{os.getuid()}-{key}.so"
    if library.exists():
        return library
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("the simulated CUDA device needs g++ (Debian: apt-get install g++)")
    torch_dir = Path(torch.__file__).parent
    partial = library.with_suffix(f".{os.getpid()}")
    command = [
        compiler,
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        str(GUARD_SOURCE),
        "-o",
        str(partial),
    ]
    command += [f"-I{torch_dir}/include", f"-I{torch_dir}/include/torch/csrc/api/include"]
    command += [f"-L{torch_dir}/lib", "-lc10", "-ltorch_cpu"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"g++ cannot compile {GUARD_SOURCE}:\n{result.stderr}")
    partial.replace(library)
    return library


def environment() -> dict[str, str]:
    """The environment of a process with a simulated CUDA device."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    libraries = (
        f"{Path(torch.__file__).parent / 'lib'}:{variables.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    )
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cuda"}
    return {
        **variables,
        **ranks,
        "LD_PRELOAD": str(build_guard()),
        "LD_LIBRARY_PATH": libraries,
        ENVIRONMENT_KEY: "1",
    }


def is_active() -> bool:
    """Whether this process was started with `environment()`."""
    return ENVIRONMENT_KEY in os.environ


def _project_frames() -> str:
    """The innermost frames of this project, for messages."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT))]
    frames = [
        frame
        for frame in frames
        if "/tests/support/" not in frame.filename and "/.venv/" not in frame.filename
    ]
    return " < ".join(
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
        for frame in reversed(frames[-4:])
    )


class SimulatedCuda(TorchDispatchMode):
    """Context manager in which device `cuda` is simulated.

    Attributes:
        kernels: kernel launches by operator or Triton kernel name.
        synchronizations: reasons why the host waited for the device.
        blocking_copies: host-to-device copies that block the host (pageable memory or
            non_blocking=False).
        scalar: what `item()` returns.
        allocated, peak: bytes of the tensors in the device's memory now, and at most since `reset`.
    """

    def __init__(self, capability: tuple[int, int] = (9, 0)):
        super().__init__()
        self.capability = capability
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._patches = contextlib.ExitStack()
        self._storages: dict[int, weakref.finalize] = {}
        self.scalar = 1
        self.allocated = 0
        self.reset()

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: torch.compile traces functions within this mode."""
        return True

    def reset(self) -> None:
        """Clear all records."""
        self.kernels: Counter[str] = Counter()
        self.synchronizations: list[str] = []
        self.blocking_copies: list[str] = []
        self.peak = self.allocated

    def __enter__(self) -> Self:
        if not is_active():
            raise RuntimeError(
                "tests/gpu needs the environment of tests.support.simulated_cuda: run "
                "tests/integration/test_gpu.py, which sets it"
            )
        # Backward passes run in this thread, where this mode is active.
        torch.autograd.set_multithreading_enabled(False)
        torch._C._set_only_lift_cpu_tensors(True)
        for target, name, replacement in self._replacements():
            self._patches.enter_context(patch.object(target, name, replacement))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()
        torch._C._set_only_lift_cpu_tensors(False)
        torch.autograd.set_multithreading_enabled(True)

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        from triton.runtime.jit import JITFunction

        rng_state = torch.zeros(16, dtype=torch.uint8)
        yield torch.cuda, "_lazy_init", lambda: None
        yield torch.cuda, "is_available", lambda: True
        yield torch.cuda, "device_count", lambda: 1
        yield torch.cuda, "current_device", lambda: 0
        yield torch.cuda, "get_device_capability", lambda *_: self.capability
        yield torch.cuda, "is_bf16_supported", lambda *_, **__: True
        yield torch.cuda, "get_rng_state", lambda *_, **__: rng_state
        yield torch.cuda, "set_rng_state", lambda *_, **__: None
        yield (
            torch.cuda,
            "synchronize",
            lambda *_: self.synchronizations.append(f"synchronize {_project_frames()}"),
        )
        handle = _handle_class(self)
        for name in (
            "device",
            "device_of",
            "Stream",
            "Event",
            "stream",
            "current_stream",
            "default_stream",
        ):
            yield torch.cuda, name, handle
        major, minor = self.capability
        properties = SimpleNamespace(
            name="Simulated",
            major=major,
            minor=minor,
            total_memory=80 * 2**30,
            multi_processor_count=132,
            shared_memory_per_block_optin=227 * 1024,
        )
        yield torch.cuda, "get_device_properties", lambda *_: properties
        yield torch.cuda, "is_initialized", lambda: True
        yield torch.cuda, "set_device", lambda _: None
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
        ):
            yield torch.cuda, name, lambda *_: 0
        for name in ("empty_cache", "reset_peak_memory_stats"):
            yield torch.cuda, name, lambda *_: None
        for name in ("range_push", "range_pop"):
            yield torch.cuda.nvtx, name, lambda *_: None
        yield torch.Tensor, "record_stream", lambda *_: None
        yield torch.Tensor, "pin_memory", _pinned
        yield torch.Tensor, "is_pinned", lambda tensor, *_: hasattr(tensor, "simulated_pinned")
        # A function, not a bound method, so that the class passes the kernel.
        yield (
            JITFunction,
            "run",
            lambda kernel, *args, **options: self._launch_triton(kernel, *args, **options),
        )
        yield torch.nn.functional, "scaled_dot_product_attention", _cuda_sdpa

    def record(self, name: str, launches: int, cost: Callable[[], Cost]) -> None:
        """Called for every operator and Triton kernel that runs on the device. Calling `cost` is
        slow.
        """
        self.kernels[name] += launches

    def _launch_triton(
        self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        for argument in (*arguments, *options.values()):
            if isinstance(argument, Tensor) and argument.device.type != "cuda":
                raise RuntimeError(
                    f"{kernel.fn.__name__}: pointer argument is on {argument.device}, not on cuda"
                )
        named = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
        grid = grid(named) if callable(grid) else grid
        self.record(f"triton.{kernel.fn.__name__}", 1, lambda: triton_cost(kernel, named, grid))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # FlexAttention
            with self._fake:
                result = func(*args, **kwargs)
            self.record(str(func), 1, lambda: Cost(1, 0, 0))
            return result
        tensors = tensors_in((args, kwargs))
        on_device = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        on_host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if not on_device and target != "cuda":
            return func(*args, **kwargs)

        name = func.__name__.removesuffix(".default")
        if func.namespace == "kerple":
            return self._run_operator(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            self.synchronizations.append(f"item() {_project_frames()}")
            return self.scalar
        if func is aten.equal.default:
            self.synchronizations.append(f"equal() {_project_frames()}")
            return True
        if name.startswith(DATA_DEPENDENT):
            self.synchronizations.append(f"{name} {_project_frames()}")
        if on_device and target == "cpu":
            self.synchronizations.append(f"copy to the host {_project_frames()}")
            return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        if func is aten.copy_.default and on_host:
            destination, source = args[:2]
            if not isinstance(destination, FakeTensor):
                self.synchronizations.append(f"copy to the host {_project_frames()}")
                return destination
            self._record_host_copy(
                source, bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False)
            )
        elif on_host and target == "cuda":
            self._record_host_copy(on_host[0], kwargs.get("non_blocking", False))
        elif any(tensor.dim() for tensor in on_host):
            # Index tensors may be on the CPU, but the device then waits for a copy of them.
            if (
                name.startswith(("index", "_index_put_impl_", "index_put"))
                and not on_host[0].dtype.is_floating_point
            ):
                self.blocking_copies.append(f"{name} with indices on the CPU {_project_frames()}")
            else:
                shapes = [(*tensor.shape,) for tensor in on_host]
                raise RuntimeError(
                    f"{name}: tensors on cuda and on the CPU {shapes} at {_project_frames()}"
                )

        def to_fake(leaf: Any) -> Any:
            is_real = isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)
            return self._fake.from_tensor(leaf) if is_real else leaf

        if on_host:
            args, kwargs = tree_map(to_fake, args), tree_map(to_fake, kwargs)
        with self._fake:
            result = func(*args, **kwargs)
        self._track_memory(result)
        # Collectives (c10d) have nothing to do on one rank.
        if func.overloadpacket.__name__ not in NO_KERNEL and func.namespace not in ("prim", "c10d"):
            launches = operator_launches(func, args, result)
            self.record(
                func.overloadpacket.__name__,
                launches,
                lambda: operator_cost(func, args, kwargs, result),
            )
        return result

    def _run_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the implementation of one of our operators, which launches kernels."""
        super().__enter__()  # not self, which would leave the patches of torch.cuda at its exit
        try:
            with torch._C._PreserveDispatchKeyGuard(), torch.no_grad():
                # Autograd's keys decompose composite operators.
                torch._C._dispatch_tls_set_dispatch_key_excluded(
                    torch._C.DispatchKey.AutogradFunctionality, False
                )
                return OPDEFS[func.name()]._init_fn(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _record_host_copy(self, source: Tensor, non_blocking: bool) -> None:
        if not (non_blocking and source.is_pinned()):
            self.blocking_copies.append(f"{(*source.shape,)} {source.dtype} {_project_frames()}")

    def _track_memory(self, result: Any) -> None:
        for leaf in tensors_in(result):
            if not isinstance(leaf, FakeTensor) or leaf.device.type != "cuda":
                continue
            storage = leaf.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._storages:
                self.allocated += size
                self._storages[key] = weakref.finalize(storage, self._free, key, size)
                self._storages[key].atexit = False
        self.peak = max(self.peak, self.allocated)

    def _free(self, key: int, size: int) -> None:
        del self._storages[key]
        self.allocated -= size


def _pinned(tensor: Tensor, *_: Any) -> Tensor:
    """A copy that counts as page-locked memory."""
    copy = tensor.clone()
    vars(copy)["simulated_pinned"] = True
    return copy


def _handle_class(device: SimulatedCuda) -> type:
    """A class for torch.cuda's devices, streams and events: it only records operations
    that wait.
    """

    class Handle:
        def __init__(self, *arguments: Any, **options: Any):
            pass

        def __enter__(self) -> "Handle":
            return self

        def __exit__(self, *exception: Any) -> None:
            pass

        def synchronize(self) -> None:
            device.synchronizations.append(f"synchronize {_project_frames()}")

        def elapsed_time(self, end: "Handle") -> float:
            device.synchronizations.append(f"elapsed_time {_project_frames()}")
            return 1.0

        def record(self, stream: "Handle | None" = None) -> None:
            pass

        def query(self) -> bool:
            return True

        def wait_stream(self, stream: "Handle") -> None:
            pass

        def wait_event(self, event: "Handle") -> None:
            pass

    return Handle


def _cuda_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention through the operators that a GPU would use.

    Raises RuntimeError for a mask that the CUDA kernels do not accept, and for different numbers of
    heads if the call does not enable them or only a kernel that stores all scores supports them.
    """
    is_flash = attn_mask is None and query.dtype != torch.float32
    if query.shape[1] != key.shape[1] and not (enable_gqa and is_flash):
        raise RuntimeError(f"{query.shape[1]} heads of queries and {key.shape[1]} of keys")
    if is_flash:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(
            ~attn_mask, float("-inf")
        )
    if attn_mask is not None:
        if attn_mask.dtype != query.dtype:
            raise RuntimeError(f"attention mask is {attn_mask.dtype}, query is {query.dtype}")
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


@torch.no_grad()
def move_to_cuda(model: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    """Replace the parameters and buffers of a model with simulated ones on `cuda`, floating point
    ones in `dtype`.

    Shared tensors stay shared. Call it within `SimulatedCuda`.
    """
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in replaced:
                    kind = (
                        dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                    )
                    moved: Tensor = torch.empty(tensor.shape, dtype=kind, device="cuda")
                    if isinstance(tensor, torch.nn.Parameter):
                        moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
                    replaced[id(tensor)] = moved
                setattr(module, name, replaced[id(tensor)])
    return model
