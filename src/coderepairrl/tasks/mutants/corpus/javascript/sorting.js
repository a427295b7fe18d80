function isSorted(xs) {
    for (let i = 1; i < xs.length; i++) {
        if (xs[i] < xs[i - 1]) {
            return false;
        }
    }
    return true;
}

function rank(xs, value) {
    let count = 1;
    for (const x of xs) {
        if (x > value) {
            count++;
        }
    }
    return count;
}
