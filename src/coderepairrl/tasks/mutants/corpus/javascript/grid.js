function inside(x, y, size) {
    return 0 <= x && x < size && 0 <= y && y < size;
}

function border(width, height) {
    if (width === 1 || height === 1) {
        return width * height;
    }
    return 2 * (width + height) - 4;
}
