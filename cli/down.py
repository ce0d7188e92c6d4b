"""``moonpool down``: stops the cluster that runs here or in a Ray cluster, and what a dead one left."""

from __future__ import annotations

import signal
import time

from moonpool.cli.options import ClusterName, ConfigFile, Settings, say
from moonpool.cli.running import find


def down(name: ClusterName = None, config_file: ConfigFile = None, settings: Settings = None) -> None:
    """Stop the cluster in order; end what an earlier one left behind."""
    from moonpool.cluster.launch.plan import patience_s
    from moonpool.cluster.launch.supervisor import region_directory
    from moonpool.core.errors import ConfigError
    from moonpool.kvstore.regions import reclaim

    running = find(name, config_file, settings, calls=False)
    if running.state is not None and running.local is None:
        raise ConfigError(
            f"cluster.registry: {running.named} is not that of {running.state.name!r}, which runs here with "
            f"{running.state.registry}; `down` stops only what runs here: leave cluster.registry out, or give --name",
            param="cluster.registry",
        )
    if running.state is None and running.config.cluster.ray_address != "local":
        from moonpool.cluster.launch.ray_finder import stop

        stop(running.config, say)
        return
    if running.state is not None:
        supervisor = running.state.supervisor
        say(f"stopping {running.state.name} (process {supervisor.pid})")
        supervisor.signal(signal.SIGTERM)
        until = time.monotonic() + patience_s(running.config)
        while supervisor.alive() and time.monotonic() < until:
            time.sleep(0.1)
        if supervisor.alive():
            say(f"process {supervisor.pid} does not end; killed")
            supervisor.signal(signal.SIGKILL)
    left = running.state_dir.end_leftovers()
    reclaim(region_directory(running.config.store))
    running.state_dir.clear()
    if left:
        say(f"ended what was left: {', '.join(left)}")
    say("stopped" if running.state else f"{running.config.cluster.name}: nothing was running")
