"""The supervisor of a cluster that is to be struck: as ``moonpool up``, every member in the place that the run has for it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moonpool.cluster.launch.process_launcher import ProcessLauncher, run_command
from moonpool.cluster.launch.state import StateDir
from moonpool.cluster.launch.supervisor import Supervisor
from moonpool.cluster.spec import RoleSpec
from moonpool.core.config import Config
from moonpool.core.ids import MemberId


@dataclass(frozen=True, slots=True)
class Place:
    """Of one member: the address it binds to, words before its command, variables of its environment."""

    address: str
    before: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    config: Config
    model_dir: Path
    places: Mapping[str, Place]

    def to_json(self) -> str:
        places = {member: asdict(place) for member, place in self.places.items()}
        return json.dumps({"config": self.config.model_dump(mode="json"), "model_dir": str(self.model_dir), "places": places})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        raw = json.loads(text)
        places = {
            member: Place(p["address"], tuple(p["before"]), tuple((k, v) for k, v in p["variables"]))
            for member, p in raw["places"].items()
        }
        return cls(Config.model_validate(raw["config"]), Path(raw["model_dir"]), places)


class PlacedLauncher:
    """A process launcher that puts every member where its ``Place`` says."""

    def __init__(self, plan: Plan, state: StateDir, failed: Callable[[MemberId, str], None]) -> None:
        self._places = plan.places
        restarts = plan.config.cluster.max_restarts
        self._inner = ProcessLauncher(state, say, failed, max_restarts=restarts, command=self._command)

    def _command(self, spec_file: Path) -> Sequence[str]:
        place = self._places[spec_file.stem]
        variables = [f"{name}={value}" for name, value in place.variables]
        return (*place.before, "env", *variables, *run_command(spec_file))

    async def open(self) -> None:
        await self._inner.open()

    async def start(self, spec: RoleSpec) -> None:
        host = self._places[spec.member].address
        config = spec.config.model_copy(
            update={
                "cluster": spec.config.cluster.model_copy(update={"host": host}),
                "gateway": spec.config.gateway.model_copy(update={"host": host}),
            }
        )
        await self._inner.start(replace(spec, config=config))

    async def stop(self) -> None:
        await self._inner.stop()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _main(plan: Plan) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    state = StateDir.create(Path(plan.config.cluster.state_dir))
    supervisor = Supervisor(plan.config, state, lambda failed: PlacedLauncher(plan, state, failed), say)
    starting = asyncio.create_task(supervisor.start(plan.model_dir))
    waiting = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await waiting
    finally:
        for task in (starting, waiting):
            task.cancel()
        await asyncio.gather(starting, waiting, return_exceptions=True)
        await supervisor.stop()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(Plan.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")))))
