"use strict";
// The time line's window, input and talk with the server. One question is on its way at a time: while somebody pans, what is there is
// moved at once and the answers follow. Every text goes into the page as text.
(() => {
  const draw = window.gpudiagDraw;
  const LEAST_NS = 200, MARGIN = 0.5, NEAR = 3, HOVER_MS = 90, ADDRESS_MS = 250, ANSWER_MS = 20_000;
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

  function unpacked(row) {
    for (const [key, Form] of Object.entries(FORMS)) {
      if (row[key] !== null) row[key] = new Form(Uint8Array.from(atob(row[key]), (character) => character.charCodeAt(0)).buffer);
    }
    return row;
  }

  const send = (id, data) => { if (S && S.root.isConnected) dash().set_props(id, { data }); };

  function ask(force) {
    // the window with half of it on either side; whatever is asked while an answer is awaited is asked once, when that has come
    const lost = performance.now() - S.asked > ANSWER_MS; // the server was stopped, or a request failed
    if (S.waiting && !lost) { S.again = true; S.force = S.force || force; return; }
    if (!force && fresh()) return;
    const length = S.to - S.from, known = S.from !== null && S.setup !== null;
    const low = known ? Math.max(S.from - MARGIN * length, S.setup.from) : S.from;
    const high = known ? Math.min(S.to + MARGIN * length, S.setup.to) : S.to;
    const pixels = S.from === null ? S.width : Math.max(1, Math.round(S.width * (high - low) / length));
    S.number += 1;
    S.waiting = S.number;
    S.asked = performance.now();
    S.root.setAttribute("aria-busy", "true");
    send("timeline-ask", { number: S.number, pixels, from_ns: low, to_ns: Math.max(high, low === null ? null : low + 1), lane: S.lane, op: S.op,
      event: S.from === null ? S.event : null, setup: S.setup === null });
  }

  function fresh() {
    if (!S.data) return false;
    const have = (S.data.to - S.data.from) / S.data.pixels, need = (S.to - S.from) / S.width;
    const covered = S.data.from <= Math.max(S.from, S.setup.from) && S.data.to >= Math.min(S.to, S.setup.to);
    return covered && have <= need * 1.2 && have >= need / 1.7;
  }

  function got(data) {
    if (!S || !data || data.number !== S.waiting) return;
    S.waiting = 0;
    S.root.setAttribute("aria-busy", "false");
    S.took = performance.now() - S.asked;
    if (data.error) return failed(data.error);
    if (data.setup) begin(data.setup);
    const follow = S.from === null;
    data.rows.forEach(unpacked);
    S.data = data;
    if (follow) { S.from = data.from; S.to = data.to; if (S.event) { choose(S.event); S.event = null; addressSoon(); } clamp(); }
    S.height = draw.places(data.rows);
    if (S.lane === null) sayLanes(new Set(data.rows.map((row) => row.lane)).size);
    keepChoice();
    legend();
    told();
    resize();
    if (S.again) { S.again = false; const force = S.force; S.force = false; ask(force); }
  }

  function sayLanes(drawn) {
    const all = S.setup.lanes.length;
    S.lanes.options[0].textContent = drawn < all ? `the busiest lanes (${drawn} of ${all})` : "all lanes";
  }

  function failed(text) {
    S.status.textContent = text;
    const tried = S.lane !== null || S.event !== null;
    if (S.lane !== null) S.lane = null;
    else if (S.event !== null) S.event = null;
    S.again = false;
    if (tried) ask(true);
    S.trouble = text;
  }

  function begin(setup) {
    S.setup = setup;
    if (setup.strip) unpacked(setup.strip);
    const choice = (key, text) => make("option", { value: key }, text);
    S.lanes.replaceChildren(choice("", "all lanes"), ...setup.lanes.map((lane) => choice(lane.key, lane.title)));
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
    told();
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
  const time = (x) => S.from + (x / S.width) * (S.to - S.from);

  function mark(op) { S.op = op; writeAddress(); ask(true); }

  function focus(event) { S.event = event; S.from = S.to = null; ask(true); }

  // -- address -------------------------------------------------------------------------------------------------------

  function addressSoon() { clearTimeout(S.addressTimer); S.addressTimer = setTimeout(writeAddress, ADDRESS_MS); }

  function writeAddress() {
    // replaceState says nothing to Dash: the page is not made anew for every step of a wheel
    if (!S || !S.root.isConnected || S.from === null) return;
    const query = new URLSearchParams(window.location.search), all = S.from <= S.setup.from && S.to >= S.setup.to;
    const put = (key, value) => (value === null ? query.delete(key) : query.set(key, value));
    put("from", all ? null : String(Math.round(S.from)));
    put("to", all ? null : String(Math.round(S.to)));
    put("lane", S.lane);
    put("op", S.op);
    put("event", S.selected && S.selected.event ? S.selected.event : null);
    window.history.replaceState(window.history.state, "", `${window.location.pathname}?${query}`);
  }

  function address(search) {
    const root = document.getElementById("timeline-root");
    if (root === null) return dash().no_update;
    if (!S || S.root !== root) build(root);
    const query = new URLSearchParams(search || ""), number = (key) => (/^-?\d{1,18}$/.test(query.get(key) || "") ? Number(query.get(key)) : null);
    S.lane = query.get("lane") || null;
    S.op = query.get("op") || null;
    S.event = query.get("event") || null;
    const from = number("from"), to = number("to"), window_ = from !== null && to !== null && to > from;
    if (window_ && S.event) { choose(S.event); S.event = null; }
    S.from = window_ ? from : null;
    S.to = window_ ? to : null;
    ask(true);
    return dash().no_update;
  }

  // -- pieces --------------------------------------------------------------------------------------------------------

  function nearest(row, at) {
    // the piece under a moment, or one within a few pixels of it
    const near = NEAR * (S.to - S.from) / S.width, first = draw.firstSeen(row, at - near);
    let best = null, least = Infinity;
    for (let i = first; i < row.start.length && row.start[i] <= at + near; i++) {
      const away = Math.max(row.start[i] - at, at - row.start[i] - row.length[i], 0);
      if (away < least) { least = away; best = i; }
    }
    return best;
  }

  function hit(x, y) {
    const row = S.data && S.data.rows.find((one) => y >= one.y && y < one.y + draw.ROW);
    const place = row ? nearest(row, time(x)) : null;
    return place === null || place === undefined ? null : { row, place };
  }

  function pointOf({ row, place }) {
    const single = row.count[place] === 1;
    return single ? { event: `${S.setup.tables[row.table[place]]}-${row.id[place]}` }
      : { event: null, lane: row.lane, row: row.row, first: row.first[place], count: row.count[place] };
  }

  function select(found) {
    S.active = found.row;
    S.outlined = found;
    choose(found);
    paintSoon();
    writeAddress();
  }

  function choose(what) {
    // an event by its name, or a piece that is drawn
    const point = typeof what === "string" ? { event: what } : pointOf(what);
    S.selected = { ...point, at: typeof what === "string" ? null : what.row.start[what.place] };
    S.pick += 1;
    send("timeline-pick", { number: S.pick, ...point });
  }

  function letGo() {
    S.selected = S.outlined = S.active = null;
    send("timeline-pick", null);
    writeAddress();
    paintSoon();
  }

  function isChosen(row, i) {
    const one = S.selected;
    if (!one) return false;
    if (one.event) return row.count[i] === 1 && one.event === `${S.setup.tables[row.table[i]]}-${row.id[i]}`;
    return row.lane === one.lane && row.row === one.row && row.first[i] === one.first && row.count[i] === one.count;
  }

  function keepChoice() {
    // rows are new objects with every answer
    if (S.active) S.active = S.data.rows.find((row) => row.lane === S.active.lane && row.row === S.active.row) || null;
    S.hovered = null;
    S.outlined = null;
    if (!S.selected) return;
    // an op of a CPU may stand in several pieces: the one that was chosen, else the first
    let first = null;
    for (const row of S.data.rows) {
      if (S.selected.event === null && (row.lane !== S.selected.lane || row.row !== S.selected.row)) continue;
      for (let i = 0; i < row.start.length; i++) {
        if (!isChosen(row, i)) continue;
        if (row.start[i] === S.selected.at) { S.outlined = { row, place: i }; return; }
        first = first || { row, place: i };
      }
    }
    if (first === null) return;
    S.outlined = first;
    S.selected.at = first.row.start[first.place];
  }

  // -- input ---------------------------------------------------------------------------------------------------------

  function wheel(event) {
    if (!S.data) return;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY), length = S.to - S.from;
    const by = event.deltaMode === 1 ? 30 : 1;
    if (sideways) {
      event.preventDefault();
      return pan((event.deltaX || event.deltaY) * by * length / S.width);
    }
    if (event.deltaY > 0 && length >= S.setup.to - S.setup.from) return; // nothing left to zoom out of: the page scrolls
    event.preventDefault();
    zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY * by)) * 0.0025), time(event.offsetX));
  }

  const place = (event) => { const box = S.canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };

  function down(event) {
    if (!S.data || event.button > 0) return;
    const [x, y] = place(event);
    S.pointers.set(event.pointerId, x);
    S.canvas.setPointerCapture(event.pointerId);
    S.drag = { x, y, from: S.from, to: S.to, far: false, strip: y < draw.STRIP, band: event.shiftKey && y >= draw.STRIP };
    S.pinch = S.pointers.size === 2 ? { apart: apart(), from: S.from, to: S.to } : null;
    if (S.drag.strip) centre(x);
    hide();
  }

  const apart = () => { const [a, b] = [...S.pointers.values()]; return Math.max(8, Math.abs(a - b)); };

  function centre(x) {
    const at = S.setup.from + (x / S.width) * (S.setup.to - S.setup.from), half = (S.to - S.from) / 2;
    show(at - half, at + half);
  }

  function move(event) {
    if (!S.data) return;
    const [x, y] = place(event);
    if (!S.drag || !S.pointers.has(event.pointerId)) return hover(x, y);
    S.pointers.set(event.pointerId, x);
    S.drag.far = S.drag.far || Math.abs(x - S.drag.x) > 4;
    if (S.pinch && S.pointers.size === 2) {
      const middle = (S.pinch.from + S.pinch.to) / 2, half = (S.pinch.to - S.pinch.from) / 2 * S.pinch.apart / apart();
      return show(middle - half, middle + half);
    }
    if (S.drag.strip) return centre(x);
    if (S.drag.band) { S.drag.end = x; return paintSoon(); }
    const by = (S.drag.x - x) / S.width * (S.drag.to - S.drag.from);
    if (S.drag.far) show(S.drag.from + by, S.drag.to + by);
  }

  function up(event) {
    const drag = S.drag, [x, y] = place(event);
    S.pointers.delete(event.pointerId);
    if (S.pointers.size) return;
    S.drag = S.pinch = null;
    if (!drag || event.type === "pointercancel" || drag.strip) return paintSoon();
    if (drag.band && drag.far) return show(...[time(drag.x), time(x)].sort((a, b) => a - b));
    const found = drag.far ? null : hit(x, y);
    if (found) select(found); else if (!drag.far) letGo();
  }

  const KEYS = {
    ArrowLeft: () => pan(-0.2 * (S.to - S.from)), ArrowRight: () => pan(0.2 * (S.to - S.from)),
    "+": () => zoom(0.6, middle()), "=": () => zoom(0.6, middle()), "-": () => zoom(1 / 0.6, middle()), _: () => zoom(1 / 0.6, middle()),
    0: fit, Home: fit, ArrowUp: () => step(-1), ArrowDown: () => step(1), n: () => next(1), p: () => next(-1), m: () => search(1),
    M: () => search(-1), Enter: zoomToChosen, Escape: letGo,
  };

  function key(event) {
    const act = KEYS[event.key];
    if (!act || !S.data || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  function middle() {
    // what is chosen stays in place while keys zoom
    const at = S.selected && S.selected.at;
    return at !== null && at >= S.from && at <= S.to ? at : (S.from + S.to) / 2;
  }

  function zoomToChosen() {
    if (!S.selected) return;
    if (S.selected.event) return focus(S.selected.event);
    if (!S.outlined) return;
    const { row, place: at } = S.outlined;
    show(row.start[at], row.start[at] + Math.max(row.length[at], LEAST_NS));
  }

  function step(by) {
    const rows = S.data.rows;
    if (!rows.length) return;
    const at = S.active ? rows.indexOf(S.active) + by : by > 0 ? 0 : rows.length - 1;
    S.active = rows[Math.min(Math.max(at, 0), rows.length - 1)];
    const lane = S.setup.lanes[S.active.lane].title;
    S.said.textContent = `row ${S.active.row + 1} of ${lane}`;
    paintSoon();
  }

  function next(by) {
    if (!S.active) step(1);
    const row = S.active, chosen = S.outlined && S.outlined.row === row ? S.outlined.place : null;
    if (!row) return;
    if (!row.start.length) { S.said.textContent = "no event of this row in or near the window"; return; }
    const at = chosen === null ? draw.firstSeen(row, S.from) - (by > 0 ? 1 : 0) : chosen;
    const found = { row, place: Math.min(Math.max(at + by, 0), row.start.length - 1) };
    S.outlined = found;
    select(found);
    const start = row.start[found.place];
    if (start < S.from || start > S.to) pan(start - (S.from + S.to) / 2);
  }

  function search(direction) {
    if (!S.op) return;
    const at = S.selected && S.selected.at !== null ? S.selected.at : direction > 0 ? S.from - 1 : S.to;
    send("timeline-search", { op: S.op, at_ns: at, direction });
  }

  function found(data) {
    if (!S || !data || !S.data) return;
    if (data.event === null) { S.said.textContent = "no further work of the marked op in this direction"; return; }
    choose(data.event);
    show(data.from, data.to);
    ask(true);
  }

  // -- what is said --------------------------------------------------------------------------------------------------

  function hover(x, y) {
    const under = hit(x, y);
    const same = under && S.hovered && under.row === S.hovered.row && under.place === S.hovered.place;
    if (under === null) return hide();
    S.hovered = under;
    if (!same) { tip(under); paintSoon(); }
    const box = S.tip.getBoundingClientRect(), right = x + 16 + box.width > S.width;
    S.tip.style.left = `${Math.max(0, right ? x - box.width - 12 : x + 16)}px`;
    S.tip.style.top = `${y + 18}px`; // may reach beyond the frame
  }

  function tip({ row, place: at }) {
    const count = row.count[at], style = S.setup.words[row.code[at]];
    const title = row.names[at] || (count > 1 ? `${count.toLocaleString("en")} events, zoom in` : style);
    fill(title, [[count > 1 ? "mostly" : "is", style], ["duration", draw.units(row.length[at])]]);
    S.tip.hidden = false;
    clearTimeout(S.hoverTimer);
    S.hoverTimer = setTimeout(() => { S.point += 1; send("timeline-point", { number: S.point, ...pointOf({ row, place: at }) }); }, HOVER_MS);
  }

  function fill(title, lines) {
    S.tip.replaceChildren(make("strong", {}, title), ...lines.map(([what, value]) => make("div", {}, make("span", {}, `${what} `), value)));
  }

  function pointed(data) {
    if (S && data && data.number === S.point && S.hovered && !S.tip.hidden) fill(data.title, data.lines);
  }

  function hide() {
    if (S.hovered) { S.hovered = null; paintSoon(); }
    clearTimeout(S.hoverTimer);
    S.tip.hidden = true;
  }

  function told() {
    if (!S.data || S.from === null) return;
    const whole = S.setup.to - S.setup.from, number = (value) => value.toLocaleString("en");
    const where = S.to - S.from >= whole ? `The whole recording, ${draw.units(whole)}.`
      : `${draw.units(S.to - S.from)} of ${draw.units(whole)}, from ${draw.units(S.from - S.setup.from)} on.`;
    const near = S.data.to - S.data.from > S.to - S.from ? " in and around it" : "";
    const joined = S.data.joined ? `, ${number(S.data.joined)} of them drawn together in lower bars: zoom in` : "";
    const text = `${where} ${number(S.data.events)} event${S.data.events === 1 ? "" : "s"}${near}${joined}.`;
    S.status.textContent = S.trouble ? `${S.trouble}. ${text}` : text;
    S.trouble = "";
    S.lanes.value = S.lane || "";
    S.marking.hidden = !S.op;
    const op = (S.op || "").replace(/\p{C}/gu, ""); // no control or bidi characters
    S.marked.textContent = S.op ? `${op.length > 60 ? `${op.slice(0, 59)}\u2026` : op}: ${number(S.data.marked || 0)} marked` : "";
  }

  function legend() {
    const seen = new Set();
    for (const row of S.data.rows) for (const code of row.code) seen.add(code);
    const wanted = [...seen].sort((a, b) => a - b), mark = wanted.join();
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
        from: S.from, to: S.to, width: S.width, ratio: S.ratio, rows: S.data.rows, lanes: S.setup.lanes, styles: S.setup.styles, colours: S.colours,
        whole: S.setup, zero: S.setup.from, strip: S.setup.strip, focused: S.lane !== null, hovered: S.hovered, selected: S.outlined, active: S.active,
        band: S.drag && S.drag.band && S.drag.far ? [S.drag.x, S.drag.end] : null,
      }, S.height);
      S.painted = performance.now() - began;
      // for tests and for the curious: what is shown, and how long the last answer and the last frame took
      S.root.dataset.window = `${Math.round(S.from)},${Math.round(S.to)}`;
      S.root.dataset.timing = `${S.took.toFixed(1)},${S.painted.toFixed(1)}`;
    });
  }

  function resize() {
    const width = Math.max(200, Math.floor(S.frame_.clientWidth)), ratio = window.devicePixelRatio || 1;
    if (S.width !== width || S.ratio !== ratio || S.canvas.height !== Math.round(S.height * ratio) || S.canvas.width !== Math.round(width * ratio)) {
      S.width = width;
      S.ratio = ratio;
      S.canvas.width = Math.round(width * ratio);
      S.canvas.height = Math.round(S.height * ratio);
      S.canvas.style.height = `${S.height}px`;
    }
    paintSoon();
  }

  function build(root) {
    const button = (text, label, act) => make("button", { type: "button", ...(text.length > 1 ? {} : { "aria-label": label }), title: label, onclick: act }, text);
    const canvas = make("canvas", { "aria-hidden": "true" }), tip_ = make("div", { class: "timeline-tip" });
    const frame_ = make("div", { class: "timeline-frame", id: "timeline-frame", tabindex: "0", role: "application",
      "aria-label": "Timeline", "aria-roledescription": "timeline",
      "aria-description": "Left and right move, plus and minus zoom, 0 shows everything, up and down choose a row, N and P its events." }, canvas, tip_);
    const status = make("p", { class: "quiet", role: "status", id: "timeline-status" }, "Drawing the timeline \u2026");
    const lanes = make("select", { id: "timeline-lanes", onchange: () => { S.lane = lanes.value || null; S.active = null; writeAddress(); ask(true); } });
    const marked = make("span", { id: "timeline-marked" }), said = make("span", { class: "hidden", role: "status" });
    const marking = make("span", { class: "timeline-marking" }, marked, button("\u2039", "Previous work of the marked op", () => search(-1)),
      button("\u203a", "Next work of the marked op", () => search(1)), button("Unmark", "Mark no op", () => mark(null)));
    const tools = make("div", { class: "timeline-tools" },
      make("span", { class: "timeline-buttons" }, button("\u2190", "Move left", () => pan(-0.4 * (S.to - S.from))),
        button("\u2192", "Move right", () => pan(0.4 * (S.to - S.from))), button("+", "Zoom in", () => zoom(0.5)),
        button("\u2212", "Zoom out", () => zoom(2)), button("All", "Show the whole recording", fit)),
      make("label", {}, "Lanes ", lanes), marking);
    const legend_ = make("ul", { class: "timeline-legend", "aria-label": "Colours and patterns" });
    marking.hidden = tip_.hidden = true;
    if (S) S.observer.disconnect();
    S = { root, canvas, frame_, status, lanes, marked, marking, said, legend: legend_, tip: tip_, width: 200, ratio: 1, height: 300,
      from: null, to: null, lane: null, op: null, event: null, setup: null, data: null, selected: null, outlined: null, hovered: null,
      active: null, number: 0, point: 0, pick: 0, waiting: 0, again: false, force: false, pointers: new Map(), drag: null, pinch: null,
      colours: draw.theme(root), legendOf: "", trouble: "", asked: 0, took: 0, painted: 0, frame: 0 };
    root.replaceChildren(tools, status, frame_, said, legend_);
    frame_.addEventListener("keydown", key);
    canvas.addEventListener("wheel", wheel, { passive: false });
    for (const [name, act] of [["pointerdown", down], ["pointermove", move], ["pointerup", up], ["pointercancel", up], ["pointerleave", hide]])
      canvas.addEventListener(name, act);
    S.observer = new ResizeObserver(() => { resize(); if (S.data) ask(false); });
    S.observer.observe(frame_);
    S.width = Math.max(200, Math.floor(frame_.clientWidth));
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
    const link = event.target instanceof Element ? event.target.closest("#timeline-panel a:is([data-event], [data-op])") : null;
    if (!link || !S || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    if (link.dataset.event) focus(link.dataset.event); else mark(link.dataset.op);
  });

  const answered = (act) => (data) => { act(data); return dash().no_update; };
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    gpudiagTimeline: { address, got: answered(got), pointed: answered(pointed), found: answered(found) },
  });
})();
