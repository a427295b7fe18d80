function fibonacci(n) {
    let a = 0;
    let b = 1;
    for (let k = 0; k < n; k++) {
        const c = a + b;
        a = b;
        b = c;
    }
    return a;
}

function triangle(n) {
    return Math.floor(n * (n + 1) / 2);
}

function collatz(n) {
    let count = 0;
    while (n !== 1) {
        if (n % 2 === 0) {
            n = Math.floor(n / 2);
        } else {
            n = 3 * n + 1;
        }
        count++;
    }
    return count;
}
