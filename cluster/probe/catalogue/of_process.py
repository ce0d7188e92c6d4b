"""What every process tells, whatever its role: ``moonpool_process_...``."""

from __future__ import annotations

from moonpool.cluster.probe.catalogue.metric import Kind, counter, gauge, kept

PROCESS = (
    kept("", Kind.INFO, "who this process is, always 1", ("member", "role", "node", "model", "version")),
    gauge("live", "1 while nothing stands still with work pending", "probe_live"),
    gauge("ready", "1 while new work is wanted", "probe_ready"),
    gauge("metrics_age_seconds", "how old these numbers are: more than a moment while its loop is busy", "metrics_age_seconds"),
    counter("metrics_errors", "times that a number could not be read or counted"),
    counter("trace_batches_lost", "batches of spans that no collector took"),
    gauge("start_time_seconds", "when it started, since the epoch", "process_start_time_seconds"),
    gauge("incarnation", "the number of its life: changes when it starts anew, and when it was fenced and came back"),
    gauge("resident_bytes", "resident memory", "process_resident_bytes"),
    gauge("threads", "threads", "process_threads"),
    gauge("python_threads", "threads that Python knows of", "process_python_threads"),
    gauge("open_fds", "open file descriptors", "process_handles"),
    gauge("sockets", "open sockets", "process_sockets"),
    gauge("certificate_left_seconds", "until its certificate ends; only where it has one", "certificate_left_s"),
    gauge("certificate_life_seconds", "from its certificate's begin to its end; only where it has one", "certificate_life_s"),
    gauge("registry_connected", "1 while etcd answers; only where etcd is the registry"),
    counter("registry_connections", "connections to etcd that were tried", "registry_attempts"),
    gauge("registry_presumed_silent", "1 while it was cut off from etcd alone, and is silent for the others"),
    counter("registry_refused_values", "foreign or damaged values below our prefix in etcd"),
)
