"""Tables as lists of rows."""


def transpose(rows: list[list[int]]) -> list[list[int]]:
    """Rows as columns."""
    out = []
    for j in range(len(rows[0])):
        out.append([row[j] for row in rows])
    return out


def row_sums(rows: list[list[int]]) -> list[int]:
    """The sum of each row."""
    out = []
    for row in rows:
        out.append(sum(row))
    return out


def trace(rows: list[list[int]]) -> int:
    """Sum of the diagonal."""
    total = 0
    for i in range(len(rows)):
        total += rows[i][i]
    return total


def identity(n: int) -> list[list[int]]:
    """Ones on the diagonal, zeros elsewhere."""
    rows = []
    for i in range(n):
        row = [0] * n
        row[i] = 1
        rows.append(row)
    return rows


def column(rows: list[list[int]], j: int) -> list[int]:
    """One column."""
    out = []
    for row in rows:
        out.append(row[j])
    return out


def dot(xs: list[int], ys: list[int]) -> int:
    """Scalar product."""
    total = 0
    for i in range(len(xs)):
        total += xs[i] * ys[i]
    return total


def count_cells(rows: list[list[int]], value: int) -> int:
    """Number of cells equal to `value`."""
    count = 0
    for row in rows:
        for x in row:
            if x == value:
                count += 1
    return count
