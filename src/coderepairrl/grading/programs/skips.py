"""Who skips a test, and which tests begin and reach their end."""


def watch(unittest, send):
    """Send ``skipping`` before a test is skipped, while its cause is on the stack, ``calling`` before one is called,
    and ``returned`` when it has reached its end. Returns a function: whether ``returned`` is sent for a test."""

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
