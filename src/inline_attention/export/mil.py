"""Evaluates a program of Core ML (MIL) with PyTorch, to check a package where Core ML does not run.

It knows the operations that models of this library are converted to, as Apple's reference of MIL defines them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def evaluate(program: Any, image: Tensor) -> Tensor:
    """The output of the program's main function; the probabilities, if it is a classifier."""
    (function,) = program.functions.values()
    (name,) = function.inputs
    values: dict[str, Any] = {name: image}

    def value_of(variable: Any) -> Any:
        if isinstance(variable, (tuple, list)):
            return [value_of(part) for part in variable]
        if variable.name in values:
            return values[variable.name]
        return _constant(variable.val)

    for operation in function.operations:
        if operation.op_type == "const":
            continue
        if operation.op_type == "classify":
            return value_of(operation.inputs["probabilities"])
        if operation.op_type not in _OPERATIONS:
            raise ValueError(f"the check knows no operation {operation.op_type!r} of Core ML")
        arguments = {key: value_of(v) for key, v in operation.inputs.items() if v is not None}
        result = _OPERATIONS[operation.op_type](**arguments)
        results = result if isinstance(result, (tuple, list)) else [result]
        for variable, part in zip(operation.outputs, results, strict=True):
            assert tuple(part.shape) == tuple(variable.shape), (operation.op_type, part.shape, variable.shape)
            values[variable.name] = part
    return value_of(function.outputs[0])


def _constant(value: Any) -> Any:
    """Weights as tensors, everything else (axes, shapes, flags) as Python's numbers"""
    if getattr(value, "ndim", 0) > 0:
        return torch.from_numpy(value.copy())
    return value.item() if hasattr(value, "item") else value


def _ints(x: Any) -> list[int]:
    return [int(n) for n in x]


def _matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    return (x.mT if transpose_x else x) @ (y.mT if transpose_y else y)


def _conv(
    x: Tensor,
    weight: Tensor,
    pad_type: str,
    strides: Tensor,
    dilations: Tensor,
    groups: int,
    pad: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    if pad_type == "custom":
        assert pad is not None
        x = _pad(x, pad, "constant", 0.0)
    elif pad_type != "valid":
        raise ValueError(f"the check knows no padding {pad_type!r} of a convolution")
    return F.conv2d(x, weight, bias, stride=_ints(strides), dilation=_ints(dilations), groups=groups)


def _pad(x: Tensor, pad: Tensor, mode: str = "constant", constant_val: float = 0.0) -> Tensor:
    """`pad` has (before, after) of the last axes, in their order; PyTorch begins with the last."""
    pairs = pad.reshape(-1, 2).flip(0).flatten()
    return F.pad(x, _ints(pairs), mode=mode, value=float(constant_val) if mode == "constant" else None)


def _slice(
    x: Tensor,
    begin: Tensor,
    end: Tensor,
    stride: Tensor | None = None,
    begin_mask: Tensor | None = None,
    end_mask: Tensor | None = None,
    squeeze_mask: Tensor | None = None,
) -> Tensor:
    index: list[slice | int] = []
    for axis in range(x.ndim):
        first = None if begin_mask is not None and begin_mask[axis] else int(begin[axis])
        last = None if end_mask is not None and end_mask[axis] else int(end[axis])
        if squeeze_mask is not None and squeeze_mask[axis]:
            index.append(int(begin[axis]))
        else:
            index.append(slice(first, last, 1 if stride is None else int(stride[axis])))
    return x[tuple(index)]


def _split(x: Tensor, axis: int, num_splits: int | None = None, split_sizes: Tensor | None = None) -> list[Tensor]:
    if split_sizes is not None:
        return list(x.split(_ints(split_sizes), axis))
    assert num_splits is not None
    return list(x.chunk(num_splits, axis))


def _layer_norm(
    x: Tensor, axes: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    return F.layer_norm(x, [x.shape[axis] for axis in _ints(axes)], gamma, beta, epsilon)


def _expand_dims(x: Tensor, axes: Tensor) -> Tensor:
    for axis in sorted(_ints(axes)):
        x = x.unsqueeze(axis)
    return x


def _gather(x: Tensor, indices: Any, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False) -> Tensor:
    if batch_dims:
        raise ValueError("the check knows no gather with batch dimensions")
    indices = torch.as_tensor(indices)
    return (
        x.index_select(axis, indices.flatten()).unflatten(axis, indices.shape)
        if indices.ndim
        else x.select(axis, int(indices))
    )


def _gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    return F.gelu(x, approximate="none" if mode == "EXACT" else "tanh")


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "real_div": lambda x, y: x / y,
    "linear": lambda x, weight, bias=None: F.linear(x, weight, bias),
    "matmul": _matmul,
    "conv": _conv,
    "layer_norm": _layer_norm,
    "softmax": lambda x, axis: x.softmax(axis),
    "gelu": _gelu,
    "relu": lambda x: x.relu(),
    "reduce_mean": lambda x, axes, keep_dims: x.mean(_ints(axes), keepdim=bool(keep_dims)),
    "reduce_sum": lambda x, axes, keep_dims: x.sum(_ints(axes), keepdim=bool(keep_dims)),
    "reshape": lambda x, shape: x.reshape(_ints(shape)),
    "transpose": lambda x, perm: x.permute(_ints(perm)),
    "expand_dims": _expand_dims,
    "squeeze": lambda x, axes: x.squeeze(tuple(_ints(axes))),
    "split": _split,
    "concat": lambda values, axis, interleave=False: torch.cat(values, axis),
    "pad": _pad,
    "slice_by_index": _slice,
    "gather": _gather,
}
