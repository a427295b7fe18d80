function isLeap(year) {
    if (year % 400 === 0) {
        return true;
    }
    if (year % 100 === 0) {
        return false;
    }
    return year % 4 === 0;
}

function weekday(start, days) {
    return (start + days) % 7;
}

function quarter(month) {
    return Math.floor((month - 1) / 3) + 1;
}

function elapsed(start, end) {
    if (end >= start) {
        return end - start;
    }
    return end + 24 - start;
}
