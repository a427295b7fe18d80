// The list of a run's steps, groups or episodes: filters and sorts ten thousand rows, and follows a run that goes on.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const FACETS = { phase: "phase", ending: "ending", language: "language", kind: "kind", tools: "tool" };
  const ALIAS = { lang: "language", tool: "tools" };
  const WORDS = ["id", "phase", "group", "task", "language", "kind", "ending", "reason", "tools"];
  const NUMBERS = ["step", "attempt", "reward", "advantage", "turns", "calls", "failed", "tokens", "added", "deleted", "seconds"];
  const VIEWS = ["steps", "groups", "episodes"];
  const SPARE = 8; // rows drawn beyond the window

  const makeElement = (tag, css, ...content) => {
    const element = document.createElement(tag);
    if (css) element.className = css;
    element.append(...content.filter((part) => part !== null && part !== undefined));
    return element;
  };
  // -- rows

  const episodes = new Map();
  const addRows = (rows) => {
    for (const cells of rows) {
      const row = Object.fromEntries(data.cells.map((name, at) => [name, cells[at]]));
      row.words = WORDS.map((name) => (name === "tools" ? row.tools.join(" ") : row[name])).join("\n").toLowerCase();
      row.href = `episode/${row.page || row.id}.html`;
      episodes.set(row.id, row);
    }
  };
  addRows(data.rows);

  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const listRewards = (rows) => rows.map((row) => row.reward).filter((reward) => reward !== null);
  const groupRows = (rows, key) => {
    const byKey = new Map();
    for (const row of rows) {
      const name = key(row);
      if (byKey.has(name)) byKey.get(name).push(row);
      else byKey.set(name, [row]);
    }
    return [...byKey.values()];
  };
  const summariseRows = (rows) => {
    const rewards = listRewards(rows), reward = mean(rewards);
    const std = reward === null ? null : Math.sqrt(mean(rewards.map((each) => (each - reward) ** 2)));
    const sum = (name) => rows.reduce((total, row) => total + (row[name] || 0), 0);
    return { ...rows[0], rows, reward, std, count: rows.length, tokens: sum("tokens"), seconds: sum("seconds") };
  };
  const makeStepRows = (episodeRows) =>
    groupRows(episodeRows, (row) => `${row.step}\n${row.phase}`).map((rows) => ({
      ...summariseRows(rows),
      href: `#view=groups&q=${encodeURIComponent(`phase=${quoteTerm(rows[0].phase)} step=${rows[0].step}`)}`,
      groups: new Set(rows.map((row) => row.group)).size,
      endings: groupRows(rows, (row) => row.ending).map((each) => `${each.length} ${each[0].ending}`).join(", "),
    }));
  const makeGroupRows = (episodeRows) =>
    groupRows(episodeRows, (row) => row.group).map((rows) => ({ ...summariseRows(rows), href: `group/${rows[0].group_page || rows[0].group}.html` }));

  // -- filter

  const quoteTerm = (text) => (/[\s"]/.test(text) ? `"${text}"` : text);
  // a term: -, NAME and sign (all optional), then "TEXT" or WORD
  const TERM = /(-?)(?:([A-Za-z_]\w*)(:|=|>=|<=|>|<))?(?:"([^"]*)"?|(\S+))/g;
  const textTests = {
    ":": (a, b) => a.includes(b), "=": (a, b) => a === b,
  };
  const numberTests = {
    ":": (a, b) => a === b, "=": (a, b) => Math.abs(a - b) < 5e-5, ">": (a, b) => a > b, "<": (a, b) => a < b,
    ">=": (a, b) => a >= b, "<=": (a, b) => a <= b,
  };
  const idsByText = new Map(); // ids of the episodes that contain a text, by texts searched for so far
  let allTexts = null; // of a written page: [id, text] of each episode, once loaded

  const parseQuery = (query) => {
    const tests = [], wrong = [], searched = [];
    const scoreNames = new Set([...episodes.values()].flatMap((row) => Object.keys(row.scores)));
    for (const [whole, not, name, sign, inQuotes, plain] of query.matchAll(TERM)) {
      const value = inQuotes ?? plain, low = value.toLowerCase(), field = ALIAS[name] || name;
      let test = null;
      if (!name) test = (row) => row.words.includes(low);
      else if (field === "text") {
        if (low) searched.push(low);
        test = (row) => !low || (idsByText.get(low)?.has(row.id) ?? false);
      } else if (field === "tools" && textTests[sign]) test = (row) => row.tools.some((tool) => textTests[sign](tool.toLowerCase(), low));
      else if (WORDS.includes(field) && textTests[sign]) test = (row) => textTests[sign](String(row[field]).toLowerCase(), low);
      else if ((NUMBERS.includes(field) || scoreNames.has(name)) && value !== "" && !isNaN(value)) {
        const read = NUMBERS.includes(field) ? (row) => row[field] : (row) => row.scores[name];
        test = (row) => { const cell = read(row); return cell !== null && cell !== undefined && numberTests[sign](cell, Number(value)); };
      }
      if (test) tests.push(not ? (row) => !test(row) : test);
      else wrong.push(whole);
    }
    return { test: (row) => tests.every((each) => each(row)), wrong, searched };
  };

  // Messages, calls and patches are not in the rows: a server searches them; pages in a folder load them from text.js.
  const searchTexts = async (low) => {
    if (idsByText.has(low)) return;
    if (data.live) {
      const got = await fetch(`search.json?text=${encodeURIComponent(low)}`).then((answer) => answer.json());
      idsByText.set(low, new Set(got.found));
    } else {
      allTexts ||= new Promise((done, failed) => {
        const all = [];
        globalThis.found = (id, text) => all.push([id, text]); // text.js calls it for each episode
        const script = makeElement("script");
        script.src = "text.js";
        script.onload = () => done(all);
        script.onerror = () => failed(new Error("text.js cannot be loaded"));
        document.head.append(script);
      });
      const all = await allTexts;
      idsByText.set(low, new Set(all.filter(([, text]) => text.includes(low)).map(([id]) => id)));
    }
  };

  // -- cells

  const formatNumber = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
  const formatSigned = (value) => (value === null ? "–" : `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`);
  const formatSeconds = (seconds) => (seconds === null || seconds === undefined ? "–" : seconds < 100 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`);
  const makeBadge = (row) => makeElement("span", `badge ${row.ending}`, row.ending + (row.reason && row.ending !== "done" ? ` · ${row.reason}` : ""));
  const makeMeter = (value) => {
    const bar = makeElement("i");
    bar.style.width = `${100 * Math.max(0, Math.min(1, value ?? 0))}%`;
    return [makeElement("span", "meter", bar), formatNumber(value)];
  };
  const makeDots = (rows) => {
    const box = makeElement("span", "dots");
    for (const row of [...rows].sort((a, b) => a.attempt - b.attempt)) {
      const dot = makeElement("i", row.reward === null ? "none" : "");
      dot.style.setProperty("--r", Math.max(0, Math.min(1, row.reward ?? 0)));
      dot.title = `attempt ${row.attempt}: ${formatNumber(row.reward)}`;
      box.append(dot);
    }
    return box;
  };
  const showField = (name) => (row) => String(row[name]);
  const showTask = (row) => makeElement("bdi", "", row.task); // cut at the front: tasks differ at the end
  const showAdvantage = (row) => makeElement("span", row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "soft", formatSigned(row.advantage));

  // by view: key, title, width, function that makes a cell, its css class, whether a phone has room for it
  const COLUMNS = {
    steps: [
      ["step", "step", "50px", showField("step"), "n", true], ["phase", "phase", "minmax(60px, 1fr)", showField("phase"), "", true],
      ["reward", "mean reward", "130px", (row) => makeMeter(row.reward), "", true], ["std", "std", "60px", (row) => formatNumber(row.std), "n"],
      ["groups", "groups", "70px", showField("groups"), "n"], ["count", "episodes", "76px", showField("count"), "n", true],
      ["endings", "endings", "minmax(120px, 2fr)", showField("endings"), ""],
      ["tokens", "tokens", "90px", (row) => row.tokens.toLocaleString("en"), "n"], ["seconds", "episode time", "100px", (row) => formatSeconds(row.seconds), "n"],
    ],
    groups: [
      ["step", "step", "50px", showField("step"), "n"], ["phase", "phase", "70px", showField("phase"), ""], ["task", "task", "minmax(120px, 3fr)", showTask, "front", true],
      ["count", "attempts", "minmax(90px, 1.4fr)", (row) => makeDots(row.rows), "", true], ["reward", "mean reward", "130px", (row) => makeMeter(row.reward), "", true],
      ["std", "std", "60px", (row) => formatNumber(row.std), "n"], ["tokens", "tokens", "80px", (row) => row.tokens.toLocaleString("en"), "n"],
    ],
    episodes: [
      ["step", "step", "44px", showField("step"), "n"], ["phase", "phase", "62px", showField("phase"), ""], ["task", "task", "minmax(120px, 3fr)", showTask, "front", true],
      ["attempt", "#", "26px", showField("attempt"), "n"], ["reward", "reward", "104px", (row) => makeMeter(row.reward), "", true],
      ["advantage", "advantage", "76px", showAdvantage, "n"], ["ending", "ending", "minmax(100px, .8fr)", makeBadge, "", true],
      ["turns", "turns", "38px", showField("turns"), "n"], ["calls", "calls", "58px", (row) => (row.failed ? `${row.calls} (${row.failed}✗)` : row.calls), "n"],
      ["tokens", "tokens", "64px", (row) => row.tokens.toLocaleString("en"), "n"],
      ["added", "patch", "78px", (row) => (row.added || row.deleted ? `+${row.added} −${row.deleted}` : "–"), "n"], ["seconds", "time", "62px", (row) => formatSeconds(row.seconds), "n"],
    ],
  };

  const nameParts = ([key, title, width, makeCell, css, onPhone]) => ({ key, title, width, makeCell, css, onPhone });

  // -- the list

  const state = { view: "episodes", q: "", sort: "" };
  const list = byId("list"), body = makeElement("div", "body");
  let shown = [], at = -1, columns = []; // rows that match, the selected one, columns with room

  const sortRows = (rows) => {
    const byPlace = (a, b) => a.step - b.step || (a.phase < b.phase ? -1 : a.phase > b.phase ? 1 : 0) || (a.group < b.group ? -1 : a.group > b.group ? 1 : 0) || a.attempt - b.attempt;
    const down = state.sort.startsWith("-"), key = state.sort.replace(/^-/, "");
    const by = (a, b) => {
      const [x, y] = [a[key] ?? a.scores?.[key] ?? null, b[key] ?? b.scores?.[key] ?? null];
      if (x === null || y === null) return (x === null) - (y === null); // what has no value comes last
      const less = x < y ? -1 : x > y ? 1 : 0;
      return (down ? -less : less) || byPlace(a, b);
    };
    return rows.sort(key ? by : byPlace);
  };

  const drawRows = () => {
    const height = parseFloat(getComputedStyle(list).getPropertyValue("--row"));
    const top = body.getBoundingClientRect().top;
    const from = Math.max(0, Math.floor(-top / height) - SPARE), to = Math.min(shown.length, Math.ceil((innerHeight - top) / height) + SPARE);
    const focused = document.activeElement?.dataset?.at;
    body.style.height = `${shown.length * height}px`;
    body.replaceChildren(...shown.slice(from, Math.max(from, to)).map((row, offset) => {
      const line = makeElement("a", `row${from + offset === at ? " here" : ""}`);
      line.href = row.href;
      line.dataset.at = from + offset;
      line.style.top = `${(from + offset) * height}px`;
      line.append(...columns.map(({ makeCell, css }) => makeElement("span", css, ...[makeCell(row)].flat())));
      return line;
    }));
    if (focused !== undefined) body.querySelector(`[data-at="${focused}"]`)?.focus({ preventScroll: true });
  };

  const makeHead = () => {
    const isPhone = innerWidth <= 720;
    columns = COLUMNS[state.view].map(nameParts).filter(({ onPhone }) => onPhone || !isPhone);
    list.style.setProperty("--columns", columns.map(({ width }) => (isPhone ? width.replace("130px", "90px") : width)).join(" "));
    return makeElement("div", "head", ...columns.map(({ key, title, css }) => {
      const isSorted = state.sort.replace(/^-/, "") === key;
      const button = makeElement("button", isSorted ? "sorted" : "", title + (isSorted ? (state.sort.startsWith("-") ? " ↓" : " ↑") : ""));
      button.addEventListener("click", () => {
        setState({ sort: state.sort === `-${key}` ? key : state.sort === key ? "" : `-${key}` });
      });
      return makeElement("span", css, button);
    }));
  };

  const update = () => {
    const query = parseQuery(state.q);
    for (const low of query.searched) {
      if (!idsByText.has(low)) searchTexts(low).then(update, (error) => showErrors([error.message]));
    }
    showErrors(query.wrong);
    const rows = [...episodes.values()].filter(query.test);
    shown = sortRows({ steps: makeStepRows, groups: makeGroupRows, episodes: (each) => each }[state.view](rows));
    at = Math.min(at, shown.length - 1);
    list.replaceChildren(makeHead(), shown.length ? body : makeElement("div", "empty", episodes.size ? "No episode matches the filter." : "No episode has begun yet."));
    const all = `${episodes.size.toLocaleString("en")} episode${episodes.size === 1 ? "" : "s"}`;
    byId("count").textContent = rows.length === episodes.size ? all : `${rows.length.toLocaleString("en")} of ${all}`;
    for (const button of document.querySelectorAll("[data-view]")) button.setAttribute("aria-pressed", button.dataset.view === state.view);
    drawFacets();
    drawRows();
  };

  const showErrors = (wrong) => {
    byId("wrong").hidden = !wrong.length;
    byId("wrong").textContent = wrong.length ? `Not understood: ${wrong.join(" ")} (press ? for help)` : "";
  };

  // the page's address keeps the state, for links and the browser's way back
  const setState = (change) => {
    Object.assign(state, change);
    const changed = Object.entries(state).filter(([key, value]) => value && !(key === "view" && value === "episodes"));
    history.replaceState(null, "", `#${changed.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&")}`);
    update();
  };
  const readAddress = () => {
    const stored = Object.fromEntries(location.hash.slice(1).split("&").filter(Boolean).map((part) => {
      const [key, ...value] = part.split("=");
      try {
        return [key, decodeURIComponent(value.join("="))];
      } catch {
        return [key, ""];
      }
    }));
    state.view = VIEWS.includes(stored.view) ? stored.view : "episodes";
    state.q = stored.q || "";
    state.sort = stored.sort || "";
    byId("query").value = state.q;
    at = -1;
    update();
  };

  const drawFacets = () => {
    const boxes = [];
    for (const [field, name] of Object.entries(FACETS)) {
      const counts = new Map();
      for (const row of episodes.values()) {
        for (const value of field === "tools" ? row.tools : [row[field]]) if (value) counts.set(value, (counts.get(value) || 0) + 1);
      }
      if (counts.size < 2 || counts.size > 200) continue;
      const term = new RegExp(`(^|\\s)(${name}|${field}):?=?("[^"]*"|\\S+)`);
      const now = term.exec(state.q)?.[3]?.replace(/"/g, "");
      const select = makeElement("select");
      select.setAttribute("aria-label", name);
      select.append(new Option(`any ${name}`, ""), ...[...counts].sort((a, b) => b[1] - a[1]).map(([value, count]) => new Option(`${value} (${count})`, value, false, value === now)));
      select.addEventListener("change", () => {
        const rest = state.q.replace(term, "").trim();
        byId("query").value = [rest, select.value && `${name}=${quoteTerm(select.value)}`].filter(Boolean).join(" ");
        setState({ q: byId("query").value });
      });
      boxes.push(select);
    }
    byId("facets").replaceChildren(...boxes);
  };

  // -- keys and clicks

  const selectRow = (to) => {
    if (!shown.length) return;
    at = Math.max(0, Math.min(shown.length - 1, to));
    const height = parseFloat(getComputedStyle(list).getPropertyValue("--row")), top = body.getBoundingClientRect().top + at * height;
    const room = byId("query").closest(".finder").getBoundingClientRect().bottom;
    if (top < room || top + height > innerHeight) scrollBy(0, top - innerHeight / 2);
    drawRows();
    body.querySelector(`[data-at="${at}"]`)?.focus({ preventScroll: true });
  };
  // the page of an episode links its neighbours in this order
  const rememberOrder = () => {
    if (state.view !== "episodes") return;
    const folder = location.pathname.replace(/[^/]*$/, "episode/");
    try {
      sessionStorage.setItem("crrl", JSON.stringify({ folder, pages: shown.map((row) => row.page || row.id) }));
    } catch {
      // without storage the neighbours are those of the group
    }
  };
  body.addEventListener("click", rememberOrder);
  const keys = {
    j: () => selectRow(at + 1), k: () => selectRow(at - 1), "/": () => byId("query").select(),
    1: () => setState({ view: "steps" }), 2: () => setState({ view: "groups" }), 3: () => setState({ view: "episodes" }),
    Enter: () => { if (shown[at] && document.activeElement === document.body) body.querySelector(`[data-at="${at}"]`)?.click(); },
    u: () => byId("up")?.click(), "?": () => byId("keys").showModal(),
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    if (event.target.matches("input, select")) {
      if (event.key === "Escape" || (event.key === "Enter" && event.target.matches("input"))) {
        event.target.blur();
        if (event.key === "Enter") selectRow(0);
      }
      return;
    }
    if (keys[event.key]) {
      if (event.key !== "Enter") event.preventDefault();
      keys[event.key]();
    }
  });
  let typing = 0;
  byId("query").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => setState({ q: byId("query").value }), 80);
  });
  for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => setState({ view: button.dataset.view }));
  addEventListener("hashchange", readAddress);
  addEventListener("scroll", drawRows, { passive: true });
  addEventListener("resize", update);
  readAddress();

  // -- live

  if (data.live) {
    let since = data.state;
    setInterval(async () => {
      const answer = await fetch(`rows.json?since=${since}`).then((got) => got.json()).catch(() => null);
      byId("live").textContent = answer ? "live" : "the server does not answer";
      if (!answer) return;
      since = answer.state;
      if (answer.rows.length) {
        addRows(answer.rows);
        update();
      }
    }, 2000);
  }
})();
