function level(points, size) {
    return Math.floor(points / size) + 1;
}

function bestOf(xs, ys) {
    let total = 0;
    for (let i = 0; i < xs.length; i++) {
        if (xs[i] > ys[i]) {
            total++;
        } else if (xs[i] < ys[i]) {
            total--;
        }
    }
    return total;
}

function nim(n, k) {
    return n % (k + 1) !== 0;
}
