"use strict";
// How the time line is drawn: colours and patterns, the lanes, the ruler, the strip of the whole recording. Knows nothing of input.
window.gpudiagDraw = (() => {
  const ROW = 18, TITLE = 20, GAP = 8, STRIP = 26, RULER = 22;
  const HEAD = STRIP + RULER;
  const FONT = '12px system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
  // style -> [variable of its colour (report.css), pattern]: what differs in colour only by little differs in pattern
  const STYLES = {
    compute: ["--compute", ""], memory: ["--memory", "dots"], overhead: ["--overhead", "vertical"],
    communication: ["--communication", "diagonal"], copy: ["--copy", "back"], unknown: ["--unknown", ""],
    idle_data: ["--idle-data", "back"], idle_launch: ["--idle", "diagonal"], idle_sync: ["--idle-sync", "horizontal"],
    idle_dependency: ["--idle-order", "back"], idle_allocation: ["--idle-stall", "vertical"], idle_compile: ["--idle-stall", "diagonal"],
    idle_gc: ["--idle-host", "dots"], idle_io: ["--idle-host", "vertical"], idle_profiler: ["--unknown", "vertical"],
    idle_unexplained: ["--unknown", "dots"], idle_init: ["--idle-host", "horizontal"], outside_recording: ["--unknown", "diagonal"],
    step: ["--quiet", ""], step_left_out: ["--line", "diagonal"], op: ["--timeline-op", ""], call: ["--timeline-call", ""],
    wait: ["--idle-sync", "horizontal"], mark: ["--timeline-mark", ""],
  };

  function units(ns) {
    // as gpudiag.units.format_ns
    const names = ["ns", "us", "ms", "s"];
    let value = Math.abs(ns), index = 0;
    while (index < 3 && Number(value.toPrecision(3)) >= 1000) { value /= 1000; index += 1; }
    const shown = Number(value.toPrecision(3));
    const digits = shown >= 100 || (index === 0 && Number.isInteger(value)) ? 0 : shown >= 10 ? 1 : 2;
    return `${ns < 0 ? "-" : ""}${value.toFixed(digits)} ${names[index]}`;
  }

  function theme(element) {
    // a probe, because a variable may hold light-dark(...) or another variable, which a canvas does not read
    const probe = document.createElement("span");
    element.append(probe);
    const get = (name) => { probe.style.color = `var(${name}, gray)`; return getComputedStyle(probe).color; };
    const found = { fills: {}, tiles: new Map() };
    for (const name of ["page", "card", "text", "quiet", "line", "focus"]) found[name] = get(`--${name}`);
    for (const [style, [variable]] of Object.entries(STYLES)) found.fills[style] = get(variable);
    probe.remove();
    return found;
  }

  function luminance(colour) {
    // WCAG 2.2, relative luminance of 'rgb(r, g, b)'
    const [r, g, b] = colour.match(/[\d.]+/g).slice(0, 3).map((text) => Number(text) / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  const ink = (colour) => (luminance(colour) > 0.179 ? "#000000" : "#ffffff");

  function tile(colours, style) {
    // one canvas of 8 x 8 for each style, kept as long as the colours
    if (colours.tiles.has(style)) return colours.tiles.get(style);
    const canvas = document.createElement("canvas"), pattern = STYLES[style][1];
    canvas.width = canvas.height = 8;
    const g = canvas.getContext("2d");
    g.fillStyle = colours.fills[style];
    g.fillRect(0, 0, 8, 8);
    g.strokeStyle = g.fillStyle = ink(colours.fills[style]);
    g.globalAlpha = 0.45;
    g.lineWidth = 1.6;
    g.beginPath();
    if (pattern === "diagonal") for (const at of [-8, 0, 8]) { g.moveTo(at - 1, 9); g.lineTo(at + 9, -1); }
    if (pattern === "back") for (const at of [-8, 0, 8]) { g.moveTo(at - 1, -1); g.lineTo(at + 9, 9); }
    if (pattern === "vertical") { g.moveTo(4, 0); g.lineTo(4, 8); }
    if (pattern === "horizontal") for (const at of [2, 6]) { g.moveTo(0, at); g.lineTo(8, at); }
    g.stroke();
    if (pattern === "dots") for (const [x, y] of [[1, 1], [5, 5]]) g.fillRect(x, y, 2, 2);
    colours.tiles.set(style, canvas);
    return canvas;
  }

  function swatch(colours, style) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 14;
    const g = canvas.getContext("2d");
    g.fillStyle = g.createPattern(tile(colours, style), "repeat");
    g.fillRect(0, 0, 14, 14);
    return canvas;
  }

  function places(rows) {
    // where each row stands: titles stand above the first row of a lane
    let y = HEAD, lane = null;
    for (const row of rows) {
      if (row.lane !== lane) { y += (lane === null ? 2 : GAP) + TITLE; lane = row.lane; row.titleY = y - TITLE; } else row.titleY = null;
      row.y = y;
      y += ROW;
    }
    return y + GAP;
  }

  function firstSeen(row, from) {
    // first piece that ends after `from`: pieces are in order and apart
    let low = 0, high = row.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.start[middle] + row.length[middle] < from) low = middle + 1; else high = middle;
    }
    return low;
  }

  function paintRow(g, row, view) {
    const { from, to, width, colours, styles, patterns } = view, scale = width / (to - from);
    let last = -1, drawn = "";
    for (let i = firstSeen(row, from); i < row.start.length && row.start[i] <= to; i++) {
      const left = (row.start[i] - from) * scale, x = Math.max(left, -2);
      const right = Math.min((row.start[i] + row.length[i] - from) * scale, width + 2);
      const wide = Math.max(1, right - x - (right - x > 4 ? 1 : 0));
      const style = styles[row.code[i]];
      // a bar of a pixel over a bar of the same look adds nothing
      const whole = row.count[i] === 1, look = `${style}${whole}${row.marked ? row.marked[i] : ""}`;
      if (wide <= 1 && Math.floor(x) === last && look === drawn) continue;
      last = Math.floor(x);
      drawn = look;
      const tall = whole ? ROW - 2 : Math.max(4, Math.round((ROW - 6) * row.busy[i] / 100));
      g.globalAlpha = row.marked && !row.marked[i] ? 0.22 : 1;
      g.fillStyle = wide > 5 ? patterns[row.code[i]] : colours.fills[style];
      g.fillRect(x, row.y + ROW - 1 - tall, wide, tall);
      if (row.marked && row.marked[i]) { g.fillStyle = colours.text; g.fillRect(x, row.y + ROW - 2, wide, 2); }
      if (wide > 34 && row.names[i]) name(g, row.names[i], x, row.y, wide, colours.fills[style]);
    }
    g.globalAlpha = 1;
  }

  function name(g, text, x, y, wide, fill) {
    const room = Math.floor((wide - 8) / 6.2);
    if (room < 4) return;
    const shown = text.length > room ? `${text.slice(0, room - 1)}\u2026` : text;
    g.fillStyle = fill; // over the pattern, so that it can be read
    g.fillRect(x + 2, y + 3, Math.min(wide - 4, g.measureText(shown).width + 4), ROW - 6);
    g.fillStyle = ink(fill);
    g.fillText(shown, x + 4, y + ROW / 2, wide - 8);
  }

  function paintStrip(g, view) {
    const { whole, from, to, width, colours, strip, styles } = view;
    g.fillStyle = colours.card;
    g.fillRect(0, 0, width, STRIP - 4);
    const scale = width / (whole.to - whole.from);
    if (strip) for (let i = 0; i < strip.start.length; i++) {
      const wide = Math.max(1, strip.length[i] * scale), tall = Math.max(3, (STRIP - 8) * (strip.count[i] === 1 ? 1 : strip.busy[i] / 100));
      g.fillStyle = colours.fills[styles[strip.code[i]]];
      g.fillRect((strip.start[i] - whole.from) * scale, STRIP - 5 - tall, wide, tall);
    }
    const x = (from - whole.from) * scale, wide = Math.max(3, (to - from) * scale);
    g.fillStyle = colours.page;
    g.globalAlpha = 0.65;
    g.fillRect(0, 0, Math.max(0, x), STRIP - 4);
    g.fillRect(x + wide, 0, Math.max(0, width - x - wide), STRIP - 4);
    g.globalAlpha = 1;
    g.strokeStyle = colours.focus;
    g.lineWidth = 2;
    g.strokeRect(x + 1, 1, wide - 2, STRIP - 6);
  }

  function ticks(from, to, width) {
    // steps of 1, 2 or 5 times a power of ten, about 110 pixels apart
    const raw = (to - from) / Math.max(1, width / 110), power = 10 ** Math.floor(Math.log10(raw));
    const step = Math.max(1, [1, 2, 5, 10].map((by) => by * power).find((by) => by >= raw));
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to && found.length < 64; at += step) found.push(at);
    return { step, found };
  }

  function tick(at, step, last) {
    // one unit for the whole ruler, enough digits that two neighbours differ
    const size = Math.max(last, step), index = size >= 1e9 ? 3 : size >= 1e6 ? 2 : size >= 1e3 ? 1 : 0;
    const unit = 1000 ** index;
    return `${(at / unit).toFixed(Math.max(0, Math.ceil(-Math.log10(step / unit) - 1e-9)))} ${["ns", "us", "ms", "s"][index]}`;
  }

  function paintRuler(g, view, height) {
    const { from, to, width, colours, zero } = view, { step, found } = ticks(from - zero, to - zero, width);
    g.textBaseline = "middle";
    for (const at of found) {
      const x = Math.round((at + zero - from) / (to - from) * width) + 0.5;
      g.strokeStyle = colours.line;
      g.lineWidth = 1;
      g.beginPath();
      g.moveTo(x, STRIP);
      g.lineTo(x, height);
      g.stroke();
      g.fillStyle = colours.quiet;
      const text = tick(at, step, to - zero);
      if (x + 4 + g.measureText(text).width <= width) g.fillText(text, x + 4, STRIP + RULER / 2 - 2);
    }
  }

  function outline(g, view, row, i, colour, thick) {
    const scale = view.width / (view.to - view.from), x = (row.start[i] - view.from) * scale;
    g.strokeStyle = colour;
    g.lineWidth = thick;
    g.strokeRect(Math.max(-4, x) - 1, row.y, Math.min(Math.max(2, row.length[i] * scale), view.width + 8) + 2, ROW);
  }

  function paint(g, view, height) {
    const { colours, width, rows } = view;
    g.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
    g.fillStyle = colours.page;
    g.fillRect(0, 0, width, height);
    g.font = FONT;
    paintRuler(g, view, height);
    view.patterns = view.styles.map((style) => g.createPattern(tile(colours, style), "repeat"));
    for (const row of rows) {
      if (row.titleY !== null) title(g, view, row);
      paintRow(g, row, view);
      if (row === view.active) { g.fillStyle = colours.focus; g.fillRect(0, row.y + 1, 3, ROW - 2); }
    }
    if (view.hovered) outline(g, view, view.hovered.row, view.hovered.place, colours.text, 1);
    if (view.selected) outline(g, view, view.selected.row, view.selected.place, colours.focus, 3);
    if (view.band) {
      g.fillStyle = colours.focus;
      g.globalAlpha = 0.2;
      g.fillRect(Math.min(...view.band), STRIP, Math.abs(view.band[1] - view.band[0]), height - STRIP);
      g.globalAlpha = 1;
    }
    paintStrip(g, view);
  }

  function title(g, view, row) {
    const lane = view.lanes[row.lane], notes = [lane.note, view.focused ? "" : lane.hint].filter(Boolean).join("; ");
    const text = fitting(g, notes ? `${lane.title}  (${notes})` : lane.title, view.width - 6);
    g.fillStyle = view.colours.page;
    g.fillRect(0, row.titleY, g.measureText(text).width + 8, TITLE - 2);
    g.fillStyle = view.colours.text;
    g.fillText(text, 2, row.titleY + TITLE / 2);
  }

  function fitting(g, text, room) {
    if (g.measureText(text).width <= room) return text;
    let low = 0, high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (g.measureText(`${text.slice(0, middle)}\u2026`).width <= room) low = middle; else high = middle - 1;
    }
    return `${text.slice(0, low)}\u2026`;
  }

  return { HEAD, ROW, STRIP, STYLES, units, theme, swatch, places, firstSeen, paint };
})();
