pub fn inside(x: i64, y: i64, size: i64) -> bool {
    return 0 <= x && x < size && 0 <= y && y < size;
}

pub fn border(width: i64, height: i64) -> i64 {
    if width == 1 || height == 1 {
        return width * height;
    }
    return 2 * (width + height) - 4;
}
