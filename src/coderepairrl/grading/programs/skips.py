"""Report skipped tests with their cause, and tests that begin and end."""


def watch(unittest, send):
    """Send ``skipping`` before a skip (its cause on the stack), ``calling`` before a test, ``returned`` at its end.

    Returns a function that says whether ``returned`` is sent for a test.
    """

    def made(self, *reason):
        send("crrl", "skipping")
        Exception.__init__(self, *reason)

    unittest.SkipTest.__init__, made.__module__ = made, "unittest.case"

    def calling(kind):
        inherited = kind._callTestMethod

        def call(self, method):
            send("crrl", "calling", self, method)
            inherited(self, method)
            send("crrl", "returned", self)

        kind._callTestMethod, call.__module__ = call, "unittest.case"
        return call

    kinds = (unittest.TestCase, getattr(unittest, "IsolatedAsyncioTestCase", None))
    calls = [calling(kind) for kind in kinds if "_callTestMethod" in getattr(kind, "__dict__", ())]
    return lambda test: getattr(type(test), "_callTestMethod", None) in calls
