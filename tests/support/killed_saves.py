"""Saves in processes that are killed, or limited; one process imports everything once and forks each of them.

    with server() as saves:
        saves.killed_after(path, seed, delay_s)

Also a program: it reads a job a line from standard input, and answers each with a line.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve()

# Each call of one of these functions of the C library counts; the one with the chosen number kills its process.
_CALLS = {
    "open": ("int", "const char *path, int flags, mode_t mode", "path, flags, mode"),
    "open64": ("int", "const char *path, int flags, mode_t mode", "path, flags, mode"),
    "openat": ("int", "int at, const char *path, int flags, mode_t mode", "at, path, flags, mode"),
    "openat64": ("int", "int at, const char *path, int flags, mode_t mode", "at, path, flags, mode"),
    "close": ("int", "int file", "file"),
    "write": ("ssize_t", "int file, const void *data, size_t size", "file, data, size"),
    "pwrite": ("ssize_t", "int file, const void *data, size_t size, off_t at", "file, data, size, at"),
    "pwrite64": ("ssize_t", "int file, const void *data, size_t size, off_t at", "file, data, size, at"),
    "writev": ("ssize_t", "int file, const void *parts, int num", "file, parts, num"),
    "pwritev": ("ssize_t", "int file, const void *parts, int num, off_t at", "file, parts, num, at"),
    "pwritev64": ("ssize_t", "int file, const void *parts, int num, off_t at", "file, parts, num, at"),
    "ftruncate": ("int", "int file, off_t size", "file, size"),
    "ftruncate64": ("int", "int file, off_t size", "file, size"),
    "fsync": ("int", "int file", "file"),
    "fdatasync": ("int", "int file", "file"),
    "flock": ("int", "int file, int how", "file, how"),
    "rename": ("int", "const char *from, const char *to", "from, to"),
    "renameat": ("int", "int a, const char *from, int b, const char *to", "a, from, b, to"),
    "renameat2": ("int", "int a, const char *from, int b, const char *to, unsigned how", "a, from, b, to, how"),
    "mkdir": ("int", "const char *path, mode_t mode", "path, mode"),
    "mkdirat": ("int", "int at, const char *path, mode_t mode", "at, path, mode"),
    "rmdir": ("int", "const char *path", "path"),
    "unlink": ("int", "const char *path", "path"),
    "unlinkat": ("int", "int at, const char *path, int how", "at, path, how"),
    "link": ("int", "const char *from, const char *to", "from, to"),
    "linkat": ("int", "int a, const char *from, int b, const char *to, int how", "a, from, b, to, how"),
    "symlink": ("int", "const char *to, const char *path", "to, path"),
}
_HEADER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <unistd.h>
static atomic_long left;
void kill_at(long call) { left = call; }
long calls_left(void) { return left; }
static void count(void) {
  if (left > 0 && atomic_fetch_sub(&left, 1) == 1) { kill(getpid(), SIGKILL); pause(); }
}
"""
_WRAPPER = """
{ret} {name}({params}) {{
  static {ret} (*real)({params});
  if (!real) real = ({ret} (*)({params}))dlsym(RTLD_NEXT, "{name}");
  count();
  return real({args});
}}
"""

COMPILER = shutil.which("cc")


def build_counter(folder):
    """Builds the library that counts calls; returns its path."""
    wrappers = [_WRAPPER.format(name=name, ret=ret, params=ps, args=args) for name, (ret, ps, args) in _CALLS.items()]
    (folder / "counter.c").write_text(_HEADER + "".join(wrappers))
    library = folder / "counter.so"
    # glibc's headers declare none of these here, so the wrappers may have types of their own.
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-w", folder / "counter.c", "-o", library], check=True)
    return library


@contextlib.contextmanager
def server(counter=None):
    """Starts the process that forks; yields the object that gives it jobs."""
    # The library counts from the moment it is told to, so that the process may start with it.
    environment = {**os.environ, **({"LD_PRELOAD": str(counter)} if counter else {})}
    command = [sys.executable, str(HERE)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Saves(process)
        finally:
            process.stdin.close()


class Saves:
    def __init__(self, process):
        self.process = process

    def ask(self, **job):
        """Does a job; returns its answer, or None if its process was killed."""
        self.start(**job)
        return self.answer()

    def start(self, **job):
        job["path"] = str(job["path"])
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, "the process that forks has ended"
        return json.loads(line)


def main():
    sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]
    import checkpoints
    from jaxferry import checkpoint

    for line in sys.stdin:
        job = json.loads(line)
        children = [_fork(job, seed, checkpoints, checkpoint) for seed in job["seeds"]]
        answers = []
        for child, pipe in children:
            begin = pipe.readline()
            if "kill_after_s" in job and begin:
                time.sleep(job["kill_after_s"])
                os.kill(child, signal.SIGKILL)
            said = pipe.read()
            os.waitpid(child, 0)
            answers.append(json.loads(said) if said else None)
        print(json.dumps(answers), flush=True)


def _fork(job, seed, checkpoints, checkpoint):
    """Starts a process that saves the content of a seed, `repeat` times; it answers through a pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, os.fdopen(reader)
    answer = {}
    try:
        os.close(reader)
        content = checkpoints.content(seed)
        checkpoints.plain(content)
        if "max_file_bytes" in job:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["max_file_bytes"], resource.RLIM_INFINITY))
        os.write(writer, b"begin\n")
        if "kill_at_call" in job:
            ctypes.CDLL(None).kill_at(ctypes.c_long(job["kill_at_call"]))
        start_s = time.perf_counter()
        for _ in range(job.get("repeat", 1)):
            checkpoint.save(content, job["path"])
        answer["save_s"] = time.perf_counter() - start_s
        if "kill_at_call" in job:
            answer["calls"] = job["kill_at_call"] - ctypes.CDLL(None).calls_left()
    except BaseException as error:  # noqa: BLE001 - the answer tells it
        answer["error"], answer["trace"] = f"{type(error).__name__}: {error}", traceback.format_exc()
    finally:
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)


if __name__ == "__main__":
    main()
