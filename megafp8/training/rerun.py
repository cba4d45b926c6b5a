"""Reruns of suspicious iterations, as Megatron-LM names them: is a strange loss the hardware's, or the training's?

A loss that is not finite (`--rerun-mode validate_results`), or that jumps (`--check-for-spiky-loss`), is computed again
from the same state and the same batches:

    another result       transient: the second result counts, and the run goes on; the `MOST_TRANSIENT`th of a process
                         ends it with exit code 17
    the same bits        the data and the model make it so, or this machine always computes wrongly. Under
                         `--rerun-mode validate_results` with `--save`, the state before the step is saved and the run
                         ends with exit code 16: the restart, on another machine if possible, tells

After the restart the iteration is computed once more: the same bits confirm the result, and others convict the machine
that was left. Either way the run goes on with what is computed now.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from megafp8.config.train import TrainConfig

EXIT_RESTART_TO_DECIDE = 16
EXIT_UNRELIABLE = 17
MOST_TRANSIENT = 3
WINDOW, FEWEST, DEVIATIONS, SHARE = 100, 20, 6.0, 0.1


class StopRun(Exception):  # noqa: N818 - no error: a decision
    """Ends the run before the update of the iteration in hand. suspect: see `Progress.suspect`."""

    def __init__(self, code: int, reason: str, suspect: tuple[int, int] | None = None) -> None:
        super().__init__(reason)
        self.code, self.reason, self.suspect = code, reason, suspect


def bits_of(value: float) -> int:
    """The 64 bits of a number: equal for equal results, NaNs included."""
    return int.from_bytes(struct.pack("<d", value), "little")


@dataclass
class Spikes:
    """The losses of late: what is far above them is a jump."""

    def __post_init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def is_jump(self, loss: float) -> bool:
        if len(self._losses) < FEWEST or not math.isfinite(loss):
            return False
        mean = sum(self._losses) / len(self._losses)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in self._losses) / len(self._losses))
        return loss > mean + max(DEVIATIONS * deviation, SHARE * abs(mean))

    def add(self, loss: float) -> None:
        if math.isfinite(loss):
            self._losses.append(loss)


class Reruns:
    """Looks at each iteration's loss before its update, and runs it again where that is strange.

    suspect: (iteration, bits of its loss) that the run before ended with. say: where verdicts go, (kind, message).
    """

    def __init__(
        self,
        train: TrainConfig,
        *,
        saves: bool,
        suspect: tuple[int, int] | None,
        say: Callable[[str, int, str], None],
    ) -> None:
        self._validates = train.rerun_mode == "validate_results"
        self._always = train.rerun_mode == "report_stats"
        self._spikes = Spikes() if train.check_for_spiky_loss else None
        self._exits = self._validates and saves
        self._suspect, self._say = suspect, say
        self._transient = self._differing = self._compared = 0

    @property
    def active(self) -> bool:
        return self._validates or self._always or self._spikes is not None

    def check(self, iteration: int, loss: float, again: Callable[[], float]) -> float:
        """The loss that counts. again: computes the iteration anew, from the same state. Raises StopRun."""
        if self._suspect is not None and self._suspect[0] == iteration:
            self._settle(iteration, loss)
        elif why := self._suspicion(loss):
            loss = self._rerun(iteration, loss, why, again)
        elif self._always:
            loss = self._compare(iteration, loss, again)
        if self._spikes is not None:
            self._spikes.add(loss)
        return loss

    def _suspicion(self, loss: float) -> str | None:
        if self._validates and not math.isfinite(loss):
            return "is not finite"
        if self._spikes is not None and self._spikes.is_jump(loss):
            return "jumps"
        return None

    def _settle(self, iteration: int, loss: float) -> None:
        same = bits_of(loss) == self._suspect[1]
        verdict = (
            "the same as before the restart: it is real, the data or the model make it so"
            if same
            else "another one than before the restart: the machine that the run left computed wrongly"
        )
        self._say("rerun-real" if same else "rerun-persistent-fault", iteration, f"loss {loss:.6g}, {verdict}")
        self._suspect = None

    def _rerun(self, iteration: int, loss: float, why: str, again: Callable[[], float]) -> float:
        second = again()
        if bits_of(second) != bits_of(loss):
            self._transient += 1
            self._say(
                "rerun-transient",
                iteration,
                f"loss {loss:.6g} {why}, and is {second:.6g} when computed again: a transient fault, number "
                f"{self._transient} of this process; the second result counts",
            )
            if self._transient >= MOST_TRANSIENT:
                raise StopRun(EXIT_UNRELIABLE, f"{self._transient} transient faults: this machine is not reliable")
            return second
        self._say("rerun-same", iteration, f"loss {loss:.6g} {why}, and comes out again, bit for bit")
        if self._exits:
            reason = "a restart, on another machine if possible, has to tell whether the loss is real"
            raise StopRun(EXIT_RESTART_TO_DECIDE, reason, (iteration, bits_of(loss)))
        return second

    def _compare(self, iteration: int, loss: float, again: Callable[[], float]) -> float:
        second = again()
        self._compared += 1
        self._differing += bits_of(second) != bits_of(loss)
        if bits_of(second) != bits_of(loss):
            counts = f"{self._differing} of {self._compared} iterations differed so far"
            self._say("rerun-differs", iteration, f"loss {loss!r}, and {second!r} when computed again; {counts}")
        return second
