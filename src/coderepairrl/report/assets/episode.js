// The page of an episode: tokens on demand, long texts cut, keys, and the way to the neighbours in the list.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const page = JSON.parse(byId("page").textContent);
  const talk = document.querySelector(".talk");
  const turns = [...document.querySelectorAll(".turn")];
  const VERSIONS = 6, SURPRISE = 5; // a logprob of -5 is shown in full colour

  const make = (tag, css, text) => {
    const element = document.createElement(tag);
    if (css) element.className = css;
    if (text) element.textContent = text;
    return element;
  };

  // -- tokens

  const write = (span, text) => {
    text.split("\n").forEach((line, at) => {
      if (at) span.append(make("b", "nl"), "\n");
      span.append(line);
    });
  };

  const token = (text, css, info) => {
    const span = make("span", `t ${css}${text ? "" : " part"}`);
    span.dataset.i = info;
    write(span, text);
    return span;
  };

  const paint = (pre) => {
    const turn = data[pre.dataset.turn];
    const version = (at) => (turn.versions.find(([, start, end]) => start <= at && at < end) || [null])[0];
    const sampled = (span, start, state, reason) =>
      span.ids.map((id, at) => {
        const by = version(start + at);
        const became = reason ? `${state} (${reason})` : state;
        const known = by === null ? "" : `version ${by} · `;
        const info = `policy · id ${id} · logprob ${span.logprobs[at].toFixed(4)} · ${known}${became}`;
        const one = token(span.text[at], `p ${state}${by === null ? "" : ` v${by % VERSIONS}`}`, info);
        one.style.setProperty("--s", Math.min(1, -span.logprobs[at] / SURPRISE).toFixed(2));
        return one;
      });
    const given = turn.given.ids.map((id, at) => token(turn.given.text[at], "g", `given · id ${id}`));
    if (given.length) pre.append(make("span", "label", "given"), ...given, "\n");
    pre.append(make("span", "label", `turn ${pre.dataset.turn}: sampled by the policy`));
    pre.append(...sampled(turn.output, 0, turn.state, turn.reason));
    pre.append(...sampled(turn.tail, turn.output.ids.length, "dropped", "stop_string"));
  };

  const legend = (shade) => {
    const states = new Set(Object.values(data).map((turn) => turn.state));
    const versions = new Set(Object.values(data).flatMap((turn) => turn.versions.map(([version]) => version)));
    const entry = (text, css, strength) => {
      const span = make("span", `t ${css}`, text);
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
        version: [...versions].sort((a, b) => a - b).map((each) => entry(`version ${each}`, `p v${each % VERSIONS}`)),
      }[shade],
    );
  };

  const show = (shade) => {
    const tokens = shade !== "words";
    talk.dataset.shade = shade;
    legend(shade);
    for (const button of document.querySelectorAll("[data-shade]")) {
      if (button.localName === "button") button.setAttribute("aria-pressed", button.dataset.shade === shade);
    }
    for (const turn of turns) {
      for (const part of turn.children) part.hidden = part.matches(".tokens") !== tokens;
      const pre = turn.querySelector(".tokens");
      if (tokens && !pre.firstChild) seen.observe(pre);
    }
  };

  // a page of a hundred thousand tokens draws what is looked at
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting && !target.firstChild) paint(target);
      }
    },
    { rootMargin: "600px" },
  );
  for (const button of document.querySelectorAll("button[data-shade]")) {
    button.addEventListener("click", () => show(button.dataset.shade));
  }

  const tip = byId("tip");
  talk.addEventListener("mouseover", (event) => {
    const one = event.target.closest?.(".t[data-i]");
    tip.hidden = !one;
    if (!one) return;
    tip.textContent = one.dataset.i;
    const { left, bottom } = one.getClientRects()[0] || one.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${bottom + 6}px`;
  });

  // -- long texts

  for (const text of document.querySelectorAll(".long")) {
    text.classList.add("cut");
    const lines = text.textContent.split("\n").length;
    const more = make("button", "more", lines > 1 ? `all ${lines} lines` : `all ${text.textContent.length} characters`);
    more.addEventListener("click", () => {
      text.classList.remove("cut");
      more.remove();
    });
    text.after(more);
  }
  const unfold = () => {
    for (const more of [...document.querySelectorAll(".more")]) more.click();
    for (const folded of document.querySelectorAll(".turns details")) folded.open = true;
  };

  // -- where we are

  let here = Math.max(0, turns.findIndex((turn) => `#${turn.id}` === location.hash));
  const mark = () => {
    const items = [...document.querySelectorAll(".outline li")];
    turns.forEach((turn, at) => turn.classList.toggle("here", at === here));
    items.forEach((item, at) => item.classList.toggle("here", at === here));
  };
  const go = (to) => {
    if (!turns.length) return;
    here = Math.max(0, Math.min(turns.length - 1, to));
    mark();
    for (const turn of turns.slice(0, here + 1)) {
      const pre = turn.querySelector(".tokens"); // those above must have their height before we scroll
      if (!pre.hidden && !pre.firstChild) paint(pre);
    }
    const reply = talk.dataset.shade === "words" && turns[here].querySelector(".assistant");
    (reply || turns[here]).scrollIntoView({ block: reply ? "center" : "start" });
    turns[here].focus({ preventScroll: true });
    history.replaceState(null, "", `#${turns[here].id}`);
  };
  addEventListener("hashchange", () => {
    const at = turns.findIndex((turn) => `#${turn.id}` === location.hash);
    if (at >= 0) go(at);
  });

  // the episodes as the list had them, or else the group's
  const stored = (() => {
    try {
      return JSON.parse(sessionStorage.getItem("crrl") || "null");
    } catch {
      return null;
    }
  })();
  const folder = location.pathname.replace(/[^/]*$/, "");
  const listed = stored && stored.folder === folder && stored.pages.includes(page.page) ? stored.pages : page.group;
  const own = listed.indexOf(page.page);
  const neighbour = (by) => listed[own + by] && location.assign(`${listed[own + by]}.html`);
  if (own >= 0 && listed.length > 1 && byId("up")) {
    const link = (text, by, title) => {
      const to = listed[own + by];
      const one = make(to ? "a" : "span", to ? "" : "faint", text);
      if (to) one.href = `${to}.html`;
      one.title = title;
      return one;
    };
    byId("walk").append(
      link("‹ previous", -1, "key ["), make("span", "num", `${own + 1} of ${listed.length}`), link("next ›", 1, "key ]"));
  }

  const to = (id) => byId(id)?.scrollIntoView({ block: "start" });
  const keys = {
    j: () => go(turns[here].classList.contains("here") ? here + 1 : here), k: () => go(here - 1),
    "]": () => neighbour(1), "[": () => neighbour(-1),
    1: () => show("words"), 2: () => show("mask"), 3: () => show("logprob"), 4: () => show("version"),
    p: () => to("patch"), s: () => to("scores"), c: () => to("conversation"),
    e: unfold, u: () => byId("up")?.click(), "?": () => byId("keys").showModal(),
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    if (keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    }
  });

  show("words");
  if (turns.some((turn) => `#${turn.id}` === location.hash)) go(here);

  // -- an episode that goes on

  if (page.open && page.live) {
    setInterval(async () => {
      const now = await fetch(`../state.json?page=${page.page}`).then((got) => got.json()).catch(() => null);
      if (now && (now.ending !== "open" || now.turns !== page.turns)) location.reload();
    }, 2000);
  }
})();
