"""The servers of a run: start them, check them, and end them with all their processes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from fk_bench.core.rows import Row, Status
from fk_bench.core.terminal.progress import Display
from fk_bench.serving import lanes, process
from fk_bench.serving.config import CompareConfig
from fk_bench.serving.estimate import START
from fk_bench.serving.lanes import Lane, Sizing
from fk_bench.serving.process import Server, ServerError
from fk_bench.serving.run_record import Record

# Patched processes write their counters once a second while these change; after this time the last ones are on disk.
_REPORT_S = 1.5


class Running:
    """A lane with a server that answers. `row` becomes the lane's row when it ends."""

    def __init__(self, lane: Lane, url: str, model: str, server: Server | None, row: Row):
        self.lane, self.url, self.model, self.server, self.row = lane, url, model, server, row

    def check(self) -> None:
        """Raises ServerError if the process has ended."""
        if self.server is not None and not self.server.alive():
            raise self.server.death()


class Fleet:
    """All servers of a run. The lanes in `running` can be measured now."""

    def __init__(
        self, config: CompareConfig, all_lanes: Sequence[Lane], sizing: Sizing, out: Path, record: Record
    ):
        self.config, self.lanes, self.sizing = config, list(all_lanes), sizing
        self.out, self.record = out, record
        self.warnings: list[str] = []
        self.running: list[Running] = []
        self.starting: list[Running] = []

    @property
    def served_name(self) -> str:
        return Path(self.config.model).name or self.config.model

    def start(self, group: Sequence[Lane], display: Display) -> None:
        """Start lanes and wait until they answer. A lane that fails gets a row with the reason; the others continue.

        They start one after the other, or all at once with --together.
        """
        for part in [group] if self.config.together else [[lane] for lane in group]:
            begun = [running for lane in part if (running := self._begin(lane, display)) is not None]
            for running in begun:
                if len(begun) > 1:
                    running.row.case["started_with"] = [r.lane.name for r in begun if r is not running]
                self._wait(running, display)

    def _begin(self, lane: Lane, display: Display) -> Running | None:
        display.doing(f"{lane.name} starts")
        row = self.record.row(lane, Status.OK, "", {"kind": "lane"})
        row.baseline = lanes.base_of(lane.name, [one.name for one in self.lanes], self.config.base)
        try:
            if lane.url is not None:
                row.case["url"] = lane.url
                model, root = process.served_model(lane.url)
                self._compare_models(row, model, root, display)
                running = Running(lane, lane.url, model, None, row)
            else:
                server = self._launch(lane, row)
                running = Running(lane, server.url, self.served_name, server, row)
        except (ServerError, OSError) as error:
            self._failed(row, error, display)
            return None
        self.starting.append(running)
        return running

    def _compare_models(self, row: Row, model: str, root: str, display: Display) -> None:
        """Warn if an attached server seems to have another model than the run: prompts and rows are of the run's."""
        wanted = {self.config.model, Path(self.config.model).name}
        if wanted & {model, root, Path(model).name, Path(root).name}:
            return
        lane, own = row.subject.lane, self.served_name
        name = repr(model) if root == model else f"{model!r} ({root})"
        warning = (
            f"the attached server has the model {name}, the run is of {own!r}: compare --attach and --model"
        )
        row.case["warning"] = warning
        self.warnings.append(f"{lane}: {warning}")
        display.line(f"warning: {lane}: {warning}")

    def _wait(self, running: Running, display: Display) -> None:
        lane, row, server, took = running.lane, running.row, running.server, ""
        if server is not None:
            display.doing(f"{lane.name} starts")
            try:
                row.metrics["ready_s"] = server.wait_ready(self.config.ready_timeout)
            except (ServerError, OSError) as error:
                server.stop()
                self.starting.remove(running)
                self._failed(row, error, display)
                return
            took = f" after {row.metrics['ready_s']:.0f} s"
        self.starting.remove(running)
        self.running.append(running)
        display.line(f"{lane.name}: ready at {running.url}{took}")
        display.advance(START)

    def _failed(self, row: Row, error: Exception, display: Display) -> None:
        row.status, row.reason = Status(getattr(error, "status", "failed")), str(error)
        self.record.add(row)
        display.line(f"{row.subject.lane}: {row.reason}")

    def _launch(self, lane: Lane, row: Row) -> Server:
        config, folder = self.config, self.out / "servers" / lane.name
        port = process.free_port() if config.port is None else config.port + self.lanes.index(lane)
        process.check_port(port)
        report = folder / "report"
        shutil.rmtree(report, ignore_errors=True)
        report.mkdir(parents=True)
        profiles = self.profiles(lane).absolute() if config.profile else None
        argv = lanes.command(lane, config.model, self.served_name, port, self.sizing, profiles)
        env = lanes.environment(lane, config.model, report.absolute(), config.together, profiles)
        (folder / "command.sh").write_text(lanes.shell_line(env, argv) + "\n")
        removed = [name for name, value in env.items() if not value]
        added = {name: value for name, value in env.items() if value}
        (folder / "environment.json").write_text(
            json.dumps({"added": added, "removed": removed}, indent=1) + "\n"
        )
        log = folder / "server.log"
        row.case.update(server_command=argv, env=env, log=str(log.relative_to(self.out)), port=port)
        return Server(lane.name, argv, env, folder / "cwd", log.absolute(), port)

    def profiles(self, lane: Lane) -> Path:
        """The folder of a lane's profiler."""
        return self.out / "profiles" / lane.name

    def stop(self, running: Running) -> None:
        """End a lane that has finished, and write its row: what was patched, and whether it ran."""
        if running.lane.patched and running.server is not None:
            time.sleep(_REPORT_S)
        try:
            running.check()
        except ServerError as error:
            self.drop(running, Status(error.status), str(error))
            return
        self._end(running)

    def drop(self, running: Running, status: Status, reason: str) -> None:
        """End a lane that cannot be measured any longer."""
        running.row.status, running.row.reason = status, reason
        self._end(running)

    def _end(self, running: Running) -> None:
        if running.server is not None:
            running.server.stop()
            self._count_patched(running)
        self.running.remove(running)
        self.record.add(running.row)

    def _count_patched(self, running: Running) -> None:
        row, lane = running.row, running.lane
        found = lanes.read_reports(self.out / "servers" / lane.name / "report")
        row.metrics.update({name: found[name] for name in ("patched_modules", "patched_calls")})
        row.case["patched_ops"], row.case["patch_notes"] = found["ops"], found["notes"]
        if found["providers"]:
            row.case["patched_providers"] = found["providers"]
        if not lane.patched or row.status is not Status.OK or found["patched_calls"]:
            return
        if found["notes"]:
            why = "; ".join(found["notes"])
        elif not found["processes"]:
            why = "its processes wrote no report"
        elif not found["patched_modules"]:
            why = "no module was patched"
        else:
            why = f"{found['patched_modules']} modules were patched, but no call was counted"
        row.status, row.reason = Status.FAILED, f"our kernels did not run in lane {lane.name}: {why}"

    def stop_all(self) -> None:
        """End all remaining servers after an interruption. The lane's row has the calls counted so far."""
        everyone = [*self.starting, *self.running]
        servers = [running.server for running in everyone if running.server is not None]
        for server in servers:
            server.terminate()  # all at once, so that they end in parallel
        for server in servers:
            server.stop(grace_s=5.0)
        for running in self.running:
            running.row.status, running.row.reason = Status.SKIPPED, "the run was interrupted"
            self._count_patched(running)
            self.record.add(running.row)
        self.running.clear()
        self.starting.clear()
