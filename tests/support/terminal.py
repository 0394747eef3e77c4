"""A command on a terminal of its own: a pty that controls its session, with a width that can change."""

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import termios
import threading

from tests.support.populating import ROOT


class Terminal:
    """Runs a command on it; a context manager that kills what still runs.

    Args:
        command: the command line.
        columns: width of the terminal; 0, as with some serial lines, says nothing of it.
        environment: added to this process's.
    """

    def __init__(self, command, columns=80, **environment):
        self._ours, theirs = os.openpty()
        self.resize(columns)
        self._output = b""
        variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**variables, "TERM": "xterm", **environment},
            preexec_fn=lambda: os.login_tty(theirs),
            pass_fds=(theirs,),
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait(30)
        self.hang_up()

    def resize(self, columns):
        """As when a window is made wider or narrower; the kernel sends SIGWINCH."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def hang_up(self):
        """As when a window is closed; the kernel sends SIGHUP, and every write fails from now on."""
        ours, self._ours = self._ours, -1
        if ours >= 0:
            os.close(ours)

    def wait(self, timeout_s=60):
        """The exit code, once the command has ended and all it printed was read."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    @property
    def output(self):
        return self._output.decode()

    @property
    def frames(self):
        """What was drawn, line by line and each time it was drawn again."""
        return [frame for frame in re.split(r"[\r\n]+", self.output) if frame.strip()]

    def percents(self, name=""):
        """The percentages that the frames of that name showed."""
        found = (re.match(rf"{re.escape(name)}.* (\d+(?:\.\d)?) % ", frame + " ") for frame in self.frames)
        return [float(match[1]) for match in found if match]

    def _read(self):
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # All who had it open have ended, or it was hung up.
                return
            if not data:
                return
            self._output += data
