function binarySearch(xs, value) {
    let lo = 0;
    let hi = xs.length - 1;
    while (lo <= hi) {
        const mid = Math.floor((lo + hi) / 2);
        if (xs[mid] === value) {
            return mid;
        }
        if (xs[mid] < value) {
            lo = mid + 1;
        } else {
            hi = mid - 1;
        }
    }
    return -1;
}

function lowerBound(xs, value) {
    let lo = 0;
    let hi = xs.length;
    while (lo < hi) {
        const mid = Math.floor((lo + hi) / 2);
        if (xs[mid] < value) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

function argmax(xs) {
    let best = 0;
    for (let i = 1; i < xs.length; i++) {
        if (xs[i] > xs[best]) {
            best = i;
        }
    }
    return best;
}

function peak(xs) {
    for (let i = 1; i < xs.length - 1; i++) {
        if (xs[i] > xs[i - 1] && xs[i] > xs[i + 1]) {
            return i;
        }
    }
    return -1;
}
