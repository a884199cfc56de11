"""The short form of the attack: one case of a few classes, and what it makes of a wrong end."""

from __future__ import annotations

import pytest

from tests.hostile.attack import run as attack
from tests.hostile.attack.places import Done, Step, ends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_few_cases_end_as_they_may(capsys: pytest.CaptureFixture[str]) -> None:
    """Settings, flags and run folders; each in a folder of its own."""
    arguments = ["--only", "settings,flags of Hydra,run folders", "--most", "1", "--seed", "3"]
    assert attack.main(arguments) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "err", "wrong"),
    [
        (2, b"error: no\n", []),
        (1, b"error: no\n", ["exit code 1, not 2"]),
        (2, b"error: no\nerror: nor that\n", ["2 error lines"]),
        (2, b"error: \x1b[31m\n", ["stderr has the control character '\\x1b'"]),
        (2, b"Traceback\nerror: no\n", ["prints 'Traceback'"]),
        (2, b"a\nb\n", ["no error line"]),
    ],
)
def test_a_wrong_end_is_told(code: int, err: bytes, wrong: list[str]) -> None:
    """By exit code and lines."""
    done = Done(code, b"", err, 1.0, False, set(), False)
    assert attack.wrong_text(Step((), ends(2)), done) == wrong
