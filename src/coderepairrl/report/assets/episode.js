// The page of an episode: draws tokens on demand, cuts long texts, handles keys, links the neighbours in the list.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const page = JSON.parse(byId("page").textContent);
  const talk = document.querySelector(".talk");
  const turns = [...document.querySelectorAll(".turn")];
  const VERSION_COLOURS = 6, SURPRISE = 5; // a logprob of -5 is shown in full colour

  const makeElement = (tag, css, text) => {
    const element = document.createElement(tag);
    if (css) element.className = css;
    if (text) element.textContent = text;
    return element;
  };

  // -- tokens

  const appendLines = (span, text) => {
    text.split("\n").forEach((line, at) => {
      if (at) span.append(makeElement("b", "nl"), "\n");
      span.append(line);
    });
  };

  const makeToken = (text, css, info) => {
    const span = makeElement("span", `t ${css}${text ? "" : " part"}`);
    span.dataset.i = info;
    appendLines(span, text);
    return span;
  };

  const drawTokens = (pre) => {
    const turn = data[pre.dataset.turn];
    const findVersion = (at) => (turn.versions.find(([, start, end]) => start <= at && at < end) || [null])[0];
    const makeSampled = (span, start, state, reason) =>
      span.ids.map((id, at) => {
        const version = findVersion(start + at);
        const fate = reason ? `${state} (${reason})` : state;
        const sampledBy = version === null ? "" : `version ${version} · `;
        const info = `policy · id ${id} · logprob ${span.logprobs[at].toFixed(4)} · ${sampledBy}${fate}`;
        const colour = version === null ? "" : ` v${version % VERSION_COLOURS}`;
        const element = makeToken(span.text[at], `p ${state}${colour}`, info);
        element.style.setProperty("--s", Math.min(1, -span.logprobs[at] / SURPRISE).toFixed(2));
        return element;
      });
    const given = turn.given.ids.map((id, at) => makeToken(turn.given.text[at], "g", `given · id ${id}`));
    if (given.length) pre.append(makeElement("span", "label", "given"), ...given, "\n");
    pre.append(makeElement("span", "label", `turn ${pre.dataset.turn}: sampled by the policy`));
    pre.append(...makeSampled(turn.output, 0, turn.state, turn.reason));
    pre.append(...makeSampled(turn.tail, turn.output.ids.length, "dropped", "stop_string"));
  };

  const drawLegend = (shade) => {
    const states = new Set(Object.values(data).map((turn) => turn.state));
    const versions = new Set(Object.values(data).flatMap((turn) => turn.versions.map(([version]) => version)));
    const entry = (text, css, strength) => {
      const span = makeElement("span", `t ${css}`, text);
      if (strength !== undefined) span.style.setProperty("--s", strength);
      return span;
    };
    const box = byId("legend");
    box.dataset.shade = shade;
    box.replaceChildren(
      ...{
        words: [],
        mask: [entry("given", "g"), ...[...states].map((state) =>
          entry(state === "trained" ? `trained, advantage ${box.dataset.advantage}` : state, `p ${state}`))],
        logprob: [entry("certain", "p", 0), entry("−2.5", "p", 0.5), entry("−5 and below", "p", 1)],
        version: [...versions].sort((a, b) => a - b).map((each) => entry(`version ${each}`, `p v${each % VERSION_COLOURS}`)),
      }[shade],
    );
  };

  const setShade = (shade) => {
    const tokens = shade !== "words";
    talk.dataset.shade = shade;
    drawLegend(shade);
    for (const button of document.querySelectorAll("[data-shade]")) {
      if (button.localName === "button") button.setAttribute("aria-pressed", button.dataset.shade === shade);
    }
    for (const turn of turns) {
      for (const part of turn.children) part.hidden = part.matches(".tokens") !== tokens;
      const pre = turn.querySelector(".tokens");
      if (tokens && !pre.firstChild) drawWhenVisible.observe(pre);
    }
  };

  // a page can have a hundred thousand tokens: only those on the screen are drawn
  const drawWhenVisible = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting && !target.firstChild) drawTokens(target);
      }
    },
    { rootMargin: "600px" },
  );
  for (const button of document.querySelectorAll("button[data-shade]")) {
    button.addEventListener("click", () => setShade(button.dataset.shade));
  }

  const tip = byId("tip");
  talk.addEventListener("mouseover", (event) => {
    const token = event.target.closest?.(".t[data-i]");
    tip.hidden = !token;
    if (!token) return;
    tip.textContent = token.dataset.i;
    const { left, bottom } = token.getClientRects()[0] || token.getBoundingClientRect(); // a token can span lines
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${bottom + 6}px`;
  });

  // -- long texts

  for (const text of document.querySelectorAll(".long")) {
    text.classList.add("cut");
    const lines = text.textContent.split("\n").length;
    const more = makeElement("button", "more", lines > 1 ? `all ${lines} lines` : `all ${text.textContent.length} characters`);
    more.addEventListener("click", () => {
      text.classList.remove("cut");
      more.remove();
    });
    text.after(more);
  }
  const showLongTexts = () => {
    for (const more of [...document.querySelectorAll(".more")]) more.click();
    for (const folded of document.querySelectorAll(".turns details")) folded.open = true;
  };

  // -- the current turn

  let current = Math.max(0, turns.findIndex((turn) => `#${turn.id}` === location.hash));
  const markCurrent = () => {
    const items = [...document.querySelectorAll(".outline li")];
    turns.forEach((turn, at) => turn.classList.toggle("here", at === current));
    items.forEach((item, at) => item.classList.toggle("here", at === current));
  };
  const goToTurn = (to) => {
    if (!turns.length) return;
    current = Math.max(0, Math.min(turns.length - 1, to));
    markCurrent();
    for (const turn of turns.slice(0, current + 1)) {
      const pre = turn.querySelector(".tokens"); // those above must have their height before we scroll
      if (!pre.hidden && !pre.firstChild) drawTokens(pre);
    }
    const reply = talk.dataset.shade === "words" && turns[current].querySelector(".assistant");
    (reply || turns[current]).scrollIntoView({ block: reply ? "center" : "start" });
    turns[current].focus({ preventScroll: true });
    history.replaceState(null, "", `#${turns[current].id}`);
  };
  addEventListener("hashchange", () => {
    const at = turns.findIndex((turn) => `#${turn.id}` === location.hash);
    if (at >= 0) goToTurn(at);
  });

  // neighbours are those in the list that this page was opened from, else those of the group
  const storedList = (() => {
    try {
      return JSON.parse(sessionStorage.getItem("crrl") || "null");
    } catch {
      return null;
    }
  })();
  const folder = location.pathname.replace(/[^/]*$/, "");
  const pages = storedList && storedList.folder === folder && storedList.pages.includes(page.page) ? storedList.pages : page.group;
  const position = pages.indexOf(page.page);
  const openNeighbour = (by) => pages[position + by] && location.assign(`${pages[position + by]}.html`);
  if (position >= 0 && pages.length > 1 && byId("up")) {
    const makeLink = (text, by, title) => {
      const neighbour = pages[position + by];
      const element = makeElement(neighbour ? "a" : "span", neighbour ? "" : "faint", text);
      if (neighbour) element.href = `${neighbour}.html`;
      element.title = title;
      return element;
    };
    byId("walk").append(
      makeLink("‹ previous", -1, "key ["), makeElement("span", "num", `${position + 1} of ${pages.length}`), makeLink("next ›", 1, "key ]"));
  }

  const scrollToId = (id) => byId(id)?.scrollIntoView({ block: "start" });
  const keys = {
    j: () => goToTurn(turns[current].classList.contains("here") ? current + 1 : current), k: () => goToTurn(current - 1),
    "]": () => openNeighbour(1), "[": () => openNeighbour(-1),
    1: () => setShade("words"), 2: () => setShade("mask"), 3: () => setShade("logprob"), 4: () => setShade("version"),
    p: () => scrollToId("patch"), s: () => scrollToId("scores"), c: () => scrollToId("conversation"),
    e: showLongTexts, u: () => byId("up")?.click(), "?": () => byId("keys").showModal(),
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  });

  setShade("words");
  if (turns.some((turn) => `#${turn.id}` === location.hash)) goToTurn(current);

  // -- an unfinished episode: reloads when it has new turns

  if (page.open && page.live) {
    setInterval(async () => {
      const now = await fetch(`../state.json?page=${page.page}`).then((got) => got.json()).catch(() => null);
      if (now && (now.ending !== "open" || now.turns !== page.turns)) location.reload();
    }, 2000);
  }
})();
