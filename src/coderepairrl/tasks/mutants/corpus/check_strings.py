"""Checks of `strings`."""

from coderepairrl.tasks.mutants.corpus.strings import (
    count_char,
    count_vowels,
    initials,
    is_palindrome,
    longest_word,
    pad,
    prefix,
    reverse_words,
)

assert count_vowels("banana") == 3
assert count_vowels("AE") == 2
assert count_vowels("xyz") == 0
assert is_palindrome("Anna") is True
assert is_palindrome("aba") is True
assert is_palindrome("ab") is False
assert is_palindrome("abca") is False
assert is_palindrome("abab") is False
assert reverse_words("a b c") == "c b a"
assert reverse_words("one") == "one"
assert reverse_words("x y") == "y x"
assert longest_word("a bbb cc") == "bbb"
assert longest_word("aa bb") == "aa"
assert longest_word("a bb ccc") == "ccc"
assert prefix("abc", "abd") == "ab"
assert prefix("a", "b") == ""
assert prefix("ab", "abc") == "ab"
assert prefix("abc", "ab") == "ab"
assert initials("ada love") == "AL"
assert initials("bob") == "B"
assert pad("7", 3) == "  7"
assert pad("abc", 2) == "abc"
assert pad("ab", 2) == "ab"
assert count_char("banana", "a") == 3
assert count_char("abc", "x") == 0
assert count_char("bob", "b") == 2
