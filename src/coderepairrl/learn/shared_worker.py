"""The process of a learner that several runs share, ``python -m coderepairrl.learn.shared_worker``, driven by frames of
`learn.shared_server`.

As `learn.learner`, but each request names its ``run``, which has a trainer of its own on the one frozen model. What
would end a process that is a run's own (it is out of memory, a bug) ends the run's part here: its reply is ``{"died":
what happened}``, and the others go on. After an error of the device itself nothing there can be trusted: the process
ends. ``leave`` forgets a run.
"""

from __future__ import annotations

import gc
import traceback
from functools import partial

import torch

from coderepairrl.learn.learner import Service, serve
from coderepairrl.learn.shared_model import SharedModel
from coderepairrl.processes.children import Frame


class SharedWorker:
    """Trainers by run."""

    def __init__(self) -> None:
        self.model = SharedModel()
        self._services: dict[str, Service] = {}

    def answer(self, frame: Frame) -> Frame:
        """Carry out one request."""
        run = frame.pop("run")
        if frame.get("op") == "leave":
            self._forget(run)
            return {"ok": None, "version": 0}
        if run not in self._services:
            self._services[run] = Service(partial(self.model.acquire, run))
        try:
            return self._services[run].answer(frame)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            traceback.print_exception(error)
            died = {"died": "".join(traceback.format_exception(error)[-3:]).strip()}
        self._forget(run)  # here, where the error no longer has its hands on tensors
        return died

    def _forget(self, run: str) -> None:
        self._services.pop(run, None)
        self.model.release(run)
        gc.collect()  # modules and their hooks refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    """Serve the process that started this one."""
    serve(SharedWorker().answer)


if __name__ == "__main__":
    main()
