"""Computes steps as jobs that the thread team does one after another (``step_loops.in_turn``).

A product, a norm or the attention of a small model takes about as long as a thread's wakeup. A step
that only decodes runs as one sequence of jobs, so that threads wake up once (``WholeStep``). A step
with prompts, whose rows need more memory, runs one sequence per layer (``LayerSteps``).

A thread that loses its core to another process does not delay the others: they redo its part. So no
job overwrites data that was written in the same sequence.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention import AttentionBackend
from worker.attention.numba_backend import NumbaAttention, Work
from worker.attention.paged import PackedBatch
from worker.cpu_kernels.block_job import Form, ProductArguments
from worker.cpu_kernels.block_products import (
    PASS_ROWS,
    TILE_ROWS,
    blocks_of,
    parts_of,
    product,
)
from worker.cpu_kernels.team import DONE, FIRST_ARGUMENT, FLAGS, PARTS, TeamTask
from worker.models.blocked import BlockedLinear
from worker.models.config import ModelConfig
from worker.models.fused import bits_of, row_parts
from worker.models.linear import Linear
from worker.models.model import Decoder

MAX_DECODES: Final = 64
"""Maximum rows of a whole step: measured up to this number (SmolLM2-135M, two cores), where it is
still faster."""
_MOST_BYTES: Final = 2**27
"""Maximum memory of the written data. For whole steps, 64 rows of SmolLM2-135M take 53 MB and those
of an 8B model ten times that, whose steps are long compared with the wakeup of threads."""
_ROWS: Final = -1
"""Placeholder in a recorded job for the step's number of rows."""
_ROW_PARTS: Final = -2
"""Placeholder for the number of parts of these rows."""


class TeamSteps:
    """The jobs of all layers, recorded once, and the data that they use; for one thread."""

    _is_one_go: ClassVar[bool]
    """Whether a whole step is one sequence of jobs, rather than each layer."""

    @classmethod
    def of(cls, model: Decoder, attention: AttentionBackend, most_rows: int) -> Self | None:
        """None if this cannot compute the model, its products or the attention."""
        if type(model) is not Decoder or not isinstance(attention, NumbaAttention):
            return None
        linears: list[Linear] = []
        for layer in model.layers:
            linears += (layer.qkv, layer.output, layer.gate_up, layer.down)
        found = [linear for linear in linears if isinstance(linear, BlockedLinear)]
        if len(found) < len(linears) or len({linear.form for linear in found}) > 1:
            return None
        form = found[0].form
        if form == Form.DOTS and attention.pool.data.dtype != torch.bfloat16:
            return None
        most = min(most_rows, _MOST_BYTES // cls._bytes_of_row(model.config))
        if form == Form.TILES:  # AMX reads weights in another order for more rows
            most = min(most, PASS_ROWS) // TILE_ROWS * TILE_ROWS
        return cls(model, attention, found, most) if most > 0 else None

    def __init__(
        self,
        model: Decoder,
        attention: NumbaAttention,
        linears: list[BlockedLinear],
        most_rows: int,
    ) -> None:
        """``linears`` are the layers' linear layers, in order of use."""
        from worker.cpu_kernels import step_loops

        self.most_rows = most_rows
        self._model = model
        self._attention = attention
        self._linears = linears
        self._loops = step_loops
        self._is_dots = linears[0].form == Form.DOTS
        self._is_short = attention.pool.data.dtype == torch.bfloat16
        arguments = ProductArguments._fields, step_loops.RowArguments._fields, attention.fields
        self._words = FIRST_ARGUMENT + max(map(len, arguments))
        """Length of a job in int64 words."""
        self._rooms: list[Tensor] = []
        self._tasks: list[TeamTask] = []
        self._attends: dict[int, list[int]] = {window: [] for window in attention.windows}
        """Indices of the first job of each layer's attention, by window."""
        self._ends: list[int] = []
        """Indices at which the sequences of jobs end."""
        self._recorded: list[NDArray[np.int64]] = []
        self._result = self._record()
        self._template = np.array(self._recorded)
        self._jobs = self._template.copy()
        where = self._jobs.ctypes.data + self._jobs.strides[0] * np.arange(len(self._tasks))
        self._rows_at = self._template == _ROWS
        self._parts_at = self._template == _ROW_PARTS
        tasks = np.array([task.address for task in self._tasks])
        self._pairs = np.ascontiguousarray(np.stack((tasks, where), axis=1))
        self._in_turn = np.zeros(FIRST_ARGUMENT + 2, np.int64)

    @staticmethod
    def _bytes_of_row(c: ModelConfig) -> int:
        """Maximum bytes of memory per row."""
        return c.num_layers * _bytes_of_layer(c)

    def takes(self, batch: PackedBatch) -> bool:
        """Whether this kind of step fits ``batch``, and there is room for it."""
        raise NotImplementedError

    # ── running ──────────────────────────────────────────────────────────────────────────────

    def hidden(self, batch: PackedBatch, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Map ``token_ids`` and ``positions`` [tokens] int64 to hidden states [tokens, hidden]."""
        self._begin(token_ids, positions)
        jobs, kept = self._jobs, list[object]()  # until the step is done
        for window, attends in self._attends.items():
            first = np.array(attends)
            work = Work(self._attention, batch, window, len(first) if self._is_one_go else 1)
            kept.append(work)
            for i, (_, fields) in enumerate(work.jobs):
                for field, value in fields.items():
                    jobs[first + i, field] = value
                if self._is_one_go:  # each layer's span results have their own memory
                    partial = self._attention.fields.partial
                    jobs[first + i, partial] += work.partial.strides[0] * np.arange(len(first))
        kept.append(self._flag())
        begin = 0
        for end in self._ends:
            self._run(begin, end)
            begin = end
        del kept
        return self._result[: len(token_ids)].clone()

    def _begin(self, token_ids: Tensor, positions: Tensor) -> None:
        rows, jobs = len(token_ids), self._jobs
        angles = self._model.rotation.at(positions)
        self._embedded[:rows] = self._model.embedded(token_ids)
        self._cos[:rows], self._sin[:rows] = angles.cos[:, 0], angles.sin[:, 0]
        np.copyto(jobs, self._template)
        jobs[self._rows_at], jobs[self._parts_at] = rows, row_parts(rows)

    def _flag(self) -> NDArray[np.int64]:
        """Flags for all parts. The caller keeps them until the parts are done."""
        counts = self._jobs[:, PARTS]
        ends = counts.cumsum()
        flags = np.zeros(int(ends[-1]), np.int64)
        self._jobs[:, FLAGS] = flags.ctypes.data + flags.itemsize * (ends - counts)
        return flags

    def _run(self, begin: int, end: int) -> None:
        """Run the jobs from ``begin`` to ``end`` (exclusive)."""
        first = self._pairs.ctypes.data + self._pairs.strides[0] * begin
        self._in_turn[FIRST_ARGUMENT:] = first, end - begin
        self._loops.in_turn().run_at(self._in_turn.ctypes.data, torch.get_num_threads())
        if (self._jobs[begin:end, DONE] != self._jobs[begin:end, PARTS]).any():
            raise MemoryError("no memory for a compiled loop")

    # ── recording ────────────────────────────────────────────────────────────────────────────

    def _record(self) -> Tensor:
        """Record the jobs of all layers, as ``Decoder.forward`` computes them, from the embedded
        tokens. Returns the hidden states."""
        x, read = self._first()
        for i in range(len(self._model.layers)):
            self._begin_layer(i)
            x, read = self._rest(i, x, self._attended(i, self._heads(i, read)))
            if not self._is_one_go:
                self._ends.append(len(self._tasks))
        if self._is_one_go:
            self._ends.append(len(self._tasks))
        return read

    def _begin_layer(self, i: int) -> None:
        """Note that the following jobs belong to layer ``i``."""

    def _first(self) -> tuple[Tensor, Tensor]:
        """The embedded tokens and their norm. Allocates the inputs of a step."""
        c = self._model.config
        self._embedded = self._room(c.hidden_size)
        self._cos, self._sin = self._room(c.head_dim), self._room(c.head_dim)
        zeros = self._room(c.hidden_size).zero_()
        weight = self._model.layers[0].attention_norm
        return self._normed(zeros, self._embedded, weight, short=self._is_dots)

    def _heads(self, i: int, read: Tensor) -> Tensor:
        """Layer ``i``'s queries, keys and values [rows, heads * head_dim] in the pool's dtype, with
        rotated queries and keys."""
        c, linear, short = self._model.config, self._linears[4 * i], self._is_short
        layer, norms = self._model.layers[i], dict[str, Tensor | int]()
        if layer.query_norm is not None and layer.key_norm is not None:
            by_kind = ((layer.query_norm, c.num_heads), (layer.key_norm, c.num_kv_heads))
            weight = torch.cat([norm.repeat(heads, 1) for norm, heads in by_kind])
            self._rooms.append(weight)
            norms = {"sums": weight, "epsilon": bits_of(c.rms_norm_eps)}
        heads = c.num_heads + 2 * c.num_kv_heads
        made, turned = self._multiplied(linear, read), self._room(linear.outputs, short=short)
        self._of_rows(
            self._loops.rotate(),
            c.head_dim,
            x=made,
            y=self._cos,
            weight=self._sin,
            heads=heads,
            rotated=c.num_heads + c.num_kv_heads,
            out=turned,
            is_short=short,
            **norms,
        )
        return turned

    def _attended(self, i: int, heads: Tensor) -> Tensor:
        """Layer ``i``'s attention results for ``heads``: queries, then keys and values."""
        attention, at = self._attention, self._attention.fields
        width = attention.heads * attention.pool.data.shape[-1]
        out = self._room(width, short=self._is_short)
        self._attends[attention.windows[i]].append(len(self._tasks))
        for task in attention.tasks[: 2 if self._is_one_go else None]:  # the chunks' are last
            job = self._job(task, 0)
            job[at.queries], job[at.new] = heads.data_ptr(), heads[:, width:].data_ptr()
            job[at.query_stride] = job[at.new_stride] = heads.shape[1]
            job[at.pages], job[at.out] = attention.pages[i], out.data_ptr()
        return out

    def _rest(self, i: int, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Layer ``i`` after its attention: the sum that the next layer adds to, and its norm."""
        c, layers = self._model.config, self._model.layers
        _, output, gate_up, down = self._linears[4 * i : 4 * i + 4]
        is_last = i == len(layers) - 1
        after = self._model.norm if is_last else layers[i + 1].attention_norm
        if self._is_short and not self._is_dots:
            mixed = self._converted(mixed, output.inputs, short=False)
        added = self._multiplied(output, mixed)
        x, read = self._normed(x, added, layers[i].mlp_norm, short=self._is_dots)
        inner = self._multiplied(gate_up, read)
        if self._is_dots:
            inner = self._converted(inner, c.intermediate_size, short=True)
        added = self._multiplied(down, inner)
        return self._normed(x, added, after, short=self._is_dots and not is_last)

    def _normed(
        self, x: Tensor, y: Tensor, weight: Tensor, *, short: bool
    ) -> tuple[Tensor, Tensor]:
        c = self._model.config
        sums, out = self._room(c.hidden_size), self._room(c.hidden_size, short=short)
        self._of_rows(
            self._loops.add_norm(),
            c.hidden_size,
            x=x,
            y=y,
            weight=weight,
            sums=sums,
            epsilon=bits_of(c.rms_norm_eps),
            out=out,
            is_short=short,
        )
        return sums, out

    def _converted(self, x: Tensor, width: int, *, short: bool) -> Tensor:
        """Convert float32 ``x`` to bfloat16 if ``short``, else bfloat16 ``x`` to float32."""
        out = self._room(width, short=short)
        self._of_rows(self._loops.convert(not short), width, x=x, out=out, is_short=short)
        return out

    def _multiplied(self, linear: BlockedLinear, x: Tensor) -> Tensor:
        results = self._room(linear.outputs)
        turns, rounded = -(-linear.inputs // linear.form.inputs_per_turn), 0
        if linear.form == Form.TILES:
            rounded = self._room(turns * linear.form.inputs_per_turn, short=True).data_ptr()
        bias = 0 if linear.bias is None else linear.bias.data_ptr()
        blocks = blocks_of(linear.outputs, is_gated=linear.is_gated)
        self._job(
            product(linear.form, is_gated=linear.is_gated).task,
            parts_of(blocks, torch.get_num_threads()),
            ProductArguments(
                *(linear.blocks.data_ptr(), x.data_ptr(), rounded, 0, 0),
                *(bias, results.data_ptr(), _ROWS, linear.inputs, linear.outputs, turns),
                *(1, 1, 1),
            ),
        )
        return results

    def _room(self, width: int, *, short: bool = False) -> Tensor:
        """Memory for all rows, in float32 or bfloat16."""
        dtype = torch.bfloat16 if short else torch.float32
        made = torch.empty((self.most_rows, width), dtype=dtype)
        self._rooms.append(made)
        return made

    def _of_rows(self, task: TeamTask, width: int, **fields: Tensor | int) -> None:
        job = self._job(task, _ROW_PARTS)
        for name, value in (fields | {"width": width, "rows": _ROWS}).items():
            at = getattr(self._loops.AT, name)
            job[at] = value.data_ptr() if isinstance(value, Tensor) else value

    def _job(self, task: TeamTask, parts: int, arguments: Iterable[int] = ()) -> NDArray[np.int64]:
        job = np.zeros(self._words, np.int64)
        given = [*arguments]
        job[PARTS], job[FIRST_ARGUMENT : FIRST_ARGUMENT + len(given)] = parts, given
        self._tasks.append(task)
        self._recorded.append(job)
        return job


class WholeStep(TeamSteps):
    """Steps that only decode. A step never overwrites data that it wrote."""

    _is_one_go = True

    @classmethod
    def of(cls, model: Decoder, attention: AttentionBackend, most_rows: int) -> Self | None:
        """See ``TeamSteps``."""
        return super().of(model, attention, min(most_rows, MAX_DECODES))

    def takes(self, batch: PackedBatch) -> bool:
        """Whether a step only decodes, and there is room for its rows and their contexts."""
        if not batch.decodes == len(batch.slots) <= self.most_rows:
            return False
        attention = self._attention
        width = attention.heads * (attention.pool.data.shape[-1] + 2)
        spans = int((batch.context_tokens // attention.span_tokens + 1).sum())
        return 4 * len(attention.pages) * spans * width <= _MOST_BYTES


class LayerSteps(TeamSteps):
    """Steps of any kind. A layer overwrites the data of the layer two before it."""

    _is_one_go = False

    def takes(self, batch: PackedBatch) -> bool:
        is_fit = len(batch.slots) <= self.most_rows
        return is_fit and len(self._attention.chunk_groups(batch)) <= 1

    @staticmethod
    def _bytes_of_row(c: ModelConfig) -> int:
        return 2 * _bytes_of_layer(c)

    def _record(self) -> Tensor:
        self._left: Iterator[Tensor] = iter(())
        """Memory of the layer two before this one that this layer can still reuse."""
        self._before: list[Tensor] = []
        self._own: list[Tensor] = []
        return super()._record()

    def _begin_layer(self, i: int) -> None:
        self._left, self._before = iter(self._before), self._own if i else []
        self._own = []  # the first jobs keep their memory

    def _room(self, width: int, *, short: bool = False) -> Tensor:
        room = next(self._left, None)
        if room is None or room.shape[1] != width or short != (room.dtype == torch.bfloat16):
            room = super()._room(width, short=short)
        self._own.append(room)
        return room


def _bytes_of_layer(c: ModelConfig) -> int:
    heads = 2 * (c.num_heads + c.num_kv_heads) * c.head_dim
    return 8 * heads + 34 * c.hidden_size + 8 * c.intermediate_size
