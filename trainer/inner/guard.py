"""`NonFiniteGuard`: counts the steps that had to be dropped, and ends the run when no other kind is left.

One bad batch, or one overflow in half precision, costs a step. Ten in a row mean that the parameters are lost or the
rate is too high, and every further step would only burn electricity.
"""

from __future__ import annotations

import math

from trainer.errors import NonFiniteTrainingError

__all__ = ["NonFiniteGuard"]


class NonFiniteGuard:
    """Decides of each step whether it may be applied.

    Args:
        max_in_a_row: so many steps dropped in a row are an error.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self.skipped = 0
        """Steps dropped since the run began."""
        self.skipped_in_a_row = 0
        """Steps dropped since the latest good one."""

    def allows(self, loss: float, grad_norm: float) -> bool:
        """Whether to apply a step with this loss and this norm of its gradient; counts it if not.

        A norm is finite only if every value under it is, so the two numbers speak for the whole gradient. (A finite
        gradient whose squares overflow fp32, from a norm of some 1e19 on, is dropped too, and rightly.)
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.skipped_in_a_row = 0
            return True
        self.skipped += 1
        self.skipped_in_a_row += 1
        return False

    def raise_if_hopeless(self, step: int, loss: float, grad_norm: float, lr: float) -> None:
        """Ends the run behind too many dropped steps in a row.

        Args:
            step: the latest of them.
            loss: its loss.
            grad_norm: the norm of its gradient.
            lr: its learning rate.

        Raises:
            NonFiniteTrainingError: it is so.
        """
        if self.skipped_in_a_row >= self._max_in_a_row:
            raise NonFiniteTrainingError(
                f"expected a finite loss and gradient, found loss {loss:.6g} and gradient norm {grad_norm:.6g} at step "
                f"{step}, the last of {self.skipped_in_a_row} such steps in a row (none was applied); go back to an "
                f"earlier checkpoint with a lower lr (now {lr:.3g}), or set precision to fp32"
            )
