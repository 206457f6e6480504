"""Several uploads at once: by threads, or by processes with a thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import final

from ..errors import DeadlineError
from .destination import Destination
from .process import UploadProcess
from .transfer import send_file

__all__ = ["Lanes"]


@final
class Lanes:
    """Do uploads side by side. Threads and processes start when they are first needed.

    Args:
        destination: Where to.
        num_lanes: How many at once.
        use_procs: Whether files are read and sent by processes of their own.
    """

    def __init__(self, destination: Destination, *, num_lanes: int, use_procs: bool) -> None:
        self._destination = destination
        self._use_procs = use_procs
        self._threads = ThreadPoolExecutor(num_lanes, thread_name_prefix="milepost-uploads")
        self._lock = threading.Lock()
        self._idle: list[UploadProcess] = []
        self._all: list[UploadProcess] = []
        self._is_stopped = False

    def run(self, jobs: Iterable[Callable[[], None]]) -> list[Exception]:
        """Do all jobs and return the errors of those that failed."""
        futures = [self._threads.submit(job) for job in jobs]
        errors: list[Exception] = []
        for future in futures:
            error = future.exception()
            if isinstance(error, Exception):
                errors.append(error)
            elif error is not None:
                raise error
        return errors

    def send(self, key: str, path: str) -> None:
        """Upload a file; called by a job.

        Raises:
            StorageError: It could not be uploaded.
        """
        self.check()
        if not self._use_procs:
            send_file(self._destination.store, key, path, progress=lambda _: self.check())
            return
        process = self._take()
        try:
            process.send(key, path, progress=lambda _: self.check())
        except Exception:
            # Whatever state it is in, the next upload begins with a fresh one.
            process.kill()
            self._drop(process)
            raise
        with self._lock:
            self._idle.append(process)

    def check(self) -> None:
        """Raise if the uploads were stopped.

        Raises:
            DeadlineError: They were.
        """
        if self._is_stopped:
            raise DeadlineError("The uploads were stopped.")

    def stop(self) -> None:
        """End everything that is on its way."""
        with self._lock:
            self._is_stopped = True
            for process in self._all:
                process.kill()

    def close(self) -> None:
        """End the threads and processes."""
        for process in list(self._all):
            self._drop(process)
        self._threads.shutdown(wait=not self._is_stopped, cancel_futures=True)

    def _take(self) -> UploadProcess:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self.check()
            process = UploadProcess(self._destination)
            self._all.append(process)
            return process

    def _drop(self, process: UploadProcess) -> None:
        process.close()
        with self._lock:
            if process in self._all:
                self._all.remove(process)
