func inside(x int, y int, size int) bool {
	return 0 <= x && x < size && 0 <= y && y < size
}

func border(width int, height int) int {
	if width == 1 || height == 1 {
		return width * height
	}
	return 2 * (width + height) - 4
}
