"""Points and rectangles."""


def manhattan(a: int, b: int, x: int, y: int) -> int:
    """Steps between two points of a grid."""
    return abs(a - x) + abs(b - y)


def inside(x: int, y: int, size: int) -> bool:
    """Whether a point lies on a square board."""
    return 0 <= x < size and 0 <= y < size


def area(a: int, b: int, x: int, y: int) -> int:
    """Area of a rectangle given two corners."""
    width = abs(x - a)
    height = abs(y - b)
    return width * height


def border(width: int, height: int) -> int:
    """Cells on the rim of a board."""
    if width == 1 or height == 1:
        return width * height
    return 2 * (width + height) - 4


def cell(i: int, width: int) -> list[int]:
    """Row and column of the `i`-th cell."""
    row = i // width
    column = i % width
    return [row, column]


def diagonal(a: int, b: int, x: int, y: int) -> bool:
    """Whether two points share a diagonal."""
    return abs(a - x) == abs(b - y)


def count_inside(xs: list[int], ys: list[int], size: int) -> int:
    """Number of points on a square board."""
    count = 0
    for i in range(len(xs)):
        if max(xs[i], ys[i]) < size and min(xs[i], ys[i]) >= 0:
            count += 1
    return count
