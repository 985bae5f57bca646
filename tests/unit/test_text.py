"""Short texts of messages."""

from titan_lite.text import error_line, first_lines, first_names, name_ranks, one_line


def test_a_text_in_one_line_loses_its_middle_and_shows_what_is_not_printable():
    assert one_line("a\nb\x1b", 10) == "a\\nb\\x1b"
    assert one_line("x" * 500, 100) == f"{'x' * 50} ... {'x' * 50}"


def test_an_error_that_quotes_a_file_is_one_short_line():
    assert error_line(ValueError("two\n  lines")) == "two lines"
    assert len(error_line(ValueError("word " * 1000))) == 305


def test_the_first_of_many_and_how_many_there_are():
    assert first_names(["a"], 1) == "a"
    assert first_names(["a", "b", "c"], 1) == "a and 2 more"
    assert first_names(["a", "b", "c"], 2) == "a, b and 1 more"
    assert first_lines(["a", "b"], 2) == ["a", "b"]
    assert first_lines(["a", "b", "c"], 2) == ["a", "b", "and 1 more"]


def test_ranks_in_words():
    assert [name_ranks([3]), name_ranks([0, 1, 2, 5]), name_ranks([4, 2])] == [
        "rank 3",
        "ranks 0-2, 5",
        "ranks 2, 4",
    ]
