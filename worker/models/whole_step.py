"""Computes a step that only decodes a few rows as one job of the team of threads.

A product, a norm or the attention of a small model takes about as long as a thread needs to wake
up. Here the threads wake up once a step and do everything in turn (``step_loops.in_turn``); nor
does Python come in between. A thread that loses its core to another process holds nobody up: the
others do its part again. So nothing overwrites what was written in the same step.
"""

from collections.abc import Iterable
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention import AttentionBackend
from worker.attention.numba_backend import NumbaAttention, Spans
from worker.attention.paged import PackedBatch
from worker.cpu_kernels.block_job import Form, ProductArguments
from worker.cpu_kernels.block_products import (
    PASS_ROWS,
    TILE_BYTES,
    TILE_ROWS,
    blocks_of,
    parts_of,
    product,
)
from worker.cpu_kernels.team import DONE, FIRST_ARGUMENT, FLAGS, PARTS, TeamTask
from worker.models.blocked import BlockedLinear
from worker.models.config import ModelConfig
from worker.models.fused import bits_of
from worker.models.linear import Linear
from worker.models.model import Decoder

MAX_ROWS: Final = 64
"""Most rows: measured up to this number (SmolLM2-135M, two cores), where it still gains."""
_MOST_BYTES: Final = 2**27
"""Most memory of what a step writes: 64 rows of SmolLM2-135M take 53 MB, those of an 8B model ten
times that, and its steps are long next to the time in which threads wake up."""
_OF_ROWS: Final = -1
"""In a job before it is known: the number of the step's rows."""


class WholeStep:
    """The hidden states of steps of up to ``most_rows`` decodes; for one thread at a time."""

    @classmethod
    def of(cls, model: Decoder, attention: AttentionBackend, most_rows: int) -> Self | None:
        """None where the model, its products or the attention are not such as this can compute."""
        if type(model) is not Decoder or not isinstance(attention, NumbaAttention):
            return None
        linears: list[Linear] = []
        for layer in model.layers:
            if layer.query_norm is not None:
                return None
            linears += (layer.qkv, layer.output, layer.gate_up, layer.down)
        found = [linear for linear in linears if isinstance(linear, BlockedLinear)]
        if len(found) < len(linears) or len({linear.form for linear in found}) > 1:
            return None
        form = found[0].form
        if form == Form.DOTS and attention.pool.data.dtype != torch.bfloat16:
            return None
        # AMX goes through weights once for so many rows, and with more in another order.
        most = PASS_ROWS if form == Form.TILES else MAX_ROWS
        most = min(most, most_rows, _MOST_BYTES // _bytes_of_row(model.config))
        return cls(model, attention, found, most) if most else None

    def __init__(
        self,
        model: Decoder,
        attention: NumbaAttention,
        linears: list[BlockedLinear],
        most_rows: int,
    ) -> None:
        """``linears`` are those of each layer, in the order of their use."""
        from worker.cpu_kernels import step_loops

        self.most_rows = most_rows
        self._model = model
        self._attention = attention
        self._loops = step_loops
        arguments = (ProductArguments, step_loops.RowArguments, attention.loops.AttentionArguments)
        self._words = FIRST_ARGUMENT + max(len(each._fields) for each in arguments)
        """Length of a job."""
        self._rooms: list[Tensor] = []
        self._tasks: list[TeamTask] = []
        self._recorded: list[NDArray[np.int64]] = []
        self._attends: dict[int, list[int]] = {window: [] for window in attention.windows}
        """Indices of the jobs of attention, each before the one that merges, by window."""
        self._embedded, self._cos, self._sin, self._result = self._record(linears)
        self._template = np.array(self._recorded)
        self._jobs = self._template.copy()
        where = self._jobs.ctypes.data + self._jobs.strides[0] * np.arange(len(self._tasks))
        self._template[:, FIRST_ARGUMENT] = where  # each job's own address is its first argument
        self._rows_at = self._template == _OF_ROWS
        tasks = np.array([task.address for task in self._tasks])
        self._pairs = np.ascontiguousarray(np.stack((tasks, where), axis=1))
        self._in_turn = np.zeros(FIRST_ARGUMENT + 2, np.int64)
        self._in_turn[FIRST_ARGUMENT:] = self._pairs.ctypes.data, len(self._tasks)
        step_loops.in_turn()

    def takes(self, batch: PackedBatch) -> bool:
        """Whether a step only decodes, as many rows and as long ones as there is room for."""
        if not batch.decodes == len(batch.slots) <= self.most_rows:
            return False
        attention = self._attention
        width = attention.heads * (attention.pool.data.shape[-1] + 2)
        spans = int((batch.context_tokens // attention.loops.SPAN_TOKENS + 1).sum())
        return 4 * len(attention.pages) * spans * width <= _MOST_BYTES

    def hidden(self, batch: PackedBatch, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Map ``token_ids`` and ``positions`` [rows] int64 to hidden states [rows, hidden]."""
        rows, jobs = len(token_ids), self._jobs
        angles = self._model.rotation.at(positions)
        self._embedded[:rows] = self._model.embedded(token_ids)
        self._cos[:rows], self._sin[:rows] = angles.cos[:, 0], angles.sin[:, 0]
        np.copyto(jobs, self._template)
        jobs[self._rows_at] = rows
        kept = []  # until the step is done
        for window, attends in self._attends.items():
            spans = Spans(self._attention, batch, window, len(attends))
            kept.append(spans)
            first = np.array(attends)
            for counted, at in ((spans.parts, first), (spans.merged, first + 1)):
                jobs[at, PARTS] = len(counted)
                for field, value in spans.fields.items():
                    jobs[at, field] = value
                partial = self._attention.loops.AT.partial
                jobs[at, partial] += spans.partial.strides[0] * np.arange(len(at))
        counts = jobs[:, PARTS]
        ends = counts.cumsum()
        flags = np.zeros(int(ends[-1]), np.int64)
        jobs[:, FLAGS] = flags.ctypes.data + flags.itemsize * (ends - counts)
        self._loops.in_turn().run_at(self._in_turn.ctypes.data, torch.get_num_threads())
        if (jobs[:, DONE] != counts).any():
            raise MemoryError("no memory for a compiled loop")
        del kept
        return self._result[:rows].clone()

    # ── what a step does ─────────────────────────────────────────────────────────────────────

    def _record(self, linears: list[BlockedLinear]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Append the jobs of all layers, as ``Decoder.forward`` computes them. → Where embedded
        tokens, cosines and sines are to be, and the hidden states will be."""
        model, c, loops = self._model, self._model.config, self._loops
        pool, heads = self._attention.pool.data, c.num_heads + 2 * c.num_kv_heads
        is_dots, is_short = linears[0].form == Form.DOTS, pool.dtype == torch.bfloat16
        after = [layer.attention_norm for layer in model.layers[1:]] + [model.norm]
        embedded = self._room(c.hidden_size)
        cos, sin = self._room(c.head_dim), self._room(c.head_dim)

        def normed(x: Tensor, y: Tensor, weight: Tensor, short: bool) -> tuple[Tensor, Tensor]:
            sums, out = self._room(c.hidden_size), self._room(c.hidden_size, short=short)
            self._of_rows(
                loops.add_norm(),
                c.hidden_size,
                x=x,
                y=y,
                weight=weight,
                sums=sums,
                **{"short" if short else "out": out},
                epsilon=bits_of(c.rms_norm_eps),
            )
            return sums, out

        zeros = self._room(c.hidden_size).zero_()
        x, read = normed(zeros, embedded, model.layers[0].attention_norm, is_dots)
        for i, layer in enumerate(model.layers):
            qkv, output, gate_up, down = linears[4 * i : 4 * i + 4]
            made = self._multiplied(qkv, read)
            turned = self._room(heads * c.head_dim, short=is_short)
            rotated = c.num_heads + c.num_kv_heads
            self._of_rows(
                loops.rotate(),
                c.head_dim,
                x=made,
                y=cos,
                weight=sin,
                **{"short" if is_short else "out": turned},
                heads=heads,
                rotated=rotated,
            )
            mixed = self._attended(i, turned)
            if is_short and not is_dots:
                mixed = self._written(loops.widen(), mixed, c.num_heads * c.head_dim, short=False)
            x, read = normed(x, self._multiplied(output, mixed), layer.mlp_norm, is_dots)
            inner = self._multiplied(gate_up, read)
            if is_dots:
                inner = self._written(loops.narrow(), inner, c.intermediate_size, short=True)
            short = is_dots and i < len(model.layers) - 1
            x, read = normed(x, self._multiplied(down, inner), after[i], short)
        return embedded, cos, sin, read

    def _room(self, width: int, *, short: bool = False) -> Tensor:
        """Room for all rows, in float32 or bfloat16."""
        dtype = torch.bfloat16 if short else torch.float32
        made = torch.empty((self.most_rows, width), dtype=dtype)
        self._rooms.append(made)
        return made

    def _job(self, task: TeamTask, parts: int, arguments: Iterable[int] = ()) -> NDArray[np.int64]:
        job = np.zeros(self._words, np.int64)
        given = [*arguments]
        job[PARTS], job[FIRST_ARGUMENT : FIRST_ARGUMENT + len(given)] = parts, given
        self._tasks.append(task)
        self._recorded.append(job)
        return job

    def _of_rows(self, task: TeamTask, width: int, **fields: Tensor | int) -> None:
        job = self._job(task, _OF_ROWS)
        for name, value in (fields | {"width": width}).items():
            at = getattr(self._loops.AT, name)
            job[at] = value.data_ptr() if isinstance(value, Tensor) else value

    def _written(self, task: TeamTask, x: Tensor, width: int, *, short: bool) -> Tensor:
        out = self._room(width, short=short)
        self._of_rows(task, width, x=x, **{"short" if short else "out": out})
        return out

    def _multiplied(self, linear: BlockedLinear, x: Tensor) -> Tensor:
        results = self._room(linear.outputs)
        turns, rounded = -(-linear.inputs // linear.form.inputs_per_turn), 0
        if linear.form == Form.TILES:
            tiles = -(-self.most_rows // TILE_ROWS) * turns
            self._rooms.append(torch.empty(tiles * TILE_BYTES, dtype=torch.uint8))
            rounded = self._rooms[-1].data_ptr()
        bias = 0 if linear.bias is None else linear.bias.data_ptr()
        blocks = blocks_of(linear.outputs, is_gated=linear.is_gated)
        self._job(
            product(linear.form, is_gated=linear.is_gated).task,
            parts_of(blocks, torch.get_num_threads()),
            ProductArguments(
                *(0, linear.blocks.data_ptr(), x.data_ptr(), rounded, 0, 0),
                *(bias, results.data_ptr(), _OF_ROWS, linear.inputs, linear.outputs, turns),
                *(1, 1, 1),
            ),
        )
        return results

    def _attended(self, layer: int, heads: Tensor) -> Tensor:
        """The results for ``heads``, queries and then keys and values, all rotated."""
        attention, at = self._attention, self._attention.loops.AT
        width = attention.heads * attention.pool.data.shape[-1]
        out = self._room(width, short=heads.dtype == torch.bfloat16)
        self._attends[attention.windows[layer]].append(len(self._tasks))
        for task in (attention.attend, attention.merge):
            job = self._job(task, 0)
            job[at.queries], job[at.new] = heads.data_ptr(), heads[:, width:].data_ptr()
            job[at.query_stride] = job[at.new_stride] = heads.shape[1]
            job[at.pages], job[at.out] = attention.pages[layer], out.data_ptr()
        return out


def _bytes_of_row(c: ModelConfig) -> int:
    """The most memory that a row takes in ``WholeStep._record``."""
    heads = 2 * (c.num_heads + c.num_kv_heads) * c.head_dim
    return c.num_layers * (8 * heads + 28 * c.hidden_size + 6 * c.intermediate_size)
