"""Linear layers whose weight is sharded over tensor-parallel ranks; the product is the op `linear`.

The classes here hold what both hosts' layers share: this rank's part of the weight, its loader, gather and reduce. The
host files add constructors and forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fastkernels.core import assemble, parallel
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.linear import linear

Output = tuple[torch.Tensor, "nn.Parameter | None"]


# From a layer's prefix to its quant_method (see quantized.py), None for an unquantized layer.
Methods = Callable[[str], Any]
_methods: ContextVar[Methods | None] = ContextVar("quantized linear methods", default=None)


@contextmanager
def weights_as(methods: Methods | None) -> Iterator[None]:
    """Build the parallel linear layers of a block of code with the methods that `methods(prefix)` returns."""
    token = _methods.set(methods)
    try:
        yield
    finally:
        _methods.reset(token)


def method_of(prefix: str) -> Any:
    """Return the method of the layer with this prefix, None if its weight is not quantized."""
    methods = _methods.get()
    return None if methods is None else methods(prefix)


def vllm_partition(
    disable_tp: bool, tp_rank: int | None = None, tp_size: int | None = None
) -> tuple[int, int]:
    """Return (rank, size); values that are not given are the bound group's."""
    if disable_tp:
        return 0, 1
    rank = parallel.get_tp_rank() if tp_rank is None else tp_rank
    return rank, parallel.get_tp_size() if tp_size is None else tp_size


def sglang_partition(parallel_group: Any) -> tuple[int, int]:
    """Return (rank, size) of SGLang's named group.

    The attention group is the bound group, since standalone layers have no data parallelism. Raises ValueError.
    """
    if parallel_group == "replicated":
        return 0, 1
    if parallel_group in (None, "tp", "attn_tp"):
        return parallel.get_tp_rank(), parallel.get_tp_size()
    raise ValueError(f"parallel_group {parallel_group!r} is not one of 'tp', 'attn_tp', 'replicated'")


class ParallelLinear(nn.Module):
    """A linear layer with weight [N, K] of which this rank holds a part; quant_method.apply computes the product.

    Its parameters carry `weight_loader(param, loaded_weight[, shard_id])`, as the hosts' do.
    """

    method_class: type[linear.UnquantizedLinearMethod] = linear.UnquantizedLinearMethod
    quant_method: Any

    weight: nn.Parameter
    bias: nn.Parameter | None
    return_bias = True
    gather_output = False
    use_presharded_weights = False

    def _build(
        self,
        input_size: int,
        output_size: int,
        output_partition_sizes: list[int],
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        quant_config: Any,
        prefix: str,
        partition: tuple[int, int],
        input_size_per_partition: int | None = None,
    ) -> None:
        """Set the host's attributes and register weight and bias.

        output_partition_sizes  rows of this rank's weight, one number for each matrix that is packed into it
        Quantized weights are those of weights_as. Raises ValueError for a host's quant_config and for a rank
        outside the group.
        """
        if quant_config is not None:
            raise ValueError(
                f"{prefix or type(self).__name__}: quantized weights ({quant_config!r}) are not supported"
            )
        self.tp_rank, self.tp_size = partition
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(
                f"{prefix or type(self).__name__}: rank {self.tp_rank} is not in 0 .. {self.tp_size - 1}"
            )
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = (
            input_size if input_size_per_partition is None else input_size_per_partition
        )
        self.output_partition_sizes = output_partition_sizes
        self.output_size_per_partition = sum(output_partition_sizes)
        self.has_bias, self.skip_bias_add = bias, skip_bias_add
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config, self.prefix = quant_config, prefix
        self.quant_method = method_of(prefix) or self.method_class()
        self.quant_method.create_weights(
            self, self.input_size_per_partition, output_partition_sizes, input_size, output_size,
            self.params_dtype, weight_loader=self.weight_loader,
        )  # fmt: skip
        if not bias:
            self.register_parameter("bias", None)
            return
        data = torch.zeros(self.output_size_per_partition, dtype=self.params_dtype)
        self.bias = nn.Parameter(data, requires_grad=False)
        self.bias.output_dim, self.bias.weight_loader = 0, self.weight_loader  # type: ignore[attr-defined]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy a whole matrix. Raises ValueError for another shape."""
        self._copy(param, param.data, loaded_weight)

    def _copy(self, param: nn.Parameter, into: torch.Tensor, loaded: torch.Tensor) -> None:
        loaded = loaded.reshape(1) if loaded.dim() == 0 else loaded
        if getattr(param, "per_matrix", False) and loaded.numel() == 1:
            loaded = loaded.reshape(1).expand(into.shape)
        if into.shape != loaded.shape:
            kind = "bias" if param is self.bias else "weight"
            raise ValueError(
                f"{self.prefix or type(self).__name__}: {kind} of shape {tuple(loaded.shape)} does not fit,"
                f" expected {tuple(into.shape)} on rank {self.tp_rank} of {self.tp_size}"
            )
        into.copy_(loaded)

    def _shard(
        self, param: nn.Parameter, loaded: torch.Tensor, dim: int, size: int, rank: int, parts: int
    ) -> torch.Tensor:
        """Return the rank's `size` rows (dim 0) or columns (dim 1) of a matrix that is cut into `parts`."""
        if self.use_presharded_weights or (getattr(param, "per_matrix", False) and loaded.numel() == 1):
            return loaded
        if loaded.dim() <= dim or loaded.shape[dim] != size * parts:
            found = tuple(loaded.shape)
            raise ValueError(
                f"{self.prefix or type(self).__name__}: weight of shape {found} does not fit, expected"
                f" {size * parts} in dimension {dim} ({size} on each of {parts} ranks)"
            )
        return loaded.narrow(dim, rank * size, size)

    def _result(self, out: torch.Tensor) -> torch.Tensor | Output:
        if not self.return_bias:
            return out
        return out, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        sizes = f"in_features={self.input_size_per_partition}, out_features={self.output_size_per_partition}"
        return f"{sizes}, bias={self.has_bias}, tp_size={self.tp_size}"


class Replicated(ParallelLinear):
    """The whole weight on every rank."""

    def _forward(self, x: torch.Tensor) -> torch.Tensor | Output:
        return self._result(self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias))


class Column(ParallelLinear):
    """Shards the rows of the weight (the output); gather_output gathers the outputs of all ranks."""

    def _build_column(
        self,
        input_size: int,
        output_sizes: list[int],
        partition: tuple[int, int],
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        quant_config: Any,
        prefix: str,
    ) -> None:
        rows = [parallel.divide(n, partition[1], "output size") for n in output_sizes]
        self._build(
            input_size, sum(output_sizes), rows, bias, skip_bias_add, params_dtype, quant_config, prefix, partition
        )  # fmt: skip

    def _forward(self, x: torch.Tensor) -> torch.Tensor | Output:
        out = self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        if self.gather_output and self.tp_size > 1:
            out = parallel.all_gather(out, -1)
        return self._result(out)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's rows of loaded_weight [N, K] or [N]. Raises ValueError for another shape."""
        rows = self._shard(param, loaded_weight, 0, param.shape[0], self.tp_rank, self.tp_size)
        self._copy(param, param.data, rows)


class MergedColumn(Column):
    """Packs several matrices, each sharded separately, into one weight; a shard id is a matrix's index."""

    output_sizes: list[int]

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        loaded_shard_id: tuple[int, ...] | int | None = None,
    ) -> None:
        """Copy this rank's rows of matrix `loaded_shard_id`.

        A tuple of ids stands for several matrices that are packed on disk, None for all of them. Raises ValueError for
        an unknown id or another shape.
        """
        count = len(self.output_sizes)
        if not isinstance(loaded_shard_id, int):
            ids = tuple(range(count)) if loaded_shard_id is None else loaded_shard_id
            sizes = (
                (self.output_partition_sizes if self.use_presharded_weights else self.output_sizes)
                if ids
                else []
            )
            parts = _split(self, param, loaded_weight, [sizes[i] for i in ids])
            for index, part in zip(ids, parts, strict=True):
                self.weight_loader(param, part, index)
            return
        if not 0 <= loaded_shard_id < count:
            raise ValueError(f"{self.prefix}: shard id {loaded_shard_id} is not in 0 .. {count - 1}")
        start, size = _span(param, self.output_partition_sizes, loaded_shard_id)
        rows = self._shard(param, loaded_weight, 0, size, self.tp_rank, self.tp_size)
        self._copy(param, param.data.narrow(0, start, size), rows)


class QKV(Column):
    """Packs query, key and value projections into one weight; replicates KV heads where there are more ranks."""

    def _build_qkv(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None,
        v_head_size: int | None,
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        quant_config: Any,
        prefix: str,
        partition: tuple[int, int],
        kv_partition: tuple[int, int] | None = None,
    ) -> None:
        size = partition[1]
        kv_rank, kv_size = partition if kv_partition is None else kv_partition
        self.hidden_size, self.head_size = hidden_size, head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        self.num_heads = parallel.divide(total_num_heads, size, "query heads")
        if kv_size >= self.total_num_kv_heads:
            self.num_kv_heads = 1
            self.num_kv_head_replicas = parallel.divide(
                kv_size, self.total_num_kv_heads, "ranks over KV heads:"
            )
        else:
            self.num_kv_heads = parallel.divide(self.total_num_kv_heads, kv_size, "KV heads")
            self.num_kv_head_replicas = 1
        self._kv_part = kv_rank // self.num_kv_head_replicas, kv_size // self.num_kv_head_replicas
        sizes = [
            self.num_heads * head_size,
            self.num_kv_heads * head_size,
            self.num_kv_heads * self.v_head_size,
        ]
        self.output_sizes = [rows * size for rows in sizes]
        self._build(
            hidden_size, sum(self.output_sizes), sizes, bias, skip_bias_add, params_dtype, quant_config, prefix,
            partition,
        )  # fmt: skip

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: str | None = None
    ) -> None:
        """Copy this rank's heads of 'q', 'k' or 'v'; without an id, of all three, which are packed on disk.

        Raises ValueError for another id or shape.
        """
        if loaded_shard_id is None:
            kv = self.total_num_kv_heads
            sizes = [self.total_num_heads * self.head_size, kv * self.head_size, kv * self.v_head_size]
            sizes = self.output_partition_sizes if self.use_presharded_weights else sizes
            for name, part in zip("qkv", _split(self, param, loaded_weight, sizes), strict=True):
                self.weight_loader(param, part, name)
            return
        if loaded_shard_id not in ("q", "k", "v"):
            raise ValueError(f"{self.prefix}: shard id {loaded_shard_id!r} is not 'q', 'k' or 'v'")
        index = "qkv".index(loaded_shard_id)
        start, size = _span(param, self.output_partition_sizes, index)
        rank, parts = (self.tp_rank, self.tp_size) if index == 0 else self._kv_part
        rows = self._shard(param, loaded_weight, 0, size, rank, parts)
        self._copy(param, param.data.narrow(0, start, size), rows)


class Row(ParallelLinear):
    """Shards the columns of the weight (the input); the ranks' products are summed."""

    input_is_parallel: bool
    reduce_results: bool

    def _build_row(
        self,
        input_size: int,
        output_size: int,
        partition: tuple[int, int],
        bias: bool,
        skip_bias_add: bool,
        params_dtype: torch.dtype | None,
        quant_config: Any,
        prefix: str,
    ) -> None:
        columns = parallel.divide(input_size, partition[1], "input size")
        self._build(
            input_size, output_size, [output_size], bias, skip_bias_add, params_dtype, quant_config, prefix,
            partition, columns,
        )  # fmt: skip

    def _forward(self, x: torch.Tensor, skip_all_reduce: bool = False) -> torch.Tensor | Output:
        if not self.input_is_parallel and self.tp_size > 1:
            x = x.chunk(self.tp_size, dim=-1)[self.tp_rank]
        # Only the first rank adds the bias, since the products are summed.
        bias = None if self.skip_bias_add or self.tp_rank > 0 else self.bias
        out = self.quant_method.apply(self, x, bias)
        if self.reduce_results and self.tp_size > 1 and not skip_all_reduce:
            out = parallel.all_reduce(out)
        return self._result(out)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's columns of loaded_weight [N, K]; a bias [N] whole. Raises ValueError for another shape."""
        if getattr(param, "input_dim", None) is not None:
            loaded_weight = self._shard(param, loaded_weight, 1, param.shape[1], self.tp_rank, self.tp_size)
        self._copy(param, param.data, loaded_weight)


def _span(param: nn.Parameter, sizes: list[int], index: int) -> tuple[int, int]:
    """Return the first row and the number of rows of a packed matrix in this parameter."""
    unit = getattr(param, "row_unit", 1)
    return sum(sizes[:index]) // unit, -(-sizes[index] // unit)


def _split(
    layer: ParallelLinear, param: nn.Parameter, loaded: torch.Tensor, sizes: list[int]
) -> tuple[torch.Tensor, ...]:
    if getattr(param, "per_matrix", False) and loaded.numel() == 1:
        return (loaded,) * len(sizes)
    sizes = [-(-size // getattr(param, "row_unit", 1)) for size in sizes]
    if loaded.shape[0] != sum(sizes):
        raise ValueError(
            f"{layer.prefix or type(layer).__name__}: packed weight of shape {tuple(loaded.shape)} does not fit,"
            f" expected {' + '.join(map(str, sizes))} rows"
        )
    return loaded.split(sizes)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, weight, bias = assemble.filled(args, 3, None)
    rows, columns = weight.shape
    sizes: tuple[Any, ...] = (columns, rows)
    if assemble.takes(cls, "output_sizes") and not assemble.takes(cls, "output_size"):
        sizes = columns, [rows - rows // 2, rows // 2]
    elif assemble.takes(cls, "total_num_heads"):
        if rows < 3:
            raise ValueError(f"{cls.__name__} has a query, a key and a value head: more than {rows} rows")
        sizes = (columns, rows // 3, 1, 1) if rows % 3 == 0 else (columns, 1, rows - 2, 1)
    module = assemble.make(cls, x, *sizes, bias=bias is not None, params_dtype=weight.dtype, prefix="linear")
    assemble.load(module, {"weight": weight, "bias": bias})
    return lambda: module(x)[0]


SPEC = OpSpec(
    name="parallel_linear",
    level=2,
    by_default=True,
    reference=linear.reference,
    cases=linear.SPEC.cases,
    arguments=linear.SPEC.arguments,
    outputs=linear.SPEC.outputs,
    axes=linear.SPEC.axes,
    flops=linear.SPEC.flops,
    build=_build,
    tolerance=linear.SPEC.tolerance,
    calls=("linear",),
    baseline="cublas",
)
