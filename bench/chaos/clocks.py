"""A wall clock of its own for every member: a small library put before libc's, which adds what a file says.

Compiled when a run begins (no compiler: clock faults are skipped). Monotonic time is left alone, as a step of the system's
clock leaves it. Waits until an instant of wall time are translated, so that they end when they would.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

from moonpool.core.errors import ConfigError

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *step_ns; /* of this process's wall clock */
static int64_t none = 0;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("MOONPOOL_CHAOS_CLOCK");
  step_ns = &none;
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *page = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (page != MAP_FAILED) step_ns = page;
}

static void add(struct timespec *at, int64_t ns) {
  int64_t whole = (int64_t)at->tv_sec * 1000000000 + at->tv_nsec + ns;
  if (whole < 0) whole = 0;
  at->tv_sec = whole / 1000000000;
  at->tv_nsec = whole % 1000000000;
}

static int64_t step(void) { return step_ns ? *step_ns : 0; }

static int is_wall(clockid_t id) { return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE; }

int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int got = real(id, at);
  if (!got && is_wall(id)) add(at, step());
  return got;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  (void)zone;
  struct timespec now;
  int got = clock_gettime(CLOCK_REALTIME, &now);
  if (!got && at) { at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000; }
  return got;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m, const struct timespec *restrict at) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  /* Conditions on the monotonic clock come here, too: an instant of theirs is far before any of wall time. */
  struct timespec until = *at;
  if (until.tv_sec > 1000000000) add(&until, -step());
  return real(c, m, &until);
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict at) {
  static int (*real)(sem_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec until = *at;
  add(&until, -step());
  return real(s, &until);
}

long syscall(long number, ...) {
  static long (*real)(long, ...);
  if (!real) real = dlsym(RTLD_NEXT, "syscall");
  va_list rest;
  va_start(rest, number);
  long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
  long d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
  va_end(rest);
  struct timespec until;
  if (number == SYS_futex && d && ((b & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) && (b & FUTEX_CLOCK_REALTIME)) {
    until = *(const struct timespec *)d;
    add(&until, -step());
    d = (long)&until;
  }
  return real(number, a, b, c, d, e, f);
}
"""
VARIABLE = "MOONPOOL_CHAOS_CLOCK"
_STEP = struct.Struct("<q")


def why_not() -> str:
    return "" if shutil.which("cc") else "needs a C compiler"


class Clocks:
    """``folder`` keeps the library and one page per member."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._library = folder / "clock.so"
        self._pages: dict[str, mmap.mmap] = {}

    def build(self) -> None:
        """ConfigError where the compiler refuses it."""
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(self._library), "-x", "c", "-", "-ldl", "-lpthread"]
        done = subprocess.run(command, input=SOURCE, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"chaos: the clock could not be compiled: {done.stderr.strip()[-400:]}", param="chaos")

    def environment(self, member: str) -> dict[str, str]:
        """Of a process that shall have a clock of its own; the same one in its next life."""
        path = self._folder / member
        if member not in self._pages:
            path.write_bytes(bytes(_STEP.size))
            with path.open("r+b") as file:
                self._pages[member] = mmap.mmap(file.fileno(), _STEP.size)
        return {"LD_PRELOAD": str(self._library), VARIABLE: str(path)}

    def set(self, member: str, seconds: float) -> None:
        """How far the member's clock is ahead of (below zero: behind) this machine's."""
        _STEP.pack_into(self._pages[member], 0, int(seconds * 1e9))

    def close(self) -> None:
        for page in self._pages.values():
            page.close()
        self._pages.clear()
