import unittest

from versions import is_newer, newest


class Releases(unittest.TestCase):
    def test_a_release_follows_its_candidates(self):
        self.assertTrue(is_newer("2.0.0", "2.0.0-rc1"))
        self.assertFalse(is_newer("2.0.0-rc1", "2.0.0"))

    def test_equal_is_not_newer(self):
        self.assertFalse(is_newer("2.0", "2.0.0"))
        self.assertFalse(is_newer("2.0-rc1", "2.0.0-rc1"))

    def test_candidates_among_themselves(self):
        self.assertTrue(is_newer("2.0.0-rc1", "2.0.0-beta"))
        self.assertFalse(is_newer("2.0.0-beta", "2.0.0-rc1"))

    def test_newest(self):
        self.assertEqual(newest(["2.0-rc1", "2.0", "2.0-rc2", "1.9"]), "2.0")
        self.assertTrue(is_newer("2.1-rc1", "2.0"))
