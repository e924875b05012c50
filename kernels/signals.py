"""Kernels that raise layer counters, and one that holds a stream until a counter is high enough.

Counters are int64 and only grow. What a signal's program wrote, or a kernel before it on the same
stream, is visible to whoever has seen the raised number by an acquiring load.
"""

import time

import torch
import triton
import triton.language as tl

from kvferry.kernels.handles import Launch, is_interpreted
from kvferry.kernels.metadata import signal_metadata, wait_metadata

LAYERS_PER_PROGRAM = 32
_SIGNAL_ARGUMENTS = (
    "values_address", "mirror_address", "limits_address", "first_layer", "end_layer", "num_signals",
)  # fmt: skip
_WAIT_ARGUMENTS = (
    "values_address", "targets_address", "expired_address", "expired_mirror_address", "layer",
    "num_layers", "limit",
)  # fmt: skip


@triton.jit
def signal_layers(counters, num_signals, mask, SYS: tl.constexpr):
    """Add to some layers' counters, behind all that the program has stored; return what they were.

    `mask` is None where `counters` is one pointer.

    Triton 3.6 puts no barrier before an atomic: without this one, only the stores of the threads
    that signal would be released.
    """
    tl.debug_barrier()
    if SYS:
        return tl.atomic_add(counters, num_signals, mask=mask, sem="release", scope="sys")
    else:
        return tl.atomic_add(counters, num_signals, mask=mask, sem="release", scope="gpu")


@triton.jit
def _store_released(pointers, value, mask, ASM: tl.constexpr):
    """Store int64 numbers into the host's memory, behind all that was raised before.

    A plain strong store, no read-modify-write: the host's memory knows none over PCIe.
    """
    if ASM:
        tl.inline_asm_elementwise(
            "{ .reg .pred on; setp.ne.s32 on, $3, 0; mov.b32 $0, 0;"
            " @on st.release.sys.global.u64 [$1], $2; }",
            "=&r,l,l,r",
            [pointers.to(tl.int64), value, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit
def _nanoseconds():
    """The GPU's clock as the warp's first thread reads it: the warp must leave its loop as one."""
    return tl.inline_asm_elementwise(
        "{ .reg .b64 now; .reg .b32 low, high;"
        " mov.u64 now, %globaltimer; mov.b64 {low, high}, now;"
        " shfl.sync.idx.b32 low, low, 0, 31, -1; shfl.sync.idx.b32 high, high, 0, 31, -1;"
        " mov.b64 $0, {low, high}; }",
        "=l",
        [],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=_SIGNAL_ARGUMENTS, launch_metadata=signal_metadata)
def _signal_kernel(
    values_address: tl.int64,  # [num_layers] int64, the counters
    mirror_address: tl.int64,  # [num_layers] int64 in the host's memory; if MIRROR
    limits_address: tl.int64,  # [num_layers] int64; if RAISE
    first_layer: tl.int32,
    end_layer: tl.int32,
    num_signals: tl.int64,  # to add to each; unless RAISE
    RAISE: tl.constexpr,  # raise to the limits what is lower, instead of adding
    SYS: tl.constexpr,  # visible to the whole system, not only to this GPU
    MIRROR: tl.constexpr,
    ASM: tl.constexpr,  # NVIDIA's inline assembly
):
    layers = first_layer + tl.program_id(0) * 32 + tl.arange(0, 32)
    mask = layers < end_layer
    counters = values_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + layers
    if RAISE:
        limits = limits_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + layers
        limit = tl.load(limits, mask=mask, other=0)
        tl.debug_barrier()
        if SYS:
            before = tl.atomic_max(counters, limit, mask=mask, sem="release", scope="sys")
        else:
            before = tl.atomic_max(counters, limit, mask=mask, sem="release", scope="gpu")
        after = tl.maximum(before, limit)
    else:
        before = signal_layers(counters, num_signals.to(tl.int64), mask, SYS)
        after = before + num_signals.to(tl.int64)
    if MIRROR:
        mirror = mirror_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + layers
        _store_released(mirror, after, mask, ASM)


@triton.jit(do_not_specialize=_WAIT_ARGUMENTS, launch_metadata=wait_metadata)
def _wait_kernel(
    values_address: tl.int64,  # [num_layers] int64, the counters
    targets_address: tl.int64,  # [num_layers + 1] int64: targets, and the number of their step
    expired_address: tl.int64,  # [num_layers + 1] int64: target that a wait gave up, and its step
    expired_mirror_address: tl.int64,  # the same in the host's memory
    layer: tl.int32,
    num_layers: tl.int32,
    limit: tl.int64,  # how long, in nanoseconds with ASM, else in polls
    ASM: tl.constexpr,
):
    targets = targets_address.to(tl.int64).to(tl.pointer_type(tl.int64))
    expired = expired_address.to(tl.int64).to(tl.pointer_type(tl.int64))
    counter = values_address.to(tl.int64).to(tl.pointer_type(tl.int64)) + layer
    target = tl.load(targets + layer)
    step = tl.load(targets + num_layers)
    # Once a wait of this step has expired the others look only once: one limit a step, not many.
    left = tl.where(tl.load(expired + num_layers) >= step, 0, limit.to(tl.int64))
    spent = left - left
    if ASM:
        begin = _nanoseconds()
    # Adding nothing is how Triton 3.6 spells an acquiring load; it compiles to one.
    value = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
    while (value < target) & (spent < left):
        value = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
        if ASM:
            spent = _nanoseconds() - begin
        else:
            spent += 1
    if value < target:
        mirror = expired_mirror_address.to(tl.int64).to(tl.pointer_type(tl.int64))
        tl.store(expired + layer, target)
        tl.store(expired + num_layers, step)
        _store_released(mirror + layer, target, target > 0, ASM)
        _store_released(mirror + num_layers, step, target > 0, ASM)


def has_clock() -> bool:
    """Whether the kernels run on NVIDIA's GPUs, and so bound a wait by time and not by polls."""
    return not is_interpreted(_wait_kernel) and torch.version.hip is None


def signal_launch(
    values: torch.Tensor,
    mirror: torch.Tensor,
    limits: torch.Tensor | None,
    first_layer: int,
    end_layer: int,
    num_signals: int,
    *,
    scope: str,
) -> Launch:
    """Return the launch that adds `num_signals` to a range of counters, or raises them to limits.

    Args:
        values: int64 `[num_layers]`, the counters, in the device's memory.
        mirror: int64 `[num_layers]` in the host's memory; takes the counters' new values.
        limits: int64 `[num_layers]` on the device: raise to these whatever is lower. None: add.
        first_layer: first of the range.
        end_layer: behind its last.
        num_signals: what to add.
        scope: "gpu" or "sys".
    """
    num_programs = -(-(end_layer - first_layer) // LAYERS_PER_PROGRAM)
    with_mirror = mirror.data_ptr() != values.data_ptr()
    return Launch(
        _signal_kernel,
        (num_programs, 1),
        (
            values.data_ptr(),
            mirror.data_ptr(),
            0 if limits is None else limits.data_ptr(),
            first_layer,
            end_layer,
            num_signals,
        ),
        (limits is not None, scope == "sys", with_mirror, has_clock()),
        1,
    )


def wait_launch(
    values: torch.Tensor,
    targets: torch.Tensor,
    expired: torch.Tensor,
    expired_mirror: torch.Tensor,
    layer: int,
    limit: int,
) -> Launch:
    """Return the launch that ends once the counter of `layer` has reached its target, or late.

    Args:
        values: int64 `[num_layers]`, the counters.
        targets: int64 `[num_layers + 1]`, read when the kernel runs: a captured graph may be
            replayed with others. The last entry is the number of the step.
        expired: int64 `[num_layers + 1]`: takes the target of a wait that was given up, and the
            step's number in the last entry.
        expired_mirror: the same in the host's memory.
        layer: which.
        limit: nanoseconds where `has_clock()`, else polls; 0 looks once.
    """
    return Launch(
        _wait_kernel,
        (1, 1),
        (
            values.data_ptr(),
            targets.data_ptr(),
            expired.data_ptr(),
            expired_mirror.data_ptr(),
            layer,
            values.numel(),
            limit,
        ),
        (has_clock(),),
        1,
    )


def signal_reference(
    values: torch.Tensor,
    mirror: torch.Tensor,
    limits: torch.Tensor | None,
    first_layer: int,
    end_layer: int,
    num_signals: int,
    *,
    scope: str,
) -> None:
    """Do what `signal_launch`'s kernel does, on host memory; one thread at a time."""
    part = values[first_layer:end_layer]
    raised = part + num_signals if limits is None else part.maximum(limits[first_layer:end_layer])
    part.copy_(raised)
    mirror[first_layer:end_layer] = part


def wait_reference(
    values: torch.Tensor,
    targets: torch.Tensor,
    expired: torch.Tensor,
    expired_mirror: torch.Tensor,
    layer: int,
    limit: int,
) -> None:
    """Do what `wait_launch`'s kernel does, on host memory; `limit` polls of 1 ms at most."""
    target, step = int(targets[layer]), int(targets[-1])
    left = 0 if int(expired[-1]) >= step else limit
    while int(values[layer]) < target and left > 0:
        left -= 1
        time.sleep(1e-3)
    if int(values[layer]) < target:
        for words in (expired, expired_mirror):
            words[layer], words[-1] = target, step
