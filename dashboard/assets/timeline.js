"use strict";
// The time line's window, state and talk with the server. One question is on its way at a time: while somebody pans, what is there is
// moved at once and the answers follow. Every text goes into the page as text.
(() => {
  const draw = window.gpudiagDraw;
  const LEAST_NS = 200, MARGIN = 0.5, AROUND = 10, ADDRESS_MS = 250, TYPED_MS = 300, AGAIN_MS = 400, ANSWER_MS = 20_000;
  const GUTTER = 176, ROOM = 640; // pixels of the names, and of a page that has room for them
  let S = null; // state of the page that is shown

  const dash = () => window.dash_clientside;
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value); else element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  };

  // -- talk ----------------------------------------------------------------------------------------------------------

  const FORMS = { start: Float64Array, length: Float64Array, code: Uint8Array, count: Int32Array, busy: Uint8Array, first: Int32Array,
    table: Uint8Array, id: Int32Array, marked: Uint8Array };

  function unpack(row) {
    for (const [key, Form] of Object.entries(FORMS)) {
      if (row[key] === null) continue;
      const text = atob(row[key]), bytes = new Uint8Array(text.length);
      for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
      row[key] = new Form(bytes.buffer);
    }
    return row;
  }

  const send = (id, data) => { if (S && S.root.isConnected) dash().set_props(id, { data }); };

  function ask(force) {
    // the window with half of it on either side; whatever is asked while an answer is awaited is asked once, when that has come
    const lost = performance.now() - S.asked > ANSWER_MS; // the server was stopped, or a request failed
    if (S.waiting && !lost) { S.again = true; S.force = S.force || force; return; }
    if (!force && fresh()) return;
    const length = S.to - S.from, known = S.from !== null && S.setup !== null, across = S.width - S.left;
    // an event is looked for: the server says where; else as much of the window as is known
    const free = S.event !== null || S.from === null;
    const low = free ? null : known ? Math.max(S.from - MARGIN * length, S.setup.from) : S.from;
    const high = free ? null : known ? Math.min(S.to + MARGIN * length, S.setup.to) : S.to;
    const pixels = free ? across : Math.max(1, Math.round(across * (high - low) / length));
    S.number += 1;
    S.waiting = S.number;
    S.asked = performance.now();
    S.root.setAttribute("aria-busy", "true");
    send("timeline-ask", { number: S.number, pixels, from_ns: low, to_ns: free ? null : Math.max(high, low + 1), op: S.op, find: S.find,
      rows: S.layout && rowsWithin(AROUND).map(({ lane, row }) => [lane, row]), event: S.event, setup: S.setup === null });
  }

  function rowsWithin(around) {
    const top = S.scroller.scrollTop - around * draw.ROW, bottom = S.scroller.scrollTop + S.height - draw.HEAD + around * draw.ROW;
    return S.layout.rows.filter((row) => row.y + draw.ROW > top && row.y < bottom);
  }

  function fresh() {
    if (!S.data) return false;
    const have = (S.data.to - S.data.from) / S.data.pixels, need = (S.to - S.from) / (S.width - S.left);
    const covered = S.data.from <= Math.max(S.from, S.setup.from) && S.data.to >= Math.min(S.to, S.setup.to);
    return covered && have <= need * 1.2 && have >= need / 1.7 && rowsWithin(0).every((row) => S.data.rows.has(row.key));
  }

  function got(data) {
    if (!S || !data || data.number !== S.waiting) return;
    const began = performance.now();
    S.waiting = 0;
    S.root.setAttribute("aria-busy", "false");
    S.took = began - S.asked;
    if (data.error) return failed(data.error);
    if (data.wait) { S.status.textContent = "Arranging the lanes \u2026"; setTimeout(() => ask(true), AGAIN_MS); return; }
    if (data.setup) begin(data.setup);
    data.rows = new Map(data.rows.map((row) => [`${row.lane}:${row.row}`, unpack(row)]));
    S.data = data;
    S.hovered = null;
    if (S.from === null || (S.event !== null && "place" in data)) arrive(data);
    legend();
    told();
    resize();
    S.unpacked = performance.now() - began;
    const again = S.again || data.setup, force = S.force; // the first answer holds the first rows, whichever are in sight
    S.again = S.force = false;
    if (again) ask(force);
  }

  function arrive(data) {
    // the window was the server's choice: all of the recording, or the surroundings of an event
    S.from = data.from;
    S.to = data.to;
    clamp();
    if (!S.event) return;
    S.choice.choose(S.event, data.place);
    S.event = null;
    addressSoon();
  }

  function failed(text) {
    S.trouble = S.status.textContent = text;
    S.again = false;
    if (S.event === null) return;
    S.event = null;
    ask(true);
  }

  function begin(setup) {
    S.setup = setup;
    if (setup.strip) unpack(setup.strip);
    const choice = (key, text) => make("option", { value: key }, text);
    S.lanes.replaceChildren(choice("", `all lanes (${setup.lanes.length})`), ...setup.lanes.map((lane) => choice(lane.key, lane.title)));
    if (S.lane !== null && !setup.lanes.some((lane) => lane.key === S.lane)) {
      S.trouble = `no lane '${S.lane.slice(0, 40)}' in this recording`;
      S.lane = null;
    }
    for (const { key } of setup.lanes) if (key.startsWith("python-")) S.folded.add(key); // stacks are deep
    arrange();
    if (S.asking) send("timeline-pick", S.asking);
    openLinked();
  }

  function openLinked() {
    // the area that the address names, once the lanes are known
    const text = S.linked;
    S.linked = null;
    if (text) S.choice.openArea(text);
  }

  function arrange() {
    if (!S.setup) return;
    S.layout = draw.layout(S.setup.lanes, S.left, S.folded, S.lane);
    if (S.active && !S.layout.rows.some((row) => row.key === S.active.key)) S.active = null;
    if (S.area) S.choice.edges(S.area);
    resize();
  }

  // -- the window ----------------------------------------------------------------------------------------------------

  function clamp() {
    const whole = S.setup.to - S.setup.from, length = Math.min(Math.max(S.to - S.from, LEAST_NS), whole);
    const middle = (S.from + S.to) / 2;
    S.from = Math.min(Math.max(middle - length / 2, S.setup.from), S.setup.to - length);
    S.to = S.from + length;
  }

  function moved() {
    clamp();
    paintSoon();
    ask(false);
    addressSoon();
  }

  function pan(ns) { if (S.data) { S.from += ns; S.to += ns; moved(); } }

  function zoom(factor, at = (S.from + S.to) / 2) {
    if (!S.data) return;
    const length = Math.min(Math.max((S.to - S.from) * factor, LEAST_NS), S.setup.to - S.setup.from), share = (at - S.from) / (S.to - S.from);
    S.from = at - share * length;
    S.to = S.from + length;
    moved();
  }

  function show(from, to) { if (S.data) { S.from = from; S.to = to; moved(); } }

  const fit = () => S.data && show(S.setup.from, S.setup.to);
  const time = (x) => S.from + ((x - S.left) / (S.width - S.left)) * (S.to - S.from);

  function focus(event) { S.event = event; ask(true); }

  // -- what is marked ------------------------------------------------------------------------------------------------

  function mark(op, find) {
    clearTimeout(S.typing);
    S.op = op;
    S.find = find;
    if (find !== null || op !== null) S.search.value = find || "";
    S.area = null;
    if (find !== null) S.choice.pick({ find });
    writeAddress();
    ask(true);
  }

  function typed() {
    clearTimeout(S.typing);
    const text = S.search.value.trim();
    if (text === (S.find || "")) return;
    mark(null, text || null);
    if (!text) S.choice.letGo();
  }

  function search(direction) {
    if (S.search.value.trim() !== (S.find || "")) typed();
    if (!S.op && !S.find) return;
    const at = S.selected && S.selected.start !== null ? S.selected.start : direction > 0 ? S.from - 1 : S.to;
    send("timeline-search", { op: S.op, find: S.find, at_ns: at, direction });
  }

  function found(data) {
    if (!S || !data || !S.data) return;
    if (data.event === null) { S.said.textContent = S.status.textContent = "Nothing further is found in this direction."; return; }
    S.choice.choose(data.event, data.place);
    show(data.from, data.to);
  }

  // -- address -------------------------------------------------------------------------------------------------------

  function addressSoon() { clearTimeout(S.addressTimer); S.addressTimer = setTimeout(() => { writeAddress(); told(); }, ADDRESS_MS); }

  function writeAddress() {
    // replaceState says nothing to Dash: the page is not made anew for every step of a wheel
    if (!S || !S.root.isConnected || S.from === null || !S.setup) return;
    const query = new URLSearchParams(window.location.search), all = S.from <= S.setup.from && S.to >= S.setup.to;
    const put = (key, value) => (value === null ? query.delete(key) : query.set(key, value));
    put("from", all ? null : String(Math.round(S.from)));
    put("to", all ? null : String(Math.round(S.to)));
    put("lane", S.lane);
    put("op", S.op);
    put("find", S.find);
    put("event", S.selected && S.selected.event ? S.selected.event : null);
    put("area", S.choice.formatArea());
    window.history.replaceState(window.history.state, "", `${window.location.pathname}?${query}`);
  }

  function address(search) {
    const root = document.getElementById("timeline-root");
    if (root === null) return dash().no_update;
    if (!S || S.root !== root) build(root);
    const query = new URLSearchParams(search || ""), number = (key) => (/^-?\d{1,18}$/.test(query.get(key) || "") ? Number(query.get(key)) : null);
    for (const key of ["lane", "op", "find", "event"]) S[key] = query.get(key) || null;
    if (S.find) S.op = null;
    S.search.value = S.find || "";
    S.area = S.selected = null;
    S.arrows = [];
    S.linked = S.event ? null : query.get("area");
    const from = number("from"), to = number("to"), window_ = from !== null && to !== null && to > from, area = S.linked !== null;
    S.from = window_ ? from : null;
    S.to = window_ ? to : null;
    if (S.setup) { arrange(); openLinked(); }
    if (S.find && !S.event) S.choice.pick({ find: S.find });
    else if (!S.event && !area) S.choice.pick(null);
    if (window_ && S.event) { S.choice.choose(S.event); S.event = null; }
    ask(true);
    return dash().no_update;
  }

  // -- what is said --------------------------------------------------------------------------------------------------

  function told() {
    if (!S.data || S.from === null) return;
    const whole = S.setup.to - S.setup.from, number = (value) => value.toLocaleString("en");
    const where = S.to - S.from >= whole ? `The whole recording, ${draw.units(whole)}.`
      : `${draw.units(S.to - S.from)} of ${draw.units(whole)}, from ${draw.units(S.from)} on.`;
    const joined = S.data.joined ? `, ${number(S.data.joined)} of them too short to be drawn one by one: zoom in` : "";
    const text = `${where} ${number(S.data.events)} event${S.data.events === 1 ? "" : "s"} of the lanes in sight${joined}.`;
    S.status.textContent = S.trouble ? `${S.trouble}. ${text}` : text;
    S.trouble = "";
    S.lanes.value = S.lane || "";
    S.marking.hidden = !S.op && !S.find;
    const op = (S.op || "").replace(/\p{C}/gu, ""); // no control or bidi characters
    const count = number(S.data.marked || 0);
    S.marked.textContent = S.op ? `${op.length > 60 ? `${op.slice(0, 59)}\u2026` : op}: ${count} marked` : `${count} found`;
  }

  function legend() {
    // of all that has been drawn so far: what stands below it does not jump
    for (const row of S.data.rows.values()) for (const code of row.code) S.codes.add(code);
    const wanted = [...S.codes].sort((a, b) => a - b), mark = wanted.join();
    if (mark === S.legendOf) return;
    S.legendOf = mark;
    const item = (code) => make("li", {}, draw.swatch(S.colours, S.setup.styles[code]), S.setup.words[code]);
    S.legend.replaceChildren(...wanted.map(item));
  }

  // -- the page ------------------------------------------------------------------------------------------------------

  function paintSoon() {
    if (S.frame) return;
    S.frame = requestAnimationFrame(() => {
      S.frame = 0;
      if (!S.data || S.from === null || !S.root.isConnected) return;
      const began = performance.now();
      draw.paint(S.canvas.getContext("2d", { alpha: false }), {
        from: S.from, to: S.to, width: S.width, left: S.left, ratio: S.ratio, scroll: S.scroller.scrollTop, layout: S.layout, data: S.data.rows,
        lanes: S.setup.lanes, styles: S.setup.styles, colours: S.colours, whole: S.setup, strip: S.setup.strip,
        hovered: S.hovered, selected: S.selected, active: S.active, area: S.area, arrows: S.arrows, pointer: S.pointer,
      }, S.height);
      S.painted = performance.now() - began;
      // for tests and for the curious: what is shown, and how long the last answer, its unpacking and the last frame took
      S.root.dataset.window = `${Math.round(S.from)},${Math.round(S.to)}`;
      S.root.dataset.timing = `${S.took.toFixed(1)},${S.unpacked.toFixed(1)},${S.painted.toFixed(1)}`;
    });
  }

  function resize() {
    const width = Math.max(200, S.scroller.clientWidth), ratio = window.devicePixelRatio || 1, left = width < ROOM ? 0 : GUTTER;
    if (left !== S.left) { S.left = left; if (S.setup) return arrange(); }
    if (S.layout) S.scroller.style.maxHeight = `${S.layout.height + draw.HEAD + 8}px`;
    const height = Math.max(120, S.scroller.clientHeight);
    if (S.width !== width || S.ratio !== ratio || S.height !== height || S.canvas.width !== Math.round(width * ratio)) {
      Object.assign(S, { width, height, ratio });
      S.canvas.width = Math.round(width * ratio);
      S.canvas.height = Math.round(height * ratio);
      S.canvas.style.height = `${height}px`;
    }
    if (S.layout) S.spacer.style.height = `${Math.max(0, S.layout.height + draw.HEAD - height)}px`;
    paintSoon();
  }

  function build(root) {
    const button = (text, label, act) => make("button", { type: "button", ...(text.length > 1 ? {} : { "aria-label": label }), title: label, onclick: act }, text);
    const canvas = make("canvas", { "aria-hidden": "true" }), tip_ = make("div", { class: "timeline-tip" }), spacer = make("div");
    const scroller = make("div", { class: "timeline-frame", id: "timeline-frame", tabindex: "0", role: "application",
      "aria-label": "Timeline", "aria-roledescription": "timeline",
      "aria-description": "W and S zoom, A and D move, 0 shows everything, up and down choose a row, N and P its events, slash searches." }, canvas, spacer);
    const status = make("p", { class: "quiet", role: "status", id: "timeline-status" }, "Drawing the timeline \u2026");
    const lanes = make("select", { id: "timeline-lanes", onchange: () => { S.lane = lanes.value || null; arrange(); writeAddress(); ask(true); } });
    const search_ = make("input", { type: "search", id: "timeline-find", placeholder: "op, kernel, call \u2026", maxlength: "2000", spellcheck: "false",
      oninput: () => { clearTimeout(S.typing); S.typing = setTimeout(typed, TYPED_MS); },
      onkeydown: (event) => {
        if (event.key === "Enter") { event.preventDefault(); search(event.shiftKey ? -1 : 1); }
        if (event.key === "Escape") scroller.focus();
      } });
    const marked = make("span", { id: "timeline-marked" }), said = make("span", { class: "hidden", role: "status" });
    const marking = make("span", { class: "timeline-marking" }, marked, button("\u2039", "Previous one", () => search(-1)),
      button("\u203a", "Next one", () => search(1)), button("Unmark", "Mark nothing", () => { S.search.value = ""; mark(null, null); S.choice.letGo(); }));
    const tools = make("div", { class: "timeline-tools" },
      make("span", { class: "timeline-buttons" }, button("\u2190", "Move left", () => pan(-0.4 * (S.to - S.from))),
        button("\u2192", "Move right", () => pan(0.4 * (S.to - S.from))), button("+", "Zoom in", () => zoom(0.5)),
        button("\u2212", "Zoom out", () => zoom(2)), button("All", "Show the whole recording", fit)),
      make("label", {}, "Search ", search_), marking, make("label", {}, "Lanes ", lanes));
    const legend_ = make("ul", { class: "timeline-legend", "aria-label": "Colours and patterns" });
    marking.hidden = tip_.hidden = true;
    if (S) S.observer.disconnect();
    S = { root, canvas, scroller, spacer, status, lanes, marked, marking, said, search: search_, legend: legend_, tip: tip_, width: 0, height: 0,
      left: -1, ratio: 1, from: null, to: null, lane: null, op: null, find: null, event: null, setup: null, layout: null, folded: new Set(),
      data: null, selected: null, hovered: null, active: null, area: null, linked: null, arrows: [], asking: null, number: 0, point: 0, pick: 0, waiting: 0, again: false,
      force: false, pointers: new Map(), pointer: null, drag: null, pinch: null, colours: draw.theme(root), legendOf: "", codes: new Set(), trouble: "", asked: 0,
      took: 0, unpacked: 0, painted: 0, frame: 0 };
    root.replaceChildren(tools, status, make("div", { class: "timeline-wrap" }, scroller, tip_), said, legend_);
    resize();
    const focusSearch = () => { S.search.focus(); S.search.select(); };
    const page = { make, send, ask, time, pan, zoom, show, fit, focus, search, focusSearch, arrange, writeAddress, paintSoon };
    S.choice = window.gpudiagChoice(S, page);
    window.gpudiagInput(S, { ...page, ...S.choice });
    scroller.addEventListener("pointerenter", () => { // so that keys work where the pointer is, unless somebody writes elsewhere
      if (!["INPUT", "SELECT", "TEXTAREA"].includes(document.activeElement.tagName)) scroller.focus({ preventScroll: true, focusVisible: false });
    });
    scroller.addEventListener("scroll", () => { S.choice.hide(); paintSoon(); if (S.data) ask(false); });
    S.observer = new ResizeObserver(() => { resize(); if (S.data) ask(false); });
    S.observer.observe(scroller);
  }

  function recolour() {
    if (!S || !S.root.isConnected) return;
    S.colours = draw.theme(S.root);
    S.legendOf = "";
    if (S.data) { legend(); paintSoon(); }
  }

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  new MutationObserver(recolour).observe(document.documentElement, { attributes: true });
  document.addEventListener("click", (event) => {
    // what leads from the panel to the time line is followed on the page, without leaving the lane and window that are looked at
    const link = event.target instanceof Element ? event.target.closest("#timeline-panel a[href*='/timeline?']") : null;
    if (!link || !S || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    event.stopPropagation();
    writeAddress();
    window.history.pushState(window.history.state, "", window.location.href); // Back leads to what was looked at before
    const query = new URL(link.href).searchParams;
    if (link.dataset.op) mark(link.dataset.op, null);
    else if (query.has("event")) focus(query.get("event"));
    else if (query.has("find")) mark(null, query.get("find"));
  }, { capture: true });

  window.addEventListener("popstate", () => {
    // Dash hears of an address that differs from the last one that it knows, and it knows none of those written here
    if (S && S.root.isConnected && window.location.pathname.endsWith("/timeline")) address(window.location.search);
  });

  const answered = (act) => (data) => { act(data); return dash().no_update; };
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    gpudiagTimeline: { address, got: answered(got), found: answered(found), pointed: answered((data) => S && S.choice.pointed(data)),
      arrows: answered((data) => S && S.choice.arrows(data)) },
  });
})();
