"""The page of all that a run can say."""

from __future__ import annotations

from scripts.messages import MOST_WORDS, PAGE, long_sentences, messages, page


def test_the_page_is_up_to_date() -> None:
    """A text that is not on the page has not been read with the others: run scripts/messages.py,
    and read it.
    """
    assert PAGE.read_text(encoding="utf-8") == page()


def test_no_sentence_is_too_long() -> None:
    """Forty words are the most."""
    found = [
        long
        for line in page().splitlines()
        if line.startswith("- ")
        for long in long_sentences(line)
    ]
    assert found == [], f"over {MOST_WORDS} words"


def test_texts_are_found_with_their_fields_as_placeholders() -> None:
    """Docstrings, names and keys are left out; parts of one text are one."""
    source = '''
"""A docstring of the module is no message."""
def f(x):
    """Nor is this one here."""
    say(f"{x} of {len(x)} images "
        "are gone", key="two words")
    y: "an annotation of sorts" = 1
'''
    assert list(messages(source)) == ["{} of {} images are gone", "an annotation of sorts"]
