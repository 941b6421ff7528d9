"""A text that anybody may have written, as it stands in a line or in a cell of a table. Knows no table."""


def one_line(text: str) -> str:
    r"""What cannot be shown, ends of lines and commands to terminals among it, as Python writes it.

    >>> print(one_line("16 requests\n| µs \x1b[2J"))
    16 requests\n| µs \x1b[2J
    """
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
