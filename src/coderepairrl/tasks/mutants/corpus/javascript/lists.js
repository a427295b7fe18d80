function indexOf(xs, value) {
    for (let i = 0; i < xs.length; i++) {
        if (xs[i] === value) {
            return i;
        }
    }
    return -1;
}

function lastIndex(xs, value) {
    let result = -1;
    for (let i = 0; i < xs.length; i++) {
        if (xs[i] === value) {
            result = i;
        }
    }
    return result;
}
