bool inside(int x, int y, int size) {
    return 0 <= x && x < size && 0 <= y && y < size;
}

int border(int width, int height) {
    if (width == 1 || height == 1) {
        return width * height;
    }
    return 2 * (width + height) - 4;
}
