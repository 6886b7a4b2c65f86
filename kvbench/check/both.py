"""Two kernels on one cache: the chosen one, and the reference beside it."""

from typing import Any

import torch
from torch import Tensor

from kvbench.kernels import REFERENCE, Kernel


class BothKernels:
    """Answers with the kernel's results.

    worst: the largest difference from the reference so far, as a share of the largest value: of the output, and of
    the probabilities where they are wanted.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.name, self.worst = kernel, kernel.name, 0.0

    def refusal(self, *arguments: Any) -> str | None:
        """What the kernel itself would pass to the reference."""
        return self.kernel.refusal(*arguments)

    def attend(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """See `kvbench.kernels.Kernel`."""
        output, probabilities = self.kernel.attend(*arguments, **named)
        theirs, their_probabilities = REFERENCE.attend(*arguments, **named)
        self._note(output, theirs)
        if probabilities is not None and their_probabilities is not None:
            self._note(probabilities, their_probabilities)
        return output, probabilities

    def _note(self, ours: Tensor, theirs: Tensor) -> None:
        difference = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
        self.worst = max(self.worst, difference if difference == difference else torch.inf)
