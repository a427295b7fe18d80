// The list of a run's episodes, as steps, groups or episodes: filtered, sorted, ten thousand rows at once, live.
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

  const make = (tag, css, ...content) => {
    const element = document.createElement(tag);
    if (css) element.className = css;
    element.append(...content.filter((part) => part !== null && part !== undefined));
    return element;
  };
  // -- rows

  const episodes = new Map();
  const take = (rows) => {
    for (const cells of rows) {
      const row = Object.fromEntries(data.cells.map((name, at) => [name, cells[at]]));
      row.words = WORDS.map((name) => (name === "tools" ? row.tools.join(" ") : row[name])).join("\n").toLowerCase();
      row.href = `episode/${row.page || row.id}.html`;
      episodes.set(row.id, row);
    }
  };
  take(data.rows);

  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const scored = (rows) => rows.map((row) => row.reward).filter((reward) => reward !== null);
  const gathered = (rows, key) => {
    const found = new Map();
    for (const row of rows) {
      const name = key(row);
      if (found.has(name)) found.get(name).push(row);
      else found.set(name, [row]);
    }
    return [...found.values()];
  };
  const summary = (rows) => {
    const rewards = scored(rows), reward = mean(rewards);
    const std = reward === null ? null : Math.sqrt(mean(rewards.map((each) => (each - reward) ** 2)));
    const sum = (name) => rows.reduce((total, row) => total + (row[name] || 0), 0);
    return { ...rows[0], rows, reward, std, count: rows.length, tokens: sum("tokens"), seconds: sum("seconds") };
  };
  const steps = (rows) =>
    gathered(rows, (row) => `${row.step}\n${row.phase}`).map((own) => ({
      ...summary(own),
      href: `#view=groups&q=${encodeURIComponent(`phase=${quoted(own[0].phase)} step=${own[0].step}`)}`,
      groups: new Set(own.map((row) => row.group)).size,
      endings: gathered(own, (row) => row.ending).map((each) => `${each.length} ${each[0].ending}`).join(", "),
    }));
  const groups = (rows) =>
    gathered(rows, (row) => row.group).map((own) => ({ ...summary(own), href: `group/${own[0].group_page || own[0].group}.html` }));

  // -- filter

  const quoted = (text) => (/[\s"]/.test(text) ? `"${text}"` : text);
  const TERM = /(-?)(?:([A-Za-z_]\w*)(:|=|>=|<=|>|<))?(?:"([^"]*)"?|(\S+))/g;
  const holds = {
    ":": (a, b) => a.includes(b), "=": (a, b) => a === b,
  };
  const compares = {
    ":": (a, b) => a === b, "=": (a, b) => Math.abs(a - b) < 5e-5, ">": (a, b) => a > b, "<": (a, b) => a < b,
    ">=": (a, b) => a >= b, "<=": (a, b) => a <= b,
  };
  const texts = { found: new Map(), asked: "" }; // ids by what was looked for

  const parse = (query) => {
    const tests = [], wrong = [], wanted = [];
    const known = new Set([...episodes.values()].flatMap((row) => Object.keys(row.scores)));
    for (const [whole, not, name, sign, inQuotes, plain] of query.matchAll(TERM)) {
      const value = inQuotes ?? plain, low = value.toLowerCase(), field = ALIAS[name] || name;
      let test = null;
      if (!name) test = (row) => row.words.includes(low);
      else if (field === "text") {
        if (low) wanted.push(low);
        test = (row) => !low || (texts.found.get(low)?.has(row.id) ?? false);
      } else if (field === "tools" && holds[sign]) test = (row) => row.tools.some((tool) => holds[sign](tool.toLowerCase(), low));
      else if (WORDS.includes(field) && holds[sign]) test = (row) => holds[sign](String(row[field]).toLowerCase(), low);
      else if ((NUMBERS.includes(field) || known.has(name)) && value !== "" && !isNaN(value)) {
        const read = NUMBERS.includes(field) ? (row) => row[field] : (row) => row.scores[name];
        test = (row) => { const own = read(row); return own !== null && own !== undefined && compares[sign](own, Number(value)); };
      }
      if (test) tests.push(not ? (row) => !test(row) : test);
      else wrong.push(whole);
    }
    return { test: (row) => tests.every((each) => each(row)), wrong, wanted };
  };

  // What was said and done is beside the list: a server searches for it, a folder has it in a file.
  const lookUp = async (low) => {
    if (texts.found.has(low)) return;
    if (data.live) {
      const got = await fetch(`search.json?text=${encodeURIComponent(low)}`).then((answer) => answer.json());
      texts.found.set(low, new Set(got.found));
    } else {
      texts.all ||= new Promise((done, failed) => {
        const all = [];
        globalThis.found = (id, text) => all.push([id, text]);
        const script = make("script");
        script.src = "text.js";
        script.onload = () => done(all);
        script.onerror = () => failed(new Error("text.js is not there"));
        document.head.append(script);
      });
      const all = await texts.all;
      texts.found.set(low, new Set(all.filter(([, text]) => text.includes(low)).map(([id]) => id)));
    }
  };

  // -- cells

  const number = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
  const signed = (value) => (value === null ? "–" : `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(2)}`);
  const short = (seconds) => (seconds === null || seconds === undefined ? "–" : seconds < 100 ? `${seconds.toFixed(1)} s` : `${(seconds / 60).toFixed(1)} min`);
  const badge = (row) => make("span", `badge ${row.ending}`, row.ending + (row.reason && row.ending !== "done" ? ` · ${row.reason}` : ""));
  const meter = (value) => {
    const bar = make("i");
    bar.style.width = `${100 * Math.max(0, Math.min(1, value ?? 0))}%`;
    return [make("span", "meter", bar), number(value)];
  };
  const dots = (rows) => {
    const box = make("span", "dots");
    for (const row of [...rows].sort((a, b) => a.attempt - b.attempt)) {
      const dot = make("i", row.reward === null ? "none" : "");
      dot.style.setProperty("--r", Math.max(0, Math.min(1, row.reward ?? 0)));
      dot.title = `attempt ${row.attempt}: ${number(row.reward)}`;
      box.append(dot);
    }
    return box;
  };
  const text = (name) => (row) => String(row[name]);
  const task = (row) => make("bdi", "", row.task); // cut at the front: tasks differ at the end
  const advantage = (row) => make("span", row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "soft", signed(row.advantage));

  // key, title, width, cell, css, whether a phone has room for it
  const COLUMNS = {
    steps: [
      ["step", "step", "50px", text("step"), "n", true], ["phase", "phase", "minmax(60px, 1fr)", text("phase"), "", true],
      ["reward", "mean reward", "130px", (row) => meter(row.reward), "", true], ["std", "std", "60px", (row) => number(row.std), "n"],
      ["groups", "groups", "70px", text("groups"), "n"], ["count", "episodes", "76px", text("count"), "n", true],
      ["endings", "endings", "minmax(120px, 2fr)", text("endings"), ""],
      ["tokens", "tokens", "90px", (row) => row.tokens.toLocaleString("en"), "n"], ["seconds", "episode time", "100px", (row) => short(row.seconds), "n"],
    ],
    groups: [
      ["step", "step", "50px", text("step"), "n"], ["phase", "phase", "70px", text("phase"), ""], ["task", "task", "minmax(120px, 3fr)", task, "front", true],
      ["count", "attempts", "minmax(90px, 1.4fr)", (row) => dots(row.rows), "", true], ["reward", "mean reward", "130px", (row) => meter(row.reward), "", true],
      ["std", "std", "60px", (row) => number(row.std), "n"], ["tokens", "tokens", "80px", (row) => row.tokens.toLocaleString("en"), "n"],
    ],
    episodes: [
      ["step", "step", "44px", text("step"), "n"], ["phase", "phase", "62px", text("phase"), ""], ["task", "task", "minmax(120px, 3fr)", task, "front", true],
      ["attempt", "#", "26px", text("attempt"), "n"], ["reward", "reward", "104px", (row) => meter(row.reward), "", true],
      ["advantage", "advantage", "76px", advantage, "n"], ["ending", "ending", "minmax(100px, .8fr)", badge, "", true],
      ["turns", "turns", "38px", text("turns"), "n"], ["calls", "calls", "58px", (row) => (row.failed ? `${row.calls} (${row.failed}✗)` : row.calls), "n"],
      ["tokens", "tokens", "64px", (row) => row.tokens.toLocaleString("en"), "n"],
      ["added", "patch", "78px", (row) => (row.added || row.deleted ? `+${row.added} −${row.deleted}` : "–"), "n"], ["seconds", "time", "62px", (row) => short(row.seconds), "n"],
    ],
  };

  // -- the list

  const state = { view: "episodes", q: "", sort: "" };
  const list = byId("list"), body = make("div", "body");
  let shown = [], at = -1, columns = [];

  const order = (rows) => {
    const plain = (a, b) => a.step - b.step || (a.phase < b.phase ? -1 : a.phase > b.phase ? 1 : 0) || (a.group < b.group ? -1 : a.group > b.group ? 1 : 0) || a.attempt - b.attempt;
    const down = state.sort.startsWith("-"), key = state.sort.replace(/^-/, "");
    const by = (a, b) => {
      const [x, y] = [a[key] ?? a.scores?.[key] ?? null, b[key] ?? b.scores?.[key] ?? null];
      if (x === null || y === null) return (x === null) - (y === null); // what has no value comes last
      const less = x < y ? -1 : x > y ? 1 : 0;
      return (down ? -less : less) || plain(a, b);
    };
    return rows.sort(key ? by : plain);
  };

  const draw = () => {
    const height = parseFloat(getComputedStyle(list).getPropertyValue("--row"));
    const top = body.getBoundingClientRect().top;
    const from = Math.max(0, Math.floor(-top / height) - SPARE), to = Math.min(shown.length, Math.ceil((innerHeight - top) / height) + SPARE);
    const focused = document.activeElement?.dataset?.at;
    body.style.height = `${shown.length * height}px`;
    body.replaceChildren(...shown.slice(from, Math.max(from, to)).map((row, offset) => {
      const line = make("a", `row${from + offset === at ? " here" : ""}`);
      line.href = row.href;
      line.dataset.at = from + offset;
      line.style.top = `${(from + offset) * height}px`;
      line.append(...columns.map(([, , , cell, css]) => make("span", css, ...[cell(row)].flat())));
      return line;
    }));
    if (focused !== undefined) body.querySelector(`[data-at="${focused}"]`)?.focus({ preventScroll: true });
  };

  const head = () => {
    columns = COLUMNS[state.view].filter(([, , , , , phone]) => phone || innerWidth > 720);
    list.style.setProperty("--columns", columns.map(([, , width]) => (innerWidth > 720 ? width : width.replace("130px", "90px"))).join(" "));
    return make("div", "head", ...columns.map(([key, title, , , css]) => {
      const own = state.sort.replace(/^-/, "") === key;
      const button = make("button", own ? "sorted" : "", title + (own ? (state.sort.startsWith("-") ? " ↓" : " ↑") : ""));
      button.addEventListener("click", () => {
        set({ sort: state.sort === `-${key}` ? key : state.sort === key ? "" : `-${key}` });
      });
      return make("span", css, button);
    }));
  };

  const update = () => {
    const query = parse(state.q);
    for (const low of query.wanted) {
      if (!texts.found.has(low)) lookUp(low).then(update, (error) => complain([error.message]));
    }
    complain(query.wrong);
    const rows = [...episodes.values()].filter(query.test);
    shown = order({ steps, groups, episodes: (each) => each }[state.view](rows));
    at = Math.min(at, shown.length - 1);
    list.replaceChildren(head(), shown.length ? body : make("div", "empty", episodes.size ? "No episode is like that." : "No episode has begun yet."));
    const all = `${episodes.size.toLocaleString("en")} episode${episodes.size === 1 ? "" : "s"}`;
    byId("count").textContent = rows.length === episodes.size ? all : `${rows.length.toLocaleString("en")} of ${all}`;
    for (const button of document.querySelectorAll("[data-view]")) button.setAttribute("aria-pressed", button.dataset.view === state.view);
    facets();
    draw();
  };

  const complain = (wrong) => {
    byId("wrong").hidden = !wrong.length;
    byId("wrong").textContent = wrong.length ? `Not understood: ${wrong.join(" ")} (? shows what can be asked)` : "";
  };

  // the state is in the address, so that a list can be sent, and is there again on the way back
  const set = (change) => {
    Object.assign(state, change);
    const asked = Object.entries(state).filter(([key, value]) => value && !(key === "view" && value === "episodes"));
    history.replaceState(null, "", `#${asked.map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&")}`);
    update();
  };
  const fromAddress = () => {
    const found = Object.fromEntries(location.hash.slice(1).split("&").filter(Boolean).map((part) => {
      const [key, ...value] = part.split("=");
      try {
        return [key, decodeURIComponent(value.join("="))];
      } catch {
        return [key, ""];
      }
    }));
    state.view = VIEWS.includes(found.view) ? found.view : "episodes";
    state.q = found.q || "";
    state.sort = found.sort || "";
    byId("query").value = state.q;
    at = -1;
    update();
  };

  const facets = () => {
    const boxes = [];
    for (const [field, name] of Object.entries(FACETS)) {
      const counts = new Map();
      for (const row of episodes.values()) {
        for (const value of field === "tools" ? row.tools : [row[field]]) if (value) counts.set(value, (counts.get(value) || 0) + 1);
      }
      if (counts.size < 2 || counts.size > 200) continue;
      const term = new RegExp(`(^|\\s)(${name}|${field}):?=?("[^"]*"|\\S+)`);
      const now = term.exec(state.q)?.[3]?.replace(/"/g, "");
      const select = make("select");
      select.setAttribute("aria-label", name);
      select.append(new Option(`any ${name}`, ""), ...[...counts].sort((a, b) => b[1] - a[1]).map(([value, count]) => new Option(`${value} (${count})`, value, false, value === now)));
      select.addEventListener("change", () => {
        const rest = state.q.replace(term, "").trim();
        byId("query").value = [rest, select.value && `${name}=${quoted(select.value)}`].filter(Boolean).join(" ");
        set({ q: byId("query").value });
      });
      boxes.push(select);
    }
    byId("facets").replaceChildren(...boxes);
  };

  // -- hands

  const select = (to) => {
    if (!shown.length) return;
    at = Math.max(0, Math.min(shown.length - 1, to));
    const height = parseFloat(getComputedStyle(list).getPropertyValue("--row")), top = body.getBoundingClientRect().top + at * height;
    const room = byId("query").closest(".finder").getBoundingClientRect().bottom;
    if (top < room || top + height > innerHeight) scrollBy(0, top - innerHeight / 2);
    draw();
    body.querySelector(`[data-at="${at}"]`)?.focus({ preventScroll: true });
  };
  // the order of the list goes with whoever opens an episode, to its neighbours
  const remember = () => {
    if (state.view !== "episodes") return;
    const folder = location.pathname.replace(/[^/]*$/, "episode/");
    try {
      sessionStorage.setItem("crrl", JSON.stringify({ folder, pages: shown.map((row) => row.page || row.id) }));
    } catch {
      // without storage the neighbours are those of the group
    }
  };
  body.addEventListener("click", remember);
  const keys = {
    j: () => select(at + 1), k: () => select(at - 1), "/": () => byId("query").select(),
    1: () => set({ view: "steps" }), 2: () => set({ view: "groups" }), 3: () => set({ view: "episodes" }),
    Enter: () => { if (shown[at] && document.activeElement === document.body) body.querySelector(`[data-at="${at}"]`)?.click(); },
    u: () => byId("up")?.click(), "?": () => byId("keys").showModal(),
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    if (event.target.matches("input, select")) {
      if (event.key === "Escape" || (event.key === "Enter" && event.target.matches("input"))) {
        event.target.blur();
        if (event.key === "Enter") select(0);
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
    typing = setTimeout(() => set({ q: byId("query").value }), 80);
  });
  for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => set({ view: button.dataset.view }));
  addEventListener("hashchange", fromAddress);
  addEventListener("scroll", draw, { passive: true });
  addEventListener("resize", update);
  fromAddress();

  // -- live

  if (data.live) {
    let since = data.state;
    setInterval(async () => {
      const answer = await fetch(`rows.json?since=${since}`).then((got) => got.json()).catch(() => null);
      byId("live").textContent = answer ? "live" : "the server does not answer";
      if (!answer) return;
      since = answer.state;
      if (answer.rows.length) {
        take(answer.rows);
        update();
      }
    }, 2000);
  }
})();
