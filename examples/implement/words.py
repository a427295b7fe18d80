"""Small functions on texts, with docstrings that specify them: tasks of the source `functions`."""


def acronym(text):
    """Return the capital letters that begin the words of a text.

    Args:
        text: words with blanks between them.

    >>> acronym("portable network graphics")
    'PNG'
    """
    letters = ""
    for word in text.split():
        letters += word[0].upper()
    return letters


def squeeze(text):
    """Return the text with one letter for each run of equal letters.

    Args:
        text: any text.

    >>> squeeze("bookkeeper")
    'bokeper'
    """
    kept = ""
    for letter in text:
        if not kept.endswith(letter):
            kept += letter
    return kept


def longest(words):
    """Return the longest of some words, of equals the first.

    Args:
        words: at least one word.

    >>> longest(["so", "long", "fish"])
    'long'
    """
    best = words[0]
    for word in words:
        if len(word) > len(best):
            best = word
    return best


def vowels(text):
    """Return how many vowels a text has.

    Args:
        text: any text.

    >>> vowels("Onomatopoeia")
    8
    """
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count += 1
    return count


def mirrored(text):
    """Return whether a text reads the same in both directions.

    Args:
        text: any text; blanks and capitals do not count.

    >>> mirrored("Never odd or even"), mirrored("odd")
    (True, False)
    """
    letters = text.replace(" ", "").lower()
    if not letters:
        return True
    return letters == letters[::-1]


def shifted(text, by):
    """Return the text with each small letter moved `by` places on in the alphabet.

    Args:
        text: any text; other letters stay.
        by: places, after z comes a.

    >>> shifted("hal xyz", 1)
    'ibm yza'
    """
    found = ""
    for letter in text:
        if "a" <= letter <= "z":
            letter = chr((ord(letter) - ord("a") + by) % 26 + ord("a"))
        found += letter
    return found


def counted(words):
    """Return how often each word occurs.

    Args:
        words: any words.

    >>> counted(["a", "b", "a"])
    {'a': 2, 'b': 1}
    """
    found = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return found


def wrapped(text, width):
    """Return the lines of a text, of whole words, as long as they may be.

    Args:
        text: words with blanks between them, none longer than a line.
        width: letters of a line at most.

    >>> wrapped("to be or not", 6)
    ['to be', 'or not']
    """
    lines = [""]
    for word in text.split():
        joined = f"{lines[-1]} {word}".strip()
        if len(joined) > width:
            lines.append(word)
        else:
            lines[-1] = joined
    return lines
