"""Runs local processes as one: shows their output with prefixes, notices how they end, and leaves none behind."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from tfps.launch.terminal import Console, LineAssembler

DRAIN_S = 1.0  # how long to read output after a process has ended: its children may hold its pipe
KILL_S = 10.0  # how long to wait for a killed process before we leave without it
REMOTE_S = 5.0  # how much longer a process on another host may take to end: word of it has to travel
HELLO = "tfps_launch: this host answers"  # the first line of a process on another host; not shown
SSH_FAILED = 255  # what ssh reports of itself
BEAT_S = 10.0  # between signs of life
_READ_BYTES = 65536
_PR_SET_PDEATHSIG = 1


class Interrupted(Exception):
    """A signal asked the supervisor to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


def signal_group(leader: int, number: int) -> None:
    """Signals the process group of process `leader`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty; macOS says EPERM
        os.killpg(leader, number)


def end_with_parent() -> Callable[[], None] | None:
    """A `preexec_fn` that ends a child with the thread that forks, even by SIGKILL; None if unsupported."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def follow() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended in between
            os.kill(os.getpid(), signal.SIGKILL)

    return follow


class RemoteInput:
    """The pipe to the standard input of one process, which is called `name`. For any thread."""

    def __init__(self, name: str, pipe: IO[bytes]) -> None:
        self._name, self._pipe = name, pipe
        self._lock = threading.Lock()  # guards that _pipe is open: its number may soon be another file's
        os.set_blocking(pipe.fileno(), False)

    def send(self, line: bytes) -> None:
        """Says what to run."""
        try:
            sent = os.write(self._pipe.fileno(), line)
        except BrokenPipeError:
            return  # the process has ended already, and its output says why
        if sent < len(line):
            raise OSError(f"{self._name}: arguments and variables of {len(line)} bytes are too long to send")

    def beat(self) -> None:
        """Says that the launcher lives."""
        with self._lock, contextlib.suppress(OSError):  # the pipe is full, or its reader gone
            if not self._pipe.closed:
                os.write(self._pipe.fileno(), b"\n")

    def close(self) -> None:
        """Asks for the end."""
        with self._lock:
            self._pipe.close()


def beat_until(over: threading.Event, inputs: Sequence[RemoteInput]) -> None:
    """Sends signs of life from a thread of its own, also while nobody reads the launcher's output (Ctrl-S)."""
    while not over.wait(BEAT_S):
        for remote_input in list(inputs):
            remote_input.beat()


@dataclass(frozen=True)
class Command:
    """What to run."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]  # all of it
    colour: int = 36  # of the terminal, 31 to 36
    stdin: bytes | None = field(default=None, repr=False)  # on another host: what `tfps.launch.remote` is to run
    noise: re.Pattern[str] | None = None  # lines of standard error that are not shown
    host: str = ""  # where it runs, for messages; "": on this machine

    @property
    def title(self) -> str:
        return f"{self.name} on {self.host}" if self.host else self.name

    @property
    def prefix(self) -> str:
        return f"[{self.name}] "


@dataclass
class Process:
    """A started command. `code` is its exit code, -N after signal N, None while it runs."""

    command: Command
    popen: subprocess.Popen[bytes]
    on_line: Callable[[str], None] | None = None
    code: int | None = None
    answered: bool = True  # it runs, and not only the program that reaches its host
    tail: list[str] = field(default_factory=list)  # its last lines on standard error
    outputs: list[_Output] = field(default_factory=list)  # those still open
    remote_input: RemoteInput | None = None  # of one on another host

    @property
    def ended(self) -> bool:
        """Whether it has ended and all its output has been shown."""
        return self.code is not None and not self.outputs

    def describe_end(self) -> str:
        """How it ended, in words."""
        if self.code is None:
            return "is still running"
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        name = signal.Signals(-self.code).name if -self.code in set(signal.Signals) else f"signal {-self.code}"
        hint = " (the system does that when memory runs out)" if -self.code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"


@dataclass
class _Output:
    """The readable end of a pipe or pty, and its decoding state."""

    process: Process
    fd: int
    error: bool
    is_pty: bool
    decoder: codecs.IncrementalDecoder
    assembler: LineAssembler = field(default_factory=LineAssembler)


class Supervisor:
    """Starts each process in its own group and follows them from the main thread, where signals arrive.

    Use it as a context manager: leaving it ends whatever still runs, with `grace_s` from SIGTERM to SIGKILL. On Linux
    the processes also end when the supervisor is killed.
    """

    def __init__(self, console: Console, grace_s: float) -> None:
        self._console = console
        self.say = console.say
        self._grace_s = grace_s
        self._processes: list[Process] = []
        self._selector = selectors.DefaultSelector()
        self._remote_inputs: list[RemoteInput] = []
        self.unheard: list[Process] = []  # those on other hosts whose end nobody has seen
        self.last: list[Process] = []  # that are ended after all others
        self._signals: list[int] = []  # ending signals not yet raised as Interrupted
        self._at_exit = contextlib.ExitStack()

    def __enter__(self) -> Supervisor:  # noqa: PYI034 (typing.Self is not in Python 3.10)
        wakeup, wake = os.pipe()
        for end in (wakeup, wake):
            self._at_exit.callback(os.close, end)
            os.set_blocking(end, False)
        self._at_exit.callback(self._selector.close)
        self._selector.register(wakeup, selectors.EVENT_READ)
        # Every signal with a Python handler writes a byte there, so the end of a child wakes the loop.
        self._at_exit.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(wake, warn_on_full_buffer=False))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGWINCH):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup: the job goes on
                self._at_exit.callback(signal.signal, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self._at_exit:
            if isinstance(error, BrokenPipeError):
                self._console.muted = True
            if isinstance(error, Interrupted) and self.last:
                self.say(f"{error}: the whole job is being stopped")
            self.end([process for process in self._processes if process not in self.last])
            self.end(self._processes)

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGWINCH:
            for output in (output for process in self._processes for output in process.outputs if output.is_pty):
                self._console.fit(output.fd, output.process.command.prefix)
        elif number != signal.SIGCHLD:
            self._signals.append(number)

    def start(
        self, command: Command, *, terminal: bool = False, on_line: Callable[[str], None] | None = None
    ) -> Process:
        """Starts `command`; with `terminal` it sees those of this process. `on_line` gets lines of standard output."""
        on_terminal = [terminal and redraws for redraws in self._console.redraws]
        pty = os.openpty() if any(on_terminal) else None  # one for both, as the program would see it without us
        (out, to_out), (err, to_err) = (pty if pty and wanted else os.pipe() for wanted in on_terminal)
        if pty:
            self._console.fit(pty[0], command.prefix)
        try:
            popen = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL if command.stdin is None else subprocess.PIPE,
                stdout=to_out,
                stderr=to_err,
                env=dict(command.environment),
                start_new_session=True,  # only we get Ctrl-C, and the group can be ended with all its children
                preexec_fn=end_with_parent(),
            )
        except BaseException:
            for end in {out, err}:
                os.close(end)
            raise
        finally:
            for end in {to_out, to_err}:
                os.close(end)
        process = Process(command, popen, on_line, answered=command.stdin is None)
        self._processes.append(process)
        if command.stdin is not None and popen.stdin is not None:
            process.remote_input = RemoteInput(command.name, popen.stdin)
            process.remote_input.send(command.stdin)
            self._remote_inputs.append(process.remote_input)
            if len(self._remote_inputs) == 1:
                over = threading.Event()
                args = over, self._remote_inputs
                beats = threading.Thread(target=beat_until, args=args, name="tfps-launch-beats", daemon=True)
                beats.start()
                self._at_exit.callback(beats.join)
                self._at_exit.callback(over.set)
        for end, error in {out: False}.items() if err == out else ((out, False), (err, True)):
            os.set_blocking(end, False)
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            output = _Output(process, end, error, on_terminal[error], decoder)
            process.outputs.append(output)
            self._selector.register(end, selectors.EVENT_READ, output)
        return process

    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Shows output until `until()` holds (True) or the time is up (False).

        Raises Interrupted after SIGINT, SIGTERM or SIGHUP, and BrokenPipeError if nobody reads our output any more.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._signals:
                raise Interrupted(self._signals.pop(0))
            if until():
                return True
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._select(left)
            self._reap()

    def end(self, processes: Sequence[Process]) -> None:
        """Ends the processes and their children: SIGTERM, then SIGKILL after the grace or another Ctrl-C.

        On other hosts `tfps.launch.remote` does so; what is killed here is the program that reaches the host.
        """
        grace_s = self._grace_s + (REMOTE_S if any(process.remote_input for process in processes) else 0.0)
        for number, timeout_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            for process in processes:
                if process.code is None and number == signal.SIGTERM and process.remote_input is not None:
                    process.remote_input.close()  # the output there goes on
                elif process.code is None:
                    if process.remote_input is not None and process.answered:
                        self.unheard.append(process)
                    signal_group(process.popen.pid, number)
            while True:
                try:
                    if self.wait(lambda: all(process.ended for process in processes), timeout_s):
                        return
                except Interrupted:
                    if number == signal.SIGKILL:
                        continue
                except BrokenPipeError:
                    self._console.muted = True
                    continue
                break

    def _select(self, timeout_s: float | None) -> None:
        """Shows what there is, or comes next."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, _Output):
                self._read(key.data)
            else:
                os.read(key.fd, _READ_BYTES)  # a signal has arrived

    def _read(self, output: _Output) -> None:
        try:
            data = os.read(output.fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EIO:  # on Linux: no process has the pty open any more
                raise
            data = b""
        self._show(output, output.assembler.feed(output.decoder.decode(data, final=not data)))
        if not data:
            self._close(output)

    def _close(self, output: _Output) -> None:
        """Shows the unfinished line and forgets the output."""
        self._selector.unregister(output.fd)
        os.close(output.fd)
        output.process.outputs.remove(output)
        self._show(output, output.assembler.finish())

    def _show(self, output: _Output, lines: list[str]) -> None:
        process = output.process
        if output.error and (noise := process.command.noise) is not None:
            lines = [line for line in lines if not noise.fullmatch(line)]
        if not process.answered and not output.error:
            # A shell's start-up files may have written something before it, even in the same line.
            process.answered = any(line.endswith(HELLO) for line in lines)
            lines = [line.removesuffix(HELLO) for line in lines if line != HELLO]
        prefix, colour = process.command.prefix, process.command.colour
        if output.is_pty:
            self._console.live(prefix, colour, "" if lines else output.assembler.partial())
        self._console.write(prefix, colour, lines, error=output.error)
        if output.error:
            process.tail = [*process.tail, *lines][-5:]
        elif process.on_line is not None:
            for line in lines:
                process.on_line(line)
        if output.is_pty and lines:
            self._console.live(prefix, colour, output.assembler.partial())

    def _reap(self) -> None:
        """Notices ended processes, ends what they leave behind, and reads their output to its end."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while ended := [
            each for each in self._processes if each.code is None and os.waitid(os.P_PID, each.popen.pid, options)
        ]:
            for process in ended:
                # Before it is reaped: until then nobody else can get its group number.
                signal_group(process.popen.pid, signal.SIGKILL)
                code = process.popen.wait()
                # From another host a signal comes as a shell says it.
                process.code = 128 - code if process.remote_input and 128 < code < SSH_FAILED else code
            deadline = time.monotonic() + DRAIN_S
            while any(process.outputs for process in ended) and (left := deadline - time.monotonic()) > 0:
                self._select(left)
            for output in [output for process in ended for output in process.outputs]:
                self._read(output)  # what is there already: we may have been late
            for output in [output for process in ended for output in process.outputs]:
                self._close(output)
