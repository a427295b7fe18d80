"""Time limit of each test."""


class Clock:
    """Interrupt a test after `each` seconds; if `each` is 0, after half of the seconds that remain of `whole`.

    Raises `Late` in the main thread repeatedly; `except Exception` does not catch it.
    """

    class Late(BaseException):
        """Raised in a test that takes too long."""

    def __init__(self, each, whole):
        import signal
        import threading
        import time

        # functions are kept, since code under test may replace them in their modules
        self.each, self.now, self.timer = each, time.monotonic, signal.setitimer
        self.signal, self.alarm, self.real = signal.signal, signal.SIGALRM, signal.ITIMER_REAL
        self.default, self.late = signal.SIG_DFL, False
        self.end = time.monotonic() + 0.9 * whole  # the rest is for the runner itself
        self.can_interrupt = threading.current_thread() is threading.main_thread()  # others cannot handle signals

    def start(self):
        """Begin a test."""
        self.late = False
        seconds = self.each or max((self.end - self.now()) / 2, 0.05)

        def ring(*_):
            self.late = True
            raise self.Late(f"not finished within {seconds:.3g} s")

        if self.can_interrupt:
            self.before = self.signal(self.alarm, ring)
            self.timer(self.real, seconds, max(seconds, 1.0))

    def stop(self):
        """End the test; return whether it took too long."""
        if self.can_interrupt:
            self.timer(self.real, 0)
            self.signal(self.alarm, self.default if self.before is None else self.before)
        return self.late
