import unittest

from versions import is_newer, newest, parse


class Versions(unittest.TestCase):
    def test_parse(self):
        self.assertEqual(parse("v1.2"), (1, 2, 0, ""))
        self.assertEqual(parse("1.2.3-beta.2"), (1, 2, 3, "beta.2"))
        with self.assertRaises(ValueError):
            parse("latest")

    def test_numbers_are_compared_as_numbers(self):
        self.assertTrue(is_newer("1.10.0", "1.9.9"))
        self.assertFalse(is_newer("1.2.0", "1.2"))

    def test_newest(self):
        self.assertEqual(newest(["1.0", "1.10", "1.2"]), "1.10")
        self.assertIsNone(newest([]))
