"""Two kernels on one cache: the chosen one, and the reference beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kernels import Kernel, reference
from kvbench.kernels.parts import Part
from kvbench.kernels.prefill import Scoring


class BothKernels:
    """Answers with the kernel's results.

    worst: the largest difference from the reference so far, as a share of the largest value: of the output, and of
    the probabilities where they are wanted.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.name, self.worst = kernel, kernel.name, 0.0

    def refusal(self, query: Tensor, keys: Sequence[Part], values: Sequence[Part]) -> str | None:
        """What the kernel itself would pass to the reference."""
        return self.kernel.refusal(query, keys, values)

    def attend(
        self,
        query: Tensor,
        keys: Sequence[Part],
        values: Sequence[Part],
        scoring: Scoring,
        visible: Tensor | None = None,
        sink_query: Tensor | None = None,
        n_sink: int = 0,
        want_probabilities: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """See `kvbench.kernels.reference.attend`."""
        arguments = query, keys, values, scoring, visible, sink_query, n_sink
        output, probabilities = self.kernel.attend(*arguments, want_probabilities)
        theirs, theirs_probabilities = reference.attend(*arguments)
        self._note(output, theirs)
        if want_probabilities and probabilities is not None:
            self._note(probabilities, theirs_probabilities)
        return output, probabilities

    def _note(self, ours: Tensor, theirs: Tensor) -> None:
        difference = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
        self.worst = max(self.worst, difference if difference == difference else torch.inf)
