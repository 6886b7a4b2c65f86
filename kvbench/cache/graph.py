"""Decoding token by token, on CUDA by replaying a captured graph of the step.

decoder = decoder_for(model, cache)
logits = decoder.feed(ids)
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.caches import KVCache
from kvbench.cache.captured import DecodeStep
from kvbench.cache.counters import DeviceCounters
from kvbench.cache.decode_cache import DecodeCache
from kvbench.cache.forward import check_ids
from kvbench.cache.slots import CannotCapture
from kvbench.errors import UserError
from kvbench.models.frequencies import frequency_change
from kvbench.results.row import GRAPH

WARM_UP = 3
"""Steps that run before the capture, which can compile no kernel and set up no library."""

Graph = Literal["auto", False]
"""Whether to decode by a CUDA graph where the cache has a captured form."""


class Recorder(Protocol):
    """Makes a function that runs `work` plainly `warm_up` times, then records it, and replays it from then on."""

    def __call__(self, work: Callable[[], Tensor | None], warm_up: int) -> Callable[[], Tensor | None]: ...


def decoder_for(
    model: PreTrainedModel, cache: DecodeCache, graph: Graph = "auto", untimed: int = WARM_UP + 1
) -> "EagerDecoder | GraphDecoder":
    """The fastest way to decode through `cache`: a graph on CUDA, unless graph=False; else step by step.

    untimed: how many of the first steps are not timed. Where the model, the method or the store cannot be captured,
    or too few steps are untimed, the decoder's `note` says which and why.
    """
    if not graph or cache.last_logits.device.type != "cuda":
        return EagerDecoder(model, cache)
    if not isinstance(cache, KVCache):
        return EagerDecoder(model, cache, f"eager: {cache.not_captured}")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return EagerDecoder(model, cache, "eager: the model lies on several devices, and a graph is one device's")
    if frequency_change(model.config.get_text_config()) is not None:
        return EagerDecoder(model, cache, "eager: rotary frequencies change with the length, and a graph is fixed")
    if untimed <= WARM_UP:
        return EagerDecoder(model, cache, f"eager: a capture wants {WARM_UP + 1} untimed steps, of which {untimed} run")
    try:
        return GraphDecoder(model, cache, DecodeStep(model, cache), CudaGraph)
    except CannotCapture as error:
        return EagerDecoder(model, cache, f"eager: {error}")


class EagerDecoder:
    """Decodes step by step. note: why there is no graph where one was wanted."""

    is_graph = False

    def __init__(self, model: PreTrainedModel, cache: DecodeCache, note: str | None = None) -> None:
        self.model, self.cache, self.note = model, cache, note

    @property
    def kernel_name(self) -> str:
        """What the rows' `kernel` column says."""
        return self.cache.kernel_name

    def feed(self, ids: Tensor) -> Tensor:
        """Logits [B, 1, V] after ids [B, q]."""
        return self.cache.step(self.model, ids)


class GraphDecoder:
    """Replays of one recorded step, and every R-th time of KIVI's flush.

    The first `WARM_UP` tokens run the step plainly, the next one records it. Where that fails the cache goes on
    eagerly, and `note` says why: the host's counters have followed all the time.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, decode: DecodeStep, record: Recorder) -> None:
        self.eager = EagerDecoder(model, cache)
        self.cache, self.decode, self.record = cache, decode, record
        self.step = record(decode.run, WARM_UP)
        self.flushes: dict[DeviceCounters, Callable[[], Tensor | None]] = {}
        self.has_run = False

    @property
    def is_graph(self) -> bool:
        """Whether steps are replays, or lead up to a recording."""
        return self.eager.note is None

    @property
    def kernel_name(self) -> str:
        """What the rows' `kernel` column says."""
        return self.cache.kernel_name + (GRAPH if self.is_graph else "")

    @property
    def note(self) -> str | None:
        return self.eager.note

    @torch.inference_mode()
    def feed(self, ids: Tensor) -> Tensor:
        """Logits [B, 1, V] after ids [B, 1], in memory that the next step writes to again.

        Raises UserError for ids that are not one token for each row of the batch, and CacheFull as `step` does.
        """
        if not self.is_graph:
            return self.eager.feed(ids)
        check_ids(ids)
        if ids.shape[1] != 1:
            raise UserError(f"ids has {ids.shape[1]} tokens a row; a captured step takes one")
        self.cache.check_room(ids)
        self.decode.prepare()
        self.decode.ids.copy_(ids)
        before = [] if self.has_run else [(tensor, tensor.clone()) for tensor in self.decode.mutable_state()]
        try:
            logits = self.step()
        except Exception as error:  # a model may do anything that cannot be captured
            for tensor, old in before:  # half a step may have run
                tensor.copy_(old)
            self.eager.note = f"eager: {type(self.eager.model).__name__} was not captured: {first_line(error)}"
            return self.eager.feed(ids)
        self.has_run = True
        for device in self.decode.count():
            self._flush(device)
        assert logits is not None
        return logits

    def _flush(self, device: DeviceCounters) -> None:
        """KIVI's flush: plainly the first time, from then on as a recording of its own."""
        if device not in self.flushes:
            # Not a function that holds `self`: decoder and cache would outlive their last use until a collection.
            self.flushes[device] = self.record(partial(self.decode.flush, device), 1)
        self.flushes[device]()


class CudaGraph:
    """A function of no arguments that only queues work on the device, as a CUDA graph after `warm_up` plain runs.

    What it returns is the same memory at every replay. Raises RuntimeError where it cannot be captured; nothing has
    run then.
    """

    def __init__(self, work: Callable[[], Tensor | None], warm_up: int) -> None:
        self.work, self.warm_up, self.runs = work, warm_up, 0
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None

    def __call__(self) -> Tensor | None:
        self.runs += 1
        if self.runs <= self.warm_up:
            return self._beside()
        if self.graph is None:
            self.graph = self._captured()
        self.graph.replay()
        return self.result

    def _beside(self) -> Tensor | None:
        """Run on the stream that will capture: libraries keep a workspace for each."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.work()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # The outer block brings the stream back where the capture breaks off.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=self.stream):
            self.result = self.work()
        return graph


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
