"""Words and letters."""


def count_vowels(text: str) -> int:
    """Number of vowels in `text`."""
    count = 0
    for char in text.lower():
        if char in "aeiou":
            count += 1
    return count


def is_palindrome(text: str) -> bool:
    """Whether `text` reads the same both ways."""
    text = text.lower()
    for i in range(len(text) // 2):  # noqa: SIM110
        if text[i] != text[-1 - i]:
            return False
    return True


def reverse_words(text: str) -> str:
    """The words in opposite order."""
    words = text.split(" ")
    out: list[str] = []
    for word in words:
        out.insert(0, word)
    return " ".join(out)


def longest_word(text: str) -> str:
    """The first longest word."""
    best = ""
    for word in text.split(" "):
        if len(word) > len(best):
            best = word
    return best


def prefix(a: str, b: str) -> str:
    """Longest common prefix."""
    i = 0
    while i < len(a) and i < len(b) and a[i] == b[i]:
        i += 1
    return a[:i]


def initials(text: str) -> str:
    """First letters of the words, in capitals."""
    out = ""
    for word in text.split(" "):
        out += word[0].upper()
    return out


def pad(text: str, size: int) -> str:
    """`text` with spaces in front up to `size`."""
    while len(text) < size:
        text = " " + text
    return text


def count_char(text: str, char: str) -> int:
    """Number of occurrences of `char`."""
    count = 0
    for x in text:
        if x == char:
            count += 1
    return count
