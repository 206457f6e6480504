"""The engine for a Ray cluster: one supervisor actor on each machine, the same supervision.

Ray does three things here: it keeps room for the workers (a placement group with a bundle for
each), it runs a :class:`~.node.Node` on every machine that got some, and it carries the messages.
The workers themselves are ordinary processes of their node, outside of Ray.

    the launcher dies    Ray ends its actors; the keeper of each node then kills the workers
    an actor dies        its keeper kills its workers; here it is a lost machine
    a machine dies       the same, once Ray has noticed

The only file that imports Ray.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any, TypeVar

from ..errors import CheckpointError, DeadlineError, NodeLostError, StorageError, UsageError
from .engine import Events, Plan
from .environment import LOOPBACK
from .node import Node
from .remote import RemoteGroup, check_machines

__all__ = ["RayEngine"]

T = TypeVar("T")

_FEWER_S = 5.0
_AGAIN_S = 0.5
# For a cluster of our own on this machine: it calls nobody, and keeps no secret in the home folder.
_LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


class RayEngine:
    """Runs workers on the machines of a Ray cluster.

    Args:
        address: Address of the cluster, or ``"auto"``. ``None``: what ``RAY_ADDRESS`` says, or a
            cluster of its own on this machine, which ends with the launch. A program that is
            connected already stays so.
        cpus_per_worker: CPUs that a worker needs.
        gpus_per_worker: GPUs that a worker needs. All GPUs of the workers of a machine are visible
            to each of them, as under ``torchrun``.
        variables: Variables for the environment of the workers. Otherwise it is that of the
            cluster's processes on their machine.
        start_timeout_s: Seconds to connect, and seconds until there is room for the fewest workers.
        silent_s: Seconds without an answer after which a machine counts as lost.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: int = 0,
        variables: Mapping[str, str] | None = None,
        start_timeout_s: float = 60.0,
        silent_s: float = 30.0,
    ) -> None:
        if cpus_per_worker < 0 or gpus_per_worker < 0 or not cpus_per_worker + gpus_per_worker:
            raise UsageError(
                f"RayEngine(cpus_per_worker={cpus_per_worker!r}, "
                f"gpus_per_worker={gpus_per_worker!r}) makes no sense.",
                hint="A worker needs some of a CPU, or a GPU.",
            )
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._bundle = {"CPU": cpus_per_worker, "GPU": float(gpus_per_worker)}
        self._bundle = {name: amount for name, amount in self._bundle.items() if amount}
        self._variables = dict(variables or {})
        self._start_timeout_s = start_timeout_s
        self._silent_s = silent_s
        # Ray's processes end with the thread that started them, so that is one of our own.
        self._thread: ThreadPoolExecutor | None = None
        self._ray: Any = None
        self._is_ours = False
        self._room: Any = None
        self._actors: list[Any] = []

    def __enter__(self) -> RayEngine:  # noqa: PYI034 - Self is younger than 3.10
        self._thread = ThreadPoolExecutor(1, "milepost-launch-ray")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        try:
            if self._ray is not None:
                self._release()
                if self._is_ours:
                    self._within(self._ray.shutdown, "end its cluster")
        finally:
            self._ray = None
            self._thread.shutdown(wait=False, cancel_futures=True)

    def reserve(self, fewest: int, most: int) -> int:
        """Return how many workers can be started now, and keep room for them.

        Raises:
            DeadlineError: There was not room for the fewest in time.
        """
        if self._ray is None:
            self._ray = self._within(lambda: self._connect(fewest), "answer")
        self._release()
        num = max(fewest, min(most, self._num_free()))
        while not self._hold(num, self._start_timeout_s if num == fewest else _FEWER_S):
            if num == fewest:
                raise DeadlineError(
                    f"Ray had no room for {_workers(fewest)}, each with {_text(self._bundle)}, "
                    f"within {self._start_timeout_s:g} s; free are "
                    f"{_text(self._ray.available_resources())}.",
                    safe="No worker was started.",
                    hint="Ask for fewer, end what uses the cluster, or look at ray status.",
                    fewest=fewest,
                )
            num -= 1
        return num

    def group(self, plan: Plan, events: Events) -> RayGroup:
        """Return the workers of an attempt."""
        return RayGroup(self, plan, events)

    # -- inside --------------------------------------------------------------------------------

    def links(self) -> tuple[list[RayLink], list[int], list[dict[str, str]]]:
        """Start an actor on each machine that has room for us.

        Returns:
            A way to each, how many workers each has, and variables for them.
        """
        ray, group = self._ray, self._room
        table = ray.util.placement_group_table(group)["bundles_to_node_id"]
        bundles: dict[str, list[int]] = {}
        for bundle, node in sorted(table.items()):
            bundles.setdefault(node, []).append(bundle)
        names = _names(ray.nodes())
        links = []
        for node, (first, *_) in bundles.items():
            actor = self._actor(RayNode, first, max_concurrency=8)
            links.append(RayLink(ray, actor, names.get(node, node)))
        for link in links:
            host = link.ask("address", timeout_s=self._start_timeout_s)
            link.address = host if len(links) > 1 else LOOPBACK
        variables = [
            {**self._variables, **self._visible(link, own[1:])}
            for link, own in zip(links, bundles.values(), strict=True)
        ]
        return links, [len(own) for own in bundles.values()], variables

    def end_actors(self) -> None:
        """End all actors."""
        for actor in self._actors:
            self._ray.kill(actor, no_restart=True)
        self._actors.clear()

    @property
    def silent_s(self) -> float:
        """Return after how many seconds a machine is lost."""
        return self._silent_s

    def _actor(self, kind: type, bundle: int, **options: Any) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = (
            self._ray.remote(kind)
            .options(
                num_cpus=self._bundle.get("CPU", 0),
                num_gpus=self._bundle.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._room, placement_group_bundle_index=bundle
                ),
                **options,
            )
            .remote()
        )
        self._actors.append(actor)
        return actor

    def _visible(self, link: RayLink, others: Sequence[int]) -> dict[str, str]:
        """Return the variable that shows all GPUs of a machine's workers to each of them.

        Ray gives each bundle its own, and tells which only to an actor in it.
        """
        if "GPU" not in self._bundle:
            return {}
        told = [link.ask("gpus", timeout_s=self._start_timeout_s)]
        for bundle in others:
            holder = RayLink(self._ray, self._actor(GpuHolder, bundle), link.name)
            told.append(holder.ask("gpus", timeout_s=self._start_timeout_s))
        return {"CUDA_VISIBLE_DEVICES": ",".join(number for own in told for number in own)}

    def _connect(self, fewest: int) -> Any:
        if self._address == "local":
            for name, value in _LOCAL.items():
                os.environ.setdefault(name, value)
        ray = _import_ray()
        if ray.is_initialized():
            return ray
        options: dict[str, Any] = {}
        if self._address == "local":
            num_cpus = max(os.cpu_count() or 1, round(fewest * self._bundle.get("CPU", 0) + 0.5))
            options = {"num_cpus": num_cpus, "include_dashboard": False}
        try:
            ray.init(self._address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"No Ray cluster at {self._address!r}: {error}",
                safe="No worker was started.",
                hint="Look at ray status, or give the address of a cluster that runs.",
                address=self._address,
            ) from error
        self._is_ours = True
        return ray

    def _within(self, work: Callable[[], T], what: str) -> T:
        assert self._thread is not None
        try:
            return self._thread.submit(work).result(self._start_timeout_s)
        except FutureTimeoutError as error:
            raise DeadlineError(
                f"Ray did not {what} within {self._start_timeout_s:g} s.",
                safe="No worker was started.",
                hint=f"Look at ray status; the address is {self._address!r}.",
            ) from error

    def _num_free(self) -> int:
        free = self._ray.available_resources()
        return min(int(free.get(name, 0) // amount) for name, amount in self._bundle.items())

    def _hold(self, num: int, wait_s: float) -> bool:
        """Try to keep room for so many workers."""
        group = self._ray.util.placement_group([self._bundle] * num, strategy="PACK")
        if group.wait(wait_s):
            self._room = group
            return True
        self._ray.util.remove_placement_group(group)
        return False

    def _release(self) -> None:
        self.end_actors()
        if self._room is not None:
            self._ray.util.remove_placement_group(self._room)
            self._room = None


class RayNode(Node):
    """A node in an actor."""

    def address(self) -> str:
        """Return how other machines reach this one."""
        return str(_import_ray().util.get_node_ip_address())

    def gpus(self) -> list[str]:
        """Return the GPUs of this actor."""
        return [str(number) for number in _import_ray().get_gpu_ids()]


class GpuHolder:
    """Tells the GPUs of its bundle."""

    def gpus(self) -> list[str]:
        """Return the GPUs of this actor."""
        return [str(number) for number in _import_ray().get_gpu_ids()]


class RayLink:
    """A way to an actor.

    Args:
        ray: The module.
        actor: The actor.
        name: How people know its machine.
    """

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self.name = name
        self.address = LOOPBACK
        self._ray = ray
        self._actor = actor

    def ask(self, method: str, *arguments: Any, timeout_s: float, **options: Any) -> Any:
        """Call a method of the node; see ``Link``.

        While the connection is broken Ray does not know whether the call has arrived. All but
        ``start`` may arrive twice, and are tried again until the time is over.
        """
        problems = self._ray.exceptions
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                answer = getattr(self._actor, method).remote(*arguments, **options)
                return self._ray.get(answer, timeout=max(0.0, deadline_s - time.monotonic()))
            except problems.GetTimeoutError as error:
                why = f"it did not answer within {timeout_s:g} s ({method})"
                raise self._lost(why) from error
            except problems.RayTaskError as error:
                if isinstance(error.cause, CheckpointError):
                    raise error.cause from error
                if isinstance(error.cause, OSError):
                    raise self._failed(method, error.cause) from error
                raise self._lost(f"its supervisor failed ({method}): {error.cause!r}") from error
            except problems.ActorUnavailableError as error:
                if method == "start" or time.monotonic() + _AGAIN_S > deadline_s:
                    raise self._lost("the connection to it is broken") from error
                time.sleep(_AGAIN_S)
            except problems.RayError as error:
                raise self._lost("its supervisor has ended") from error
            except Exception as error:
                raise self._lost(f"Ray cannot ask it ({method}): {error!r}") from error

    def _failed(self, method: str, cause: OSError) -> StorageError:
        return StorageError(
            f"The supervisor on the machine {self.name} failed ({method}): {cause}.",
            safe="Acknowledged checkpoints are whole.",
            hint="Look at its disks, its folder for temporary files and its limits.",
            node=self.name,
            errno=cause.errno,
        )

    def _lost(self, why: str) -> NodeLostError:
        return NodeLostError(
            f"The machine {self.name} is lost: {why}.",
            safe="Acknowledged checkpoints are whole.",
            hint="Look at ray status and at the machine.",
            node=self.name,
        )


class RayGroup:
    """The workers of one attempt, on the machines where there is room for them.

    Args:
        engine: Has kept room for them.
        plan: The attempt.
        events: Where what happens is put.
    """

    def __init__(self, engine: RayEngine, plan: Plan, events: Events) -> None:
        self._engine = engine
        self._plan = plan
        self._events = events
        self._inner: RemoteGroup | None = None

    @property
    def running(self) -> set[int]:
        """Return the ranks whose end has not been taken from the events yet."""
        assert self._inner is not None
        return self._inner.running

    def start(self) -> None:
        """Start them all, once every machine has shown that it can take part."""
        here = os.getcwd()  # noqa: PTH109 - told to the workers as text
        try:
            links, counts, variables = self._engine.links()
            needed = [here]
            if self._plan.script is not None:
                needed.append(os.path.join(here, self._plan.script))  # noqa: PTH118
            check_machines(links, self._plan.place, needed=needed, timeout_s=self._engine.silent_s)
            inner = RemoteGroup(
                self._plan,
                links,
                counts,
                events=self._events,
                working_folder=here,
                variables=variables,
                silent_s=self._engine.silent_s,
            )
            inner.start()
        except BaseException:
            self._engine.end_actors()
            raise
        self._inner = inner

    def signal(self, number: int, *, but: int | None = None) -> None:
        """Send a signal to every worker that runs; see ``Group``."""
        assert self._inner is not None
        self._inner.signal(number, but=but)

    def kill(self) -> None:
        """Kill every worker and all that it has started."""
        assert self._inner is not None
        self._inner.kill()

    def close(self) -> None:
        """Kill what is left, and end the actors."""
        assert self._inner is not None
        try:
            self._inner.close()
        finally:
            self._engine.end_actors()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "The engine 'ray' needs the package ray, which is not installed.",
            hint="pip install 'milepost[ray]'",
        ) from error
    return ray


def _names(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return how people know each machine: by its host name, with the address where that helps."""
    hosts = Counter(one["NodeManagerHostname"] for one in nodes)
    names = {}
    for one in nodes:
        host, node = str(one["NodeManagerHostname"]), str(one["NodeID"])
        is_unique = hosts[host] == 1 and host != socket.gethostname()
        names[node] = host if is_unique else f"{host} ({node[:8]})"
    return names


def _text(amounts: Mapping[str, float]) -> str:
    told = [f"{amounts.get(name, 0):g} {name}" for name in ("CPU", "GPU") if amounts.get(name)]
    return " and ".join(told) or "nothing"


def _workers(num: int) -> str:
    return "1 worker" if num == 1 else f"{num} workers"
